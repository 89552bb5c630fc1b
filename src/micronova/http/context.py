"""Who asks: the identity behind a request, as the token said it."""

import msgspec


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request; made by authentication, read by policy and handlers."""

    request_id: str
    user_id: str = ""
    project_id: str = ""
    roles: tuple[str, ...] = ()
    user_name: str = ""
    project_name: str = ""
    user_domain_id: str = "default"
    project_domain_id: str = "default"
    domain_id: str | None = None  # domain-scoped tokens
    system_scope: str | None = None
    token: str = ""
    expires_at: float = 0.0
    remote_address: str = ""
    host: str = ""  # a compute host that came with its ticket: then there is neither user nor role
    traceparent: str = ""

    @property
    def is_authenticated(self) -> bool:
        """Say whether a token was given and was good."""
        return bool(self.user_id)

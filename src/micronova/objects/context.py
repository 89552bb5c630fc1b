"""The caller of an HTTP request, and the part of it that every message carries."""

import msgspec


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The caller and the request that a message belongs to, and how long the sender waits for the answer."""

    request_id: str = ""
    user_id: str = ""
    project_id: str = ""
    roles: tuple[str, ...] = ()
    is_admin: bool = False
    traceparent: str = ""
    deadline: float = 0.0
    """Monotonic time of this process after which the caller no longer waits; 0: none. Messages do not carry it."""
    sender: str = ""
    """The sender of the message as verified by the transport, which overwrites what the sender writes here."""


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request. Authentication makes it; policy and handlers read it."""

    request_id: str
    user_id: str = ""
    project_id: str = ""
    roles: tuple[str, ...] = ()
    is_admin: bool = False  # by the policy rule `context_is_admin` of the service that got the request
    user_name: str = ""
    project_name: str = ""
    user_domain_id: str = "default"
    project_domain_id: str = "default"
    domain_id: str | None = None  # domain-scoped tokens
    system_scope: str | None = None
    token: str = ""
    expires_at: float = 0.0
    remote_address: str = ""
    host: str = ""  # of a compute host that authenticated by its ticket; such a caller has no user and no roles
    traceparent: str = ""
    # The only requests that the token is good for (type of service, method, path); None: it is good for all.
    access_rules: tuple[tuple[str, str, str], ...] | None = None

    def for_bus(self) -> Context:
        """Return the part that messages carry."""
        return Context(
            request_id=self.request_id,
            user_id=self.user_id,
            project_id=self.project_id,
            roles=self.roles,
            is_admin=self.is_admin,
            traceparent=self.traceparent,
        )

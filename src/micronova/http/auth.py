"""Authentication: from the X-Auth-Token header to a caller."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from micronova.http.access_rules import AccessRules
from micronova.http.tokens import Claims, TokenVerifier, UnknownKey, is_signed
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized

MISSING = "The request you have made requires authentication: send a token in X-Auth-Token."


class NoAuth2:
    """`noauth2`, for development: the token is `USER:PROJECT`, and the user admin is an administrator and a service."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Return the caller that the token names, unchecked."""
        if not token:
            raise Unauthorized(MISSING)
        user, _, project = token.partition(":")
        project = project or user
        roles = ("admin", "manager", "member", "reader", "service") if user == "admin" else ("member", "reader")
        return msgspec.structs.replace(
            context, user_id=user, project_id=project, user_name=user, project_name=project, roles=roles, token=token
        )


class NoTokens:
    """For services that authenticate their callers in another way: no token is valid."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Raise Unauthorized."""
        raise Unauthorized("This service takes no tokens.")


def apply_claims(context: RequestContext, claims: Claims, token: str) -> RequestContext:
    """Return the context with the caller of a signed token."""
    return RequestContext(
        request_id=context.request_id,
        remote_address=context.remote_address,
        traceparent=context.traceparent,
        user_id=claims.user_id,
        user_name=claims.user_name,
        user_domain_id=claims.user_domain_id,
        project_id=claims.project_id or "",
        project_name=claims.project_name or "",
        project_domain_id=claims.project_domain_id or "",
        domain_id=claims.domain_id,
        system_scope="all" if claims.system else None,
        roles=tuple(name for _, name in claims.roles),
        token=token,
        expires_at=claims.expires_at,
        access_rules=claims.access_rules,
    )


class SignedTokens:
    """Tokens of the embedded identity service, verified by their signature without a request."""

    def __init__(self, verifier: TokenVerifier, now: Callable[[], float]) -> None:
        self.verifier = verifier
        self.now = now

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Verify the signature, the expiry and that the token was not revoked."""
        if not token:
            raise Unauthorized(MISSING)
        return apply_claims(context, self.verifier.verify(token, self.now()), token)


class TokenValidation(Protocol):
    """Asks the identity service about a token; implemented in `micronova.clients.identity.client`."""

    async def validate(self, token: str) -> dict[str, Any]:
        """Return the `token` object of the service's answer; raise Unauthorized for an unknown token."""


class KeystoneTokens:
    """Tokens of any Keystone, validated by a request and cached for `cache_seconds`."""

    def __init__(self, identity: TokenValidation, now: Callable[[], float], *, cache_seconds: float = 300.0) -> None:
        self._identity = identity
        self._now = now
        self._cache_seconds = cache_seconds
        self._known: dict[str, tuple[float, RequestContext]] = {}

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Return the cached caller, or ask the identity service."""
        if not token:
            raise Unauthorized(MISSING)
        now = self._now()
        known = self._known.get(token)
        if known is None or known[0] <= now:
            caller = _from_keystone(await self._identity.validate(token), token)
            if len(self._known) > 4096:
                self._known.clear()
            until = min(now + self._cache_seconds, caller.expires_at or now + self._cache_seconds)
            known = self._known[token] = (until, caller)
        return msgspec.structs.replace(
            known[1],
            request_id=context.request_id,
            remote_address=context.remote_address,
            traceparent=context.traceparent,
        )


class EitherTokens:
    """Accepts signed tokens, and any other token that the identity service validates."""

    def __init__(self, signed: SignedTokens, other: KeystoneTokens) -> None:
        self._signed = signed
        self._other = other

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Choose the way by the token's prefix; ask about signed tokens of keys that are not known here."""
        if token and is_signed(token):
            try:
                return await self._signed.authenticate(token, context)
            except UnknownKey:
                pass  # the identity service has a new key that is not in the settings here
        return await self._other.authenticate(token, context)


def _from_keystone(token: dict[str, Any], text: str) -> RequestContext:
    from datetime import datetime

    user = token.get("user") or {}
    project = token.get("project") or {}
    expires = token.get("expires_at")
    return RequestContext(
        request_id="",
        user_id=user.get("id", ""),
        user_name=user.get("name", ""),
        user_domain_id=(user.get("domain") or {}).get("id", ""),
        project_id=project.get("id", ""),
        project_name=project.get("name", ""),
        project_domain_id=(project.get("domain") or {}).get("id", ""),
        domain_id=(token.get("domain") or {}).get("id"),
        system_scope="all" if token.get("system") else None,
        roles=tuple(role["name"] for role in token.get("roles", ())),
        token=text,
        expires_at=datetime.fromisoformat(expires).timestamp() if expires else 0.0,
        access_rules=_rules(token),
    )


def _rules(token: dict[str, Any]) -> AccessRules | None:
    """Return the access rules of a token; a rule that is not complete allows nothing."""
    rules = (token.get("application_credential") or {}).get("access_rules")
    if rules is None:
        return None
    return tuple((str(rule.get("service")), str(rule.get("method")), str(rule.get("path"))) for rule in rules)

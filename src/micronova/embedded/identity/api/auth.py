"""/v3/auth: issue, show, check and revoke tokens; the catalog and the scopes that the caller can use."""

from typing import Any

from micronova.embedded.identity import catalog_view, tokens
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import (
    V3,
    checked_route,
    collection,
    own_urls,
    route,
    self_link,
    token_headers,
    token_response,
)
from micronova.embedded.identity.authentication import Auth, AuthBody, authenticate
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import grants, revocations
from micronova.embedded.identity.store.rows import flag
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.tokens import Claims
from micronova.objects.clock import micros
from micronova.objects.errors import Forbidden, NotFound, Unauthorized


class AuthAPI:
    """Tokens."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{V3}/auth/tokens"
        return [
            Route(method="POST", path=path, handler=self.issue, policy=None, status=201, body=AuthBody),
            checked_route("GET", path, self.show, "validate_token", about_own_token=True),
            checked_route("HEAD", path, self.check, "check_token"),
            checked_route("DELETE", path, self.revoke, "revoke_token", status=204),
            route("GET", f"{V3}/auth/catalog", self.catalog, "get_auth_catalog"),
            route("GET", f"{V3}/auth/projects", self.projects, "get_auth_projects"),
            route("GET", f"{V3}/auth/domains", self.domains, "get_auth_domains"),
            route("GET", f"{V3}/auth/system", self.system, "get_auth_system"),
        ]

    async def issue(self, request: Request) -> Response:
        """Issue a token to a caller that authenticates."""
        auth: Auth = request.body.auth
        with_catalog = not flag(request.raw_query, "nocatalog")
        issued_at = self._core.timestamps.next()
        authenticated = await authenticate(self._core, auth.identity, request.context.remote_address)
        token, claims, details = await tokens.issue(self._core, authenticated, auth.scope, with_catalog, issued_at)
        return token_response(self._core, request, token, claims, details, with_catalog)

    def _authorized_subject(self, request: Request) -> tuple[str, Claims]:
        token = request.header("x-subject-token")
        if token is None:
            request.authorize({"user_id": None})
            raise NotFound("The header X-Subject-Token is missing.")
        try:
            claims = self._core.verifier.verify(token, self._core.clock.now())
        except Unauthorized:  # to everybody: policy cannot tell whose token it was
            raise NotFound("The token in X-Subject-Token is not valid, expired or revoked.") from None
        request.authorize({"user_id": claims.user_id})
        return token, claims

    def _enforceable_subject(self, request: Request) -> tuple[str, Claims]:
        """Return the token in X-Subject-Token. One with access rules is hidden from callers that ignore them."""
        token, claims = self._authorized_subject(request)
        if claims.access_rules is not None and not _knows_access_rules(request):
            raise NotFound("The token in X-Subject-Token has access rules, and the caller does not enforce these.")
        return token, claims

    async def show(self, request: Request) -> Response:
        """Show what a token contains."""
        token, claims = self._enforceable_subject(request)
        with_catalog = not flag(request.raw_query, "nocatalog")
        details = await self._core.database.read(tokens.read_details, claims, with_catalog)
        return token_response(self._core, request, token, claims, details, with_catalog)

    async def check(self, request: Request) -> Response:
        """Answer 200 if a token is valid, 404 if not."""
        token, _ = self._enforceable_subject(request)
        return Response(headers=token_headers(token))

    async def revoke(self, request: Request) -> None:
        """Revoke a token."""
        _, claims = self._authorized_subject(request)
        audit_id = claims.audit_ids[0]
        time = self._core.revocation_time()
        await self._core.write(revocations.revoke_token, time, audit_id, micros(claims.expires_at) + 1)
        self._core.revocations.revoke(audit_id, claims.expires_at)

    async def catalog(self, request: Request) -> dict[str, Any]:
        """Return the catalog of the caller's token."""
        claims = self._core.claims(request)
        if not tokens.is_scoped(claims):
            raise Forbidden(
                "A token without a scope has no catalog: ask for one with a project, a domain or the system."
            )
        details = await self._core.database.read(tokens.read_details, claims, True)
        shown = catalog_view.for_token(details.catalog, own_urls(self._core, request), claims)
        return {"catalog": shown, "links": {"self": self_link(request)}}

    async def projects(self, request: Request) -> dict[str, Any]:
        """List the projects that the caller can get a token for."""
        rows, tags = await self._core.database.read(grants.projects_of, request.context.user_id, {"enabled": ["true"]})
        return collection(request, "projects", [views.project(request, row, tags[row["id"]]) for row in rows])

    async def domains(self, request: Request) -> dict[str, Any]:
        """List the domains that the caller can get a token for."""
        rows, tags = await self._core.database.read(grants.domains_of, request.context.user_id)
        return collection(request, "domains", [views.domain(request, row, tags[row["id"]]) for row in rows])

    async def system(self, request: Request) -> dict[str, Any]:
        """Show whether the caller can get a token for the system."""
        allowed = await self._core.database.read(grants.on_system, request.context.user_id)
        return {"system": [{"all": True}] if allowed else [], "links": {"self": self_link(request)}}


def _knows_access_rules(request: Request) -> bool:
    """Return whether the caller says that it enforces access rules, as keystonemiddleware does."""
    try:
        return float(request.header("openstack-identity-access-rules") or 0) >= 1.0
    except ValueError:
        return False

"""POST /v3/auth/tokens and what one may ask about one's own and others' tokens."""

from typing import Any

import sqlalchemy as sa

from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.tokens import Claims
from micronova.neighbours.identity import catalog, tokens
from micronova.neighbours.identity.api import views
from micronova.neighbours.identity.api.common import V3, collection, public_url, self_link
from micronova.neighbours.identity.authentication import Auth, AuthBody, prove
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import assignments, domains, projects, revocations
from micronova.neighbours.identity.store.rows import Page, Row, flag
from micronova.objects.clock import micros
from micronova.objects.errors import Forbidden, NotFound, Unauthorized


class AuthAPI:
    """Tokens."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        path = f"{V3}/auth/tokens"
        return [
            Route(method="POST", path=path, handler=self.issue, policy=None, status=201, body=AuthBody),
            Route(method="GET", path=path, handler=self.show, policy="identity:validate_token", checks_policy=True),
            Route(method="HEAD", path=path, handler=self.check, policy="identity:check_token", checks_policy=True),
            Route(
                method="DELETE", path=path, handler=self.revoke, policy="identity:revoke_token", checks_policy=True,
                status=204,
            ),
            Route(method="GET", path=f"{V3}/auth/catalog", handler=self.catalog, policy="identity:get_auth_catalog"),
            Route(method="GET", path=f"{V3}/auth/projects", handler=self.projects, policy="identity:get_auth_projects"),
            Route(method="GET", path=f"{V3}/auth/domains", handler=self.domains, policy="identity:get_auth_domains"),
            Route(method="GET", path=f"{V3}/auth/system", handler=self.system, policy="identity:get_auth_system"),
        ]  # fmt: skip

    async def issue(self, request: Request) -> Response:
        """Give a token to whoever proves who it is."""
        auth: Auth = request.body.auth
        with_catalog = not flag(request.raw_query, "nocatalog")
        begun = self._core.ticks.next()
        proven = await prove(self._core, auth.identity, request.context.remote_address)
        token, claims, about = await tokens.issue(self._core, proven, auth.scope, with_catalog, begun)
        return self._describe(request, token, claims, about, with_catalog)

    def _describe(
        self, request: Request, token: str, claims: Claims, about: tokens.About, with_catalog: bool
    ) -> Response:
        described = tokens.body(claims, about, with_catalog, public_url(request))
        return Response(body={"token": described}, headers={"x-subject-token": token, "vary": "X-Auth-Token"})

    def _subject(self, request: Request) -> tuple[str, Claims | None]:
        token = request.header("x-subject-token")
        if not token:
            return "", None
        try:
            return token, self._core.verifier.verify(token, self._core.clock.now())
        except Unauthorized:
            return token, None

    def _authorized_subject(self, request: Request) -> tuple[str, Claims]:
        token, claims = self._subject(request)
        request.authorize({"user_id": claims.user_id if claims else None})
        if claims is None:
            raise NotFound("The token in X-Subject-Token is missing, not valid, expired or revoked.")
        return token, claims

    async def show(self, request: Request) -> Response:
        """Tell what a token says."""
        token, claims = self._authorized_subject(request)
        with_catalog = not flag(request.raw_query, "nocatalog")
        about = await tokens.about(self._core, claims, with_catalog)
        return self._describe(request, token, claims, about, with_catalog)

    async def check(self, request: Request) -> Response:
        """Tell whether a token is good."""
        token, _ = self._authorized_subject(request)
        return Response(headers={"x-subject-token": token, "vary": "X-Auth-Token"})

    async def revoke(self, request: Request) -> None:
        """Void a token."""
        _, claims = self._authorized_subject(request)
        audit_id = claims.audit_ids[0]
        await self._core.write(revocations.void_token, audit_id, self._core.moment(), micros(claims.expires_at) + 1)
        self._core.revocations.revoke(audit_id, claims.expires_at)

    async def catalog(self, request: Request) -> dict[str, Any]:
        """Return the catalog of the caller's token."""
        claims = self._core.verifier.verify(request.context.token, self._core.clock.now())
        if not tokens.is_scoped(claims):
            raise Forbidden(
                "A token without a scope has no catalog: ask for one with a project, a domain or the system."
            )
        about = await tokens.about(self._core, claims, True)
        shown = catalog.view(about.catalog, public_url(request), claims)
        return {"catalog": shown, "links": {"self": self_link(request)}}

    async def projects(self, request: Request) -> dict[str, Any]:
        """List the projects that the caller can get a token for."""
        rows, tags = await self._core.read(projects_of, request.context.user_id, True)
        return collection(request, "projects", [views.project(request, row, tags[row["id"]]) for row in rows])

    async def domains(self, request: Request) -> dict[str, Any]:
        """List the domains that the caller can get a token for."""
        rows, tags = await self._core.read(_domains_of, request.context.user_id)
        return collection(request, "domains", [views.domain(request, row, tags[row["id"]]) for row in rows])

    async def system(self, request: Request) -> dict[str, Any]:
        """Tell whether the caller can get a token for the system."""
        allowed = await self._core.read(assignments.on_system, request.context.user_id)
        return {"system": [{"all": True}] if allowed else [], "links": {"self": self_link(request)}}


def projects_of(conn: sa.Connection, user_id: str, enabled: bool = False) -> tuple[list[Row], dict[str, list[str]]]:
    """Return the projects that a user has a role on, with their tags."""
    query = {"enabled": ["true"]} if enabled else {}
    listed, tags = projects.listing(conn, query, None, Page(), assignments.projects_of(conn, user_id))
    return listed.rows, tags


def _domains_of(conn: sa.Connection, user_id: str) -> tuple[list[Row], dict[str, list[str]]]:
    rows = [row for row in assignments.domains_of(conn, user_id) if row["enabled"]]
    return rows, domains.tags_of(conn, [row["id"] for row in rows])

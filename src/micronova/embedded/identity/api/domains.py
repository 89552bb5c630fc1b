"""/v3/domains"""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.common.query import Query
from micronova.embedded.identity import attributes
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page, route
from micronova.embedded.identity.attributes import DomainAttributes, DomainChanges
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import domains
from micronova.embedded.identity.store.kinds import DOMAINS, DomainRow
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.store.tags import tags_of
from micronova.http.request import Request
from micronova.http.service import Route


class DomainBody(Struct):
    """A body that holds a domain."""

    domain: dict[str, Any]


class DomainsAPI:
    """Domains."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/domains", f"{V3}/domains/{{domain_id}}"
        return [
            route("GET", path, self.index, "list_domains"),
            route("POST", path, self.create, "create_domain", status=201, body=DomainBody),
            checked_route("GET", one, self.show, "get_domain"),
            route("PATCH", one, self.update, "update_domain", body=DomainBody),
            route("DELETE", one, self.delete, "delete_domain", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List domains."""
        listed, tags = await self._core.database.read(
            _list, request.raw_query, request.context.domain_id, page(request)
        )
        items = [views.domain(request, row, tags[row["id"]]) for row in listed.rows]
        return collection(request, "domains", items, listed)

    async def show(self, request: Request, domain_id: str) -> dict[str, Any]:
        """Show a domain."""
        own = bool(request.context.project_id) and request.context.project_domain_id == domain_id
        request.authorize({"domain_id": domain_id, "owner_is_caller": own})
        row, tags = await self._core.database.read(_get, domain_id)
        return {"domain": views.domain(request, row, tags)}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a domain."""
        wanted, extra = attributes.read(request.body.domain, DomainAttributes, "domain")
        row = await self._core.write(domains.create, self._core.new_id(), wanted, extra, self._core.now())
        return {"domain": views.domain(request, row, sorted(wanted.tags))}

    async def update(self, request: Request, domain_id: str) -> dict[str, Any]:
        """Change a domain."""
        wanted, extra = attributes.changes(request.body.domain, DomainChanges, "domain")
        row = await self._core.write_revoking(domains.change, domain_id, wanted, extra)
        tags = await self._core.database.read(tags_of, [domain_id])
        return {"domain": views.domain(request, row, tags[domain_id])}

    async def delete(self, request: Request, domain_id: str) -> None:
        """Delete a domain with everything in it."""
        await self._core.write_revoking(domains.delete, domain_id)


def _get(conn: sa.Connection, domain_id: str) -> tuple[DomainRow, list[str]]:
    return DOMAINS.get(conn, domain_id), tags_of(conn, [domain_id])[domain_id]


def _list(
    conn: sa.Connection, query: Query, only: str | None, wanted: Page
) -> tuple[Listed[DomainRow], dict[str, list[str]]]:
    listed = domains.listing(conn, query, only, wanted)
    return listed, tags_of(conn, [row["id"] for row in listed.rows])

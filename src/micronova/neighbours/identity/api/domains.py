"""/v3/domains"""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity import attributes
from micronova.neighbours.identity.api import views
from micronova.neighbours.identity.api.common import V3, collection, filter_domain, page
from micronova.neighbours.identity.attributes import DomainAttributes, DomainChanges
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import domains
from micronova.neighbours.identity.store.rows import Listed, Page, Row


class DomainBody(Struct):
    """A body that holds a domain."""

    domain: dict[str, Any]


class DomainsAPI:
    """Domains."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        path, one = f"{V3}/domains", f"{V3}/domains/{{domain_id}}"
        return [
            Route(method="GET", path=path, handler=self.index, policy="identity:list_domains"),
            Route(
                method="POST", path=path, handler=self.create, policy="identity:create_domain", status=201,
                body=DomainBody,
            ),
            Route(method="GET", path=one, handler=self.show, policy="identity:get_domain", checks_policy=True),
            Route(method="PATCH", path=one, handler=self.update, policy="identity:update_domain", body=DomainBody),
            Route(method="DELETE", path=one, handler=self.delete, policy="identity:delete_domain", status=204),
        ]  # fmt: skip

    async def index(self, request: Request) -> dict[str, Any]:
        """List domains."""
        listed, tags = await self._core.read(_list, request.raw_query, filter_domain(request), page(request))
        items = [views.domain(request, row, tags[row["id"]]) for row in listed.rows]
        return collection(request, "domains", items, listed)

    async def show(self, request: Request, domain_id: str) -> dict[str, Any]:
        """Show a domain."""
        own = bool(request.context.project_id) and request.context.project_domain_id == domain_id
        request.authorize({"domain_id": domain_id, "owner_is_caller": own})
        row, tags = await self._core.read(_get, domain_id)
        return {"domain": views.domain(request, row, tags)}

    async def create(self, request: Request) -> dict[str, Any]:
        """Make a domain."""
        wanted, extra = attributes.read(request.body.domain, DomainAttributes, "domain")
        row = await self._core.write(domains.create, self._core.new_id(), wanted, extra, self._core.now)
        return {"domain": views.domain(request, row, sorted(wanted.tags))}

    async def update(self, request: Request, domain_id: str) -> dict[str, Any]:
        """Change a domain."""
        wanted, extra = attributes.changes(request.body.domain, DomainChanges, "domain")
        moment = self._core.moment()
        _, voided = await self._core.write(domains.change, domain_id, wanted, extra, moment)
        self._core.apply(voided, moment)
        row, tags = await self._core.read(_get, domain_id)
        return {"domain": views.domain(request, row, tags)}

    async def delete(self, request: Request, domain_id: str) -> None:
        """Delete a domain with all that is in it."""
        moment = self._core.moment()
        self._core.apply(await self._core.write(domains.delete, domain_id, moment), moment)


def _get(conn: sa.Connection, domain_id: str) -> tuple[Row, list[str]]:
    return domains.get(conn, domain_id), domains.tags_of(conn, [domain_id])[domain_id]


def _list(conn: sa.Connection, query: Any, only: str | None, wanted: Page) -> tuple[Listed, dict[str, list[str]]]:
    listed = domains.listing(conn, query, only, wanted)
    return listed, domains.tags_of(conn, [row["id"] for row in listed.rows])

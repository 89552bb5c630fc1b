"""The IP availability API: how many addresses of a network's subnets are allocated."""

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.cidrs import parse_pools
from micronova.embedded.network.collection import Collection, Resource
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.listing import QUERY, Attributes, Clause, Listing
from micronova.embedded.network.row_types import NetworkRow
from micronova.embedded.network.tables import addresses, networks, subnets
from micronova.http.request import Request


def _has_version(values: Sequence[str]) -> Clause:
    return QUERY.matches(subnets.c.ip_version, "ip_version", values)


class IPAvailability(Collection[NetworkRow]):
    """The network IP availability API, for admins."""

    singular = "network_ip_availability"
    plural = "network_ip_availabilities"
    slug = "network-ip-availabilities"
    attributes = Attributes(
        networks,
        {"network_id": networks.c.id, "network_name": networks.c.name, "project_id": networks.c.project_id},
        {"ip_version": lambda values: networks.c.id.in_(sa.select(subnets.c.network_id).where(_has_version(values)))},
    )

    def visible_rows(self, request: Request) -> Clause | None:
        """Policy alone decides."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[NetworkRow]) -> list[Resource]:
        """Return networks with the used and total addresses of each subnet."""
        return self._resources(conn, rows, sa.true())

    def page(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], visible: Clause | None
    ) -> list[Resource] | None:
        """Return a page; with a filter on `ip_version` only the subnets of that version are counted."""
        rows = self.rows(conn, listing, conditions, visible)
        versions = listing.filters.get("ip_version")
        counted = sa.true() if versions is None else _has_version(versions)
        return None if rows is None else self._resources(conn, rows, counted)

    def _resources(self, conn: sa.Connection, rows: Sequence[NetworkRow], on_subnets: Clause) -> list[Resource]:
        below: dict[str, list[dict[str, Any]]] = {}
        for part in chunks([row.id for row in rows]):
            counted = (
                sa.select(subnets, sa.func.count(addresses.c.number).label("used"))
                .outerjoin(addresses, addresses.c.subnet_id == subnets.c.id)
                .where(subnets.c.network_id.in_(part), on_subnets)
                .group_by(*subnets.c)
            )
            for row in conn.execute(counted):
                below.setdefault(row.network_id, []).append(_subnet_availability(row))
        return [Resource(_availability(row, below.get(row.id, [])), {"project_id": row.project_id}) for row in rows]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the IP availability of networks."""
        request.authorize({})
        return await super().index(request)

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show the IP availability of one network."""
        request.authorize({})
        resource = await self.core.database.read(self.load, id)
        if resource is None:
            raise not_found("network", id)
        listing = Listing.parse({k: v for k, v in request.raw_query.items() if k == "fields"}, self.attributes)
        return {self.singular: listing.choose(resource.values)}


def _subnet_availability(row: Any) -> dict[str, Any]:
    return {
        "subnet_id": row.id,
        "subnet_name": row.name,
        "cidr": row.cidr,
        "ip_version": row.ip_version,
        "total_ips": sum(last - first + 1 for first, last in parse_pools(row.allocation_pools)),
        "used_ips": row.used,
    }


def _availability(row: NetworkRow, below: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": row.id,
        "network_id": row.id,
        "network_name": row.name,
        "project_id": row.project_id,
        "tenant_id": row.project_id,
        "total_ips": sum(each["total_ips"] for each in below),
        "used_ips": sum(each["used_ips"] for each in below),
        "subnet_ip_availability": below,
    }

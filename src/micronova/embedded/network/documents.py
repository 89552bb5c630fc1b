"""Versions, resources, extensions, availability zones, agents, and the IP availability of networks."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.cidrs import parse_pools
from micronova.embedded.network.collection import Collection, Deletable, Resource, Updatable
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.extensions import EXTENSIONS
from micronova.embedded.network.listing import Attributes, Clause, Listing
from micronova.embedded.network.port_rows import alive_since
from micronova.embedded.network.tables import AgentRow, NetworkRow, addresses, agents, networks, subnets
from micronova.embedded.network.wire import Body, Flag, Name, Optional, body_of_one, convert_text
from micronova.http.paging import iso
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.objects.errors import NotFound

RESOURCES = (
    ("network", "networks"),
    ("subnet", "subnets"),
    ("subnetpool", "subnetpools"),
    ("port", "ports"),
    ("security_group", "security-groups"),
    ("security_group_rule", "security-group-rules"),
    ("router", "routers"),
    ("floatingip", "floatingips"),
    ("policy", "qos/policies"),
)


class Documents:
    """Version documents, extensions, availability zones."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(method="GET", path="/", handler=self.versions, policy=None),
            Route(method="GET", path="/v2.0", handler=self.resources, policy=AUTHENTICATED),
            Route(method="GET", path="/v2.0/extensions", handler=self.extensions, policy=AUTHENTICATED),
            Route(method="GET", path="/v2.0/extensions/{alias}", handler=self.extension, policy=AUTHENTICATED),
            Route(
                method="GET",
                path="/v2.0/availability_zones",
                handler=self.zones,
                policy="get_availability_zone",
                checks_policy=True,
            ),
            Route(
                method="GET",
                path="/v2.0/service-providers",
                handler=self.providers,
                policy="get_service_provider",
                checks_policy=True,
            ),
        ]

    async def versions(self, request: Request) -> dict[str, Any]:
        """GET /: the version."""
        link = {"rel": "self", "href": f"{request.base_url}/v2.0/"}
        return {"versions": [{"id": "v2.0", "status": "CURRENT", "links": [link]}]}

    async def resources(self, request: Request) -> dict[str, Any]:
        """GET /v2.0: the URLs of the collections."""
        return {
            "resources": [
                {
                    "name": name,
                    "collection": collection,
                    "links": [{"rel": "self", "href": f"{request.base_url}/v2.0/{collection}"}],
                }
                for name, collection in RESOURCES
            ]
        }

    async def extensions(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/extensions."""
        return {"extensions": [_extension(alias) for alias in EXTENSIONS]}

    async def extension(self, request: Request, alias: str) -> dict[str, Any]:
        """GET /v2.0/extensions/{alias}."""
        if alias not in EXTENSIONS:
            raise NotFound(f"Extensions not found: {alias[:64]}.", type="ExtensionsNotFound")
        return {"extension": _extension(alias)}

    async def zones(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/availability_zones: one for networks and one for routers."""
        request.authorize({})
        name = self.core.settings.availability_zone
        found = [{"name": name, "resource": kind, "state": "available"} for kind in ("network", "router")]
        query = request.raw_query
        kept = [zone for zone in found if all(zone[k] in v for k, v in query.items() if k in zone)]
        return {"availability_zones": kept}

    async def providers(self, request: Request) -> dict[str, Any]:
        """GET /v2.0/service-providers: none."""
        request.authorize({})
        return {"service_providers": []}


def _extension(alias: str) -> dict[str, Any]:
    return {
        "alias": alias,
        "name": EXTENSIONS[alias][0],
        "description": EXTENSIONS[alias][1],
        "updated": "2026-01-01T00:00:00-00:00",
        "links": [],
    }


class AgentUpdate(Body, kw_only=True):
    """The attributes of an agent that an admin may set."""

    admin_state_up: Flag | Optional = UNSET
    description: Name | Optional = UNSET


class Agents(Updatable[AgentRow], Deletable[AgentRow]):
    """The agent API, for admins."""

    singular = "agent"
    plural = "agents"
    slug = "agents"
    taggable = False
    attributes = Attributes(
        agents,
        {
            **{name: agents.c[name] for name in ("id", "agent_type", "binary", "host", "topic", "description")},
            **{name: agents.c[name] for name in ("availability_zone", "admin_state_up", "created_at")},
        },
        {"alive": lambda values: sa.true()},
    )
    update_body = body_of_one("agent", AgentUpdate)

    def scope(self, request: Request) -> Clause | None:
        """Agents belong to no project, so policy alone decides."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[AgentRow]) -> list[Resource]:
        """Return agents with whether they are alive."""
        since = alive_since(self.core)
        return [Resource(_agent(row, row.heartbeat_at >= since), {}) for row in rows]

    async def update_now(self, request: Request, id: str) -> dict[str, Any]:
        """Update an agent."""
        resource = await self.find(request, id, "update_agent")
        [given] = self.given(request)
        convert_text(given, ("admin_state_up",))
        changed = await self.core.database.write(self._change, resource.id, given)
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, given: dict[str, Any]) -> Resource:
        if given:
            conn.execute(agents.update().where(agents.c.id == id).values(**given))
        resource = self.load(conn, id)
        if resource is None:
            raise not_found("agent", id)
        return resource

    async def delete_now(self, request: Request, id: str) -> None:
        """Delete the row of an agent."""
        resource = await self.find(request, id, "delete_agent")
        await self.core.database.write(_forget, resource.id)


def _forget(conn: sa.Connection, id: str) -> None:
    conn.execute(agents.delete().where(agents.c.id == id))


def _agent(row: AgentRow, alive: bool) -> dict[str, Any]:
    return {
        "id": row.id,
        "agent_type": row.agent_type,
        "binary": row.binary,
        "host": row.host,
        "topic": row.topic,
        "availability_zone": row.availability_zone,
        "alive": alive,
        "admin_state_up": row.admin_state_up,
        "description": row.description,
        "configurations": row.configurations,
        "created_at": iso(row.created_at),
        "started_at": iso(row.started_at),
        "heartbeat_timestamp": iso(row.heartbeat_at),
        "resources_synced": None,
    }


class Availability(Collection[NetworkRow]):
    """The network IP availability API, for admins."""

    singular = "network_ip_availability"
    plural = "network_ip_availabilities"
    slug = "network-ip-availabilities"
    taggable = False
    attributes = Attributes(
        networks,
        {"network_id": networks.c.id, "network_name": networks.c.name, "project_id": networks.c.project_id},
        {
            "ip_version": lambda values: networks.c.id.in_(
                sa.select(subnets.c.network_id).where(subnets.c.ip_version.in_([4 if v == "4" else 6 for v in values]))
            )
        },
    )

    def scope(self, request: Request) -> Clause | None:
        """Policy alone decides."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[NetworkRow]) -> list[Resource]:
        """Return networks with the used and total addresses of each subnet."""
        below: dict[str, list[dict[str, Any]]] = {}
        for part in chunks([row.id for row in rows]):
            counted = (
                sa.select(subnets, sa.func.count(addresses.c.number).label("used"))
                .outerjoin(addresses, addresses.c.subnet_id == subnets.c.id)
                .where(subnets.c.network_id.in_(part))
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

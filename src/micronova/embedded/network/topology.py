"""Topologies that the service creates: for a project that requests a network but has none, and for a new cloud.

Both have a network with a subnet, and a router between it and an external network.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.revisions import Changed, retry
from micronova.embedded.network.addresses import allocation_subnet, allocation_subnets
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.networks import PUBLIC_PHYSICAL_NETWORK, Networks
from micronova.embedded.network.quotas import charge, charge_unchecked
from micronova.embedded.network.router_ports import connect, disconnect, gateway_on, interface_on
from micronova.embedded.network.routers import Routers
from micronova.embedded.network.routing import checked_route
from micronova.embedded.network.rows import new_row
from micronova.embedded.network.sharing import SUBNET_POOL, share_with_all
from micronova.embedded.network.subnets import Subnets
from micronova.embedded.network.tables import (
    marks,
    networks,
    ports,
    router_interfaces,
    subnetpools,
    subnets,
    topologies,
)
from micronova.http.request import Request
from micronova.http.service import Route


class Topologies:
    """The auto-allocated-topology API, which compute uses for `networks: auto`."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.builder = Builder(core)

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = "/v2.0/auto-allocated-topology/{project}"
        return [
            checked_route("GET", path, self.show, "get_auto_allocated_topology"),
            checked_route("DELETE", path, self.delete, "delete_auto_allocated_topology", 204),
        ]

    async def show(self, request: Request, project: str) -> dict[str, Any]:
        """Return the project's network; create it if it is missing, or with `fields=dry-run` check that it could be."""
        project = _own(request, project)
        request.authorize({"project_id": project})
        if "dry-run" in request.raw_query.get("fields", ()):
            await self.core.database.read(_requirements)
            found = "dry-run=pass"
        else:
            found = await retry(self._ensure, project)
        shown = {"id": found, "project_id": project, "tenant_id": project}
        return {"auto_allocated_topology": shown}

    async def _ensure(self, project: str) -> str:
        known = await self.core.database.read(_of_project, project)
        if known is not None:
            return known
        return await self.core.write_and_wake(self.builder.allocate, project)

    async def delete(self, request: Request, project: str) -> None:
        """Delete the topology of a project; raise Conflict if something uses it."""
        project = _own(request, project)
        request.authorize({"project_id": project})
        await retry(self._delete, project)

    async def _delete(self, project: str) -> None:
        await self.core.write_and_wake(self.builder.release, project)


class Builder:
    """Creates networks with subnet, router and gateway in one transaction."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.networks = Networks(core)
        self.subnets = Subnets(core)
        self.routers = Routers(core)

    def network(self, conn: sa.Connection, project: str, **given: Any) -> str:
        """Create a network."""
        row = self.networks.row(project, given)
        self.networks.insert(conn, [(row, given)])
        return row["id"]

    def subnet(self, conn: sa.Connection, project: str, network_id: str, **given: Any) -> str:
        """Create a subnet."""
        asked = {"network_id": network_id, **given}
        row = self.subnets.row(project, asked)
        self.subnets.insert(conn, [(row, asked)], project, True)
        return row["id"]

    def router(self, conn: sa.Connection, project: str, name: str, external: str | None, inside: Sequence[str]) -> str:
        """Create a router between subnets and, if given, an external network."""
        row = self.routers.row(project, {"name": name})
        plan = None
        if external is not None:
            candidates = allocation_subnets(conn, [external]).get(external, [])
            plan = gateway_on(self.core, row["id"], candidates, {"network_id": external})
        self.routers.insert(conn, [(row, {}, plan)])
        for subnet in conn.execute(sa.select(subnets).where(subnets.c.id.in_(inside))):
            joined = interface_on(self.core, project, row["id"], allocation_subnet(subnet))
            connect(conn, self.core, row["id"], joined)
        return row["id"]

    def allocate(self, conn: sa.Connection, project: str) -> str:
        """Create a project's topology; of concurrent requests the later ones return the first one's."""
        external, pools = _requirements(conn)
        network_id = self.network(conn, project, name="auto_allocated_network")
        made = [
            self.subnet(
                conn,
                project,
                network_id,
                name=f"auto_allocated_subnet_v{pool.ip_version}",
                subnetpool_id=pool.id,
                ip_version=pool.ip_version,
            )
            for pool in pools
        ]
        router_id = self.router(conn, project, "auto_allocated_router", external, made)
        row = {"project_id": project, "network_id": network_id, "router_id": router_id}
        if not insert_if_absent(conn, topologies, row):
            raise Changed  # rolls the transaction back
        return network_id

    def release(self, conn: sa.Connection, project: str) -> None:
        """Delete a project's topology."""
        row = conn.execute(sa.select(topologies).where(topologies.c.project_id == project)).first()
        if row is None:
            return
        joined = sa.select(router_interfaces.c.port_id).where(router_interfaces.c.router_id == row.router_id)
        used = sa.select(ports.c.id).where(ports.c.network_id == row.network_id, ports.c.id.not_in(joined))
        if conn.execute(used.limit(1)).first() is not None:
            raise conflict(
                f"Unable to complete operation on network {row.network_id}. There are one or more ports still in use "
                f"on the network.",
                "NetworkInUse",
            )
        conn.execute(topologies.delete().where(topologies.c.project_id == project))
        if row.router_id is not None:
            for port_id in dict.fromkeys(conn.execute(joined).scalars()):
                disconnect(conn, self.core, row.router_id, None, port_id)
            self.routers.delete_router(conn, row.router_id)
        self.networks.delete_network(conn, row.network_id)

    def first_networks(self, conn: sa.Connection, project: str, plan: Mapping[str, Any]) -> bool:
        """Create the first networks of a new cloud, once: a shared one, an external one and a router between them."""
        if not insert_if_absent(conn, marks, {"name": "first networks"}):
            return False
        public = self.network(
            conn,
            project,
            name="public",
            description="Addresses that can be reached from outside",
            **{
                "router:external": True,
                "is_default": True,
                "provider:network_type": "flat",
                "provider:physical_network": PUBLIC_PHYSICAL_NETWORK,
            },
        )
        self.subnet(conn, project, public, name="public-subnet", cidr=plan["public_cidr"], enable_dhcp=False)
        private = self.network(conn, project, name="private", description="Everybody's network", shared=True)
        inside = self.subnet(
            conn,
            project,
            private,
            name="private-subnet",
            cidr=plan["private_cidr"],
            dns_nameservers=list(plan["dns_nameservers"]),
        )
        self.router(conn, project, "router1", public, [inside])
        self._subnet_pool(conn, project, plan["pool_prefix"])
        return True

    def _subnet_pool(self, conn: sa.Connection, project: str, prefix: str) -> None:
        about = {"description": "Ranges for networks that are made automatically"}
        row = new_row(self.core, project, about)
        new_rbac_policies = share_with_all(conn, self.core.new_id, SUBNET_POOL, row["id"], project)
        charge_unchecked(conn, project, "rbac_policy", new_rbac_policies)
        charge(conn, project, "subnetpool", self.core.settings.quotas)
        conn.execute(
            subnetpools.insert(),
            {
                **row,
                "name": "shared-default-subnetpool-v4",
                "ip_version": 4,
                "prefixes": [str(ipaddress.ip_network(prefix))],
                "min_prefixlen": 8,
                "default_prefixlen": 24,
                "max_prefixlen": 32,
                "default_quota": None,
                "shared": True,
                "is_default": True,
                "address_scope_id": None,
            },
        )


def _own(request: Request, project: str) -> str:
    return request.context.project_id if project.lower() in ("none", "null") else project[:255]


def _of_project(conn: sa.Connection, project: str) -> str | None:
    return conn.execute(sa.select(topologies.c.network_id).where(topologies.c.project_id == project)).scalar()


def _requirements(conn: sa.Connection) -> tuple[str, list[Any]]:
    """Return the default external network and the default subnet pools; raise Conflict if one is missing."""
    external = conn.execute(sa.select(networks.c.id).where(networks.c.is_default, networks.c.external)).scalar()
    if external is None:
        raise conflict("Deployment error: No default router:external network.", "AutoAllocationFailure")
    pools = list(
        conn.execute(sa.select(subnetpools).where(subnetpools.c.is_default).order_by(subnetpools.c.ip_version))
    )
    if not pools:
        raise conflict("Deployment error: No default subnetpools defined.", "AutoAllocationFailure")
    return external, pools

"""The ports of routers (gateways on external networks, interfaces on subnets), and extra routes."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import (
    AddressRequest,
    AllocationSubnet,
    address_requests,
    addresses_of,
    allocation_subnet,
)
from micronova.embedded.network.collection import Resource, seen_by
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, invalid, not_found
from micronova.embedded.network.host_changes import note, topics_of_ports
from micronova.embedded.network.network_targets import NETWORK_LABELS, parent_network_of, visible_network
from micronova.embedded.network.port_rows import (
    CreatedPort,
    PortPlan,
    insert_port,
    locked_port,
    read_port_facts,
    remove_port,
    service_port,
)
from micronova.embedded.network.quotas import charge
from micronova.embedded.network.request_bodies import ip_address, ip_network
from micronova.embedded.network.row_types import RouterRow, SubnetOnNetworkRow
from micronova.embedded.network.sharing import (
    EXTERNAL,
    NETWORK,
    NOBODY,
    Access,
    access_of,
    check_still_shared,
    reading_for,
    uses,
)
from micronova.embedded.network.tables import (
    addresses,
    floatingips,
    networks,
    ports,
    router_interfaces,
    routers,
    subnets,
)
from micronova.embedded.network.topics import network_topic, router_topic
from micronova.embedded.network.trunk_ports import check_free_of_trunks
from micronova.http.request import Request
from micronova.objects.errors import Conflict, NotFound


@dataclass
class GatewayPlan:
    """A gateway to set."""

    network_id: str
    enable_snat: bool
    explicit: bool  # the request names addresses
    port: PortPlan
    made: list[CreatedPort] = field(default_factory=list)


@dataclass
class InterfacePlan:
    """An interface to add, with a new port or the user's own."""

    subnets: list[AllocationSubnet]
    port: PortPlan | None
    port_id: str | None


async def plan_gateway(core: Core, request: Request, router_id: str, gateway: dict[str, Any]) -> GatewayPlan:
    """Check the requested external network and plan the router's port on it."""
    network_id = gateway["network_id"]
    read = reading_for([request.context.project_id], read_port_facts)
    facts = await core.database.read(read, [network_id])
    network = visible_network(request, network_id, facts.networks, facts.access)
    if not network.external:
        raise invalid(f"Bad router request: Network {network_id} is not an external network.", "BadRequest")
    plan = gateway_on(core, router_id, facts.subnets.get(network_id, []), gateway)
    caller, access = request.context.project_id, facts.access.get(network_id, NOBODY)
    plan.port.relies_on += uses(NETWORK, network_id, network.project_id, caller, access, EXTERNAL)
    return plan


def gateway_on(core: Core, router_id: str, candidates: list[AllocationSubnet], gateway: dict[str, Any]) -> GatewayPlan:
    """Plan a router's port on an external network."""
    network_id = gateway["network_id"]
    asked = gateway.get("external_fixed_ips") or None
    wanted = address_requests(network_id, candidates, asked, device_owners.ROUTER_GATEWAY)
    return GatewayPlan(
        network_id=network_id,
        enable_snat=gateway.get("enable_snat", True),
        explicit=asked is not None,
        port=service_port(core, "", network_id, router_id, device_owners.ROUTER_GATEWAY, wanted),
    )


def set_gateway(conn: sa.Connection, router_id: str, plan: GatewayPlan) -> None:
    """Create a router's gateway port."""
    try:
        plan.made = [insert_port(conn, plan.port)]
        check_still_shared(conn, plan.port.relies_on)
    except Conflict as error:
        if error.details.get("type") == "IpAddressGenerationFailure":
            raise invalid(
                f"Unable to find any IP address on external network {plan.network_id}.", "ExternalIpAddressExhausted"
            ) from None
        raise
    conn.execute(
        routers.update()
        .where(routers.c.id == router_id)
        .values(
            external_network_id=plan.network_id,
            gateway_port_id=plan.port.row["id"],
            enable_snat=plan.enable_snat,
        )
    )


def clear_gateway(conn: sa.Connection, core: Core, row: RouterRow, moving_within: str | None = None) -> None:
    """Remove a router's gateway; raise Conflict if a floating IP uses it."""
    if row.gateway_port_id is None:
        return
    if moving_within != row.external_network_id:
        used = sa.select(floatingips.c.id).where(floatingips.c.router_id == row.id).limit(1)
        if conn.execute(used).first() is not None:
            raise conflict(
                f"Gateway cannot be updated for router {row.id}, since a gateway to external network "
                f"{row.external_network_id} is required by one or more floating IPs.",
                "RouterExternalGatewayInUseByFloatingIp",
            )
    conn.execute(
        routers.update()
        .where(routers.c.id == row.id)
        .values(external_network_id=None, gateway_port_id=None, enable_snat=True)
    )
    remove_port(conn, row.gateway_port_id, core.now(), with_owner=True)


# --- interfaces ---


async def plan_interface(
    core: Core, request: Request, router: dict[str, Any], subnet_id: str | None, port_id: str | None
) -> InterfacePlan:
    """Check the subnet or port to add to a router, and plan the interface."""
    if subnet_id is not None and port_id is not None:
        raise invalid("Bad router request: Cannot specify both subnet-id and port-id.", "BadRequest")
    if port_id is not None:
        return await core.database.read(_plan_by_port, request, port_id)
    assert subnet_id is not None
    row, access = await core.database.read(reading_for([request.context.project_id], _subnet), subnet_id)
    if row is None:
        raise not_found("subnet", subnet_id)
    seen = seen_by(request, Resource({}, {"project_id": row.project_id, **parent_network_of(row)}, access))
    if not request.allows(seen.target, "get_subnet"):
        raise not_found("subnet", subnet_id)
    mine = request.context.project_id in (row.project_id, row.network_project)
    if not (mine or seen.target["network:shared"] or request.context.is_admin):
        raise invalid(
            f"Bad router request: Cannot add interface to router because subnet {subnet_id} is not owned by project "
            f"making the request.",
            "BadRequest",
        )
    if row.gateway_ip is None:
        raise invalid("Bad router request: Subnet for router interface must have a gateway IP.", "BadRequest")
    plan = interface_on(core, router["project_id"], router["id"], allocation_subnet(row))
    assert plan.port is not None
    owner, caller = row.network_project, request.context.project_id
    if not mine:
        plan.port.relies_on += uses(NETWORK, row.network_id, owner, caller, access)
    return plan


def interface_on(core: Core, project: str, router_id: str, subnet: AllocationSubnet) -> InterfacePlan:
    """Plan a router's port at the gateway address of a subnet."""
    wanted = AddressRequest((subnet,), ip_address(subnet.gateway or "", "gateway_ip"))
    return InterfacePlan(
        [subnet],
        service_port(core, project, subnet.network_id, router_id, device_owners.ROUTER_INTERFACE, [wanted]),
        None,
    )


def _plan_by_port(conn: sa.Connection, request: Request, port_id: str) -> InterfacePlan:
    row = conn.execute(
        sa.select(ports, networks.c.project_id.label("network_project"))
        .join(networks, networks.c.id == ports.c.network_id)
        .where(ports.c.id == port_id)
    ).first()
    target = {} if row is None else {"project_id": row.project_id, "network:project_id": row.network_project}
    # This changes the port, so it is not enough that the caller may see it.
    if row is None or not request.allows(target, "update_port"):
        raise not_found("port", port_id)
    fixed = addresses_of(conn, [port_id]).get(port_id, [])
    if not fixed:
        raise invalid("Bad router request: Router port must have at least one fixed IP.", "BadRequest")
    ids = [each["subnet_id"] for each in fixed]
    joined = [allocation_subnet(each) for each in conn.execute(sa.select(subnets).where(subnets.c.id.in_(ids)))]
    if sum(1 for each in joined if each.version == 4) > 1:
        raise invalid("Bad router request: Cannot have multiple IPv4 subnets on router port.", "BadRequest")
    return InterfacePlan(joined, None, port_id)


def connect(conn: sa.Connection, core: Core, router_id: str, plan: InterfacePlan) -> dict[str, Any]:
    """Add a planned interface to a router."""
    locked = conn.execute(
        sa.select(routers.c.id).where(routers.c.id == router_id).with_for_update(key_share=True)
    ).first()
    if locked is None:
        raise Changed
    for joined in interface_subnets(conn, router_id):
        for new in plan.subnets:
            if joined.id == new.id:
                raise invalid(f"Bad router request: Router already has a port on subnet {new.id}.", "BadRequest")
            if joined.version == new.version and joined.cidr.overlaps(new.cidr):
                raise invalid(
                    f"Bad router request: Cidr {new.cidr} of subnet {new.id} overlaps with cidr {joined.cidr} of "
                    f"subnet {joined.id}.",
                    "BadRequest",
                )
    if plan.port is not None:
        port_id = insert_port(conn, plan.port).row["id"]
        check_still_shared(conn, plan.port.relies_on)
    else:
        assert plan.port_id is not None
        port_id = plan.port_id
        _adopt(conn, core, router_id, port_id)
    rows = [{"port_id": port_id, "router_id": router_id, "subnet_id": each.id} for each in plan.subnets]
    conn.execute(router_interfaces.insert(), rows)
    note(conn, core.now(), [router_topic(router_id), *(network_topic(each.network_id) for each in plan.subnets)])
    if plan.port is not None:
        charge(conn, plan.port.row["project_id"], "port", core.settings.quotas)
    return _described(port_id, plan.subnets)


def _adopt(conn: sa.Connection, core: Core, router_id: str, port_id: str) -> None:
    """Turn a user's port into a router interface."""
    port = locked_port(conn, port_id)
    check_free_of_trunks(conn, port_id)
    if port["device_id"]:
        raise conflict(
            f"Unable to complete operation on port {port_id} for network {port['network_id']}. Port already has an "
            f"attached device {port['device_id']}.",
            "PortInUse",
        )
    note(conn, core.now(), topics_of_ports(port))
    joined = {"device_id": router_id, "device_owner": device_owners.ROUTER_INTERFACE, "status": "ACTIVE"}
    revisions.touch(conn, ports.c.revision, ports.c.id == port_id, now=core.now(), **joined)


def disconnect(
    conn: sa.Connection, core: Core, router_id: str, subnet_id: str | None, port_id: str | None
) -> dict[str, Any]:
    """Remove the interface of a subnet or a port from a router."""
    i = router_interfaces.c
    statement = sa.select(i.port_id, i.subnet_id).where(i.router_id == router_id)
    if port_id is not None:
        statement = statement.where(i.port_id == port_id)
    else:
        mine = sa.select(i.port_id).where(i.router_id == router_id, i.subnet_id == subnet_id)
        statement = statement.where(i.port_id.in_(mine))
    rows = list(conn.execute(statement))
    if not rows:
        if port_id is not None:
            raise NotFound(
                f"Router {router_id} does not have an interface with id {port_id}.", type="RouterInterfaceNotFound"
            )
        raise NotFound(
            f"Router {router_id} has no interface on subnet {subnet_id}.", type="RouterInterfaceNotFoundForSubnet"
        )
    held = [row.subnet_id for row in rows]
    if subnet_id is not None and subnet_id not in held:
        raise invalid(
            f"Subnet on port {port_id} does not match the requested subnet {subnet_id}.", "SubnetMismatchForPort"
        )
    for each in held:
        _check_no_floating(conn, router_id, each)
    gone = rows[0].port_id
    joined = [allocation_subnet(row) for row in conn.execute(sa.select(subnets).where(subnets.c.id.in_(held)))]
    conn.execute(router_interfaces.delete().where(i.port_id == gone))
    remove_port(conn, gone, core.now(), with_owner=True)
    note(conn, core.now(), [router_topic(router_id), *(network_topic(each.network_id) for each in joined)])
    _drop_dead_routes(conn, router_id)
    return _described(gone, joined)


def _check_no_floating(conn: sa.Connection, router_id: str, subnet_id: str) -> None:
    used = (
        sa.select(floatingips.c.id)
        .join(
            addresses,
            sa.and_(
                addresses.c.port_id == floatingips.c.port_id,
                addresses.c.address == floatingips.c.fixed_ip_address,
            ),
        )
        .where(floatingips.c.router_id == router_id, addresses.c.subnet_id == subnet_id)
    )
    if conn.execute(used.limit(1)).first() is not None:
        raise conflict(
            f"Router interface for subnet {subnet_id} on router {router_id} cannot be deleted, as it is required by "
            f"one or more floating IPs.",
            "RouterInterfaceInUseByFloatingIP",
        )


def interface_subnets(conn: sa.Connection, router_id: str) -> list[AllocationSubnet]:
    """Return the subnets of a router's interfaces."""
    rows = conn.execute(
        sa.select(subnets)
        .join(router_interfaces, router_interfaces.c.subnet_id == subnets.c.id)
        .where(router_interfaces.c.router_id == router_id)
    )
    return [allocation_subnet(row) for row in rows]


def _reachable(conn: sa.Connection, router_id: str) -> list[AllocationSubnet]:
    beyond = conn.execute(
        sa.select(subnets)
        .join(routers, routers.c.external_network_id == subnets.c.network_id)
        .where(routers.c.id == router_id)
    )
    return interface_subnets(conn, router_id) + [allocation_subnet(row) for row in beyond]


def check_routes(conn: sa.Connection, router_id: str, given: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return extra routes in canonical form; the next hop of each must be on a subnet of the router."""
    around = _reachable(conn, router_id)
    found = []
    for route in given:
        destination = ip_network(route["destination"], "routes")
        hop = ip_address(route["nexthop"], "routes")
        if destination.version != hop.version:
            raise invalid(f"Invalid format for routes: {destination} via {hop} mixes IP versions.", "InvalidRoutes")
        if not any(hop in each.cidr for each in around):
            raise invalid(
                f"Invalid format for routes: the nexthop {hop} is not connected with router.", "InvalidRoutes"
            )
        found.append({"destination": str(destination), "nexthop": str(hop)})
    if len({(r["destination"], r["nexthop"]) for r in found}) != len(found):
        raise invalid("Invalid format for routes: duplicate routes.", "InvalidRoutes")
    return found


def _drop_dead_routes(conn: sa.Connection, router_id: str) -> None:
    """Delete routes whose next hop is no longer on a subnet of the router."""
    routes = conn.execute(sa.select(routers.c.routes).where(routers.c.id == router_id)).scalar_one()
    if not routes:
        return
    around = _reachable(conn, router_id)
    alive = [r for r in routes if any(ipaddress.ip_address(r["nexthop"]) in each.cidr for each in around)]
    conn.execute(routers.update().where(routers.c.id == router_id).values(routes=alive))


def _described(port_id: str, joined: list[AllocationSubnet]) -> dict[str, Any]:
    return {
        "port_id": port_id,
        "network_id": joined[0].network_id,
        "subnet_ids": [each.id for each in joined],
    }


def _subnet(conn: sa.Connection, id: str) -> tuple[SubnetOnNetworkRow | None, Access]:
    row: Any = conn.execute(
        sa.select(subnets, *NETWORK_LABELS)
        .join(networks, networks.c.id == subnets.c.network_id)
        .where(subnets.c.id == id)
    ).first()
    access = {} if row is None else access_of(conn, NETWORK, [row.network_id])
    return row, access.get(row.network_id, NOBODY) if access else NOBODY

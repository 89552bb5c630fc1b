"""Rows of ports: those of users, and those that the service creates for routers, floating IPs and DHCP."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import AddressRequest, AllocationSubnet, allocate, allocation_subnets
from micronova.embedded.network.agent_liveness import hosts_with_agents
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.host_changes import note, topics_of_groups, topics_of_ports
from micronova.embedded.network.quotas import release
from micronova.embedded.network.row_types import PortNetworkRow, PortRow, port_with
from micronova.embedded.network.rows import new_row
from micronova.embedded.network.security_groups import default_groups
from micronova.embedded.network.sharing import NETWORK, SECURITY_GROUP, Access, Use, access_of
from micronova.embedded.network.tables import (
    floatingips,
    networks,
    port_security_groups,
    ports,
    router_interfaces,
    routers,
    security_groups,
    tags,
)
from micronova.embedded.network.topics import members_topic, router_topic
from micronova.objects.errors import Unavailable

MACS = 4  # MAC addresses that are tried for a new port; a unique index decides


@dataclass
class PortPlan:
    """A port to create."""

    row: PortRow
    macs: list[str]
    address_requests: list[AddressRequest]
    groups: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    mac_is_given: bool = False  # the user named the MAC address
    relies_on: list[Use] = field(default_factory=list)
    network_qos_policy: str | None = None


@dataclass
class CreatedPort:
    """A port that was created, with its addresses."""

    row: PortRow
    fixed_ips: list[dict[str, str]]
    groups: list[str]
    tags: list[str]
    taken: list[tuple[str, int | None, int]]  # subnet, hint and number, for the next search
    network_qos_policy: str | None = None  # of a bound port: as it stays while the port is bound


@dataclass
class PortFacts:
    """What has to be known to create or change the ports of a request."""

    networks: dict[str, PortNetworkRow]
    access: dict[str, Access]  # to the networks
    subnets: dict[str, list[AllocationSubnet]]
    default_groups: dict[str, str]  # project -> its default security group
    group_projects: dict[str, str]  # security group -> its project
    group_access: dict[str, Access]  # to security groups
    agent_hosts: set[str]  # hosts with a network agent


def read_port_facts(
    conn: sa.Connection,
    network_ids: Sequence[str],
    *,
    projects: Sequence[str] = (),
    group_ids: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> PortFacts:
    """Read what has to be known about the ports of a request; `projects` are those whose default group is needed."""
    rows = conn.execute(_NETWORKS, {"ids": network_ids})
    groups: dict[str, str] = {}
    if group_ids:
        statement = sa.select(security_groups.c.id, security_groups.c.project_id)
        groups = {r.id: r.project_id for r in conn.execute(statement.where(security_groups.c.id.in_(group_ids)))}
    return PortFacts(
        networks={row.id: row for row in rows},
        access=access_of(conn, NETWORK, network_ids),
        subnets=allocation_subnets(conn, network_ids),
        default_groups=default_groups(conn, projects) if projects else {},
        group_projects=groups,
        group_access=access_of(conn, SECURITY_GROUP, list(groups)),
        agent_hosts=hosts_with_agents(conn, hosts) if hosts else set(),
    )


_NETWORKS = sa.select(
    *(networks.c[name] for name in ("id", "project_id", "external", "port_security_enabled", "qos_policy_id"))
).where(networks.c.id.in_(sa.bindparam("ids", expanding=True)))


def new_port_row(core: Core, project_id: str, network_id: str) -> PortRow:
    """Return the row of a new port with default values."""
    return {
        **new_row(core, project_id, {}, revision=1),
        "name": "",
        "network_id": network_id,
        "mac_address": "",
        "admin_state_up": True,
        "status": "DOWN",
        "device_id": "",
        "device_owner": "",
        "host": "",
        "vif_type": "unbound",
        "vif_details": {},
        "vnic_type": "normal",
        "profile": {},
        "port_security_enabled": True,
        "allowed_address_pairs": [],
        "extra_dhcp_opts": [],
        "dns_name": "",
        "dns_domain": "",
        "qos_policy_id": None,
    }


def random_macs(core: Core) -> list[str]:
    """Return candidates for a new port's MAC address."""
    prefix = core.settings.mac_prefix
    missing = 6 - len(prefix.split(":"))
    found = []
    for _ in range(MACS):
        tail = core.random_source.getrandbits(8 * missing).to_bytes(missing, "big")
        found.append(prefix + "".join(f":{byte:02x}" for byte in tail))
    return found


def with_hints(core: Core, address_requests: list[AddressRequest]) -> list[AddressRequest]:
    """Return the requests with the addresses at which their searches begin."""
    return [
        request
        if request.address is not None
        else replace(
            request,
            hints={r.id: core.hints.take(r.id, r.pools[0][0]) for r in request.choices[:1] if r.pools},
        )
        for request in address_requests
    ]


def service_port(
    core: Core,
    project: str,
    network_id: str,
    device_id: str,
    device_owner: str,
    address_requests: list[AddressRequest],
    status: str = "ACTIVE",
) -> PortPlan:
    """Plan a port that the service creates: without security groups, and in a quota only if it has a project."""
    row = new_port_row(core, project, network_id)
    row = port_with(
        row, {"device_id": device_id, "device_owner": device_owner, "status": status, "port_security_enabled": False}
    )
    return PortPlan(row=row, macs=random_macs(core), address_requests=with_hints(core, address_requests))


def remember_addresses(core: Core, made: Sequence[CreatedPort]) -> None:
    """Let later searches begin after the allocated addresses."""
    for each in made:
        for subnet_id, hint, number in each.taken:
            core.hints.learn(subnet_id, hint, number)


def insert_port(conn: sa.Connection, plan: PortPlan) -> CreatedPort:
    """Insert the rows of a port: MAC address, addresses, security groups and tags.

    The caller charges the quota, and checks afterwards that what the port relies on is still shared.
    """
    row = plan.row
    pairs = row["allowed_address_pairs"]
    for mac in plan.macs:
        row["mac_address"] = mac
        row["allowed_address_pairs"] = [{**pair, "mac_address": pair["mac_address"] or mac} for pair in pairs]
        if insert_if_absent(conn, ports, row):
            break
    else:
        if plan.mac_is_given:
            raise mac_in_use(row["network_id"], row["mac_address"])
        raise Unavailable("No free MAC address was found on the network: try again.")
    fixed, taken = allocate_addresses(conn, plan.address_requests, row["id"], row["mac_address"])
    add_to_groups(conn, row["id"], plan.groups)
    note(conn, row["created_at"], [*topics_of_ports(row), *map(members_topic, plan.groups)])
    if plan.tags:
        conn.execute(tags.insert(), [{"resource_id": row["id"], "tag": tag} for tag in dict.fromkeys(plan.tags)])
    return CreatedPort(row, fixed, plan.groups, plan.tags, taken, plan.network_qos_policy)


def allocate_addresses(
    conn: sa.Connection, address_requests: Sequence[AddressRequest], port_id: str, mac: str, start: int = 0
) -> tuple[list[dict[str, str]], list[tuple[str, int | None, int]]]:
    """Allocate all addresses of a port; return them, and what `remember_addresses` needs."""
    fixed, taken = [], []
    for position, request in enumerate(address_requests, start):
        subnet, address = allocate(conn, request, port_id, position, mac)
        fixed.append({"subnet_id": subnet.id, "ip_address": str(address)})
        if request.address is None and not subnet.slaac:
            taken.append((subnet.id, (request.hints or {}).get(subnet.id), int(address)))
    return fixed, taken


def groups_of(conn: sa.Connection, port_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the security groups of ports."""
    found: dict[str, list[str]] = {}
    for part in chunks(port_ids):
        for row in conn.execute(_GROUPS, {"ids": part}):
            found.setdefault(row.port_id, []).append(row.security_group_id)
    return found


_GROUPS = (
    sa.select(port_security_groups)
    .where(port_security_groups.c.port_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(port_security_groups.c.port_id, port_security_groups.c.security_group_id)
)


def add_to_groups(conn: sa.Connection, port_id: str, groups: Sequence[str]) -> None:
    """Add a port to security groups."""
    if groups:
        rows = [{"port_id": port_id, "security_group_id": group} for group in groups]
        conn.execute(port_security_groups.insert(), rows)


def mac_in_use(network_id: str, mac: str) -> Exception:
    """Return the error for a MAC address that another port of the network has."""
    return conflict(
        f"Unable to complete operation for network {network_id}. The mac address {mac} is in use.", "MacAddressInUse"
    )


def remove_port(conn: sa.Connection, id: str, now: int, *, with_owner: bool = False) -> PortRow:
    """Delete the rows of a port with its addresses, tags and associations, release its quota, and return its last row.

    A port that belongs to a router or a floating IP is deleted only with its owner (`with_owner`).
    """
    gone = locked_port(conn, id)
    if not with_owner:
        _check_free(conn, gone)
    topics = topics_of_ports(gone) | topics_of_groups(conn, [id])
    if routers_of := conn.execute(_ROUTERS_OF, {"id": id}).scalars().all():
        free = {"port_id": None, "fixed_ip_address": None, "router_id": None, "status": "DOWN"}
        revisions.touch(conn, floatingips.c.revision, floatingips.c.port_id == id, now=now, **free)
        topics.update(router_topic(router) for router in routers_of if router)
    note(conn, now, topics)
    conn.execute(_UNTAG, {"id": id})
    conn.execute(_DELETE, {"id": id})  # the database deletes its addresses and memberships, too
    release(conn, gone["project_id"], "port")
    return gone


def locked_port(conn: sa.Connection, id: str) -> PortRow:
    """Lock the row of a port and return it; raise Changed if it is gone."""
    row = conn.execute(_LOCK, {"id": id}).mappings().first()
    if row is None:
        raise Changed
    return cast(PortRow, dict(row))


_LOCK = sa.select(ports).where(ports.c.id == sa.bindparam("id")).with_for_update()
_DELETE = ports.delete().where(ports.c.id == sa.bindparam("id"))
_UNTAG = tags.delete().where(tags.c.resource_id == sa.bindparam("id"))
_ROUTERS_OF = (
    sa.select(floatingips.c.router_id)
    .where(floatingips.c.port_id == sa.bindparam("id"))
    .order_by(floatingips.c.id)
    .with_for_update()
)


def _check_free(conn: sa.Connection, row: PortRow) -> None:
    if not device_owners.is_service(row["device_owner"]):
        return  # only these can belong to a router or a floating IP
    if belongs_to_service(conn, row["id"]):
        raise conflict(
            f"Port {row['id']} cannot be deleted directly via the port API: it has device owner {row['device_owner']}.",
            "ServicePortInUse",
        )


def belongs_to_service(conn: sa.Connection, id: str) -> bool:
    """Return whether a port belongs to a router or a floating IP."""
    used = sa.select(
        sa.exists().where(router_interfaces.c.port_id == id)
        | sa.exists().where(routers.c.gateway_port_id == id)
        | sa.exists().where(floatingips.c.floating_port_id == id)
    )
    return bool(conn.execute(used).scalar())

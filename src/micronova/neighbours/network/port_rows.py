"""Ports in the database: making, changing and removing them, for users and for routers and floating IPs alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.network.addresses import Range, Wish, ranges_of, take
from micronova.neighbours.network.core import Changed, Core, insert_unless_there
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.quotas import give_back
from micronova.neighbours.network.rows import new_row
from micronova.neighbours.network.security_groups import default_groups
from micronova.neighbours.network.tables import (
    agents,
    floatingips,
    networks,
    port_security_groups,
    ports,
    router_interfaces,
    routers,
    security_groups,
    tags,
)
from micronova.objects.clock import micros
from micronova.objects.errors import Unavailable

MACS = 4  # candidates for a MAC address: the unique row decides


@dataclass
class Plan:
    """A port to be made."""

    row: dict[str, Any]
    macs: list[str]
    wishes: list[Wish]
    groups: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    own_mac: bool = False  # the user named the MAC address


@dataclass
class Made:
    """A port that was made: its row and its addresses."""

    row: dict[str, Any]
    fixed_ips: list[dict[str, str]]
    groups: list[str]
    tags: list[str]
    taken: list[tuple[str, int | None, int]]  # subnet, hint, number: for the next search


@dataclass
class Surroundings:
    """What a decision about ports needs to know."""

    networks: dict[str, Any]
    ranges: dict[str, list[Range]]
    defaults: dict[str, str]  # project -> its default group
    groups: dict[str, str]  # group -> its project
    watched: set[str]  # hosts that have a network agent


def surroundings(
    conn: sa.Connection,
    network_ids: Sequence[str],
    projects: Sequence[str],
    group_ids: Sequence[str],
    hosts: Sequence[str],
    since: int,
) -> Surroundings:
    """Read what there is around the ports of a request."""
    rows = conn.execute(_NETWORKS, {"ids": network_ids})
    groups: dict[str, str] = {}
    if group_ids:
        statement = sa.select(security_groups.c.id, security_groups.c.project_id)
        groups = {r.id: r.project_id for r in conn.execute(statement.where(security_groups.c.id.in_(group_ids)))}
    return Surroundings(
        networks={row.id: row for row in rows},
        ranges=ranges_of(conn, network_ids),
        defaults=default_groups(conn, projects) if projects else {},
        groups=groups,
        watched=watched_hosts(conn, hosts, since) if hosts else set(),
    )


def watched_hosts(conn: sa.Connection, hosts: Sequence[str], since: int) -> set[str]:
    """Return those of the hosts whose network agent was heard of lately."""
    return set(conn.execute(_WATCHED, {"hosts": hosts, "since": since}).scalars())


_NETWORKS = sa.select(
    *(networks.c[name] for name in ("id", "project_id", "shared", "external", "port_security_enabled", "qos_policy_id"))
).where(networks.c.id.in_(sa.bindparam("ids", expanding=True)))
_WATCHED = sa.select(agents.c.host).where(
    agents.c.host.in_(sa.bindparam("hosts", expanding=True)), agents.c.heartbeat_at >= sa.bindparam("since")
)


def heard_since(core: Core) -> int:
    """Return the moment since which an agent must have been heard of to count as alive."""
    return core.now() - micros(core.settings.agent_down_after)


def blank(core: Core, project_id: str, network_id: str) -> dict[str, Any]:
    """Return the row of a port about which nothing is known yet."""
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
        tail = core.chance.getrandbits(8 * missing).to_bytes(missing, "big")
        found.append(prefix + "".join(f":{byte:02x}" for byte in tail))
    return found


def with_hints(core: Core, wishes: list[Wish]) -> list[Wish]:
    """Say where the search for each address begins."""
    return [
        wish
        if wish.address is not None
        else replace(wish, hints={r.id: core.hints.take(r.id, r.pools[0][0]) for r in wish.choices[:1] if r.pools})
        for wish in wishes
    ]


def learn(core: Core, made: Sequence[Made]) -> None:
    """Note where addresses were found."""
    for each in made:
        for subnet_id, hint, number in each.taken:
            core.hints.learn(subnet_id, hint, number)


def insert(conn: sa.Connection, plan: Plan) -> Made:
    """Make a port: MAC address, addresses and groups. The quota is for the caller to charge, in the end."""
    row = plan.row
    pairs = row["allowed_address_pairs"]
    for mac in plan.macs:
        row["mac_address"] = mac
        row["allowed_address_pairs"] = [{**pair, "mac_address": pair["mac_address"] or mac} for pair in pairs]
        if insert_unless_there(conn, ports, row):
            break
    else:
        if plan.own_mac:
            raise mac_in_use(row["network_id"], row["mac_address"])
        raise Unavailable("No free MAC address was found on the network: try again.")
    fixed, taken = take_all(conn, plan.wishes, row["id"], row["mac_address"])
    if plan.groups:
        rows = [{"port_id": row["id"], "security_group_id": group} for group in plan.groups]
        conn.execute(port_security_groups.insert(), rows)
    if plan.tags:
        conn.execute(tags.insert(), [{"resource_id": row["id"], "tag": tag} for tag in dict.fromkeys(plan.tags)])
    return Made(row, fixed, plan.groups, plan.tags, taken)


def take_all(
    conn: sa.Connection, wishes: Sequence[Wish], port_id: str, mac: str, start: int = 0
) -> tuple[list[dict[str, str]], list[tuple[str, int | None, int]]]:
    """Take every address that a port wishes for."""
    fixed, taken = [], []
    for position, wish in enumerate(wishes, start):
        subnet, address = take(conn, wish, port_id, position, mac)
        fixed.append({"subnet_id": subnet.id, "ip_address": str(address)})
        if wish.address is None and not subnet.slaac:
            taken.append((subnet.id, (wish.hints or {}).get(subnet.id), int(address)))
    return fixed, taken


def mac_in_use(network_id: str, mac: str) -> Exception:
    """The refusal of a MAC address that another port of the network has."""
    return conflict(
        f"Unable to complete operation for network {network_id}. The mac address {mac} is in use.", "MacAddressInUse"
    )


def remove(conn: sa.Connection, id: str, now: int, *, of_service: bool = False) -> dict[str, Any]:
    """Delete a port and all that hangs on it, and return what it was.

    A port that a router or a floating IP lives on goes only with it (`of_service`).
    """
    row = conn.execute(LOCK, {"id": id}).mappings().first()
    if row is None:
        raise Changed
    gone = dict(row)
    if not of_service:
        _check_free(conn, gone)
    conn.execute(_DISASSOCIATE, {"port": id, "now": now})
    conn.execute(_UNTAG, {"id": id})
    conn.execute(_DELETE, {"id": id})  # addresses and memberships go with it
    give_back(conn, gone["project_id"], "port")
    return gone


LOCK = sa.select(ports).where(ports.c.id == sa.bindparam("id")).with_for_update()
_DELETE = ports.delete().where(ports.c.id == sa.bindparam("id"))
_UNTAG = tags.delete().where(tags.c.resource_id == sa.bindparam("id"))
_DISASSOCIATE = (
    floatingips.update()
    .where(floatingips.c.port_id == sa.bindparam("port"))
    .values(
        port_id=None,
        fixed_ip_address=None,
        router_id=None,
        status="DOWN",
        revision=floatingips.c.revision + 1,
        updated_at=sa.bindparam("now"),
    )
)


def _check_free(conn: sa.Connection, row: Mapping[str, Any]) -> None:
    if not row["device_owner"].startswith("network:"):
        return  # only these can belong to a router or a floating IP
    if belongs_to_service(conn, row["id"]):
        raise conflict(
            f"Port {row['id']} cannot be deleted directly via the port API: it has device owner "
            f"{row['device_owner']}.",
            "ServicePortInUse",
        )


def belongs_to_service(conn: sa.Connection, id: str) -> bool:
    """Say whether a router or a floating IP lives on the port."""
    used = sa.select(
        sa.exists().where(router_interfaces.c.port_id == id)
        | sa.exists().where(routers.c.gateway_port_id == id)
        | sa.exists().where(floatingips.c.floating_port_id == id)
    )
    return bool(conn.execute(used).scalar())

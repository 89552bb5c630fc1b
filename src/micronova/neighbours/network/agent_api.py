"""What network agents ask of the service: all that one host should be like, in one answer, and what they tell it.

`GET /v2.0/agent-states/HOST` answers with the whole desired state of a host and its fingerprint. With `fingerprint` in
the query it waits until the state is another one, for at most `wait` seconds. Changes that this process makes are
noticed at once; those of other processes within `LOOK` seconds. `POST /v2.0/agent-reports` is an agent's heartbeat and
tells which ports are wired. Both are for service users, and for hosts: each for itself, by its ticket.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.network import dhcp_ports
from micronova.neighbours.network.addresses import addresses_of
from micronova.neighbours.network.binding import news_of
from micronova.neighbours.network.collection import chunks
from micronova.neighbours.network.core import Core
from micronova.neighbours.network.notifier import Event
from micronova.neighbours.network.port_rows import heard_since
from micronova.neighbours.network.qos_use import limits_of
from micronova.neighbours.network.rules import PROTOCOLS
from micronova.neighbours.network.tables import (
    addresses,
    agents,
    floatingips,
    networks,
    port_security_groups,
    ports,
    router_interfaces,
    routers,
    security_group_rules,
    security_groups,
    subnets,
)
from micronova.neighbours.network.wire import refuse_nul

P = ParamSpec("P")
R = TypeVar("R")

AGENT_TYPE = "Linux bridge agent"
LOOK = 1.0  # seconds after which the changes of other processes are noticed
SETTLE = 0.02  # seconds that a change waits for company
LONGEST = 60.0

HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class Changes:
    """Tells when this process has changed something."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def happened(self) -> None:
        """Wake all who wait."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout: float) -> None:
        """Return when something has changed, or when the time is over."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            self._waiting.discard(future)


class Watched(Database):
    """A database that tells of every write."""

    def __init__(self, inner: Database, changes: Changes) -> None:
        self.inner = inner
        self.dialect = inner.dialect
        self.statistics = inner.statistics
        self._changes = changes

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read."""
        return await self.inner.read(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write, then tell."""
        found = await self.inner.write(fn, *args, **kwargs)
        self._changes.happened()
        return found

    async def close(self) -> None:
        """Close."""
        await self.inner.close()


class StateQuery(msgspec.Struct, kw_only=True):
    """What the agent has already, and how long it waits for more."""

    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    wait: Annotated[float, Meta(ge=0, le=LONGEST)] = 0.0


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A heartbeat."""

    host: HostName
    started: bool = False  # the agent has just been started
    configurations: dict[str, Any] = {}
    up: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    down: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    dhcp: bool = False  # ports of DHCP servers are missing, or too many


class AgentRoutes:
    """The routes of agents."""

    def __init__(self, core: Core, changes: Changes) -> None:
        self.core = core
        self._changes = changes

    def routes(self) -> list[Route]:
        """Declare the operations."""
        return [
            Route(
                method="GET", path="/v2.0/agent-states/{id}", handler=self.state, policy="get_agent_state",
                query=StateQuery, checks_policy=True, for_hosts=True,
            ),
            Route(
                method="POST", path="/v2.0/agent-reports", handler=self.report, policy="report_agent", body=Report,
                status=204, checks_policy=True, for_hosts=True,
            ),
        ]  # fmt: skip

    async def state(self, request: Request, id: str) -> dict[str, Any]:
        """GET /v2.0/agent-states/{id}: the id is the host's name."""
        refuse_nul(id, "host")
        request.authorize_host(id)
        query: StateQuery = request.query
        deadline = asyncio.get_running_loop().time() + query.wait
        while True:
            found = await self.core.database.read(host_state, id, heard_since(self.core))
            fingerprint = hashlib.blake2b(msgspec.json.encode(found), digest_size=16).hexdigest()
            left = deadline - asyncio.get_running_loop().time()
            if fingerprint != query.fingerprint:
                return {"fingerprint": fingerprint, "state": found}
            if left <= 0:
                return {"fingerprint": fingerprint}
            await self._changes.wait(min(left, LOOK))
            await asyncio.sleep(min(left, SETTLE))

    async def report(self, request: Request) -> None:
        """POST /v2.0/agent-reports."""
        body: Report = request.body
        refuse_nul(body.host, "host")
        request.authorize_host(body.host)
        database = self.core.database
        quiet = database.inner if isinstance(database, Watched) else database  # a heartbeat is no news to agents
        await quiet.write(_heard, self.core, body)
        if body.up or body.down:
            await self.core.change(_wired, self.core, body)
        if body.dhcp:
            await dhcp_ports.settle(self.core, body.host)


def _heard(conn: sa.Connection, core: Core, report: Report) -> None:
    now = core.now()
    values: dict[str, Any] = {"heartbeat_at": now, "configurations": report.configurations}
    if report.started:
        values["started_at"] = now
    mine = sa.and_(agents.c.host == report.host, agents.c.agent_type == AGENT_TYPE)
    if conn.execute(agents.update().where(mine).values(**values)).rowcount:
        return
    conn.execute(
        agents.insert(),
        {
            "id": core.new_id(),
            "agent_type": AGENT_TYPE,
            "binary": "micronova-network-agent",
            "host": report.host,
            "topic": "N/A",
            "availability_zone": core.settings.availability_zone,
            "description": "",
            "admin_state_up": True,
            "configurations": report.configurations,
            "created_at": now,
            "started_at": now,
            "heartbeat_at": now,
        },
    )


def _wired(conn: sa.Connection, core: Core, report: Report) -> tuple[None, list[Event]]:
    """Note which of a host's ports are wired; compute hears of each that was not, or is no longer."""
    news: list[Event] = []
    for status, ids in (("DOWN", report.down), ("ACTIVE", report.up)):
        for part in chunks(sorted(set(ids))):
            p = ports.c
            chosen = sa.select(ports).where(p.id.in_(part), p.host == report.host, p.status != status)
            for row in conn.execute(chosen.with_for_update()).mappings().all():
                if status == "ACTIVE" and not row["admin_state_up"]:
                    continue
                after = {"status": status, "updated_at": core.now(), "revision": row["revision"] + 1}
                conn.execute(ports.update().where(p.id == row["id"]).values(**after))
                before = dict(row)
                news += news_of(core, before, {**before, **after})
    return None, news


# --- the state of a host ---


def host_state(conn: sa.Connection, host: str, since: int) -> dict[str, Any]:
    """Return all that a host's agent needs: networks, ports, groups and routers."""
    p = ports.c
    local = list(conn.execute(sa.select(ports).where(p.host == host, p.vif_type != "binding_failed")))
    routed = _routers(conn) if _leads(conn, host, since) else []
    of_routers = [id for router in routed for id in (*router["ports"], *filter(None, [router["gateway_port"]]))]
    held = {row.id for row in local}
    for part in chunks([id for id in of_routers if id not in held]):
        local += conn.execute(sa.select(ports).where(p.id.in_(part)))
    local.sort(key=lambda row: row.id)
    groups = _groups_of(conn, [row.id for row in local])
    fixed = addresses_of(conn, [row.id for row in local])
    chosen = sorted({group for each in groups.values() for group in each})
    rules, members = _rules(conn, chosen)
    loose = _stateless(conn, chosen)
    limits = limits_of(conn, local)
    return {
        "networks": _networks(conn, sorted({row.network_id for row in local})),
        "ports": [
            {
                **_port(row, fixed.get(row.id, []), groups.get(row.id, [])),
                "stateful": not groups.get(row.id) or not loose.issuperset(groups[row.id]),
                **limits.get(row.id, {}),
            }
            for row in local
        ],
        "rules": rules,
        "members": members,
        "routers": routed,
    }


def _leads(conn: sa.Connection, host: str, since: int) -> bool:
    """Say whether a host is the one that has the routers: the first of those whose agents live."""
    first = sa.select(sa.func.min(agents.c.host)).where(
        agents.c.heartbeat_at >= since, agents.c.admin_state_up, agents.c.agent_type == AGENT_TYPE
    )
    return conn.execute(first).scalar() in (host, None)


def _port(row: Any, fixed: Sequence[dict[str, str]], groups: Sequence[str]) -> dict[str, Any]:
    return {
        "id": row.id,
        "network_id": row.network_id,
        "project_id": row.project_id,
        "mac_address": row.mac_address,
        "status": row.status,
        "admin_state_up": row.admin_state_up,
        "device_id": row.device_id,
        "device_owner": row.device_owner,
        "host": row.host,
        "port_security_enabled": row.port_security_enabled,
        "fixed_ips": sorted(fixed, key=lambda each: (each["subnet_id"], each["ip_address"])),
        "security_groups": sorted(groups),
        "allowed_address_pairs": row.allowed_address_pairs,
        "extra_dhcp_opts": row.extra_dhcp_opts,
        "dns_name": row.dns_name,
    }


def _networks(conn: sa.Connection, ids: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in chunks(list(ids)):
        n, s = networks.c, subnets.c
        below: dict[str, list[dict[str, Any]]] = {}
        routed = sa.exists().where(router_interfaces.c.subnet_id == s.id).label("routed")
        for row in conn.execute(sa.select(subnets, routed).where(s.network_id.in_(part)).order_by(s.id)):
            shown = {name: getattr(row, name) for name in _SUBNET}
            below.setdefault(row.network_id, []).append(shown)
        found += [
            {**{name: getattr(row, name) for name in _NETWORK}, "subnets": below.get(row.id, [])}
            for row in conn.execute(sa.select(networks).where(n.id.in_(part)).order_by(n.id))
        ]
    return found


_NETWORK = ("id", "mtu", "external", "dns_domain", "admin_state_up", "network_type", "segmentation_id")
_SUBNET = (
    "id", "ip_version", "cidr", "gateway_ip", "enable_dhcp", "ipv6_ra_mode", "ipv6_address_mode", "dns_nameservers",
    "host_routes", "routed",
)  # fmt: skip


def _groups_of(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    g = port_security_groups.c
    for part in chunks(list(ids)):
        for row in conn.execute(sa.select(g.port_id, g.security_group_id).where(g.port_id.in_(part))):
            found.setdefault(row.port_id, []).append(row.security_group_id)
    return found


def _stateless(conn: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Return those of the groups that track no connections."""
    g = security_groups.c
    found: set[str] = set()
    for part in chunks(list(ids)):
        found |= set(conn.execute(sa.select(g.id).where(g.id.in_(part), sa.not_(g.stateful))).scalars())
    return found


def _rules(conn: sa.Connection, ids: Sequence[str]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
    """Return the rules of groups, and the addresses of the groups that rules name."""
    rules: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    r = security_group_rules.c
    for part in chunks(list(ids)):
        chosen = sa.select(security_group_rules).where(r.security_group_id.in_(part)).order_by(r.id)
        for row in conn.execute(chosen):
            rules[row.security_group_id].append(
                {
                    "direction": row.direction,
                    "ethertype": row.ethertype,
                    "protocol": _number(row.protocol, row.ethertype),
                    "port_range_min": row.port_range_min,
                    "port_range_max": row.port_range_max,
                    "remote_ip_prefix": row.remote_ip_prefix,
                    "remote_group_id": row.remote_group_id,
                }
            )
    named = sorted({each["remote_group_id"] for group in rules.values() for each in group if each["remote_group_id"]})
    members: dict[str, list[str]] = {id: [] for id in named}
    g = port_security_groups.c
    for part in chunks(named):
        membership = (
            sa.select(g.security_group_id, addresses.c.address, ports.c.allowed_address_pairs)
            .join(addresses, addresses.c.port_id == g.port_id)
            .join(ports, ports.c.id == g.port_id)
            .where(g.security_group_id.in_(part))
            .order_by(addresses.c.number)
        )
        for row in conn.execute(membership):
            pairs = [pair["ip_address"] for pair in row.allowed_address_pairs]
            members[row.security_group_id] += [row.address, *pairs]
    return rules, members


def _number(protocol: str | None, ethertype: str) -> int | None:
    if protocol is None:
        return None
    number = int(protocol) if protocol.isdecimal() else PROTOCOLS.get(protocol)
    return 58 if number == 1 and ethertype == "IPv6" else number  # clients say icmp and mean that of the family


def _routers(conn: sa.Connection) -> list[dict[str, Any]]:
    joined: dict[str, set[str]] = {}
    for row in conn.execute(sa.select(router_interfaces)):
        joined.setdefault(row.router_id, set()).add(row.port_id)
    f = floatingips.c
    floating: dict[str, list[dict[str, str]]] = {}
    chosen = sa.select(f.router_id, f.floating_ip_address, f.fixed_ip_address)
    for row in conn.execute(chosen.where(f.router_id.is_not(None), f.port_id.is_not(None)).order_by(f.id)):
        pair = {"floating": row.floating_ip_address, "fixed": row.fixed_ip_address}
        floating.setdefault(row.router_id, []).append(pair)
    return [
        {
            "id": row.id,
            "admin_state_up": row.admin_state_up,
            "gateway_port": row.gateway_port_id,
            "enable_snat": row.enable_snat,
            "routes": row.routes,
            "ports": sorted(joined.get(row.id, ())),
            "floating": floating.get(row.id, []),
        }
        for row in conn.execute(sa.select(routers).order_by(routers.c.id))
    ]

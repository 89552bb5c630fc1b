"""The API of network agents: the desired state of a host, and reports.

`GET /v2.0/agent-states/HOST` returns the desired state of a host and its fingerprint. With `fingerprint` in the query
it waits until the state has another one, for at most `wait` seconds. It notices changes by this process at once,
and those by other processes within `POLL_INTERVAL` seconds. `POST /v2.0/agent-reports` is an agent's heartbeat and says
which ports are wired. Service users may use both; a host may use them for itself, with its ticket.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.db.engine import Database
from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import dhcp_ports
from micronova.embedded.network.addresses import addresses_of
from micronova.embedded.network.agents import alive_since
from micronova.embedded.network.binding import events_of
from micronova.embedded.network.core import Core
from micronova.embedded.network.notifier import Event
from micronova.embedded.network.port_changes import groups_of
from micronova.embedded.network.qos_use import limits_of
from micronova.embedded.network.security_group_rules import PROTOCOLS
from micronova.embedded.network.tables import (
    PortChanges,
    PortRow,
    addresses,
    agents,
    floatingips,
    networks,
    port_security_groups,
    port_with,
    ports,
    router_interfaces,
    routers,
    security_group_rules,
    security_groups,
    subnets,
)
from micronova.http.request import Request
from micronova.http.service import Route

P = ParamSpec("P")
R = TypeVar("R")

AGENT_TYPE = "Linux bridge agent"
POLL_INTERVAL = 1.0  # seconds between two looks for changes by other processes
BATCH_TIME = 0.02  # seconds in which further changes are collected
MAX_WAIT = 60.0
MAX_MEMBERS = 5_000  # addresses of a security group that rules name as remote
MAX_HOST_MEMBERS = 40_000  # addresses of all these security groups, in the desired state of one host

HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class Changes:
    """Wakes waiting requests when this process has changed something."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def happened(self) -> None:
        """Wake all waiting requests."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout: float) -> None:
        """Return when something has changed, or after a time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            self._waiting.discard(future)


class WakingDatabase(Database):
    """A database that wakes waiting requests after every write."""

    def __init__(self, inner: Database, changes: Changes) -> None:
        self.inner = inner
        self.dialect = inner.dialect
        self.statistics = inner.statistics
        self._changes = changes

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read."""
        return await self.inner.read(fn, *args, **kwargs)

    async def snapshot(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Read one moment."""
        return await self.inner.snapshot(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write, then wake waiting requests."""
        found = await self.inner.write(fn, *args, **kwargs)
        self._changes.happened()
        return found

    async def close(self) -> None:
        """Close."""
        await self.inner.close()


class StateQuery(msgspec.Struct, kw_only=True):
    """The fingerprint of the state that the agent has, and how long it waits for another."""

    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = 0.0


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An agent's report."""

    host: HostName
    started: bool = False  # the agent has just started
    configurations: dict[str, Any] = {}
    up: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    down: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    dhcp: bool = False  # ports of DHCP servers have to be brought up to date


class AgentRoutes:
    """The handlers of network agents."""

    def __init__(self, core: Core, changes: Changes) -> None:
        self.core = core
        self._changes = changes

    def routes(self) -> list[Route]:
        """Return the routes."""
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
        request.authorize_host(id)
        query: StateQuery = request.query
        deadline = asyncio.get_running_loop().time() + query.wait
        while True:
            found = await self.core.database.read(host_state, id, alive_since(self.core))
            fingerprint = hashlib.blake2b(msgspec.json.encode(found), digest_size=16).hexdigest()
            left = deadline - asyncio.get_running_loop().time()
            if fingerprint != query.fingerprint:
                return {"fingerprint": fingerprint, "state": found}
            if left <= 0:
                return {"fingerprint": fingerprint}
            await self._changes.wait(min(left, POLL_INTERVAL))
            await asyncio.sleep(min(left, BATCH_TIME))

    async def report(self, request: Request) -> None:
        """POST /v2.0/agent-reports."""
        body: Report = request.body
        request.authorize_host(body.host)
        database = self.core.database
        # A heartbeat does not change the desired state of any host, so it wakes no request.
        quiet = database.inner if isinstance(database, WakingDatabase) else database
        await quiet.write(_record_heartbeat, self.core, body)
        if body.up or body.down:
            await self.core.write_with_events(_record_wired, self.core, body)
        if body.dhcp:
            await dhcp_ports.bring_up_to_date(self.core, body.host)


def _record_heartbeat(conn: sa.Connection, core: Core, report: Report) -> None:
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


def _record_wired(conn: sa.Connection, core: Core, report: Report) -> tuple[None, list[Event]]:
    """Set the status of a host's ports as reported; return the events for compute."""
    events: list[Event] = []
    for status, ids in (("DOWN", report.down), ("ACTIVE", report.up)):
        for part in chunks(sorted(set(ids))):
            p = ports.c
            chosen = sa.select(ports).where(p.id.in_(part), p.host == report.host, p.status != status)
            for row in conn.execute(chosen.with_for_update()).mappings().all():
                if status == "ACTIVE" and not row["admin_state_up"]:
                    continue
                after: PortChanges = {"status": status, "updated_at": core.now(), "revision": row["revision"] + 1}
                conn.execute(ports.update().where(p.id == row["id"]).values(**after))
                before = cast(PortRow, dict(row))
                events += events_of(core, before, port_with(before, after))
    return None, events


# --- the desired state of a host ---


def host_state(conn: sa.Connection, host: str, since: int) -> dict[str, Any]:
    """Return the desired state of a host: networks, ports, security groups and routers."""
    p = ports.c
    local = list(conn.execute(sa.select(ports).where(p.host == host, p.vif_type != "binding_failed")))
    routed = _routers(conn) if _has_routers(conn, host, since) else []
    of_routers = [id for router in routed for id in (*router["ports"], *filter(None, [router["gateway_port"]]))]
    held = {row.id for row in local}
    for part in chunks([id for id in of_routers if id not in held]):
        local += conn.execute(sa.select(ports).where(p.id.in_(part)))
    local.sort(key=lambda row: row.id)
    groups = groups_of(conn, [row.id for row in local])
    fixed = addresses_of(conn, [row.id for row in local])
    chosen = sorted({group for each in groups.values() for group in each})
    rules = _rules(conn, chosen)
    members, oversized = _members(conn, rules)
    stateless = _stateless(conn, chosen)
    limits = limits_of(conn, local)
    return {
        "networks": _networks(conn, sorted({row.network_id for row in local})),
        "ports": [
            {
                **_port(row, fixed.get(row.id, []), groups.get(row.id, [])),
                "stateful": not groups.get(row.id) or not stateless.issuperset(groups[row.id]),
                **limits.get(row.id, {}),
            }
            for row in local
        ],
        "rules": rules,
        "members": members,
        "oversized": oversized,
        "routers": routed,
    }


def _has_routers(conn: sa.Connection, host: str, since: int) -> bool:
    """Return whether a host has the routers: it is the first one with a live agent."""
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


def _stateless(conn: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Return the stateless ones of these security groups."""
    g = security_groups.c
    found: set[str] = set()
    for part in chunks(list(ids)):
        found |= set(conn.execute(sa.select(g.id).where(g.id.in_(part), sa.not_(g.stateful))).scalars())
    return found


def _rules(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of security groups."""
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
    return rules


def _members(
    conn: sa.Connection, rules: dict[str, list[dict[str, Any]]]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the addresses of the groups that rules name as remote, and the number of those of groups left out.

    Members of a project choose address pairs freely, and the host's firewall is one for all projects. So a group with
    more than `MAX_MEMBERS` addresses is left out, and then the largest ones until `MAX_HOST_MEMBERS` are left.
    """
    named = sorted({each["remote_group_id"] for group in rules.values() for each in group if each["remote_group_id"]})
    found: dict[str, set[str]] = {id: set() for id in named}
    pairs: dict[str, list[str]] = {}
    g = port_security_groups.c
    for part in chunks(named):
        inside = sa.select(g.port_id).where(g.security_group_id.in_(part))
        for port in conn.execute(sa.select(ports.c.id, ports.c.allowed_address_pairs).where(ports.c.id.in_(inside))):
            pairs[port.id] = [pair["ip_address"] for pair in port.allowed_address_pairs]
        membership = (
            sa.select(g.security_group_id, g.port_id, addresses.c.address)
            .join(addresses, addresses.c.port_id == g.port_id)
            .where(g.security_group_id.in_(part))
        )
        for row in conn.execute(membership):
            found[row.security_group_id].update((row.address, *pairs.get(row.port_id, ())))
    oversized: dict[str, int] = {}
    total = sum(len(each) for each in found.values())
    for id in sorted(named, key=lambda id: (-len(found[id]), id)):
        count = len(found[id])
        if count > MAX_MEMBERS or total > MAX_HOST_MEMBERS:
            oversized[id] = count
            total -= count
    return {id: sorted(found[id]) for id in named if id not in oversized}, oversized


def _number(protocol: str | None, ethertype: str) -> int | None:
    if protocol is None:
        return None
    number = int(protocol) if protocol.isdecimal() else PROTOCOLS.get(protocol)
    return 58 if number == 1 and ethertype == "IPv6" else number  # icmp in an IPv6 rule means ICMPv6


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

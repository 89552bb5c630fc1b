"""Claims: who holds how much of what, taken so that nothing is ever oversold.

A claim is part of one transaction. Its heart is one statement for all nodes and resource classes of a batch,
`UPDATE inventories SET used = used + n … WHERE used + n <= capacity`, which takes its rows in the order of
their keys; either every row takes its amount or all is put back. Any number of schedulers may race: whoever
comes second sees what the first has left. A claim replaces what its consumer held: repeating one is harmless.
No consumer gets more of a row than its `max_unit`; what one has already, from when the host was larger, it keeps.

A claim of NUMA cells or devices finds its assignment under the lock of its node's topology (`db/topologies.py`). A
claim with request groups finds, under the same lock, the other providers of the node's tree that serve them.

ARCHITECTURE.md has the order of locks.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType
from typing import Literal, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import provider_trees, topologies
from micronova.db.listed import one_of
from micronova.db.tables import (
    allocations,
    compute_nodes,
    deleted_instances,
    instances,
    server_group_hosts,
    server_groups,
    services,
)
from micronova.objects import service_names
from micronova.objects.pci_devices import Alias
from micronova.objects.scheduling import GroupSpec, RequestSpec, Selection
from micronova.objects.topology import TopologyRequest
from micronova.objects.topology_request import topology_request
from micronova.placement import candidates, extra_specs
from micronova.placement.model import Candidate, ResourceRequest

Resources = dict[str, int]
NOTHING_OF_NODE: Resources = {"VCPU": 0}
"""The amount of a consumer that takes nothing of its compute node: its row says which node that is."""
MOST_ROWS = 3_000  # of inventories in one statement: four parameters each, and drivers take 32,766 in all


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What one consumer (an instance) wants to hold on one node."""

    consumer_uuid: str
    node_uuid: str
    host: str
    resources: Resources
    topology: TopologyRequest | None = None  # the NUMA cells and devices that it wants
    server_group: GroupSpec | None = None  # `hosts` is not used: the rows count
    epoch: int | None = None  # the instance must exist and be at this epoch
    keep_held: bool = False  # the same amounts held elsewhere are kept instead of replaced…
    avoid_hosts: tuple[str, ...] = ()  # …unless they are on one of these hosts
    resource_request: ResourceRequest | None = None
    """Request groups with a suffix, which other providers of the node's tree serve."""
    moving: str | None = None  # the migration that holds what the instance leaves: both are one member of the group
    ignore_status: bool = False  # the host may be disabled

    @classmethod
    def of(
        cls,
        instance_uuid: str,
        selected: Selection,
        spec: RequestSpec,
        epoch: int | None,
        *,
        aliases: Mapping[str, Alias],
        keep_held: bool = False,
        moving: str | None = None,
    ) -> "Claim":
        """Return the claim of an instance on the node that was selected for it; `aliases` are those of PCI devices."""
        return cls(
            consumer_uuid=instance_uuid,
            node_uuid=selected.node_uuid,
            host=selected.host,
            resources=extra_specs.node_resources(spec.flavor, spec.image),
            resource_request=extra_specs.resource_request(spec.flavor, spec.image),
            topology=topology_request(spec.flavor, spec.image, aliases),
            server_group=spec.server_group,
            epoch=epoch,
            keep_held=keep_held,
            avoid_hosts=spec.ignore_hosts,
            moving=moving,
            ignore_status=spec.ignore_status,
        )


class ClaimFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node cannot take a batch: its host is disabled, too little is left, or the group forbids it.

    `topology`: its NUMA cells or PCI devices do not hold what was asked for. `search`: the search for its providers
    ended early, so that it is not known whether they have what was asked for.
    """

    node_uuid: str
    host: str
    reason: Literal["disabled", "capacity", "group", "topology", "search"]
    resource_class: str = ""


class ClaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a batch: claimed if nothing is listed here, else nothing was changed."""

    failures: tuple[ClaimFailure, ...] = ()
    held: dict[str, str] = {}  # consumer -> the node where it holds the same amounts already
    stale: tuple[str, ...] = ()  # consumers that are gone, or at another epoch

    @property
    def claimed(self) -> bool:
        """Whether every consumer of the batch now holds what it wanted."""
        return not (self.failures or self.held or self.stale)


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer holds of one provider."""

    node_uuid: str  # of the provider, which need not be a compute node
    host: str | None  # None: the provider is no compute node
    resources: Resources


class _LockedRow(Protocol):
    """What a claim checks of an instance, which is locked."""

    uuid: str
    epoch: int
    server_group_id: str | None


_a = allocations.c
_LOCK_INSTANCES = (
    sa.select(instances.c.uuid, instances.c.epoch, instances.c.server_group_id)
    .where(one_of(instances.c.uuid, "uuids"))
    .order_by(instances.c.uuid)
    .with_for_update()
)
_ALLOCATIONS = (
    sa.select(_a.consumer_uuid, _a.node_uuid, _a.resource_class, _a.used, compute_nodes.c.host)
    .outerjoin(compute_nodes, compute_nodes.c.uuid == _a.node_uuid)
    .where(one_of(_a.consumer_uuid, "uuids"))
)
_CLOSED = sa.select(services.c.host).where(
    services.c.binary == service_names.COMPUTE,
    one_of(services.c.host, "hosts"),
    sa.or_(services.c.disabled, services.c.forced_down),
)
_INSERT = allocations.insert()
_RENAME = allocations.update().where(_a.consumer_uuid == bindparam("b_old")).values(consumer_uuid=bindparam("b_new"))
_DELETE = allocations.delete().where(one_of(_a.consumer_uuid, "uuids"))
_DELETE_RETURNING = (
    allocations.delete()
    .where(_a.consumer_uuid == bindparam("uuid"))
    .returning(_a.node_uuid, _a.resource_class, _a.used)
)
_GROUP_OF_DELETED = sa.select(deleted_instances.c.server_group_id).where(deleted_instances.c.uuid == bindparam("uuid"))
_LOCK_GROUP = sa.select(server_groups.c.uuid).where(server_groups.c.uuid == bindparam("uuid")).with_for_update()
_MEMBERS = (
    sa.select(server_group_hosts.c.host, server_group_hosts.c.members)
    .select_from(server_groups)
    .outerjoin(
        server_group_hosts,
        sa.and_(server_group_hosts.c.group_uuid == server_groups.c.uuid, server_group_hosts.c.members > 0),
    )
    .where(server_groups.c.uuid == bindparam("uuid"))
)
_HOSTS_OF = sa.select(compute_nodes.c.host).distinct().where(
    one_of(compute_nodes.c.uuid, "uuids")
)  # fmt: skip
# `most` is the largest amount of one consumer. `Trees.serve` checks all units (`fits_units`) for request groups. Nobody
# checks the smallest unit and the steps for the node's own classes, as docs/placement.md says.
_ADD = """
    WITH wanted (provider, class, amount, most) AS (VALUES {rows}),
    found (provider, class, amount, most) AS (
        SELECT i.node_uuid, i.resource_class, w.amount, w.most
        FROM inventories i JOIN wanted w ON i.node_uuid = w.provider AND i.resource_class = w.class
        ORDER BY i.node_uuid, i.resource_class {lock}
    )
    UPDATE inventories SET used = used + found.amount, changed_at = :now
    FROM found WHERE node_uuid = found.provider AND resource_class = found.class {check}
    RETURNING node_uuid, resource_class
"""
_CHECK = "AND (found.amount <= 0 OR (used + found.amount <= capacity AND found.most <= max_unit))"
_JOIN_GROUP = sa.text(
    "INSERT INTO server_group_hosts (group_uuid, host, members) VALUES (:group_uuid, :host, :members) "
    "ON CONFLICT (group_uuid, host) DO UPDATE SET members = server_group_hosts.members + excluded.members"
)
_LEAVE_GROUP = sa.text(
    "UPDATE server_group_hosts SET members = members - :members "
    "WHERE group_uuid = :group_uuid AND host = :host AND members >= :members"
)


def claim(conn: sa.Connection, claims: Sequence[Claim], *, now: int) -> ClaimResult:
    """Take all of these claims, or none of them; each replaces what its consumer held before."""
    uuids = sorted({each.consumer_uuid for each in claims})
    locked: dict[str, _LockedRow] = {row.uuid: row for row in conn.execute(_LOCK_INSTANCES, {"uuids": uuids})}
    stale = tuple(
        each.consumer_uuid
        for each in claims
        if each.epoch is not None and ((known := locked.get(each.consumer_uuid)) is None or known.epoch != each.epoch)
    )
    if stale:
        return ClaimResult(stale=stale)
    before = get_many(conn, uuids)
    elsewhere = {each.consumer_uuid: node for each in claims if (node := _kept(each, before)) is not None}
    if elsewhere:
        return ClaimResult(held=elsewhere)
    changed = [each for each in claims if not _is_held(each, before)]
    if not changed:
        return ClaimResult()
    hosts = {each.node_uuid: each.host for each in changed}
    closed = _closed(conn, {each.host for each in changed if not each.ignore_status})
    if closed:
        nodes = [(node, host) for node, host in hosts.items() if host in closed]
        return ClaimResult(
            failures=tuple(ClaimFailure(node_uuid=node, host=host, reason="disabled") for node, host in nodes)
        )
    changed = [_in_present_group(each, locked) for each in changed]
    members = _member_changes(changed, before, locked)
    group_specs = {each.server_group.id: each.server_group for each in changed if each.server_group is not None}
    refused = _refused_by_server_groups(conn, members, group_specs, _hosts_left(conn, changed))
    if refused:
        nodes = [(node, host) for node, host in hosts.items() if host in refused]
        return ClaimResult(
            failures=tuple(ClaimFailure(node_uuid=node, host=host, reason="group") for node, host in nodes)
        )
    gone = [each.consumer_uuid for each in changed if each.consumer_uuid in before]
    asking = {each.consumer_uuid for each in changed if each.topology is not None or each.resource_request is not None}
    plan = topologies.plan(conn, changed, asking.union(gone))
    if plan.refused:
        return ClaimResult(
            failures=tuple(
                ClaimFailure(node_uuid=node, host=hosts[node], reason="topology")
                for node in dict.fromkeys(plan.refused)
            )
        )
    served, unserved = _serve(conn, changed, before)
    if unserved:
        return ClaimResult(
            failures=tuple(
                ClaimFailure(node_uuid=node, host=hosts[node], reason="search" if ended_early else "capacity")
                for node, ended_early in sorted(unserved.items())
            )
        )
    for each in changed:
        if each.consumer_uuid in served:
            plan.add_mdevs(each.consumer_uuid, each.node_uuid, served[each.consumer_uuid].allocations)
    short = _apply(conn, _amount_changes(changed, before, served), now, most=_largest(changed, served))
    if short:
        return ClaimResult(
            failures=tuple(
                ClaimFailure(node_uuid=node, host=hosts[node], reason="capacity", resource_class=name)
                for provider, name in short
                for node in _nodes_of(provider, changed, served)
            )
        )
    topologies.record(conn, plan, now)
    if gone:
        conn.execute(_DELETE, {"uuids": gone})
    rows = [
        {
            "consumer_uuid": each.consumer_uuid,
            "node_uuid": provider,
            "resource_class": name,
            "used": amount,
        }
        for each in changed
        for provider, resources in _amounts_by_provider(each, served).items()
        for name, amount in resources.items()
    ]
    if rows:
        conn.execute(_INSERT, rows)
    for group, counts in members.items():
        count_members(conn, group, counts)
    return ClaimResult()


def _closed(conn: sa.Connection, hosts: Collection[str]) -> set[str]:
    """Return the hosts that an admin has disabled or forced down. The scheduler may not have read that yet."""
    return set(conn.execute(_CLOSED, {"hosts": sorted(hosts)}).scalars()) if hosts else set()


def _serve(
    conn: sa.Connection, claims: Sequence[Claim], before: Mapping[str, list[Allocation]]
) -> tuple[dict[str, Candidate], dict[str, bool]]:
    """Find the providers that serve the request groups of claims, each with what the ones before it take.

    Return them by consumer, and the nodes whose trees cannot serve all of them, with whether a search ended early.
    """
    served: dict[str, Candidate] = {}
    refused: dict[str, bool] = {}
    asking = [(each, each.resource_request) for each in claims if each.resource_request is not None]
    if not asking:
        return served, refused
    trees = provider_trees.Trees(conn, {each.node_uuid for each, _ in asking})
    for each, request in asking:
        for old in before.get(each.consumer_uuid, ()):
            trees.take({(old.node_uuid, name): -amount for name, amount in old.resources.items()})
        trees.take({(each.node_uuid, name): amount for name, amount in each.resources.items()})
        ended_early = trees.ended_early
        found = trees.serve(each.node_uuid, request)
        if found is None:
            refused[each.node_uuid] = refused.get(each.node_uuid, False) or trees.ended_early > ended_early
        else:
            served[each.consumer_uuid] = found
            trees.take(candidates.amounts_of(found))
    return served, refused


def _amounts_by_provider(each: Claim, served: Mapping[str, Candidate]) -> dict[str, dict[str, int]]:
    """Return what a consumer takes, by provider; that it takes nothing of its own node is an amount, too."""
    amounts = {each.node_uuid: dict(each.resources) or dict(NOTHING_OF_NODE)}
    if each.consumer_uuid in served:
        for provider, resources in served[each.consumer_uuid].allocations.items():
            own = amounts.setdefault(provider, {})
            for name, amount in resources.items():
                own[name] = own.get(name, 0) + amount
    return amounts


def _nodes_of(provider: str, claims: Sequence[Claim], served: Mapping[str, Candidate]) -> list[str]:
    """Return the nodes whose claims take of a provider."""
    return sorted({each.node_uuid for each in claims if provider in _amounts_by_provider(each, served)})


def _in_present_group(each: Claim, locked: Mapping[str, _LockedRow]) -> Claim:
    """Return a claim without its server group if that was deleted since the request was made."""
    known = locked.get(each.consumer_uuid)
    if each.server_group is None or known is None or known.server_group_id == each.server_group.id:
        return each
    return msgspec.structs.replace(each, server_group=None)


def _member_changes(
    claims: Sequence[Claim], before: Mapping[str, list[Allocation]], locked: Mapping[str, _LockedRow]
) -> dict[str, Counter[str]]:
    """Return how the members of each server group change by host."""
    members: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in claims:
        if each.server_group is not None:
            members[each.server_group.id][each.host] += 1
        known = locked.get(each.consumer_uuid)
        old_group = known.server_group_id if known is not None else each.server_group.id if each.server_group else None
        for old in before.get(each.consumer_uuid, ()):
            if old_group is not None and old.host is not None:
                members[old_group][old.host] -= 1
    return members


def _amount_changes(
    claims: Sequence[Claim], before: Mapping[str, list[Allocation]], served: Mapping[str, Candidate]
) -> Counter[tuple[str, str]]:
    """Return how the use of each provider changes by resource class."""
    amounts: Counter[tuple[str, str]] = Counter()
    for each in claims:
        for provider, resources in _amounts_by_provider(each, served).items():
            for name, amount in resources.items():
                amounts[provider, name] += amount
        for old in before.get(each.consumer_uuid, ()):
            for name, amount in old.resources.items():
                amounts[old.node_uuid, name] -= amount
    return amounts


def _largest(claims: Sequence[Claim], served: Mapping[str, Candidate]) -> dict[tuple[str, str], int]:
    """Return the largest amount that one consumer takes, by provider and resource class."""
    most: dict[tuple[str, str], int] = {}
    for each in claims:
        for provider, resources in _amounts_by_provider(each, served).items():
            for name, amount in resources.items():
                most[provider, name] = max(amount, most.get((provider, name), 0))
    return most


def release(conn: sa.Connection, consumer_uuid: str, *, now: int, group_uuid: str | EllipsisType | None = ...) -> None:
    """Give back all that a consumer holds; holding nothing is no error.

    A caller that has locked the instance passes its server group (or None), which saves reading it here.
    """
    group: str | None = None
    known = not isinstance(group_uuid, EllipsisType)
    if not isinstance(group_uuid, EllipsisType):
        group = group_uuid
    elif (locked := conn.execute(_LOCK_INSTANCES, {"uuids": [consumer_uuid]}).first()) is not None:
        known, group = True, locked.server_group_id
    amounts: Counter[tuple[str, str]] = Counter()
    for row in conn.execute(_DELETE_RETURNING, {"uuid": consumer_uuid}):
        amounts[row.node_uuid, row.resource_class] -= row.used
    if not amounts:
        # Its amounts may have been given back through the Placement API, which knows no topologies.
        topologies.release(conn, consumer_uuid, now)
        return
    if not known:  # a deleted server is moved to `deleted_instances` before its claim is released
        group = conn.execute(_GROUP_OF_DELETED, {"uuid": consumer_uuid}).scalar()
    if group is not None:
        conn.execute(_LOCK_GROUP, {"uuid": group})
        hosts = conn.execute(_HOSTS_OF, {"uuids": sorted({provider for provider, _ in amounts})}).scalars().all()
        count_members(conn, group, Counter(dict.fromkeys(hosts, -1)))
    topologies.release(conn, consumer_uuid, now)
    _apply(conn, amounts, now)


def hand_over(conn: sa.Connection, consumer_uuid: str, *, holder: str) -> None:
    """Let a migration hold what an instance holds, so that the instance can claim another host."""
    conn.execute(_RENAME, {"b_old": consumer_uuid, "b_new": holder})
    topologies.rename(conn, consumer_uuid, holder)


def take_back(
    conn: sa.Connection, consumer_uuid: str, *, holder: str, node_uuid: str | None, now: int, group_uuid: str | None
) -> None:
    """Give an instance back what a migration holds of its source node, in place of what the instance has claimed since.

    Nothing changes if it was given back before.
    """
    if not is_handed_over(conn, consumer_uuid, holder=holder, node_uuid=node_uuid):
        return
    release(conn, consumer_uuid, now=now, group_uuid=group_uuid)
    conn.execute(_RENAME, {"b_old": holder, "b_new": consumer_uuid})
    topologies.rename(conn, holder, consumer_uuid)


def is_handed_over(conn: sa.Connection, consumer_uuid: str, *, holder: str, node_uuid: str | None) -> bool:
    """Return whether a migration has what an instance held on a node, and the instance may have claimed another one.

    The migration holds something, or the instance holds something elsewhere: amounts may be missing, because somebody
    may have deleted them through the Placement API, which knows no topologies.
    """
    if conn.execute(_ALLOCATIONS, {"uuids": [holder]}).first() is not None or topologies.assignments_of(conn, [holder]):
        return True
    return any(
        row.node_uuid != node_uuid and row.host for row in conn.execute(_ALLOCATIONS, {"uuids": [consumer_uuid]})
    )


def hosts_of(conn: sa.Connection, consumer_uuids: Collection[str]) -> Counter[str]:
    """Return on which hosts consumers hold resources, and how many of them."""
    held = get_many(conn, consumer_uuids).values()
    return Counter(each.host for allocated in held for each in allocated if each.host is not None)


def get_many(conn: sa.Connection, consumer_uuids: Collection[str]) -> dict[str, list[Allocation]]:
    """Return what consumers hold; those that hold nothing are left out."""
    found: dict[str, dict[str, Allocation]] = {}
    for row in conn.execute(_ALLOCATIONS, {"uuids": list(consumer_uuids)}):
        providers = found.setdefault(row.consumer_uuid, {})
        if row.node_uuid not in providers:
            providers[row.node_uuid] = Allocation(node_uuid=row.node_uuid, host=row.host, resources={})
        providers[row.node_uuid].resources[row.resource_class] = row.used
    return {consumer: list(providers.values()) for consumer, providers in found.items()}


def group_hosts(conn: sa.Connection, group_uuid: str) -> dict[str, int] | None:
    """Return where the members of a server group are, host -> members; None if there is no such group."""
    found = conn.execute(_MEMBERS, {"uuid": group_uuid}).all()
    return {row.host: row.members for row in found if row.host is not None} if found else None


def _hosts_left(conn: sa.Connection, claims: Sequence[Claim]) -> Counter[str]:
    """Return the hosts that moving instances leave."""
    moving = [each.moving for each in claims if each.moving is not None]
    return hosts_of(conn, moving) if moving else Counter()


def _kept(each: Claim, before: Mapping[str, list[Allocation]]) -> str | None:
    """Return the other node on which the consumer already holds the same amounts and may keep them, or None."""
    allocation = node_allocation(before.get(each.consumer_uuid, []), each.resources, each.resource_request)
    if not each.keep_held or allocation is None:
        return None
    same = allocation.node_uuid == each.node_uuid
    return None if same or allocation.host in each.avoid_hosts else allocation.node_uuid


def _is_held(each: Claim, before: Mapping[str, list[Allocation]]) -> bool:
    allocation = node_allocation(before.get(each.consumer_uuid, []), each.resources, each.resource_request)
    return allocation is not None and allocation.node_uuid == each.node_uuid


def node_allocation(
    held: Sequence[Allocation], resources: Mapping[str, int], resource_request: ResourceRequest | None
) -> Allocation | None:
    """Return what a consumer holds of its compute node, if it holds just these amounts in all; else None."""
    total: Counter[str] = Counter()
    for each in held:
        total.update(each.resources)
    wanted = Counter(resources)
    for group in resource_request.groups if resource_request is not None else ():
        wanted.update(group.resources)
    on_nodes = [each for each in held if each.host is not None]
    return on_nodes[0] if len(on_nodes) == 1 and total == wanted else None


def _refused_by_server_groups(
    conn: sa.Connection, changes: Mapping[str, Counter[str]], group_specs: Mapping[str, GroupSpec], left: Counter[str]
) -> set[str]:
    """Lock the server groups and return the hosts that their policies close to further members.

    `left` are the hosts that members leave and still hold resources on: they count for other members, and not for
    themselves.
    """
    refused: set[str] = set()
    for uuid in sorted(changes):
        conn.execute(_LOCK_GROUP, {"uuid": uuid})  # one change of a group at a time
        joined = {host for host, change in changes[uuid].items() if change > 0}
        group = group_specs.get(uuid)
        if group is None or not joined or group.policy not in ("affinity", "anti-affinity"):
            continue
        members = Counter(group_hosts(conn, uuid)) - left  # of a group that is gone: none
        if group.policy == "anti-affinity":
            refused |= {h for h in joined if members[h] + changes[uuid][h] > group.max_server_per_host}
            continue
        # Members that leave a host in this claim do not count: the others need not join them there.
        staying = {host for host, count in members.items() if count + min(0, changes[uuid][host]) > 0}
        if staying:
            refused |= joined - staying
        elif len(joined) > 1:
            refused |= joined
    return refused


def count_members(conn: sa.Connection, group_uuid: str, changes: Mapping[str, int]) -> None:
    """Count members in and out; the group is locked."""
    for statement, sign in ((_LEAVE_GROUP, -1), (_JOIN_GROUP, 1)):
        rows = [
            {"group_uuid": group_uuid, "host": host, "members": sign * change}
            for host, change in sorted(changes.items())
            if sign * change > 0
        ]
        if rows:
            conn.execute(statement, rows)


def lock_groups(conn: sa.Connection, uuids: Collection[str]) -> set[str]:
    """Lock server groups, in the order of their uuids; return those that exist."""
    return {uuid for uuid in sorted(uuids) if conn.execute(_LOCK_GROUP, {"uuid": uuid}).first() is not None}


def change_used(conn: sa.Connection, amounts: Mapping[tuple[str, str], int], now: int) -> None:
    """Add amounts to what is used of inventories that the caller has locked and found large enough."""
    _add(conn, sorted((key, amount) for key, amount in amounts.items() if amount), now, unchecked=True)


def _apply(
    conn: sa.Connection,
    amounts: Mapping[tuple[str, str], int],
    now: int,
    *,
    most: Mapping[tuple[str, str], int] | None = None,
) -> list[tuple[str, str]]:
    """Add amounts to what is used; if some do not fit, put all back and return those.

    `most` is the largest amount of one consumer, where several may take.
    """
    wanted = sorted((key, amount) for key, amount in amounts.items() if amount)
    taken = _add(conn, wanted, now, most=most or {})
    short = [key for key, amount in wanted if amount > 0 and key not in taken]
    if short:
        _add(conn, [(key, -amount) for key, amount in wanted if key in taken], now, unchecked=True)
    return short


def _add(
    conn: sa.Connection,
    wanted: Sequence[tuple[tuple[str, str], int]],
    now: int,
    *,
    most: Mapping[tuple[str, str], int] | None = None,
    unchecked: bool = False,
) -> set[tuple[str, str]]:
    taken: set[tuple[str, str]] = set()
    for first in range(0, len(wanted), MOST_ROWS):
        part = wanted[first : first + MOST_ROWS]
        parameters: dict[str, str | int] = {"now": now}
        for number, (key, amount) in enumerate(part):
            parameters |= {f"p{number}": key[0], f"c{number}": key[1], f"a{number}": amount}
            parameters[f"m{number}"] = (most or {}).get(key, 0)
        statement = _addition(len(part), conn.dialect.name == "postgresql", unchecked)
        taken |= {(row.node_uuid, row.resource_class) for row in conn.execute(statement, parameters)}
    return taken


@functools.lru_cache(maxsize=256)
def _addition(count: int, lock: bool, unchecked: bool) -> sa.TextClause:
    """Return the statement for so many rows; with `unchecked` it refuses no amount.

    PostgreSQL locks the rows in the order of their keys, which an UPDATE alone would not promise; SQLite has one writer
    at a time.
    """
    rows = ", ".join(f"(:p{n}, :c{n}, CAST(:a{n} AS INTEGER), CAST(:m{n} AS INTEGER))" for n in range(count))
    return sa.text(
        _ADD.format(
            rows=rows,
            lock="FOR UPDATE OF i" if lock else "",
            check="" if unchecked else _CHECK,
        )
    )

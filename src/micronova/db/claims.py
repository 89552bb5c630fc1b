"""Claims: consumers take resources of nodes, so that nothing is ever oversold.

A claim is part of one transaction. One statement takes the amounts of all nodes and resource classes of a batch
(`db/used_amounts.py`): either every row takes its amount or all is put back. Any number of schedulers may race: whoever
comes second sees what the first has left. A claim replaces what its consumer held: repeating one is harmless.
No consumer gets more of a row than its `max_unit`; what one has already, from when the host was larger, it keeps.

A claim of NUMA cells or devices finds its assignment under the lock of its node's topology (`db/topologies.py`). A
claim with request groups finds, under the same lock, the other providers of the node's tree that serve them. Those that
serve a port are recorded with the port.

ARCHITECTURE.md has the order of locks.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import sqlalchemy as sa

from micronova.db import allocations as allocation_rows
from micronova.db import group_members, provider_trees, topologies, used_amounts
from micronova.db.allocations import NOTHING_OF_NODE, Allocation, LockedInstance, Resources
from micronova.db.listed import one_of
from micronova.db.prepared import Prepared
from micronova.db.tables import allocations, services
from micronova.objects import service_names
from micronova.objects.pci_devices import Alias
from micronova.objects.port_resources import PortResources, all_answered
from micronova.objects.scheduling import GroupSpec, RequestSpec, Selection
from micronova.objects.topology import Assignment, TopologyRequest
from micronova.objects.topology_request import topology_request
from micronova.placement import candidates, extra_specs, port_groups
from micronova.placement.model import Candidate, ResourceRequest

Reason: TypeAlias = Literal["disabled", "down", "capacity", "group", "topology", "search"]


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
    avoid_hosts: tuple[str, ...] = ()  # …unless they are on one of these hosts…
    avoid_node: str | None = None  # …or on this node
    resource_request: ResourceRequest | None = None
    """Request groups with a suffix, which other providers of the node's tree serve."""
    ports: tuple[PortResources, ...] = ()  # whose groups are in `resource_request`
    moving: str | None = None
    """The migration that holds the claim on the host that the instance leaves: both are one member of the group."""
    names_host: bool = False  # the request is about this host: what is held there stays, also if the host was closed
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
        avoid_node: str | None = None,
        moving: str | None = None,
    ) -> "Claim":
        """Return the claim of an instance on the node that was selected for it; `aliases` are those of PCI devices."""
        return cls(
            consumer_uuid=instance_uuid,
            node_uuid=selected.node_uuid,
            host=selected.host,
            resources=extra_specs.node_resources(spec.flavor, spec.image),
            resource_request=extra_specs.resource_request(spec.flavor, spec.image, spec.ports),
            ports=spec.ports,
            topology=topology_request(spec.flavor, spec.image, aliases),
            server_group=spec.server_group,
            epoch=epoch,
            keep_held=keep_held,
            avoid_hosts=spec.ignore_hosts,
            avoid_node=avoid_node,
            moving=moving,
            names_host=spec.names_host,
            ignore_status=spec.ignore_status,
        )


class ClaimFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node cannot take a batch: its host is disabled, too little is left, or the group forbids it.

    `down`: an admin has forced its host down. `topology`: its NUMA cells or PCI devices do not hold what was asked for.
    `search`: the search for its providers ended early, so that it is not known whether they have what was asked for.
    """

    node_uuid: str
    host: str
    reason: Reason
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


_CLOSED = Prepared(
    sa.select(services.c.host, services.c.disabled).where(
        services.c.binary == service_names.COMPUTE,
        one_of(services.c.host, "hosts"),
        sa.or_(services.c.disabled, services.c.forced_down),
    )
)
_INSERT = Prepared(allocations.insert())
_DELETE = allocations.delete().where(one_of(allocations.c.consumer_uuid, "uuids"))


def claim(conn: sa.Connection, claims: Sequence[Claim], *, now: int) -> ClaimResult:
    """Take all of these claims, or none of them; each replaces what its consumer held before."""
    uuids = sorted({each.consumer_uuid for each in claims})
    locked = allocation_rows.lock_instances(conn, uuids)
    stale = tuple(
        each.consumer_uuid
        for each in claims
        if each.epoch is not None and ((known := locked.get(each.consumer_uuid)) is None or known.epoch != each.epoch)
    )
    if stale:
        return ClaimResult(stale=stale)
    before = allocation_rows.get_many(conn, uuids)
    elsewhere = {each.consumer_uuid: node for each in claims if (node := _kept(each, before)) is not None}
    if elsewhere:
        return ClaimResult(held=elsewhere)
    with_ports = [each.consumer_uuid for each in claims if each.ports and each.consumer_uuid in before]
    recorded = topologies.assignments_of(conn, with_ports) if with_ports else {}
    changed = [each for each in claims if not _is_held(each, before, recorded)]
    held = {each.consumer_uuid for each in claims}.difference(each.consumer_uuid for each in changed)
    # Who may go elsewhere does not stay on a host that was closed since; a request that names its host stays.
    asked = [each for each in claims if not each.names_host or each.consumer_uuid not in held]
    hosts = {each.node_uuid: each.host for each in asked}
    closed = _closed(conn, {each.host for each in asked if not each.ignore_status})
    if closed:
        return ClaimResult(
            failures=tuple(
                ClaimFailure(node_uuid=node, host=host, reason=closed[host])
                for node, host in hosts.items()
                if host in closed
            )
        )
    if not changed:
        return ClaimResult()
    changed = [_without_deleted_group(each, locked) for each in changed]
    hosts = {each.node_uuid: each.host for each in changed}
    members = _member_changes(changed, before, locked)
    group_specs = {each.server_group.id: each.server_group for each in changed if each.server_group is not None}
    refused = group_members.refused_hosts(conn, members, group_specs, _hosts_left(conn, changed))
    if refused:
        return _refused({node: host for node, host in hosts.items() if host in refused}, "group")
    gone = [each.consumer_uuid for each in changed if each.consumer_uuid in before]
    asking = {each.consumer_uuid for each in changed if each.topology is not None or each.resource_request is not None}
    plan = topologies.plan(conn, changed, asking.union(gone))
    if plan.refused:
        return _refused({node: hosts[node] for node in plan.refused}, "topology")
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
            candidate = served[each.consumer_uuid]
            plan.add_mdevs(each.consumer_uuid, each.node_uuid, candidate.allocations)
            plan.add_ports(each.consumer_uuid, each.node_uuid, port_groups.served(each.ports, candidate.mappings))
    short = used_amounts.change(conn, _amount_changes(changed, before, served), now, most=_largest(changed, served))
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
    _INSERT.run_each(conn, rows)
    for group, counts in members.items():
        group_members.count(conn, group, counts)
    return ClaimResult()


def _refused(hosts: Mapping[str, str], reason: Reason) -> ClaimResult:
    """Return the result of a batch that these nodes, with their hosts, cannot take."""
    return ClaimResult(
        failures=tuple(ClaimFailure(node_uuid=node, host=host, reason=reason) for node, host in hosts.items())
    )


def _closed(conn: sa.Connection, hosts: Collection[str]) -> dict[str, Reason]:
    """Return which of the hosts an admin has disabled or forced down. The scheduler may not have read that yet."""
    found = _CLOSED.records(conn, {"hosts": sorted(hosts)}) if hosts else ()
    return {host: "disabled" if disabled else "down" for host, disabled in found}


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
        of_node = {(each.node_uuid, name): amount for name, amount in each.resources.items()}
        trees.take(of_node)
        ended_early = trees.ended_early
        found = trees.serve(each.node_uuid, request, of_node)
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


def _without_deleted_group(each: Claim, locked: Mapping[str, LockedInstance]) -> Claim:
    """Return a claim without its server group if that was deleted since the request was made."""
    known = locked.get(each.consumer_uuid)
    if each.server_group is None or known is None or known.server_group_id == each.server_group.id:
        return each
    return msgspec.structs.replace(each, server_group=None)


def _member_changes(
    claims: Sequence[Claim], before: Mapping[str, list[Allocation]], locked: Mapping[str, LockedInstance]
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


def _hosts_left(conn: sa.Connection, claims: Sequence[Claim]) -> Counter[str]:
    """Return the hosts that moving instances leave."""
    moving = [each.moving for each in claims if each.moving is not None]
    return allocation_rows.hosts_of(conn, moving) if moving else Counter()


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


def _kept(each: Claim, before: Mapping[str, list[Allocation]]) -> str | None:
    """Return the other node on which the consumer already holds the same amounts and may keep them, or None."""
    allocation = _held(each, before)
    if not each.keep_held or allocation is None:
        return None
    if allocation.node_uuid in (each.node_uuid, each.avoid_node) or allocation.host in each.avoid_hosts:
        return None
    return allocation.node_uuid


def _is_held(
    each: Claim, before: Mapping[str, list[Allocation]], recorded: Mapping[str, tuple[str, Assignment]]
) -> bool:
    """Return whether the consumer already holds the same amounts on the claimed node, and for the same ports."""
    allocation = _held(each, before)
    if allocation is None or allocation.node_uuid != each.node_uuid:
        return False
    _, known = recorded.get(each.consumer_uuid, ("", Assignment()))
    return not each.ports or all_answered(known.ports, each.ports)


def _held(each: Claim, before: Mapping[str, list[Allocation]]) -> Allocation | None:
    """Return what the consumer holds on a node, if these are the amounts that it claims."""
    held = before.get(each.consumer_uuid, [])
    return allocation_rows.node_allocation(held, each.resources, each.resource_request)

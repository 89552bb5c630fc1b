"""What servers hold for single ports: claimed when an interface is attached, given back when it is detached.

What the ports of a new or moving server ask for is part of its claim (`db/claims.py`), which replaces all that it held.
Here a port is added to what a server holds, or taken away, and the rest stays. Both record which providers serve the
port with the NUMA cells and devices of the server (`db/topologies.py`). The record follows what others change of a
server's allocations through the Placement API.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import allocations as allocation_rows
from micronova.db import provider_trees, topologies, used_amounts
from micronova.db.listed import one_of
from micronova.db.tables import allocations, instances, topology_claims
from micronova.objects.port_resources import BoundPort, PortResources, ServedPort
from micronova.objects.topology import Assignment
from micronova.placement import candidates, port_groups
from micronova.placement.candidates import Amounts

PART = 500  # servers that are compared at once
ATTEMPTS = 8  # of one claim, while others take of the same providers through the Placement API

_a = allocations.c
_SET = (
    allocations.update()
    .where(
        _a.consumer_uuid == bindparam("b_consumer"),
        _a.node_uuid == bindparam("b_provider"),
        _a.resource_class == bindparam("b_class"),
    )
    .values(used=bindparam("b_used"))
)
_DELETE = allocations.delete().where(
    _a.consumer_uuid == bindparam("b_consumer"),
    _a.node_uuid == bindparam("b_provider"),
    _a.resource_class == bindparam("b_class"),
)


_t = topology_claims.c
_WITH_PORTS = sa.select(_t.consumer_uuid).where(_t.assignment.contains('"ports"')).order_by(_t.consumer_uuid)
_SERVERS = (
    sa.select(_t.consumer_uuid, _t.assignment, instances.c.network_info)
    .join(instances, instances.c.uuid == _t.consumer_uuid)
    .where(one_of(_t.consumer_uuid, "uuids"))
    .order_by(_t.consumer_uuid)
)


def add(conn: sa.Connection, consumer: str, node: str, port: PortResources, *, now: int) -> ServedPort | None:
    """Claim what a port asks for on the node of a server; return which providers serve it, None if none can.

    The caller has locked the server. A port that the server holds already is found again.
    """
    known = topologies.lock_assignment(conn, consumer, node)
    for each in known.ports:
        if each.port_id == port.port_id:
            return each
    request = port_groups.request_of([port])
    for _ in range(ATTEMPTS):
        before = _held(conn, consumer)
        found = provider_trees.Trees(conn, {node}).serve(node, request, before)
        if found is None:
            return None
        amounts = candidates.amounts_of(found)
        most = {key: before.get(key, 0) + amount for key, amount in amounts.items()}
        if not used_amounts.change(conn, amounts, now, most=most):
            break
    else:
        return None
    for (provider, name), used in most.items():
        key = {"b_consumer": consumer, "b_provider": provider, "b_class": name}
        if (provider, name) in before:
            conn.execute(_SET, {**key, "b_used": used})
        else:
            row = {"consumer_uuid": consumer, "node_uuid": provider, "resource_class": name, "used": used}
            conn.execute(allocations.insert(), row)
    [served] = port_groups.served([port], found.mappings)
    ports = (*known.ports, served)
    topologies.replace_assignment(conn, consumer, node, msgspec.structs.replace(known, ports=ports))
    return served


def remove(conn: sa.Connection, consumer: str, port_ids: Collection[str], *, now: int) -> list[str]:
    """Give back what a server holds for ports; return those of them for which it held something.

    Of amounts that were changed through the Placement API meanwhile, no more is given back than is left.
    """
    found = topologies.assignments_of(conn, [consumer]).get(consumer)
    if found is None or not any(each.port_id in port_ids for each in found[1].ports):
        return []
    node = found[0]
    known = topologies.lock_assignment(conn, consumer, node)
    gone = [each for each in known.ports if each.port_id in port_ids]
    amounts = port_groups.amounts_of(group for port in gone for group in port.groups)
    before = _held(conn, consumer)
    freed = {key: min(amount, before[key]) for key, amount in amounts.items() if before.get(key)}
    used_amounts.change(conn, {key: -amount for key, amount in freed.items()}, now)
    for (provider, name), amount in sorted(freed.items()):
        key = {"b_consumer": consumer, "b_provider": provider, "b_class": name}
        left = before[provider, name] - amount
        # A row without an amount says on which node its consumer is.
        if left or provider == node:
            conn.execute(_SET, {**key, "b_used": left})
        else:
            conn.execute(_DELETE, key)
    kept = tuple(each for each in known.ports if each not in gone)
    topologies.replace_assignment(conn, consumer, node, msgspec.structs.replace(known, ports=kept))
    return [each.port_id for each in gone]


def follow(conn: sa.Connection, changes: Mapping[str, tuple[Amounts, Amounts]]) -> None:
    """Record what serves the ports of consumers whose allocations were replaced, from what they held and hold now.

    The caller has locked their servers.
    """
    for consumer, (_, known) in topologies.assignments_of(conn, changes).items():
        ports = port_groups.followed(known.ports, *changes[consumer])
        if ports != known.ports:
            topologies.rewrite(conn, consumer, msgspec.structs.replace(known, ports=ports))


def _held(conn: sa.Connection, consumer: str) -> dict[tuple[str, str], int]:
    return _held_by(conn, [consumer]).get(consumer, {})


def _held_by(conn: sa.Connection, consumers: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
    return {
        consumer: {(each.node_uuid, name): amount for each in held for name, amount in each.resources.items()}
        for consumer, held in allocation_rows.get_many(conn, consumers).items()
    }


def holds_any(conn: sa.Connection, *consumers: str) -> bool:
    """Return whether one of these consumers holds something for ports."""
    return any(assignment.ports for _, assignment in topologies.assignments_of(conn, consumers).values())


class Unheld(NamedTuple):
    """What a bound port needs, and its server does not hold for it."""

    server: str
    port_id: str
    provider: str  # empty: of whichever provider
    resource_class: str = ""  # empty: the port is bound with the provider, which nothing is recorded of
    wanted: int = 0
    held: int = 0


def unheld(conn: sa.Connection, bound: Iterable[BoundPort]) -> list[Unheld]:
    """Return what bound ports ask for, or are bound with, and their servers do not hold.

    What is held is compared with what is recorded to serve the ports, and that with what the network service says. Some
    hundred servers cost two statements. A server that is being changed may differ for a moment.
    """
    by_server: dict[str, list[BoundPort]] = {}
    for port in bound:
        by_server.setdefault(port.server, []).append(port)
    found: list[Unheld] = []
    servers = sorted(by_server)
    for first in range(0, len(servers), PART):
        part = servers[first : first + PART]
        recorded = topologies.assignments_of(conn, part)
        held = _held_by(conn, part)
        for server in part:
            ports = recorded[server][1].ports if server in recorded else ()
            found += _unheld_of(by_server[server], ports, held.get(server, {}))
    return found


def _unheld_of(bound: Iterable[BoundPort], ports: Sequence[ServedPort], held: Amounts) -> Iterator[Unheld]:
    known = {each.port_id: each.groups for each in ports}
    needed = port_groups.amounts_of(group for each in ports for group in each.groups)
    for port in sorted(bound, key=lambda each: each.port_id):
        serving = port_groups.amounts_of(known.get(port.port_id, ()))
        # By class, not by group: Neutron changes the ids of groups with a policy.
        recorded: Counter[str] = Counter()
        for (_, name), amount in serving.items():
            recorded[name] += amount
        asked: Counter[str] = Counter()
        for group in port.asks.groups if port.asks is not None else ():
            asked.update(group.resources)
        for name in sorted(asked - recorded):
            yield Unheld(port.server, port.port_id, "", name, asked[name], recorded[name])
        for provider in sorted(port.providers.difference(provider for provider, _ in serving)):
            yield Unheld(port.server, port.port_id, provider)
        for provider, name in sorted(serving):
            if (have := held.get((provider, name), 0)) < needed[provider, name]:
                yield Unheld(port.server, port.port_id, provider, name, needed[provider, name], have)


def strays(conn: sa.Connection) -> Iterator[tuple[str, list[str]]]:
    """Yield servers that hold something for ports that they do not have, with these ports; read in parts."""
    servers = conn.execute(_WITH_PORTS).scalars().all()
    for first in range(0, len(servers), PART):
        for row in conn.execute(_SERVERS, {"uuids": servers[first : first + PART]}):
            own = {vif["port_id"] for vif in row.network_info}
            assignment = msgspec.json.decode(row.assignment, type=Assignment)
            if others := [each.port_id for each in assignment.ports if each.port_id not in own]:
                yield row.consumer_uuid, others

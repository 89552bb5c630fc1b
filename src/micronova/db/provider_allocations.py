"""Allocations through the Placement API: read and replaced, with the generations of their consumers.

The rows are those that the scheduler claims, so a write here is like a claim: the inventories are locked in the order
of their keys, and what exceeds a capacity is refused.

A consumer that another service makes has a row in `consumers` with a generation. A server or a migration has none: its
project and user are those of the server, and its generation is a checksum of what it holds. So every claim of the
scheduler changes the generation, without a write more, and a client that has read another state is refused.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import group_members, placement_names, port_claims, providers, used_amounts
from micronova.db.listed import one_of
from micronova.db.provider_inventories import InventoryRow, UnknownClass
from micronova.db.tables import allocations, compute_nodes, consumers, instances, inventories, migrations
from micronova.db.upsert import PerDialect
from micronova.objects import migration_states
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.placement.model import fits_units

_a, _c = allocations.c, consumers.c
Allocations = dict[str, dict[str, int]]  # of one consumer: provider -> resource class -> amount
UNKNOWN_TYPE: Final = "unknown"
INSTANCE, MIGRATION = "INSTANCE", "MIGRATION"
NOBODY: Final = "00000000-0000-0000-0000-000000000000"  # project and user of clients that name none


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds resources."""

    uuid: str
    project_id: str
    user_id: str
    type: str | None
    generation: int
    updated_at: int = 0


class AllocationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to replace the allocations of a consumer."""

    consumer: str
    allocations: Allocations
    project_id: str | None = None
    user_id: str | None = None
    type: str | None = None
    generation: int | None = None  # the generation that the client sent; None: it expects no such consumer
    checks_generation: bool = True  # False: the client sends none, before microversion 1.28


def generation_of(held: Allocations) -> int:
    """Return a number that differs for different allocations of a server."""
    text = msgspec.json.encode(held, order="deterministic")
    return zlib.crc32(text) & 0x7FFFFFFF


_ALLOCATIONS = sa.select(_a.consumer_uuid, _a.node_uuid, _a.resource_class, _a.used).order_by(
    _a.consumer_uuid, _a.node_uuid, _a.resource_class
)
_ROWS = sa.select(consumers).where(one_of(_c.uuid, "uuids")).order_by(_c.uuid)
_SERVERS = (
    sa.select(instances.c.uuid, instances.c.project_id, instances.c.user_id, instances.c.server_group_id)
    .where(one_of(instances.c.uuid, "uuids"))
    .order_by(instances.c.uuid)
)
# The row is locked, whether it was there or not. An insert that only finds it would not lock it.
_LOCK_CONSUMER = PerDialect(
    lambda insert: (
        insert(consumers)
        .on_conflict_do_update(index_elements=[_c.uuid], set_={"updated_at": _c.updated_at})
        .returning(*_c)
    )
)
_WRITE_CONSUMER = (
    consumers.update()
    .where(_c.uuid == bindparam("b_uuid"))
    .values({name: bindparam(name) for name in ("project_id", "user_id", "consumer_type", "generation", "updated_at")})
)
_MIGRATIONS = sa.select(
    migrations.c.uuid, migrations.c.project_id, migrations.c.user_id, migrations.c.instance_uuid
).where(one_of(migrations.c.uuid, "uuids"))


def allocations_of_consumers(conn: sa.Connection, uuids: Collection[str]) -> dict[str, Allocations]:
    """Return the allocations of consumers, by consumer; a row that only says where a server is is none."""
    return _shown(_held(conn, uuids))


def _shown(held: Mapping[str, Allocations]) -> dict[str, Allocations]:
    some = {
        consumer: {provider: shown for provider, amounts in own.items() if (shown := _some(amounts))}
        for consumer, own in held.items()
    }
    return {consumer: own for consumer, own in some.items() if own}


def _some(amounts: Mapping[str, int]) -> dict[str, int]:
    return {name: amount for name, amount in amounts.items() if amount}


def _held(conn: sa.Connection, uuids: Collection[str]) -> dict[str, Allocations]:
    found: dict[str, Allocations] = {}
    for row in conn.execute(_ALLOCATIONS.where(one_of(_a.consumer_uuid, "uuids")), {"uuids": sorted(uuids)}):
        found.setdefault(row.consumer_uuid, {}).setdefault(row.node_uuid, {})[row.resource_class] = row.used
    return found


def allocations_of_provider(conn: sa.Connection, provider: str) -> dict[str, dict[str, int]]:
    """Return the amounts that are allocated of a provider, by consumer."""
    found: dict[str, dict[str, int]] = {}
    for row in conn.execute(_ALLOCATIONS.where(_a.node_uuid == provider, _a.used > 0)):
        found.setdefault(row.consumer_uuid, {})[row.resource_class] = row.used
    return found


def consumers_of(conn: sa.Connection, held: Mapping[str, Allocations]) -> dict[str, Consumer]:
    """Return the consumers with these allocations; a generation needs all allocations of its consumer."""
    named = {"uuids": sorted(held)}
    servers = conn.execute(_SERVERS, named).all()
    moving = conn.execute(_MIGRATIONS, named).all()
    return _described(servers, moving, conn.execute(_ROWS, named).all(), held)


class _Owned(Protocol):
    """A server, or a migration, with its owner."""

    uuid: str
    project_id: str
    user_id: str


class ConsumerRow(Protocol):
    """A row of `consumers`. Times are microseconds since 1970 (UTC)."""

    uuid: str
    project_id: str
    user_id: str
    consumer_type: str | None
    generation: int
    created_at: int
    updated_at: int


def _described(
    servers: Iterable[_Owned],
    moving: Iterable[_Owned],
    rows: Iterable[ConsumerRow],
    held: Mapping[str, Allocations],
) -> dict[str, Consumer]:
    """Return the consumers that exist: servers and migrations that hold something, and those of other services."""
    found: dict[str, Consumer] = {}
    for kind, those in ((INSTANCE, servers), (MIGRATION, moving)):
        for row in those:
            if held.get(row.uuid):
                found[row.uuid] = Consumer(
                    uuid=row.uuid,
                    project_id=row.project_id,
                    user_id=row.user_id,
                    type=kind,
                    generation=generation_of(held[row.uuid]),
                )
    for row in rows:
        if row.generation > 0:
            found[row.uuid] = Consumer(
                uuid=row.uuid,
                project_id=row.project_id,
                user_id=row.user_id,
                type=row.consumer_type,
                generation=row.generation,
                updated_at=row.updated_at,
            )
    return found


class _Locked(msgspec.Struct, frozen=True, kw_only=True):
    """Consumers that nobody else changes until the transaction ends."""

    known: dict[str, Consumer]
    server_groups: dict[str, str | None]  # of those that are servers or migrations
    allocations: dict[str, Allocations]


def _lock(conn: sa.Connection, uuids: Collection[str], now: int) -> _Locked:
    """Lock servers, their server groups, and other consumers, in this order; new ones get a row of the generation 0."""
    named = {"uuids": sorted(uuids)}
    moving = conn.execute(_MIGRATIONS, named).all()
    instance_of = {row.uuid: row.instance_uuid for row in moving}
    server_uuids = {"uuids": sorted({*uuids, *instance_of.values()})}
    servers = conn.execute(_SERVERS.with_for_update(), server_uuids).all()
    group_of = {row.uuid: row.server_group_id for row in servers}
    server_groups = {uuid: group_of[uuid] for uuid in uuids if uuid in group_of}
    server_groups |= {uuid: group_of.get(instance) for uuid, instance in instance_of.items()}
    group_members.lock(conn, {group for group in server_groups.values() if group is not None})
    new = {"project_id": NOBODY, "user_id": NOBODY, "generation": 0, "created_at": now, "updated_at": now}
    others = [{"uuid": uuid, **new} for uuid in sorted(set(uuids) - server_groups.keys())]
    rows = conn.execute(_LOCK_CONSUMER.on(conn), others).all() if others else []
    held = _held(conn, uuids)
    known = _described(servers, moving, rows, _shown(held))
    return _Locked(known=known, server_groups=server_groups, allocations=held)


def lock_reshape(
    conn: sa.Connection, stock: Mapping[str, Collection[str]], requests: Sequence[AllocationRequest], now: int
) -> None:
    """Lock all that a reshape changes, in the order of ARCHITECTURE.md, which its single steps would not have.

    `stock` are the resource classes of the new inventories, by provider. Schedulers read the nodes of these again.
    """
    consumer_uuids = sorted({each.consumer for each in requests})
    of_migrations = {row.instance_uuid for row in conn.execute(_MIGRATIONS, {"uuids": consumer_uuids})}
    conn.execute(_SERVERS.with_for_update(), {"uuids": sorted({*consumer_uuids, *of_migrations})})
    for root in sorted({row.root_uuid for row in providers.get_many(conn, stock).values()}):
        providers.touch_tree(conn, root, now)
    locked = _lock(conn, consumer_uuids, now)
    named = {provider for each in requests for provider in each.allocations}
    touched = named.union(stock, *locked.allocations.values())
    providers.get_many(conn, touched, lock=True)
    classes = {name for each in requests for resources in each.allocations.values() for name in resources}
    placement_names.unknown_classes(conn, classes.union(*stock.values()), keep=True)
    providers.lock_inventories(conn, touched)


def replace(conn: sa.Connection, requests: Sequence[AllocationRequest], now: int, *, advance: bool = True) -> None:
    """Replace the allocations of consumers, of all or of none.

    Raise Invalid for a provider or resource class that does not exist, Conflict if a capacity is exceeded or a
    consumer has another generation. The generations of the providers grow if they shall `advance`.
    """
    locked = _lock(conn, {each.consumer for each in requests}, now)
    for each in requests:
        _check_consumer(each, locked.known.get(each.consumer), each.consumer in locked.server_groups)
    named = {provider for each in requests for provider in each.allocations}
    touched = named.union(*locked.allocations.values())
    rows = providers.get_many(conn, touched, lock=True)
    for uuid in sorted(named - rows.keys()):
        raise Invalid(f"Allocation for resource provider '{uuid}' that does not exist.")
    classes = {name for each in requests for resources in each.allocations.values() for name in resources}
    if unknown := placement_names.unknown_classes(conn, classes, keep=True):
        raise UnknownClass(f"No such resource class {', '.join(unknown)}.")
    _take(conn, requests, locked.allocations, now)
    _write(conn, requests, locked, now)
    if advance:
        providers.advance_all(conn, touched & rows.keys(), now)


def _check_consumer(request: AllocationRequest, known: Consumer | None, is_server: bool) -> None:
    if request.checks_generation:
        expected = None if known is None else known.generation
        if request.generation != expected:
            raise Conflict(
                "consumer generation conflict - expected "
                f"{'null' if expected is None else expected} but got "
                f"{'null' if request.generation is None else request.generation}",
                placement_code=providers.CONCURRENT_UPDATE,
            )
    if not is_server or known is None:
        return
    for name, given, own in (
        ("project", request.project_id, known.project_id),
        ("user", request.user_id, known.user_id),
        ("type", request.type, known.type),
    ):
        if given is not None and given != own:
            raise Invalid(f"Consumer {request.consumer} is a server or a migration of one: its {name} is {own}.")


def _take(
    conn: sa.Connection, requests: Sequence[AllocationRequest], before: Mapping[str, Allocations], now: int
) -> None:
    """Take and give back what changes; the inventories are locked first, so what they say holds."""
    amounts: Counter[tuple[str, str]] = Counter()
    for each in requests:
        for provider, resources in each.allocations.items():
            for name, amount in resources.items():
                amounts[provider, name] += amount
        for provider, resources in before.get(each.consumer, {}).items():
            for name, amount in resources.items():
                amounts[provider, name] -= amount
    stock = {
        (row.node_uuid, row.resource_class): row
        for row in providers.lock_inventories(conn, {provider for provider, _ in amounts})
    }
    for each in requests:
        for provider, resources in sorted(each.allocations.items()):
            for name, amount in sorted(resources.items()):
                _check_capacity(stock.get((provider, name)), provider, name, amount, amounts[provider, name])
    used_amounts.change_unchecked(conn, amounts, now)


def _check_capacity(row: InventoryRow | None, provider: str, name: str, amount: int, change: int) -> None:
    """Raise Conflict unless the inventory has an amount; `change` is how much more of it is used in all."""
    where = f"Inventory for '{name}' on resource provider '{provider}'"
    if row is None:
        raise CapacityExceeded(f"Unable to allocate inventory: {where} invalid: the provider has none of it.")
    if change > 0 and row.used + change > row.capacity:
        raise CapacityExceeded(
            f"Unable to allocate inventory: Unable to create allocation for '{name}' on resource provider "
            f"'{provider}'. The requested amount would exceed the capacity: {row.capacity - row.used} are left."
        )
    if not fits_units(row, amount):
        raise CapacityExceeded(
            f"Unable to allocate inventory: Unable to create allocation for '{name}' on resource provider "
            f"'{provider}'. The requested amount would violate inventory constraints: from {row.min_unit} to "
            f"{row.max_unit} in steps of {row.step_size}."
        )


class CapacityExceeded(Conflict):
    """An inventory does not have the amount of an allocation, or does not allow it (409)."""


def _write(conn: sa.Connection, requests: Sequence[AllocationRequest], locked: _Locked, now: int) -> None:
    conn.execute(
        allocations.delete().where(one_of(_a.consumer_uuid, "uuids")), {"uuids": [each.consumer for each in requests]}
    )
    rows = [
        {"consumer_uuid": each.consumer, "node_uuid": provider, "resource_class": name, "used": amount}
        for each in requests
        for provider, resources in each.allocations.items()
        for name, amount in resources.items()
    ]
    if rows:
        conn.execute(allocations.insert(), rows)
    for each in requests:
        if each.consumer in locked.server_groups:
            _move_in_group(
                conn, locked.server_groups[each.consumer], locked.allocations.get(each.consumer, {}), each.allocations
            )
    changes = {
        each.consumer: (_flat(locked.allocations.get(each.consumer, {})), _flat(each.allocations))
        for each in requests
        if each.consumer in locked.server_groups
    }
    if changes:
        port_claims.follow(conn, changes)
    _write_consumers(conn, [each for each in requests if each.consumer not in locked.server_groups], locked.known, now)


def _flat(held: Allocations) -> dict[tuple[str, str], int]:
    return {(provider, name): amount for provider, own in held.items() for name, amount in own.items()}


def _move_in_group(conn: sa.Connection, group: str | None, before: Allocations, after: Allocations) -> None:
    """Count a server in and out of the hosts of its server group."""
    if group is None or before.keys() == after.keys():
        return
    uuids = {"uuids": sorted({*before, *after})}
    nodes = sa.select(compute_nodes.c.uuid, compute_nodes.c.host).where(one_of(compute_nodes.c.uuid, "uuids"))
    hosts = {row.uuid: row.host for row in conn.execute(nodes, uuids)}
    changes: Counter[str] = Counter()
    changes.update(hosts[uuid] for uuid in after if uuid in hosts)
    changes.subtract(hosts[uuid] for uuid in before if uuid in hosts)
    group_members.count(conn, group, changes)


def _write_consumers(
    conn: sa.Connection, requests: Sequence[AllocationRequest], known: Mapping[str, Consumer], now: int
) -> None:
    """Write who the consumers are, and their next generations; one without allocations is no consumer."""
    gone = [each.consumer for each in requests if not each.allocations]
    if gone:
        conn.execute(consumers.delete().where(one_of(_c.uuid, "uuids")), {"uuids": gone})
    rows = [_consumer_row(each, known.get(each.consumer), now) for each in requests if each.allocations]
    if rows:
        conn.execute(_WRITE_CONSUMER, rows)


def _consumer_row(request: AllocationRequest, known: Consumer | None, now: int) -> dict[str, Any]:
    return {
        "b_uuid": request.consumer,
        "project_id": request.project_id or (known.project_id if known else NOBODY),
        "user_id": request.user_id or (known.user_id if known else NOBODY),
        "consumer_type": request.type or (known.type if known else None),
        "generation": known.generation + 1 if known else 1,
        "updated_at": now,
    }


def release(conn: sa.Connection, consumer: str, now: int) -> None:
    """Remove the allocations of a consumer; raise NotFound if it has none. The providers keep their generations."""
    if not allocations_of_consumers(conn, [consumer]):
        raise NotFound(f"No allocations for consumer '{consumer}'.")
    replace(conn, [AllocationRequest(consumer=consumer, allocations={}, checks_generation=False)], now, advance=False)


# --- usages


def usages_of_provider(conn: sa.Connection, provider: str) -> dict[str, int]:
    """Return how much is used of each resource class that a provider has."""
    i = inventories.c
    query = sa.select(i.resource_class, i.used).where(i.node_uuid == provider).order_by(i.resource_class)
    return {row.resource_class: row.used for row in conn.execute(query)}


class Usage(msgspec.Struct, kw_only=True):
    """What the consumers of one type hold."""

    consumers: int = 0
    amounts: dict[str, int] = {}


_AMOUNTS = [
    (_c.consumer_type, consumers, _c.uuid == _a.consumer_uuid),
    (sa.literal(INSTANCE), instances, instances.c.uuid == _a.consumer_uuid),
    # Only those that are open hold something; ended ones stay as long as the records of their servers.
    (
        sa.literal(MIGRATION),
        migrations,
        sa.and_(migrations.c.uuid == _a.consumer_uuid, migrations.c.status.in_(migration_states.OPEN)),
    ),
]


def usages(conn: sa.Connection, project_id: str, user_id: str | None) -> dict[str, Usage]:
    """Return what the consumers of a project, and of a user if one is named, hold, by the type of the consumers."""
    found: dict[str, Usage] = {}
    for kind, owners, same in _AMOUNTS:
        mine = owners.c.project_id == project_id
        if user_id is not None:
            mine = sa.and_(mine, owners.c.user_id == user_id)
        held = sa.select(kind.label("kind"), _a.resource_class, sa.func.sum(_a.used)).join_from(
            allocations, owners, same
        )
        for each, name, used in conn.execute(held.where(mine).group_by(kind, _a.resource_class)):
            amounts = found.setdefault(each or UNKNOWN_TYPE, Usage()).amounts
            amounts[name] = amounts.get(name, 0) + int(used)
        number = sa.func.count(sa.distinct(_a.consumer_uuid))
        counted = sa.select(kind.label("kind"), number).join_from(allocations, owners, same)
        for each, many in conn.execute(counted.where(mine).group_by(kind)):
            found.setdefault(each or UNKNOWN_TYPE, Usage()).consumers += many
    return found

"""Resource providers: what has inventories. Each compute node is one, with its own uuid.

A provider's generation grows with each change of its inventories, traits and aggregates, and of its allocations through
the Placement API; a client that names an old one is refused. The scheduler's claims do not change it: what is left is
decided by the rows of `inventories` alone.

ARCHITECTURE.md has the order of locks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.listed import one_of
from micronova.db.locking import in_order
from micronova.db.tables import (
    aggregate_hosts,
    aggregates,
    allocations,
    compute_nodes,
    inventories,
    provider_aggregates,
    provider_traits,
    resource_providers,
    services,
)
from micronova.db.upsert import PerDialect, insert_if_absent
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.service_names import COMPUTE
from micronova.placement.standard import STATUS_DISABLED

_p, _n = resource_providers.c, compute_nodes.c
CONCURRENT_UPDATE = "placement.concurrent_update"
DUPLICATE_NAME = "placement.duplicate_name"
LONGEST_NAME = 200


class ProviderRow(Protocol):
    """A row of `resource_providers`. Times are microseconds."""

    uuid: str
    name: str
    parent_uuid: str | None
    root_uuid: str
    generation: int
    created_at: int
    updated_at: int


_GET = sa.select(resource_providers).where(_p.uuid == bindparam("uuid"))
_OF_TREES = sa.select(resource_providers).where(one_of(_p.root_uuid, "roots")).order_by(_p.created_at, _p.uuid)
_MANY = sa.select(resource_providers).where(one_of(_p.uuid, "uuids")).order_by(_p.uuid)
_TOUCH_NODES = (
    compute_nodes.update()
    .where(_n.uuid.in_(sa.select(_p.root_uuid).where(_p.uuid == bindparam("b_uuid"))))
    .values(changed_at=bindparam("b_now"))
)
_ADVANCE = (
    resource_providers.update()
    .where(_p.uuid == bindparam("b_uuid"))
    .values(generation=_p.generation + 1, updated_at=bindparam("b_now"))
)
_ADVANCE_ALL = (
    resource_providers.update()
    .where(one_of(_p.uuid, "uuids"))
    .values(generation=_p.generation + 1, updated_at=bindparam("b_now"))
)
_INSERT = PerDialect(lambda insert: insert(resource_providers).on_conflict_do_nothing())
_DELETE_TRAIT = provider_traits.delete().where(
    provider_traits.c.provider_uuid == bindparam("b_uuid"), provider_traits.c.trait == bindparam("b_trait")
)
_INSERT_TRAITS = PerDialect(lambda insert: insert(provider_traits).on_conflict_do_nothing())
_INSERT_AGGREGATES = PerDialect(lambda insert: insert(provider_aggregates).on_conflict_do_nothing())


def find(conn: sa.Connection, uuid: str) -> ProviderRow | None:
    """Return a provider, or None."""
    return cast("ProviderRow | None", conn.execute(_GET, {"uuid": uuid}).first())


def get(conn: sa.Connection, uuid: str, purpose: str = "") -> ProviderRow:
    """Return a provider; raise NotFound."""
    found = find(conn, uuid)
    if found is None:
        raise NotFound(f"No resource provider with uuid {uuid} found{purpose}.")
    return found


def get_many(conn: sa.Connection, uuids: Collection[str], *, lock: bool = False) -> dict[str, ProviderRow]:
    """Return those providers that exist, by uuid; locked in the order of their uuids if asked for."""
    query = _MANY.with_for_update() if lock else _MANY
    return {row.uuid: cast(ProviderRow, row) for row in conn.execute(query, {"uuids": sorted(uuids)})}


def of_trees(conn: sa.Connection, roots: Collection[str]) -> list[ProviderRow]:
    """Return the providers of trees, in the order in which they came."""
    return [cast(ProviderRow, row) for row in conn.execute(_OF_TREES, {"roots": sorted(roots)})]


def create(conn: sa.Connection, uuid: str, name: str, parent: str | None, now: int) -> ProviderRow:
    """Add a provider; raise Conflict if its name or uuid is taken, Invalid if its parent is wrong."""
    wrong = f'Unable to create resource provider "{name}", {uuid}:'
    if parent == uuid:
        raise Invalid(f"{wrong} parent provider UUID cannot be same as UUID. Leave it out for a root.")
    root = uuid
    if parent is not None:
        above = lock_trees(conn, [parent], now).get(parent)
        if above is None:
            raise Invalid(f"{wrong} parent provider UUID does not exist.")
        root = above.root_uuid
    row = {"uuid": uuid, "name": name, "parent_uuid": parent, "root_uuid": root, "generation": 0}
    if not insert_if_absent(conn, resource_providers, {**row, "created_at": now, "updated_at": now}):
        taken = []
        if find(conn, uuid) is not None:
            taken.append(f"uuid: {uuid}")
        if conn.execute(sa.select(_p.uuid).where(_p.name == name)).first() is not None:
            taken.append(f"name: {name}")
        raise Conflict(
            f"Conflicting resource provider {', '.join(taken)} already exists.",
            placement_code=DUPLICATE_NAME,
        )
    return get(conn, uuid)


def update(
    conn: sa.Connection,
    uuid: str,
    name: str,
    parent: str | EllipsisType | None,
    *,
    may_move: bool,
    now: int,
) -> ProviderRow:
    """Rename a provider, or give it another parent; raise NotFound, Conflict or Invalid."""
    found = get(conn, uuid)
    values: dict[str, Any] = {"name": name, "updated_at": now}
    if not isinstance(parent, EllipsisType) and parent != found.parent_uuid:
        known = lock_trees(conn, [uuid, *([parent] if parent is not None else [])], now)
        found = known.get(uuid) or get(conn, uuid)
        values |= _moved(conn, found, parent, known, may_move)
    if conn.execute(sa.select(_p.uuid).where(_p.name == name, _p.uuid != uuid)).first() is not None:
        raise Conflict(f"Conflicting resource provider {name} already exists.", placement_code=DUPLICATE_NAME)
    conn.execute(resource_providers.update().where(_p.uuid == uuid).values(**values))
    return get(conn, uuid)


def _moved(
    conn: sa.Connection, found: ProviderRow, parent: str | None, known: Mapping[str, ProviderRow], may_move: bool
) -> dict[str, Any]:
    """Give a provider's descendants their new root; return the new parent and root of the provider itself.

    The trees of both are locked; `known` has the parent, if it exists.
    """
    wrong = f"Unable to save resource provider {found.uuid}:"
    if found.parent_uuid is not None and not may_move:
        what = "un-parenting" if parent is None else "re-parenting"
        raise Invalid(f"{wrong} {what} a provider is not currently allowed before microversion 1.37.")
    tree = of_trees(conn, [found.root_uuid])
    below = _subtree(tree, found.uuid)
    root = found.uuid
    if parent is not None:
        if parent == found.uuid or parent in below:
            raise Invalid(f"{wrong} creating loop in the provider tree is not allowed.")
        above = known.get(parent)
        if above is None:
            raise Invalid(f"{wrong} parent provider UUID does not exist.")
        if conn.execute(sa.select(_n.uuid).where(_n.uuid == found.uuid)).first() is not None:
            raise Invalid(f"{wrong} it is a compute node, which has no parent.")
        root = above.root_uuid
    conn.execute(
        resource_providers.update().where(one_of(_p.uuid, "b_uuids")).values(root_uuid=root), {"b_uuids": sorted(below)}
    )
    return {"parent_uuid": parent, "root_uuid": root}


def _subtree(tree: Iterable[ProviderRow], top: str) -> set[str]:
    """Return a provider and its descendants."""
    children: dict[str | None, list[str]] = {}
    for row in tree:
        children.setdefault(row.parent_uuid, []).append(row.uuid)
    found, queue = set[str](), [top]
    while queue:
        current = queue.pop()
        found.add(current)
        queue += [child for child in children.get(current, []) if child not in found]
    return found


def delete(conn: sa.Connection, uuid: str, now: int) -> None:
    """Remove a provider with all that it has; raise NotFound, or Conflict while it has children or allocations."""
    get(conn, uuid, " for delete")
    if conn.execute(sa.select(_n.uuid).where(_n.uuid == uuid)).first() is not None:
        raise Conflict(
            f"Unable to delete resource provider {uuid}: it is a compute node; delete its compute service instead.",
            placement_code="placement.resource_provider.inuse",
        )
    if uuid not in lock_trees(conn, [uuid], now):
        get(conn, uuid, " for delete")
    lock_inventories(conn, [uuid])
    if conn.execute(sa.select(_p.uuid).where(_p.parent_uuid == uuid)).first() is not None:
        raise Conflict(
            f"Unable to delete parent resource provider {uuid}: It has child resource providers.",
            placement_code="placement.resource_provider.cannot_delete_parent",
        )
    if conn.execute(sa.select(allocations.c.consumer_uuid).where(allocations.c.node_uuid == uuid).limit(1)).first():
        raise Conflict(
            f"Unable to delete resource provider {uuid}: Resource provider has allocations.",
            placement_code="placement.resource_provider.inuse",
        )
    _remove(conn, [uuid])


def _remove(conn: sa.Connection, uuids: Sequence[str]) -> None:
    wanted = {"uuids": sorted(uuids)}
    for table, column in (
        (inventories, inventories.c.node_uuid),
        (provider_traits, provider_traits.c.provider_uuid),
        (provider_aggregates, provider_aggregates.c.provider_uuid),
        (resource_providers, _p.uuid),
    ):
        conn.execute(sa.delete(table).where(one_of(column, "uuids")), wanted)


def lock_trees(conn: sa.Connection, uuids: Collection[str], now: int) -> dict[str, ProviderRow]:
    """Lock providers and the roots of their trees, and return those providers that exist, as they are then.

    Whoever gives a provider a child, another parent, or deletes it locks the root of its tree: one change of a tree at
    a time. Whoever changes what a provider has locks its own row. Schedulers read the compute nodes of the trees again.
    """
    locked: set[str] = set()
    while True:
        rows = get_many(conn, uuids)
        roots = {row.root_uuid for row in rows.values()}
        if roots.union(rows) <= locked:
            return rows
        for root in sorted(roots):
            touch_tree(conn, root, now)
        get_many(conn, roots.union(rows), lock=True)
        locked |= roots.union(rows)  # if a provider has moved meanwhile, its new root is missing


def lock_inventories(conn: sa.Connection, uuids: Collection[str]) -> Sequence[Any]:
    """Return the inventories of providers, locked in the order of their keys."""
    i = inventories.c
    query = sa.select(inventories).where(one_of(i.node_uuid, "uuids")).order_by(i.node_uuid, i.resource_class)
    return conn.execute(query.with_for_update(), {"uuids": sorted(uuids)}).all()


def touch_tree(conn: sa.Connection, root: str, now: int) -> None:
    """Make schedulers read a compute node again, after a change in its tree."""
    conn.execute(compute_nodes.update().where(_n.uuid == root).values(changed_at=now))


def touch(conn: sa.Connection, uuid: str, now: int) -> None:
    """Make schedulers read the compute node again that a provider is, or is below."""
    conn.execute(_TOUCH_NODES, {"b_uuid": uuid, "b_now": now})


def advance(conn: sa.Connection, uuid: str, generation: int | None, now: int, message: str = "") -> None:
    """Raise the generation, from the given one if one is given; raise Conflict if it is another."""
    statement = _ADVANCE if generation is None else _ADVANCE.where(_p.generation == bindparam("b_old"))
    values: dict[str, Any] = {"b_uuid": uuid, "b_now": now}
    if generation is not None:
        values["b_old"] = generation
    if conn.execute(statement, values).rowcount != 1:
        raise Conflict(message or GENERATION_CONFLICT, placement_code=CONCURRENT_UPDATE)


def advance_all(conn: sa.Connection, uuids: Collection[str], now: int) -> None:
    """Raise the generations of providers that the caller has locked."""
    if uuids:
        conn.execute(_ADVANCE_ALL, {"uuids": sorted(uuids), "b_now": now})


GENERATION_CONFLICT = "resource provider generation conflict: read the provider again, and repeat with its generation."


# --- the providers that compute nodes are


def ensure_nodes(
    conn: sa.Connection,
    nodes: Mapping[str, tuple[str, str]],
    now: int,
    *,
    below: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Make the providers of compute nodes (uuid -> host and name) that have none, in the aggregates of their hosts.

    `below` are providers to make below nodes: uuid -> the node, and the name.
    """
    parents: dict[str, tuple[str | None, str]] = {uuid: (None, name) for uuid, (_, name) in nodes.items()}
    wanted = parents | dict(below or {})
    if wanted:
        _ensure(conn, wanted, now)
    if not nodes:
        return
    hosts = sorted({host for host, _ in nodes.values()})
    found: dict[str, list[str]] = {}
    for host, aggregate in conn.execute(_AGGREGATES_OF_HOSTS, {"hosts": hosts}):
        found.setdefault(host, []).append(aggregate)
    memberships = [
        {"provider_uuid": uuid, "aggregate_uuid": aggregate}
        for uuid, (host, _) in sorted(nodes.items())
        for aggregate in sorted(found.get(host, ()))
    ]
    if memberships:
        conn.execute(_INSERT_AGGREGATES.on(conn), memberships)


def _ensure(conn: sa.Connection, wanted: Mapping[str, tuple[str | None, str]], now: int) -> None:
    """Make providers that do not exist: uuid -> the parent, which is a root, and the name."""
    missing = sorted(wanted)
    for form in ("{name}", "{name} ({uuid})"):  # names are unique, and two hosts may name a node alike
        rows = [
            {
                "uuid": uuid,
                "name": form.format(name=wanted[uuid][1], uuid=uuid),
                "parent_uuid": wanted[uuid][0],
                "root_uuid": wanted[uuid][0] or uuid,
                "generation": 0,
                "created_at": now,
                "updated_at": now,
            }
            for uuid in missing
        ]
        conn.execute(_INSERT.on(conn), rows)
        missing = sorted(set(missing) - get_many(conn, missing).keys())
        if not missing:
            break


def remove_unused(conn: sa.Connection, uuids: Collection[str]) -> None:
    """Remove those providers that have no inventories and no children; nobody holds anything of them."""
    if not uuids:
        return
    named = {"uuids": sorted(uuids)}
    stock = sa.select(inventories.c.node_uuid).where(one_of(inventories.c.node_uuid, "uuids"))
    parents = sa.select(_p.parent_uuid).where(one_of(_p.parent_uuid, "uuids"))
    kept = {*conn.execute(stock, named).scalars(), *conn.execute(parents, named).scalars()}
    if unused := sorted(set(uuids) - kept):
        _remove(conn, unused)


_AGGREGATES_OF_HOSTS = (
    sa.select(aggregate_hosts.c.host, aggregates.c.uuid)
    .join(aggregates, aggregates.c.id == aggregate_hosts.c.aggregate_id)
    .where(one_of(aggregate_hosts.c.host, "hosts"))
)


def delete_trees(conn: sa.Connection, roots: Sequence[str]) -> None:
    """Remove whole trees that have no allocations; raise Conflict if one has."""
    uuids: list[str] = []
    while missing := {row.uuid for row in of_trees(conn, roots)}.difference(uuids):
        uuids = sorted(missing.union(uuids))
        get_many(conn, [*uuids, *roots], lock=True)
    held = sa.select(allocations.c.node_uuid).where(one_of(allocations.c.node_uuid, "uuids")).limit(1)
    lock_inventories(conn, [*uuids, *roots])
    if (used := conn.execute(held, {"uuids": [*uuids, *roots]}).scalar()) is not None:
        raise Conflict(f"Resource provider {used} still has allocations.")
    _remove(conn, [*uuids, *roots])


# --- traits and aggregates of a provider


def traits_of(conn: sa.Connection, uuids: Collection[str]) -> dict[str, set[str]]:
    """Return the traits of providers."""
    t = provider_traits.c
    found: dict[str, set[str]] = {}
    for uuid, trait in conn.execute(
        sa.select(t.provider_uuid, t.trait).where(one_of(t.provider_uuid, "uuids")), {"uuids": sorted(uuids)}
    ):
        found.setdefault(uuid, set()).add(trait)
    return found


def aggregates_of(conn: sa.Connection, uuids: Collection[str]) -> dict[str, set[str]]:
    """Return the aggregates of providers."""
    a = provider_aggregates.c
    found: dict[str, set[str]] = {}
    for uuid, aggregate in conn.execute(
        sa.select(a.provider_uuid, a.aggregate_uuid).where(one_of(a.provider_uuid, "uuids")), {"uuids": sorted(uuids)}
    ):
        found.setdefault(uuid, set()).add(aggregate)
    return found


def set_traits(conn: sa.Connection, uuid: str, wanted: Collection[str]) -> None:
    """Give a provider exactly these traits; a compute node keeps those that its host reports, and those of its service.

    Nova puts them back with its next report.
    """
    before = traits_of(conn, [uuid]).get(uuid, set())
    reported = conn.execute(sa.select(_n.traits).where(_n.uuid == uuid)).scalar()
    named = {*wanted, *(reported or ())}
    change_traits(
        conn, added=[(uuid, name) for name in named - before], removed=[(uuid, name) for name in before - named]
    )
    if reported is not None:
        follow_services(conn, [uuid])


def change_traits(
    conn: sa.Connection, *, added: Collection[tuple[str, str]], removed: Collection[tuple[str, str]]
) -> None:
    """Add and remove traits of providers (uuid and trait); having one already, or not at all, is not an error."""
    if removed:
        conn.execute(_DELETE_TRAIT, [{"b_uuid": uuid, "b_trait": name} for uuid, name in sorted(removed)])
    if added:
        rows = [{"provider_uuid": uuid, "trait": name} for uuid, name in sorted(added)]
        conn.execute(_INSERT_TRAITS.on(conn), rows)


def set_aggregates(conn: sa.Connection, uuid: str, wanted: Collection[str]) -> None:
    """Put a provider into exactly these aggregates."""
    a = provider_aggregates.c
    before = aggregates_of(conn, [uuid]).get(uuid, set())
    gone = sa.delete(provider_aggregates).where(a.provider_uuid == uuid, one_of(a.aggregate_uuid, "uuids"))
    if removed := before - set(wanted):
        conn.execute(gone, {"uuids": sorted(removed)})
    if added := set(wanted) - before:
        rows = [{"provider_uuid": uuid, "aggregate_uuid": each} for each in sorted(added)]
        conn.execute(_INSERT_AGGREGATES.on(conn), rows)


_STATUS = (
    sa.select(_n.uuid, services.c.disabled)
    .join(services, sa.and_(services.c.host == _n.host, services.c.binary == COMPUTE))
    .outerjoin(
        provider_traits,
        sa.and_(provider_traits.c.provider_uuid == _n.uuid, provider_traits.c.trait == STATUS_DISABLED),
    )
    .where(one_of(_n.uuid, "uuids"), services.c.disabled == provider_traits.c.trait.is_(None))
)
_TOUCH_HOST = (
    compute_nodes.update()
    .where(in_order(_n.uuid, _n.host == bindparam("b_host")))
    .values(changed_at=bindparam("b_now"))
    .returning(_n.uuid)
)


def follow_services(conn: sa.Connection, nodes: Collection[str]) -> None:
    """Give nodes that the caller has locked the trait of those whose service is disabled, or take it from them."""
    wrong = {row.uuid: row.disabled for row in conn.execute(_STATUS, {"uuids": sorted(nodes)})}
    _set_disabled(conn, wrong)


def follow_service(conn: sa.Connection, host: str, *, disabled: bool, now: int) -> None:
    """Give the nodes of a host the trait of those whose service is disabled, or take it from them.

    The caller changes the service afterwards, in the same transaction.
    """
    uuids = conn.execute(_TOUCH_HOST, {"b_host": host, "b_now": now}).scalars().all()
    _set_disabled(conn, dict.fromkeys(uuids, disabled))


def _set_disabled(conn: sa.Connection, nodes: Mapping[str, bool]) -> None:
    change_traits(
        conn,
        added=[(uuid, STATUS_DISABLED) for uuid, disabled in nodes.items() if disabled],
        removed=[(uuid, STATUS_DISABLED) for uuid, disabled in nodes.items() if not disabled],
    )


def follow_host(conn: sa.Connection, host: str, aggregate_uuid: str, *, joined: bool) -> None:
    """Put the nodes of a host into an aggregate that the host joins, or take them out."""
    a = provider_aggregates.c
    uuids = sorted(conn.execute(sa.select(_n.uuid).where(_n.host == host)).scalars())
    if joined and uuids:
        rows = [{"provider_uuid": uuid, "aggregate_uuid": aggregate_uuid} for uuid in uuids]
        conn.execute(_INSERT_AGGREGATES.on(conn), rows)
    elif uuids:
        left = sa.delete(provider_aggregates).where(
            one_of(a.provider_uuid, "uuids"), a.aggregate_uuid == aggregate_uuid
        )
        conn.execute(left, {"uuids": uuids})

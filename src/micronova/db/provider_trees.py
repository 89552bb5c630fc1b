"""Finds resource providers by what they have, and loads whole trees of them for allocation candidates."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import providers
from micronova.db.listed import one_of
from micronova.db.providers import ProviderRow
from micronova.db.tables import inventories, provider_aggregates, provider_traits, resource_providers
from micronova.placement import candidates
from micronova.placement.candidates import Amounts
from micronova.placement.model import Candidate, Inventory, Provider, RequestGroup, ResourceRequest, by_root
from micronova.placement.standard import SHARES_VIA_AGGREGATE

_p, _i, _t, _a = resource_providers.c, inventories.c, provider_traits.c, provider_aggregates.c
PART = 500  # trees that are loaded at once


def search(conn: sa.Connection, *, name: str | None, uuid: str | None, group: RequestGroup) -> list[ProviderRow]:
    """Return providers with this name or uuid that are in the group's tree and aggregates and have what it asks for."""
    query = sa.select(resource_providers).order_by(_p.created_at, _p.uuid)
    if name is not None:
        query = query.where(_p.name == name)
    if uuid is not None:
        query = query.where(_p.uuid == uuid)
    if group.in_tree is not None:
        root = sa.select(_p.root_uuid).where(_p.uuid == group.in_tree).correlate(None).scalar_subquery()
        query = query.where(_p.root_uuid == root)
    for number, (wanted, amount) in enumerate(group.resources.items()):
        query = query.where(_p.uuid.in_(_with_capacity(f"class{number}", f"amount{number}")))
        query = query.params({f"class{number}": wanted, f"amount{number}": amount})
    for traits in group.required:
        query = query.where(_p.uuid.in_(_with_traits(traits)))
    if group.forbidden:
        query = query.where(_p.uuid.not_in(_with_traits(group.forbidden)))
    for members in group.member_of:
        query = query.where(_p.uuid.in_(_in_aggregates(members)))
    if group.not_member_of:
        query = query.where(_p.uuid.not_in(_in_aggregates(group.not_member_of)))
    return [cast(ProviderRow, row) for row in conn.execute(query)]


def _in_aggregates(wanted: Collection[str]) -> Any:
    """The providers that are in one of these aggregates."""
    return sa.select(_a.provider_uuid).where(_a.aggregate_uuid.in_(sorted(wanted)))


def _with_traits(wanted: Collection[str]) -> Any:
    """The providers that have one of these traits."""
    return sa.select(_t.provider_uuid).where(_t.trait.in_(sorted(wanted)))


def _with_capacity(name: str, amount: str) -> Any:
    """The providers that have an amount of a class; the parameters have these names. It is `Inventory.has` in SQL."""
    wanted = bindparam(amount, type_=sa.BigInteger)
    return sa.select(_i.node_uuid).where(
        _i.resource_class == bindparam(name),
        _i.used + wanted <= _i.capacity,
        _i.min_unit <= wanted,
        _i.max_unit >= wanted,
        wanted % _i.step_size == 0,
    )


def load(conn: sa.Connection, rows: Sequence[ProviderRow]) -> list[Provider]:
    """Return providers with their inventories, traits and aggregates: three statements."""
    uuids = [row.uuid for row in rows]
    traits, members = providers.traits_of(conn, uuids), providers.aggregates_of(conn, uuids)
    stock: dict[str, dict[str, Inventory]] = {}
    query = sa.select(inventories).where(one_of(_i.node_uuid, "uuids")).order_by(_i.node_uuid, _i.resource_class)
    for each in conn.execute(query, {"uuids": uuids}):
        stock.setdefault(each.node_uuid, {})[each.resource_class] = Inventory(
            total=each.total,
            reserved=each.reserved,
            min_unit=each.min_unit,
            max_unit=each.max_unit,
            step_size=each.step_size,
            allocation_ratio=each.allocation_ratio,
            capacity=each.capacity,
            used=each.used,
        )
    return [
        Provider(
            uuid=row.uuid,
            name=row.name,
            parent=row.parent_uuid,
            root=row.root_uuid,
            generation=row.generation,
            traits=frozenset(traits.get(row.uuid, ())),
            aggregates=frozenset(members.get(row.uuid, ())),
            inventories=stock.get(row.uuid, {}),
        )
        for row in rows
    ]


def load_sharing(conn: sa.Connection) -> list[Provider]:
    """Return the trees of the providers that share their resources by aggregates."""
    shares = sa.select(_t.provider_uuid).where(_t.trait == SHARES_VIA_AGGREGATE)
    in_aggregates = sa.select(_a.provider_uuid)
    query = sa.select(_p.root_uuid).distinct().where(_p.uuid.in_(shares), _p.uuid.in_(in_aggregates))
    roots = list(conn.execute(query).scalars())
    return load_trees(conn, roots) if roots else []


def roots_of(conn: sa.Connection, request: ResourceRequest, sharing: Sequence[Provider]) -> list[str]:
    """Return the roots of the trees that may serve a request, in the order in which they came.

    What no sharing provider can serve must be in the tree itself: each resource class in a provider that has the
    amount, and somewhere each trait and an aggregate of each list. How these go together is found later.
    """
    shared = {name for each in sharing if each.shares for name in each.inventories}
    query = sa.select(_p.uuid).where(_p.uuid == _p.root_uuid).order_by(_p.created_at, _p.uuid)
    number = 0
    for group in request.groups:
        if group.in_tree is not None:
            wanted = sa.select(_p.root_uuid).where(_p.uuid == group.in_tree).correlate(None).scalar_subquery()
            if not sharing:
                query = query.where(_p.uuid == wanted)
        for name, amount in group.resources.items():
            if name in shared:
                continue
            number += 1
            able = _p.uuid.in_(_with_member(_with_capacity(f"class{number}", f"amount{number}")))
            query = query.where(able).params({f"class{number}": name, f"amount{number}": amount})
        for traits in group.required:
            if not any(each.traits & traits for each in sharing):
                query = query.where(_p.uuid.in_(_with_member(_with_traits(traits))))
        if not sharing or group.resources.keys() - shared:
            for members in group.member_of:
                query = query.where(_p.uuid.in_(_with_member(_in_aggregates(members))))
    for trait in sorted(request.root_required):
        query = query.where(_p.uuid.in_(_with_traits([trait])))
    if request.root_forbidden:
        query = query.where(_p.uuid.not_in(_with_traits(request.root_forbidden)))
    return list(conn.execute(query).scalars())


def _with_member(providers: Any) -> Any:
    """The roots of the trees with one of some providers."""
    member = resource_providers.alias()
    return sa.select(member.c.root_uuid).where(member.c.uuid.in_(providers)).correlate(None)


def trees(conn: sa.Connection, roots: Sequence[str]) -> Iterator[list[Provider]]:
    """Yield the providers of these trees, some trees at a time, in their order."""
    for first in range(0, len(roots), PART):
        yield load_trees(conn, roots[first : first + PART])


def load_trees(conn: sa.Connection, roots: Collection[str]) -> list[Provider]:
    """Return the providers of these trees."""
    return load(conn, providers.of_trees(conn, roots))


class Trees:
    """The trees of some roots with the sharing providers, read once, and what consumers take of them one by one."""

    def __init__(self, conn: sa.Connection, roots: Collection[str]) -> None:
        self._known: dict[str, Provider] = {}
        self._steps = candidates.RequestSteps()
        self._sharing = self._add(load_sharing(conn))
        self._of_root: dict[str, list[str]] = {}
        for part in trees(conn, sorted(roots)):
            self._of_root |= {root: self._add(tree) for root, tree in by_root(part).items()}

    def _add(self, loaded: Sequence[Provider]) -> list[str]:
        self._known |= {each.uuid: each for each in loaded}
        return [each.uuid for each in loaded]

    @property
    def ended_early(self) -> int:
        """How many searches took too many steps."""
        return self._steps.ended_early

    def take(self, amounts: Amounts) -> None:
        """Count more as used, by provider and resource class; less if an amount is negative."""
        changed = {uuid: self._known[uuid] for uuid, _ in amounts if uuid in self._known}
        self._known |= {each.uuid: each for each in candidates.take(list(changed.values()), amounts)}

    def serve(self, root: str, request: ResourceRequest, held: Amounts) -> Candidate | None:
        """Return how the tree of a root serves a request now; None if it cannot.

        `held` is what the consumer takes besides, which is counted as used.
        """
        tree = [self._known[uuid] for uuid in self._of_root.get(root, ())]
        others = [each for uuid in self._sharing if (each := self._known[uuid]).root != root]
        found = candidates.find(dataclasses.replace(request, limit=1), [*tree, *others], [root], self._steps, held)
        return found[0] if found else None

"""Quotas: limits, and usage that is charged in the transaction that takes the resource.

A charge is one conditional statement per resource, so the sum never passes the limit however many requests race. The
resources are charged in the order of their names, so two requests cannot deadlock. Usage belongs to a project; key
pairs belong to a user and are kept under project "". A user of a project may have limits of their own, which old
clients still set; only then is there a usage row for the pair of both.

Resources have the names of the API. A resource without a limit is not limited.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.prepared import Prepared
from micronova.db.tables import (
    allocations,
    instances,
    key_pairs,
    migrations,
    quota_class_limits,
    quota_limits,
    quota_usages,
    server_groups,
)
from micronova.db.upsert import PerDialect
from micronova.objects import migration_states
from micronova.objects.errors import QuotaExceeded
from micronova.objects.instance import InstanceRow

COUNTED = ("cores", "instances", "key_pairs", "ram", "server_groups")  # the resources that have usage


class Limits(dict[str, int]):
    """The limits of a project by resource; `of_user` has the limits of one of its users in addition."""

    of_user: dict[str, int]

    def __init__(self, limits: Mapping[str, int], of_user: Mapping[str, int] | None = None) -> None:
        super().__init__(limits)
        self.of_user = dict(of_user or {})


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded usage that differs from what exists."""

    project_id: str
    user_id: str
    resource: str
    recorded: int
    actual: int


_u = quota_usages.c
_ROW = {
    "project_id": sa.bindparam("project"),
    "user_id": sa.bindparam("user"),
    "resource": sa.bindparam("resource"),
    "in_use": sa.bindparam("amount", type_=sa.Integer),
}


def of_server(vcpus: int, ram: int) -> dict[str, int]:
    """Return what one server with such a flavor counts against the quota."""
    return {"instances": 1, "cores": vcpus, "ram": ram}


def _charge(insert: Any) -> sa.Executable:
    statement = insert(quota_usages).values(_ROW)
    amount = statement.excluded.in_use
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_u.project_id, _u.user_id, _u.resource],
        set_={"in_use": _u.in_use + amount},
        where=_u.in_use <= sa.bindparam("limit", type_=sa.Integer) - amount,  # the sum may be too large to be computed
    )
    return kept


def _set(insert: Any) -> sa.Executable:
    statement = insert(quota_usages).values(_ROW)
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_u.project_id, _u.user_id, _u.resource], set_={"in_use": statement.excluded.in_use}
    )
    return kept


_CHARGE = Prepared(PerDialect(_charge).on)
_SET = PerDialect(_set)
_NO_LIMIT = 2**31 - 1  # as much as a row can say
_amount = sa.bindparam("amount", type_=sa.Integer)
_RELEASE = Prepared(
    sa.update(quota_usages)
    .where(_u.project_id == sa.bindparam("project"), _u.user_id == sa.bindparam("user"))
    .where(_u.resource == sa.bindparam("name"))
    # Never below 0: a release that is repeated must not free what others use.
    .values(in_use=sa.case((_u.in_use > _amount, _u.in_use - _amount), else_=0))
)


def charge(
    conn: sa.Connection,
    project_id: str,
    amounts: Mapping[str, int],
    limits: Mapping[str, int],
    user_id: str = "",
) -> None:
    """Charge all amounts; raise QuotaExceeded if one does not fit, after which the caller rolls back."""
    wanted = {resource: amounts[resource] for resource in sorted(amounts) if amounts[resource] > 0}
    if not project_id:
        _charge_owner(conn, "", user_id, wanted, limits)
        return
    _charge_owner(conn, project_id, "", wanted, limits)
    if isinstance(limits, Limits) and limits.of_user:
        own = {resource: amount for resource, amount in wanted.items() if resource in limits.of_user}
        _charge_owner(conn, project_id, user_id, own, limits.of_user)


def _charge_owner(
    conn: sa.Connection, project: str, user: str, amounts: Mapping[str, int], limits: Mapping[str, int]
) -> None:
    taken: dict[str, int] = {}
    for resource, amount in amounts.items():
        if not _take(conn, project, user, resource, amount, _most_of(limits, resource)):
            raise _exceeded(conn, project, user, amounts, limits, taken)
        taken[resource] = amount


def exceeds(limits: Mapping[str, int], resource: str, amount: int) -> bool:
    """Return whether an amount of a resource is more than its limit; a negative limit is none."""
    return amount > _most_of(limits, resource)


def _most_of(limits: Mapping[str, int], resource: str) -> int:
    limit = limits.get(resource, -1)
    return limit if limit >= 0 else _NO_LIMIT


def _take(conn: sa.Connection, project: str, user: str, resource: str, amount: int, limit: int) -> bool:
    if limit < amount:
        return False  # the statement checks no limit when it inserts the first usage
    row = {"project": project, "user": user, "resource": resource, "amount": amount, "limit": limit}
    return _CHARGE.run(conn, row) == 1


def charge_up_to(
    conn: sa.Connection,
    project_id: str,
    each: Mapping[str, int],
    least: int,
    most: int,
    limits: Mapping[str, int],
    user_id: str = "",
) -> int:
    """Charge as many units as the limits allow, from `least` to `most`; return how many."""
    count = most
    if most > least:
        used = _usage_of(conn, project_id, ["", user_id], lock=True)  # nobody changes it before the charge
        of_user = limits.of_user if isinstance(limits, Limits) else {}
        for resource, amount in each.items():
            for user, limit in (("", limits.get(resource, -1)), (user_id, of_user.get(resource, -1))):
                if amount > 0 and limit >= 0:
                    count = min(count, (limit - used.get((user, resource), 0)) // amount)
        count = max(count, least)
    charge(conn, project_id, {name: amount * count for name, amount in each.items()}, limits, user_id)
    return count


def release(conn: sa.Connection, project_id: str, amounts: Mapping[str, int], user_id: str = "") -> None:
    """Release amounts of resources."""
    users = dict.fromkeys(("", user_id) if project_id else (user_id,))
    rows = [
        {"project": project_id, "user": user, "name": resource, "amount": amounts[resource]}
        for resource in sorted(amounts)
        for user in users
        if amounts[resource] > 0
    ]
    _RELEASE.run_each(conn, rows)


def release_server(conn: sa.Connection, row: InstanceRow) -> None:
    """Release what a server counts against the quota."""
    flavor = row["flavor"]
    release(conn, row["project_id"], of_server(flavor["vcpus"], flavor["ram"]), row["user_id"])


def charge_server(conn: sa.Connection, row: InstanceRow, limits: Mapping[str, int]) -> None:
    """Charge what a server counts against the quota; raise QuotaExceeded if it does not fit."""
    flavor = row["flavor"]
    charge(conn, row["project_id"], of_server(flavor["vcpus"], flavor["ram"]), limits, row["user_id"])


def _exceeded(
    conn: sa.Connection,
    project: str,
    user: str,
    amounts: Mapping[str, int],
    limits: Mapping[str, int],
    taken: Mapping[str, int],
) -> QuotaExceeded:
    """Return an error that names every resource that exceeds its limit, not only the first."""
    used = _usage_of(conn, project, [user])
    over: list[tuple[str, int, int, int]] = []
    for resource, amount in amounts.items():
        limit, in_use = _most_of(limits, resource), used.get((user, resource), 0)
        if resource not in taken and limit < in_use + amount:
            over.append((resource, amount, in_use, limit))
    names, asked, already, most = (", ".join(map(str, column)) for column in zip(*over, strict=True))
    return QuotaExceeded(
        f"Quota exceeded for {names}: Requested {asked}, but already used {already} of {most} {names}",
        over=[resource for resource, *_ in over],
    )


_USAGE = sa.select(quota_usages).where(
    _u.project_id == sa.bindparam("project"), _u.user_id.in_(sa.bindparam("users", expanding=True))
)
_LOCKED_USAGE = _USAGE.order_by(_u.project_id, _u.user_id, _u.resource).with_for_update()


def _usage_of(
    conn: sa.Connection, project: str, users: Sequence[str], lock: bool = False
) -> dict[tuple[str, str], int]:
    """Return what is in use, by user ("" is the project) and resource."""
    rows = conn.execute(_LOCKED_USAGE if lock else _USAGE, {"project": project, "users": list(users)})
    return {(row.user_id, row.resource): row.in_use for row in rows}


def usage(conn: sa.Connection, project_id: str, user_id: str = "") -> dict[str, int]:
    """Return what is in use, by resource: of a project, of a user in it, or (project "") of a user alone."""
    used = dict.fromkeys(COUNTED, 0)
    recorded = {resource: n for (_, resource), n in _usage_of(conn, project_id, [user_id]).items()}
    if project_id and user_id and not recorded:
        recorded = _actual_of_user(conn, project_id, user_id)
    return {**used, **recorded}


def _has_rows(conn: sa.Connection, project_id: str, user_id: str) -> bool:
    query = sa.select(_u.resource).where(_u.project_id == project_id, _u.user_id == user_id).limit(1)
    return conn.execute(query).first() is not None


_of_class, _own = quota_class_limits.c, quota_limits.c
_LIMITS = Prepared(
    sa.union_all(
        sa.select(sa.literal("class").label("owner"), _of_class.resource, _of_class.hard_limit).where(
            _of_class.class_name == "default"
        ),
        sa.select(sa.literal("project").label("owner"), _own.resource, _own.hard_limit).where(
            _own.project_id == sa.bindparam("project"), _own.user_id == ""
        ),
        sa.select(sa.literal("user").label("owner"), _own.resource, _own.hard_limit).where(
            _own.project_id == sa.bindparam("project"), _own.user_id == sa.bindparam("user"), _own.user_id != ""
        ),
    )
)


def limits_for(conn: sa.Connection, project_id: str, defaults: Mapping[str, int], user_id: str = "") -> Limits:
    """Return the limits of a project: its own, else those of the default class, else the defaults."""
    found: dict[str, dict[str, int]] = {"class": {}, "project": {}, "user": {}}
    for row in _LIMITS.all(conn, {"project": project_id, "user": user_id}):
        found[row["owner"]][row["resource"]] = row["hard_limit"]
    return Limits({**defaults, **found["class"], **found["project"]}, found["user"])


def given_to_users(conn: sa.Connection, project_id: str, besides: str) -> dict[str, int]:
    """Return the sum of the limits of a project's users, without one of them."""
    c = quota_limits.c
    query = sa.select(c.resource, sa.func.sum(c.hard_limit).label("total")).group_by(c.resource)
    others = (c.project_id == project_id, c.user_id.not_in(("", besides)), c.hard_limit > 0)
    rows = conn.execute(query.where(*others))
    return {row.resource: int(row.total) for row in rows}


def class_limits(conn: sa.Connection, class_name: str, defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of a quota class."""
    c = quota_class_limits.c
    rows = conn.execute(sa.select(c.resource, c.hard_limit).where(c.class_name == class_name))
    return {**defaults, **{row.resource: row.hard_limit for row in rows}}


def set_limits(conn: sa.Connection, project_id: str, limits: Mapping[str, int], user_id: str = "") -> None:
    """Set some limits of a project, or of a user in it; the user's usage is recorded from then on."""
    if user_id and not _has_rows(conn, project_id, user_id):
        _write_usage(conn, project_id, user_id, _actual_of_user(conn, project_id, user_id))
    for resource in sorted(limits):
        key = {"project_id": project_id, "user_id": user_id, "resource": resource}
        conn.execute(_LIMIT.on(conn), {**key, "hard_limit": limits[resource]})


def set_class_limits(conn: sa.Connection, class_name: str, limits: Mapping[str, int]) -> None:
    """Set some limits of a quota class."""
    for resource in sorted(limits):
        row = {"class_name": class_name, "resource": resource, "hard_limit": limits[resource]}
        conn.execute(_CLASS_LIMIT.on(conn), row)


def delete_limits(conn: sa.Connection, project_id: str, user_id: str = "") -> None:
    """Return a project with all its users, or one user in it, to the defaults."""
    for table in (quota_limits, quota_usages):
        where = [table.c.project_id == project_id]
        if user_id:
            where.append(table.c.user_id == user_id)
        elif table is quota_usages:
            where.append(table.c.user_id != "")  # the project's usage stays
        conn.execute(sa.delete(table).where(*where))


def drift(conn: sa.Connection, project_id: str | None = None) -> list[Drift]:
    """Return every recorded usage that differs from what exists; exact only while nothing changes."""
    query = sa.select(quota_usages)
    if project_id is not None:
        query = query.where(_u.project_id == project_id)
    recorded = {(row.project_id, row.user_id, row.resource): row.in_use for row in conn.execute(query)}
    actual = _actual(conn, project_id, {(project, user) for project, user, _ in recorded if project and user})
    return [
        Drift(project_id=key[0], user_id=key[1], resource=key[2], recorded=found, actual=counted)
        for key in sorted(recorded.keys() | actual.keys())
        if (found := recorded.get(key, 0)) != (counted := actual.get(key, 0))
    ]


def knows(conn: sa.Connection, project_id: str) -> bool:
    """Return whether anything is recorded of a project that its usage counts."""
    places = (_u.project_id, instances.c.project_id, server_groups.c.project_id)
    return any(conn.execute(sa.select(each).where(each == project_id).limit(1)).first() for each in places)


def recount(conn: sa.Connection, project_id: str) -> list[Drift]:
    """Set a project's recorded usage to what exists; return what was wrong."""
    # Transactions that charge hold locks on these rows. With the locks, all charged instances are committed.
    query = sa.select(_u.user_id).where(_u.project_id == project_id).order_by(_u.user_id, _u.resource)
    conn.execute(query.with_for_update()).all()
    wrong = drift(conn, project_id)
    for found in wrong:
        _write_usage(conn, found.project_id, found.user_id, {found.resource: found.actual})
    return wrong


def _write_usage(conn: sa.Connection, project_id: str, user_id: str, amounts: Mapping[str, int]) -> None:
    for resource in sorted(amounts):
        row = {"project": project_id, "user": user_id, "resource": resource, "amount": amounts[resource]}
        conn.execute(_SET.on(conn), row)


def _actual(
    conn: sa.Connection, project_id: str | None, pairs: Collection[tuple[str, str]]
) -> dict[tuple[str, str, str], int]:
    """Count what exists, by project; by pair of project and user for the given ones; key pairs by user.

    The number of statements does not depend on how many pairs there are.
    """
    counted: Counter[tuple[str, str, str]] = Counter()

    def add(project: str, user: str, amounts: Mapping[str, int]) -> None:
        for owner in ("", user) if (project, user) in pairs else ("",):
            for resource, amount in amounts.items():
                counted[project, owner, resource] += amount

    i, g = instances.c, server_groups.c
    servers = sa.select(i.project_id, i.user_id, *_SUMS).where(_CHARGED).group_by(i.project_id, i.user_id)
    groups = sa.select(g.project_id, g.user_id, sa.func.count().label("n")).group_by(g.project_id, g.user_id)
    if project_id is not None:
        servers, groups = servers.where(i.project_id == project_id), groups.where(g.project_id == project_id)
    for row in conn.execute(servers):
        add(row.project_id, row.user_id, {"instances": row.instances, "cores": row.cores, "ram": row.ram})
    for (project, user), more in _held_by_moves(conn, project_id).items():
        add(project, user, more)
    for row in conn.execute(groups):
        add(row.project_id, row.user_id, {"server_groups": row.n})
    if not project_id:
        k = key_pairs.c
        for row in conn.execute(sa.select(k.user_id, sa.func.count().label("n")).group_by(k.user_id)):
            counted["", row.user_id, "key_pairs"] = row.n
    return {key: amount for key, amount in counted.items() if amount}


def _actual_of_user(conn: sa.Connection, project_id: str, user_id: str) -> dict[str, int]:
    i, g = instances.c, server_groups.c
    of_user = (i.project_id == project_id, i.user_id == user_id)
    row = conn.execute(sa.select(*_SUMS).where(_CHARGED, *of_user)).one()
    groups = sa.select(sa.func.count()).select_from(server_groups)
    n = conn.execute(groups.where(g.project_id == project_id, g.user_id == user_id)).scalar_one()
    used = Counter({"instances": row.instances, "cores": row.cores, "ram": row.ram, "server_groups": n})
    used.update(_held_by_moves(conn, project_id).get((project_id, user_id), {}))
    return dict(used)


def _held_by_moves(conn: sa.Connection, project_id: str | None) -> dict[tuple[str, str], Counter[str]]:
    """Return what open migrations are charged with beyond the servers' flavors, by project and user of the server.

    With `project_id`, only of the servers of this project.
    """
    moves = _MOVES if project_id is None else _MOVES.where(instances.c.project_id == project_id)
    held: dict[tuple[str, str], Counter[str]] = {}
    for row in conn.execute(moves):
        counted = held.setdefault((row.project_id, row.user_id), Counter())
        for resource, key in (("cores", "vcpus"), ("ram", "ram")):
            counted[resource] += max(row.old_flavor[key], row.new_flavor[key]) - row.flavor[key]
    return held


def _limit(table: sa.Table) -> PerDialect:
    def build(insert: Any) -> sa.Executable:
        statement = insert(table)
        kept: sa.Executable = statement.on_conflict_do_update(
            index_elements=list(table.primary_key), set_={"hard_limit": statement.excluded.hard_limit}
        )
        return kept

    return PerDialect(build)


_LIMIT = _limit(quota_limits)
_CLASS_LIMIT = _limit(quota_class_limits)


def _sum(key: str) -> sa.Label[int]:
    name = {"vcpus": "cores"}.get(key, key)
    return sa.func.coalesce(sa.func.sum(instances.c.flavor[key].as_integer()), 0).label(name)


_CHARGED = instances.c.deleted_at.is_(None)  # servers that are soft-deleted are not charged
_m = migrations.c
_MOVES = (
    sa.select(instances.c.project_id, instances.c.user_id, instances.c.flavor, _m.old_flavor, _m.new_flavor)
    .join(instances, instances.c.uuid == _m.instance_uuid)
    .where(_m.status.in_(migration_states.OPEN))
    # One that is being reverted is charged until its destination has removed its guest: then it holds nothing any more.
    .where(
        sa.or_(
            _m.status != migration_states.REVERTING,
            sa.exists().where(allocations.c.consumer_uuid == _m.uuid),
        )
    )
)
_SUMS = (sa.func.count(instances.c.uuid).label("instances"), _sum("vcpus"), _sum("ram"))

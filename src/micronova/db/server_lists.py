"""Lists of servers: filters, order and keyset paging, over existing and deleted servers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from micronova.db import expressions, keyset, services
from micronova.db.keyset import SortKey
from micronova.db.tables import deleted_instances, instances
from micronova.objects import states
from micronova.objects.errors import Invalid

Row = Mapping[Any, Any]
# Not as a parameter: a plan that PostgreSQL keeps has to know that most servers are in another state.
_SOFT_DELETED = sa.literal_column(f"'{states.SOFT_DELETED}'", sa.String)
ALL = tuple(column.name for column in instances.c if column.name != "deleted_at")

SORT_KEYS = {
    "created_at": "created_at",
    "updated_at": "updated_at",
    "launched_at": "launched_at",
    "terminated_at": "terminated_at",
    "uuid": "uuid",
    "display_name": "display_name",
    "display_description": "display_description",
    "project_id": "project_id",
    "user_id": "user_id",
    "host": "host",
    "node": "node",
    "hostname": "hostname",
    "image_ref": "image_ref",
    "vm_state": "vm_state",
    "task_state": "task_state",
    "power_state": "power_state",
    "progress": "progress",
    "key_name": "key_name",
    "availability_zone": "availability_zone",
    "config_drive": "config_drive",
    "access_ip_v4": "access_ip_v4",
    "access_ip_v6": "access_ip_v6",
    "launch_index": "launch_index",
    "root_device_name": "root_device_name",
    "auto_disk_config": "disk_config",
    "locked_by": "locked_by",
    "locked": "locked_by",
    "instance_type_id": "flavor_id",
}


@dataclass(kw_only=True)
class Filters:
    """The conditions of a list; None is no condition."""

    project_id: str | None = None
    deleted: bool | None = None
    """Only deleted ones, also softly, or none; None: also deleted ones if changes-since or changes-before is given."""
    soft_deleted: bool | None = None  # with existing ones also soft-deleted ones; with deleted ones not those
    changes_since: int | None = None
    changes_before: int | None = None
    statuses: list[str] = field(default_factory=list)
    equal: dict[str, Any] = field(default_factory=dict)  # column -> value
    name: str | None = None  # a regular expression
    patterns: dict[str, str] = field(default_factory=dict)  # column -> regular expression
    ip: str | None = None
    ip6: str | None = None
    uuids: list[str] | None = None
    locked: bool | None = None
    tags_all: list[str] = field(default_factory=list)
    tags_any: list[str] = field(default_factory=list)
    not_tags_all: list[str] = field(default_factory=list)
    not_tags_any: list[str] = field(default_factory=list)
    sort: list[tuple[str, bool]] = field(default_factory=list)  # (column, descending)
    limit: int = 1000
    marker: str | None = None


def list_(
    conn: sa.Connection, filters: Filters, columns: Sequence[str] = ALL, *, with_services: bool = False
) -> list[Row]:
    """Return these columns of one page of servers; with `with_services` also the columns `services.STATE_OF_HOST`."""
    with_soft_deleted = filters.deleted and filters.soft_deleted is not False
    if _is_of_changes(filters) or with_soft_deleted:
        tables = [instances, deleted_instances]
    else:
        tables = [deleted_instances] if filters.deleted else [instances]
    if len(tables) == 1:
        return _page(conn, tables[0], filters, columns, with_services)
    # Two tables: take a page of each and merge them; either may hold the next servers in order.
    sorted_by = [column for column, _ in _order(filters)]
    read = list(dict.fromkeys([*columns, *sorted_by]))
    rows = [row for table in tables for row in _page(conn, table, filters, read, with_services)]
    for column, descending in reversed(_order(filters)):
        rows.sort(key=_sort_key(column), reverse=descending)
    return rows[: filters.limit]


def _is_of_changes(filters: Filters) -> bool:
    """Return whether the list has all servers that changed in some time, deleted or not."""
    changes = filters.changes_since is not None or filters.changes_before is not None
    return changes and filters.deleted is None


def _sort_key(column: str) -> Callable[[Row], tuple[bool, Any]]:
    return lambda row: (row[column] is not None, row[column])


def _page(
    conn: sa.Connection, table: sa.Table, filters: Filters, columns: Sequence[str], with_services: bool
) -> list[Row]:
    order = _order(filters)
    after = None if filters.marker is None else _position(conn, filters)
    keys = [SortKey(table.c[column], descending) for column, descending in order]
    read = list(dict.fromkeys([*columns, "host", *(column for column, _ in order)])) if with_services else columns
    query = sa.select(*(table.c[name] for name in read)).where(*_conditions(table, filters))
    query = keyset.page(query, keys, after, filters.limit)
    if with_services:
        # PostgreSQL may read all that match and sort them: only the hosts of the page are looked up.
        page = query.subquery("page")
        joined = services.with_services(page)
        query = sa.select(*(page.c[name] for name in columns), *services.STATE_OF_HOST).select_from(joined)
        query = keyset.page(query, [SortKey(page.c[column], descending) for column, descending in order])
    result = conn.execute(query)
    names = list(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]


def _order(filters: Filters) -> list[tuple[str, bool]]:
    order = [(column, descending) for column, descending in filters.sort if column != "uuid"]
    if not filters.sort:
        order = [("created_at", True)]
    uuid = [(column, descending) for column, descending in filters.sort if column == "uuid"]
    return [*order, uuid[0] if uuid else ("uuid", True)]


def _position(conn: sa.Connection, filters: Filters) -> Sequence[Any]:
    """Return the values of the marker's server in the columns of the order; raise Invalid."""
    for table in (instances, deleted_instances):
        keys = [SortKey(table.c[column], descending) for column, descending in _order(filters)]
        conditions = [table.c.uuid == filters.marker]
        if filters.project_id is not None:
            conditions.append(table.c.project_id == filters.project_id)
        found = keyset.position(conn, keys, *conditions)
        if found is not None:
            return found
    raise Invalid(f"marker [{filters.marker}] not found")


def _conditions(table: sa.Table, filters: Filters) -> list[sa.ColumnElement[bool]]:
    c = table.c
    found: list[sa.ColumnElement[bool]] = []
    if table is instances and filters.deleted:
        found += [c.deleted_at.is_not(None), c.vm_state == _SOFT_DELETED]
    elif table is instances and not filters.soft_deleted and not _is_of_changes(filters):
        found.append(c.vm_state != _SOFT_DELETED)
    if filters.project_id is not None:
        found.append(c.project_id == filters.project_id)
    if filters.changes_since is not None:
        found.append(c.updated_at >= filters.changes_since)
    if filters.changes_before is not None:
        found.append(c.updated_at <= filters.changes_before)
    if filters.statuses:
        found.append(_with_status(table, filters.statuses))
    for column, value in filters.equal.items():
        found.append(c[column].in_(value) if isinstance(value, list) else c[column] == value)
    patterns = dict(filters.patterns)
    if filters.name is not None:
        patterns["display_name"] = filters.name
    for column, pattern in patterns.items():
        matches = _matches(c[column], pattern, "name" if column == "display_name" else column)
        # PostgreSQL guesses that few servers match a pattern, and would read and sort all servers of the project. It
        # makes no such guess about a function: it reads them in order until the page is full.
        found.append(matches if filters.project_id is None else sa.func.coalesce(matches, sa.false()))
    found += [
        _matches(sa.cast(c.network_info, sa.Text), _in_json(text), "ip")
        for text in (filters.ip, filters.ip6)
        if text is not None
    ]
    if filters.uuids is not None:
        found.append(c.uuid.in_(filters.uuids))
    if filters.locked is not None:
        found.append(c.locked_by.is_not(None) if filters.locked else c.locked_by.is_(None))
    found += [_tagged(c.tags, tag) for tag in filters.tags_all]
    if filters.tags_any:
        found.append(sa.or_(*(_tagged(c.tags, tag) for tag in filters.tags_any)))
    if filters.not_tags_all:
        found.append(sa.not_(sa.and_(*(_tagged(c.tags, tag) for tag in filters.not_tags_all))))
    found += [sa.not_(_tagged(c.tags, tag)) for tag in filters.not_tags_any]
    return found


def _in_json(pattern: str) -> str:
    """Addresses are kept as JSON; what users send is the beginning of one, or a regular expression for it."""
    text = pattern.removeprefix("^")
    end = '"' if text.endswith("$") else ""
    text = text.removesuffix("$")
    return f'"address":"{f"(?:{text})" if "|" in text else text}{end}'


def _tagged(column: Any, tag: str) -> sa.ColumnElement[bool]:
    import msgspec

    return sa.cast(column, sa.Text).contains(msgspec.json.encode(tag).decode(), autoescape=True)


def _with_status(table: sa.Table, wanted: list[str]) -> sa.ColumnElement[bool]:
    choices: list[sa.ColumnElement[bool]] = []
    for status in wanted:
        for vm_state, tasks, excluded in states.states_of(status):
            same = table.c.vm_state == vm_state
            if tasks is not None:
                choices.append(sa.and_(same, table.c.task_state.in_(sorted(tasks))))
            elif excluded:
                free = sa.or_(table.c.task_state.is_(None), table.c.task_state.not_in(sorted(excluded)))
                choices.append(sa.and_(same, free))
            else:
                choices.append(same)
    return sa.or_(*choices) if choices else sa.false()


_LITERAL = re.compile(r"^\^?[\w .:@/\"{}=,-]*\$?$")


def _matches(column: Any, pattern: str, name: str) -> sa.ColumnElement[bool]:
    """Match a regular expression; the plain ones that clients send become LIKE, which an index or a scan does fast."""
    if len(pattern) > 255:
        raise Invalid(f"Invalid input for query parameter {name}: a pattern has at most 255 characters.")
    plain = pattern.replace("\\.", "\0").replace("\\-", "-")
    if _LITERAL.match(plain.replace("\0", "-")) and "." not in plain:
        text = plain.replace("\0", ".")
        start, end = text.startswith("^"), text.endswith("$")
        text = text.removeprefix("^").removesuffix("$")
        if start and end:
            return sa.cast(column == text, sa.Boolean)
        if start:
            return sa.cast(column.startswith(text, autoescape=True), sa.Boolean)
        if end:
            return sa.cast(column.endswith(text, autoescape=True), sa.Boolean)
        return sa.cast(column.contains(text, autoescape=True), sa.Boolean)
    _check_pattern(pattern, name)
    return sa.cast(column.regexp_match(pattern), sa.Boolean)


def _check_pattern(pattern: str, name: str) -> None:
    """Refuse invalid regular expressions and nested repetitions, which can take exponential time."""
    try:
        expressions.expression(pattern)
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except ValueError as error:
        raise Invalid(f"Invalid input for query parameter {name}: {error}.") from None

    def nested(items: Any, inside: bool) -> bool:
        for kind, argument in items:
            repeats = str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and argument[1] > 1
            if repeats and inside:
                return True
            parts = argument if isinstance(argument, tuple | list) else ()
            for part in parts:
                subs = part if isinstance(part, list) else [part]
                for sub in subs:
                    if isinstance(sub, re._parser.SubPattern) and nested(sub, inside or repeats):  # type: ignore[attr-defined]
                        return True
        return False

    if nested(parsed, False):
        raise Invalid(f"Invalid input for query parameter {name}: a repetition within a repetition is not allowed.")

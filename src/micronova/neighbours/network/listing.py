"""Lists: filters on any attribute, sorting, pages, chosen fields; from the query string to one SELECT."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from micronova.http.paging import next_link
from micronova.neighbours.network.tables import tags
from micronova.neighbours.network.wire import truth
from micronova.objects.clock import micros
from micronova.objects.errors import Invalid

Clause = sa.ColumnElement[bool]
Filter = Callable[[Sequence[str]], Clause]

_RESERVED = frozenset({"fields", "sort_key", "sort_dir", "limit", "marker", "page_reverse"})
_TAG_FILTERS = frozenset({"tags", "tags-any", "not-tags", "not-tags-any"})
_INTEGER = 2**31
_STANDARD = ("id", "project_id", "description", "created_at", "updated_at")


@dataclass(frozen=True)
class Attributes:
    """What a kind of thing can be filtered and sorted by."""

    table: sa.Table
    columns: Mapping[str, sa.Column[Any]]  # by name on the wire
    special: Mapping[str, Filter] = field(default_factory=dict)

    @classmethod
    def standard(
        cls,
        table: sa.Table,
        *names: str,
        renamed: Mapping[str, sa.Column[Any]] | None = None,
        special: Mapping[str, Filter] | None = None,
    ) -> "Attributes":
        """What (nearly) everything has, columns by their own names, and those that the wire names otherwise."""
        columns = {name: table.c[name] for name in (*_STANDARD, *names)}
        return cls(table, {**columns, "revision_number": table.c.revision, **(renamed or {})}, special or {})

    def clause(self, name: str, values: Sequence[str]) -> Clause:
        """Return the condition that one filter means."""
        if name in self.special:
            return self.special[name](values)
        if name in _TAG_FILTERS:
            return _tagged(self.table.c.id, name, values)
        if name == "changed_since":
            return self.table.c.updated_at >= _moment(values[-1])
        if name not in self.columns:
            raise Invalid(f"['{name[:64]}'] is invalid attribute for filtering")
        return matches(self.columns[name], name, values)


def flag(clause: Clause) -> Filter:
    """A filter that is true or false: the rows of which the clause holds, or the others."""
    return lambda values: clause if any(truth(value) for value in values) else sa.not_(clause)


def only_empty(values: Sequence[str]) -> Clause:
    """A filter on what nothing has here."""
    return sa.true() if "" in values else sa.false()


def matches(column: sa.Column[Any], name: str, values: Sequence[str]) -> Clause:
    """The column has one of the values, which came as text."""
    if isinstance(column.type, sa.Boolean):
        return column.in_([_boolean(name, value) for value in values])
    if isinstance(column.type, sa.Integer):
        numbers = [_number(name, value) for value in values]
        return column.in_([number for number in numbers if -_INTEGER <= number < _INTEGER])
    if column.nullable and "" in values:
        return sa.or_(column.in_(values), column.is_(None))
    return column.in_(values)


@dataclass
class Listing:
    """A query string, understood."""

    attributes: Attributes
    filters: dict[str, list[str]]
    fields: list[str]
    sorts: list[tuple[str, bool]]  # name, descending
    limit: int | None
    marker: str | None
    reverse: bool
    query: Mapping[str, list[str]]

    @classmethod
    def parse(cls, query: Mapping[str, list[str]], attributes: Attributes) -> "Listing":
        """Read a query string; raise Invalid for what it must not contain."""
        if any("\0" in value for values in query.values() for value in values):
            raise Invalid("The query string must not contain NUL characters.")
        filters = {name: values for name, values in query.items() if name not in _RESERVED}
        if "tenant_id" in filters:
            filters["project_id"] = filters.pop("tenant_id") + filters.get("project_id", [])
        keys, directions = query.get("sort_key", []), query.get("sort_dir", [])
        if len(keys) != len(directions) and directions:
            raise Invalid("The number of sort_keys and sort_dirs must be the same.")
        sorts = []
        for index, key in enumerate(keys):
            direction = directions[index].lower() if directions else "asc"
            if direction not in ("asc", "desc"):
                raise Invalid(f"Invalid input for sort_dir: '{direction[:16]}' is not 'asc' or 'desc'.")
            key = "project_id" if key == "tenant_id" else key
            if key not in attributes.columns:
                raise Invalid(f"['{key[:64]}'] is invalid attribute for sort keys")
            sorts.append((key, direction == "desc"))
        limit = _limit(query["limit"][-1]) if "limit" in query else None
        marker = query["marker"][-1] if "marker" in query and limit else None
        reverse = _boolean("page_reverse", query["page_reverse"][-1]) if "page_reverse" in query else False
        fields = [name for name in query.get("fields", []) if name]
        return cls(attributes, filters, fields, sorts, limit, marker, reverse, query)

    def conditions(self) -> list[Clause]:
        """Return what the filters ask for."""
        return [self.attributes.clause(name, values) for name, values in self.filters.items()]

    def page(self, conn: sa.Connection, statement: sa.Select[Any]) -> list[Any] | None:
        """Run the statement for the page that was asked for; None when the marker does not exist."""
        table = self.attributes.table
        if self.sorts:
            keys = [(_sortable(self.attributes.columns[name]), down) for name, down in self.sorts]
            keys.append((table.c.id, False))
        else:
            keys = [(table.c.created_at, False), (table.c.id, False)] if "created_at" in table.c else []
            keys = keys or [(table.c.id, False)]
        keys = [(column, down != self.reverse) for column, down in keys]
        if self.marker:
            last = conn.execute(sa.select(*(column for column, _ in keys)).where(table.c.id == self.marker)).first()
            if last is None:
                return None
            statement = statement.where(_after(keys, last))
        statement = statement.order_by(*(column.desc() if down else column.asc() for column, down in keys))
        if self.limit:
            statement = statement.limit(self.limit)
        rows = list(conn.execute(statement))
        return rows[::-1] if self.reverse else rows

    def links(self, url: str, identifiers: Sequence[str]) -> list[dict[str, str]]:
        """Return the links to the pages around this one; none without a limit."""
        if not self.limit:
            return []
        plain = {name: values for name, values in self.query.items() if name != "page_reverse"}
        full = len(identifiers) >= self.limit
        found = []
        if full or self.reverse:
            marker = identifiers[-1] if identifiers else self.marker or ""
            found.append({"rel": "next", "href": next_link(url, plain, marker, self.limit)})
        if full or not self.reverse:
            marker = identifiers[0] if identifiers else self.marker or ""
            link = next_link(url, {**plain, "page_reverse": ["True"]}, marker, self.limit)
            found.append({"rel": "previous", "href": link})
        return found

    def choose(self, document: dict[str, Any]) -> dict[str, Any]:
        """Keep only the fields that were asked for."""
        if not self.fields:
            return document
        return {name: document[name] for name in self.fields if name in document}


def _after(keys: Sequence[tuple[Any, bool]], last: Sequence[Any]) -> Clause:
    """Rows that come after `last` in the order of the keys."""
    parts = []
    for index, (column, down) in enumerate(keys):
        beyond = column < last[index] if down else column > last[index]
        parts.append(sa.and_(*(keys[i][0] == last[i] for i in range(index)), beyond))
    return sa.or_(*parts)


def _sortable(column: sa.Column[Any]) -> Any:
    # NULL compares with nothing, so a page could not begin after it.
    if not column.nullable:
        return column
    return sa.func.coalesce(column, 0 if isinstance(column.type, sa.Integer) else "")


def _tagged(identifier: sa.Column[str], name: str, values: Sequence[str]) -> Clause:
    wanted = {tag for value in values for tag in value.split(",") if tag}
    having = sa.select(tags.c.resource_id).where(tags.c.tag.in_(wanted))
    if not name.endswith("-any"):
        having = having.group_by(tags.c.resource_id).having(sa.func.count() == len(wanted))
    return identifier.not_in(having) if name.startswith("not-") else identifier.in_(having)


def _limit(text: str) -> int | None:
    try:
        limit = int(text)
        if limit < 0:
            raise ValueError
    except ValueError:
        raise Invalid(f"Limit must be an integer 0 or greater and not '{text[:32]}'.") from None
    return min(limit, _INTEGER - 1) or None


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise Invalid(f"Invalid input for {name}: '{text[:32]}' cannot be converted to boolean.")
    return text.lower() in ("true", "1")


def _number(name: str, text: str) -> int:
    try:
        return int(text[:32])
    except ValueError:
        raise Invalid(f"Invalid input for {name}: '{text[:32]}' is not an integer.") from None


def _moment(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"Invalid input for changed_since: '{text[:64]}' is not an ISO 8601 time.") from None
    return micros((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())

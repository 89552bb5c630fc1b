"""Lists: filters, sorting, paging and field selection, from the query string to one SELECT."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.embedded.common.query import Query, QueryRules, last
from micronova.embedded.network.tables import tags
from micronova.http.paging import next_link
from micronova.objects.errors import Invalid

Clause = sa.ColumnElement[bool]
Filter = Callable[[Sequence[str]], Clause]

_RESERVED = frozenset({"fields", "sort_key", "sort_dir", "limit", "marker", "page_reverse"})
_TAG_FILTERS = ("tags", "tags-any", "not-tags", "not-tags-any")
MAX_LIMIT = 2**31 - 1
_STANDARD = ("id", "project_id", "description", "created_at", "updated_at")

QUERY = QueryRules(
    true=frozenset({"true", "1"}),
    false=frozenset({"false", "0"}),
    not_boolean="Invalid input for {name}: '{value}' cannot be converted to boolean.",
    not_integer="Invalid input for {name}: '{value}' is not an integer.",
    not_time="Invalid input for {name}: '{value}' is not an ISO 8601 time.",
    not_limit="Limit must be an integer 0 or greater and not '{value}'.",
)


@dataclass(frozen=True)
class Attributes:
    """The attributes by which a kind of resource can be filtered and sorted."""

    table: sa.Table
    columns: Mapping[str, sa.Column[Any]]  # by name in the API
    special: Mapping[str, Filter] = field(default_factory=dict)  # filters that are not columns

    @classmethod
    def standard(
        cls,
        table: sa.Table,
        *names: str,
        renamed: Mapping[str, sa.Column[Any]] | None = None,
        special: Mapping[str, Filter] | None = None,
        taggable: bool = True,
    ) -> "Attributes":
        """Return the attributes of nearly all resources, columns by name, and columns with another name in the API.

        They can be filtered by the time of their last change, and by tags if they can have any.
        """
        columns = {name: table.c[name] for name in (*_STANDARD, *names)}
        filters: dict[str, Filter] = {"changed_since": partial(_changed_since, table.c.updated_at)}
        if taggable:
            filters |= {name: partial(_tagged, table.c.id, name) for name in _TAG_FILTERS}
        return cls(
            table,
            {**columns, "revision_number": table.c.revision, **(renamed or {})},
            {**filters, **(special or {})},
        )

    @property
    def taggable(self) -> bool:
        """Whether the resources can have tags."""
        return "tags" in self.special

    def clause(self, name: str, values: Sequence[str]) -> Clause:
        """Return the condition of one filter."""
        if name in self.special:
            return self.special[name](values)
        if name not in self.columns:
            raise unknown_filter(name)
        return QUERY.matches(self.columns[name], name, values, empty_is_null=True)


def flags(**clauses: Clause) -> dict[str, Filter]:
    """Return boolean filters: true selects the rows for which the clause holds, false the others."""
    return {name: partial(flag, name, clause) for name, clause in clauses.items()}


def flag(name: str, clause: Clause, values: Sequence[str]) -> Clause:
    """Return the condition of a boolean filter."""
    return clause if any(QUERY.boolean(name, value) for value in values) else sa.not_(clause)


def only_empty(values: Sequence[str]) -> Clause:
    """Return the condition of a filter on an attribute that is always empty here."""
    return sa.true() if "" in values else sa.false()


def unknown_filter(name: str) -> Invalid:
    """Return the error for a filter that a collection does not have."""
    return Invalid(f"['{name[:64]}'] is invalid attribute for filtering")


def filters_of(query: Query) -> dict[str, list[str]]:
    """Return the filters of a query string; the other parameters are about pages, sorting and fields."""
    return {name: list(values) for name, values in query.items() if name not in _RESERVED}


@dataclass
class Listing:
    """A parsed query string."""

    attributes: Attributes
    filters: dict[str, list[str]]
    fields: list[str]
    sorts: list[tuple[str, bool]]  # name, descending
    limit: int | None
    marker: str | None
    reverse: bool
    query: Query
    limit_asked: bool

    @classmethod
    def parse(cls, query: Query, attributes: Attributes, most: int | None = None) -> "Listing":
        """Parse a query string; raise Invalid if it is malformed. A page has at most `most` resources."""
        filters = filters_of(query)
        if "tenant_id" in filters:
            filters["project_id"] = filters.pop("tenant_id") + filters.get("project_id", [])
        keys, directions = query.get("sort_key", []), query.get("sort_dir", [])
        if len(keys) != len(directions) and directions:
            raise Invalid("The number of sort_keys and sort_dirs must be the same.")
        sorts: dict[str, bool] = {}  # a column that comes again changes nothing
        for index, key in enumerate(keys):
            direction = directions[index].lower() if directions else "asc"
            if direction not in ("asc", "desc"):
                raise Invalid(f"Invalid input for sort_dir: '{direction[:16]}' is not 'asc' or 'desc'.")
            key = "project_id" if key == "tenant_id" else key
            if key not in attributes.columns:
                raise Invalid(f"['{key[:64]}'] is invalid attribute for sort keys")
            sorts.setdefault(key, direction == "desc")
        asked = QUERY.limit(query, most=MAX_LIMIT) or None
        limit = most if asked is None else min(asked, most or asked)
        marker = last(query, "marker") if limit else None
        reverse = "page_reverse" in query and QUERY.boolean("page_reverse", query["page_reverse"][-1])
        fields = [name for name in query.get("fields", []) if name]
        return cls(attributes, filters, fields, list(sorts.items()), limit, marker, reverse, query, asked is not None)

    def conditions(self) -> list[Clause]:
        """Return the conditions of the filters."""
        return [self.attributes.clause(name, values) for name, values in self.filters.items()]

    def page(self, conn: sa.Connection, statement: sa.Select[Any]) -> list[Any] | None:
        """Return the rows of the requested page; None if the marker does not exist."""
        table = self.attributes.table
        keys = [SortKey(self.attributes.columns[name], descending) for name, descending in self.sorts]
        if not keys and "created_at" in table.c:
            keys = [SortKey(table.c.created_at)]
        keys.append(SortKey(table.c.id))
        keys = [SortKey(key.column, key.descending != self.reverse) for key in keys]
        after = None
        if self.marker:
            after = keyset.position(conn, keys, table.c.id == self.marker)
            if after is None:
                return None
        rows = list(conn.execute(keyset.page(statement, keys, after, self.limit)))
        return rows[::-1] if self.reverse else rows

    def links(self, url: str, identifiers: Sequence[str]) -> list[dict[str, str]]:
        """Return the links to the next and the previous page; to the next alone if no limit was asked for."""
        if not self.limit:
            return []
        plain = {name: values for name, values in self.query.items() if name != "page_reverse"}
        full = len(identifiers) >= self.limit
        if not self.limit_asked:
            return [{"rel": "next", "href": next_link(url, plain, identifiers[-1], self.limit)}] if full else []
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
        """Return only the requested fields of a document."""
        if not self.fields:
            return document
        return {name: document[name] for name in self.fields if name in document}


def _changed_since(updated_at: sa.Column[int], values: Sequence[str]) -> Clause:
    return updated_at >= QUERY.time("changed_since", values[-1])


def _tagged(identifier: sa.Column[str], name: str, values: Sequence[str]) -> Clause:
    wanted = {tag for value in values for tag in value.split(",") if tag}
    having = sa.select(tags.c.resource_id).where(tags.c.tag.in_(wanted))
    if not name.endswith("-any"):
        having = having.group_by(tags.c.resource_id).having(sa.func.count() == len(wanted))
    return identifier.not_in(having) if name.startswith("not-") else identifier.in_(having)

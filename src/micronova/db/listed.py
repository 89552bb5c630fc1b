"""Conditions over lists and mappings of any length.

`column IN (…)` has a parameter per value: another number of values is another statement to prepare, and drivers limit
their number (asyncpg: 32,767). `one_of` has one parameter for all values.

PostgreSQL does not see the list when it plans, because it is the result of a subquery. It assumes ten values, and uses
the plan again. It would make a plan for each execution otherwise: one for a short list always seems cheaper.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

DIALECTS = ("sqlite", "postgresql")


class Texts(sa.TypeDecorator[list[str]]):
    """A list of strings as one parameter: an array on PostgreSQL, JSON on SQLite."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> Any:
        """Return the type of the parameter on this database."""
        own = postgresql.ARRAY(sa.Text()) if dialect.name == "postgresql" else sa.JSON()
        return dialect.type_descriptor(own)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """Return the values as a list."""
        return list(value or ())


class OneOf(FunctionElement[bool]):
    """The condition that a column has one of the values of a list parameter; `one_of` makes it."""

    type = sa.Boolean()
    inherit_cache = True

    def self_group(self, against: Any = None) -> Any:
        """Return the condition as it is: SQLAlchemy would compare a function with 1 where it wants a boolean."""
        return self


def one_of(column: sa.ColumnElement[str], parameter: str) -> sa.ColumnElement[bool]:
    """Return the condition that a column of strings has one of the values of the list parameter with this name."""
    return OneOf(column, sa.bindparam(parameter, type_=Texts()))


def pairs(parameter: str, dialect: str) -> sa.TableValuedAlias:
    """Return the pairs of a mapping as a table with the columns `key` and `value`; the parameter is `as_pairs(…)`."""
    value = sa.bindparam(parameter, type_=sa.Text())
    if dialect == "sqlite":
        return sa.func.json_each(value).table_valued("key", "value")
    return sa.func.jsonb_each_text(sa.cast(value, postgresql.JSONB)).table_valued("key", "value")


def triples(parameter: str, dialect: str) -> sa.Select[str, str, int]:
    """Return triples of two strings and a number as a query; the parameter is `as_triples(…)`."""
    value = sa.bindparam(parameter, type_=sa.Text())
    if dialect == "sqlite":
        each: Any = sa.func.json_each(value).table_valued("value").c.value
        parts = [sa.func.json_extract(each, f"$[{number}]") for number in range(3)]
    else:
        each = sa.func.jsonb_array_elements(sa.cast(value, postgresql.JSONB)).column_valued()
        parts = [each.op("->>")(sa.literal_column(str(number))) for number in range(3)]
    return sa.select(parts[0], parts[1], sa.cast(parts[2], sa.Integer))


def as_triples(values: Iterable[tuple[str, str, int]]) -> str:
    """Return triples as the parameter of `triples`."""
    return json.dumps(list(values))


def as_pairs(mapping: Mapping[str, str | int]) -> str:
    """Return a mapping as the parameter of `pairs`."""
    return json.dumps(mapping)


@compiles(OneOf, "postgresql")
def _array(element: OneOf, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, values = (compiler.process(each, **kwargs) for each in element.clauses)
    return f"{column} = ANY ((SELECT {values})::text[])"


@compiles(OneOf, "sqlite")
def _json(element: OneOf, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, values = (compiler.process(each, **kwargs) for each in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({values}))"  # noqa: S608 - SQLAlchemy wrote both

"""The values of query strings: booleans, integers, times, limits, and the filters that they make.

OpenStack's APIs accept different words for true and false, and word their errors differently. A service declares
both in its `QueryRules`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import sqlalchemy as sa

from micronova.http.paging import parse_iso
from micronova.objects.errors import Invalid

Query = Mapping[str, Sequence[str]]  # values by parameter, as `Request.raw_query` has them

_SHOWN = 64  # characters of a wrong value that an error repeats
_INTEGER = re.compile(r"-?[0-9]+")  # not all that int() reads, such as digits of other scripts
_DIGITS = 32  # more make no number that a column could hold


@dataclass(frozen=True, kw_only=True)
class QueryRules:
    """How one API reads the values of a query string.

    The messages are for values that it refuses; they may contain {name} and {value}.
    """

    true: frozenset[str]  # in lower case; case does not matter
    false: frozenset[str]
    not_boolean: str
    not_integer: str
    not_time: str
    not_limit: str

    def boolean(self, name: str, text: str) -> bool:
        """Return a boolean; raise Invalid."""
        word = text.lower()
        if word not in self.true and word not in self.false:
            _refuse(self.not_boolean, name, text)
        return word in self.true

    def integer(self, name: str, text: str, least: int | None = None, most: int | None = None) -> int:
        """Return an integer in these bounds; raise Invalid."""
        number = _integer(text)
        if number is None or (least is not None and number < least) or (most is not None and number > most):
            _refuse(self.not_integer, name, text)
        return number

    def time(self, name: str, text: str) -> int:
        """Return an ISO 8601 time in microseconds; raise Invalid."""
        try:
            return parse_iso(text)
        except ValueError:
            _refuse(self.not_time, name, text)

    def limit(self, query: Query, *, most: int, least: int = 0, refuse_above: int | None = None) -> int | None:
        """Return the length of a page: what `limit` says, and at most `most`; None without it; raise Invalid."""
        if "limit" not in query:
            return None
        text = query["limit"][-1]
        number = _integer(text)
        if number is None or number < least or (refuse_above is not None and number > refuse_above):
            _refuse(self.not_limit, "limit", text)
        return min(number, most)

    def matches(
        self, column: sa.Column[Any], name: str, values: Sequence[str], *, empty_is_null: bool = False
    ) -> sa.ColumnElement[bool]:
        """Return the condition that a column has one of the values; raise Invalid for a value of another type."""
        if isinstance(column.type, sa.Boolean):
            return column.in_([self.boolean(name, value) for value in values])
        if isinstance(column.type, sa.Integer):
            most = 2**63 if isinstance(column.type, sa.BigInteger) else 2**31
            numbers = [self.integer(name, value) for value in values]
            # A number that the column's type cannot hold equals none; PostgreSQL would refuse it.
            return column.in_([number for number in numbers if -most <= number < most])
        if empty_is_null and column.nullable and "" in values:
            return sa.or_(column.in_(values), column.is_(None))
        return column.in_(values)


def last(query: Query, name: str) -> str | None:
    """Return the last value of a parameter; None without it."""
    return query[name][-1] if name in query else None


def _integer(text: str) -> int | None:
    return int(text[:_DIGITS]) if _INTEGER.fullmatch(text) else None


def _refuse(message: str, name: str, text: str) -> NoReturn:
    raise Invalid(message.format(name=name, value=text[:_SHOWN])) from None

"""JsonFilter: a query in JSON that the hint `query` has, such as `[">=", "$free_ram_mb", 4096]`.

A query is a list of an operator and its operands. Comparisons take numbers, texts and variables, which are attributes
of hosts; `and`, `or` and `not` take queries.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import msgspec
import numpy as np

from micronova.objects.errors import Invalid
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.attributes import FACTS, NUMBERS, TEXTS, find_fact
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": operator.eq,  # to one of the others instead of all
}
_COMBINE: Final = ("and", "or", "not")
_PARTS: Final = ("cpu_info", "stats")  # facts that have parts
_DEEPEST: Final = 16
_MOST_PARTS: Final = 64
"""Operators and operands of a query. Each operand is compared with each host, in the event loop."""

_Operand = Any  # a number, a text, or an array with one of these (or None) per host


class JsonFilter(HostFilter):
    """Passes hosts for which the query of the hint `query` is true."""

    name = "JsonFilter"
    predicate = "fulfils the query of the scheduler hint"
    lack = "do not fulfil the query"
    scope = Scope.HOST
    hints = frozenset({"query"})

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        query_of(hints)

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        query = query_of(spec.hints)
        return None if query is None else _Evaluation(hosts).mask(query)


def query_of(hints: Mapping[str, Sequence[str]]) -> list[Any] | None:
    """Return the query, None without one; raise Invalid if it is malformed."""
    given = hints.get("query")
    if not given:
        return None
    try:
        if len(given) > 1:
            raise Invalid("it must be one text in JSON")
        try:
            query = msgspec.json.decode(given[0])
        except (msgspec.DecodeError, RecursionError) as error:
            raise Invalid(f"it is no JSON: {error}") from error
        _check(query, 1)
        if _parts(query) > _MOST_PARTS:
            raise Invalid(f"it has more than {_MOST_PARTS} operators and operands")
    except Invalid as error:
        raise Invalid(
            f"The scheduler hint query is wrong: {error.message}. "
            'Right is, for example, ["and", [">=", "$free_ram_mb", 4096], ["=", "$hypervisor_type", "QEMU"]].'
        ) from error
    return query  # type: ignore[no-any-return]  # `_check` has seen that it is a list


def _check(query: Any, depth: int) -> None:
    if not isinstance(query, list) or not query:
        raise Invalid("a query is a list of an operator and its operands")
    if depth > _DEEPEST:
        raise Invalid(f"it has more than {_DEEPEST} queries within each other")
    name, *operands = query
    if not isinstance(name, str) or name not in (*_COMPARE, *_COMBINE):
        raise Invalid(f"{_shown(name)} is no operator; there are {', '.join((*_COMPARE, *_COMBINE))}")
    if name in _COMBINE:
        if not operands:
            raise Invalid(f"{name} needs a query")
        for each in operands:
            _check(each, depth + 1)
        return
    if len(operands) < 2:
        raise Invalid(f"{name} compares two operands or more")
    kinds = {_kind(each) for each in operands} - {""}
    if len(kinds) > 1:
        raise Invalid(f"{name} compares numbers with numbers, or texts with texts")


def _kind(operand: Any) -> str:
    """Return whether an operand is a number or a text, "" for a part of a fact: hosts report what they like."""
    if isinstance(operand, int | float) and not isinstance(operand, bool):
        return "number"
    if not isinstance(operand, str) or not operand:
        raise Invalid(f"{_shown(operand)} is no operand: these are numbers, texts, and variables such as $free_ram_mb")
    if not operand.startswith("$"):
        return "text"
    name, *parts = operand[1:].split(".")
    if name in _PARTS and parts:
        return ""
    if not parts and (name in NUMBERS or name == "hypervisor_version"):
        return "number"
    if not parts and (name in TEXTS or name == "hypervisor_type"):
        return "text"
    known = sorted({*NUMBERS, *TEXTS, *FACTS} - {*_PARTS})
    raise Invalid(f"{operand} is no variable; there are ${', $'.join(known)}, $cpu_info.NAME and $stats.NAME")


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:64]


def _parts(query: Any) -> int:
    return 1 + sum(map(_parts, query[1:])) if isinstance(query, list) else 1


class _Evaluation:
    """The evaluation of a query: each variable is looked up once."""

    def __init__(self, hosts: HostView) -> None:
        self._hosts = hosts
        self._known: dict[str, _Operand] = {}

    def mask(self, query: list[Any]) -> Bools:
        """Return for which hosts a query is true."""
        name, *operands = query
        masks: Iterable[Bools]
        if name in _COMPARE:
            first, *others = operands
            masks = (
                _compared(len(self._hosts), _COMPARE[name], self._operand(first), self._operand(other))
                for other in others
            )
            return reduce(np.logical_or if name == "in" else np.logical_and, masks)
        masks = map(self.mask, operands)
        if name == "or":
            return reduce(np.logical_or, masks)
        together = reduce(np.logical_and, masks)
        return ~together if name == "not" else together

    def _operand(self, operand: Any) -> _Operand:
        if not isinstance(operand, str) or not operand.startswith("$"):
            return operand
        if operand not in self._known:
            self._known[operand] = self._variable(operand[1:])
        return self._known[operand]

    def _variable(self, name: str) -> _Operand:
        hosts = self._hosts
        if name in NUMBERS:
            return NUMBERS[name](hosts)
        if name in TEXTS:
            return np.array(list(TEXTS[name](hosts)), object)
        path = name.replace(".", ":")
        return hosts.objects_by_facts(("JsonFilter", path), lambda facts: find_fact(facts, path))


def _compared(size: int, compare: Callable[[Any, Any], Any], first: _Operand, other: _Operand) -> Bools:
    if all(np.asarray(each).dtype.kind in "iuf" for each in (first, other)):
        return np.broadcast_to(np.asarray(compare(first, other), np.bool_), size)
    pairs = zip(np.broadcast_to(first, size), np.broadcast_to(other, size), strict=True)
    return np.fromiter((_is_true(compare, one, another) for one, another in pairs), np.bool_, size)


def _is_true(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> bool:
    """Return whether a comparison is true; what a host does not report, or is of another kind, is not."""
    if one is None or other is None:
        return False
    try:
        return bool(compare(one, other))
    except TypeError:
        return False

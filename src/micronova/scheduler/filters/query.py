"""JsonFilter: a query in JSON that the hint `query` has, such as `[">=", "$free_ram_mb", 4096]`.

A query is a list of an operator and its operands. Comparisons take numbers, texts and variables, which are attributes
of hosts; `and`, `or` and `not` take queries.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from micronova.objects.errors import Invalid
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.attributes import FACTS, NUMBERS, TEXTS, find_fact
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools, Column, Facts
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

_LARGEST: Final = 2**53  # numbers of hosts are floats
_Operand = Any  # a number, a text, a `_Fact`, or an array with a number or a text per host


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


class _Fact(NamedTuple):
    """A variable that hosts share: it is looked up and compared once per kind of host."""

    path: str


class _Evaluation:
    """The evaluation of a query: each variable is looked up once, and no comparison runs Python for each host."""

    def __init__(self, hosts: HostView) -> None:
        self._hosts = hosts
        self._known: dict[object, Any] = {}

    def mask(self, query: list[Any]) -> Bools:
        """Return for which hosts a query is true."""
        name, *operands = query
        masks: Iterable[Bools]
        if name in _COMPARE:
            first, *others = operands
            masks = (self._compared(name, self._operand(first), self._operand(other)) for other in others)
            return reduce(np.logical_or if name == "in" else np.logical_and, masks)
        masks = map(self.mask, operands)
        if name == "or":
            return reduce(np.logical_or, masks)
        together = reduce(np.logical_and, masks)
        return ~together if name == "not" else together

    def _operand(self, operand: Any) -> _Operand:
        if not isinstance(operand, str):
            return float(operand) if abs(operand) <= _LARGEST else math.copysign(math.inf, operand)
        if not operand.startswith("$"):
            return operand
        name = operand[1:]
        if name in NUMBERS:
            return self._once(name, lambda: NUMBERS[name](self._hosts))
        if name in TEXTS:
            return self._once(name, lambda: np.array(list(TEXTS[name](self._hosts)), object))
        return _Fact(name.replace(".", ":"))

    def _compared(self, name: str, *operands: _Operand) -> Bools:
        """Compare two operands as numbers or as texts; what a host does not report as such does not compare."""
        found = np.zeros(len(self._hosts), np.bool_)
        for kind in (str, float):
            if not all(isinstance(each, _Fact) or _is(kind, each) for each in operands):
                continue
            values = []
            reported: list[Bools] = []
            for each in operands:
                if isinstance(each, _Fact):
                    each, known = self._once((kind, each), partial(self._reported, kind, each))
                    reported.append(known)
                values.append(each)
            found |= reduce(np.logical_and, reported, np.asarray(_COMPARE[name](*values), np.bool_))
        return found

    def _reported(self, kind: type, fact: _Fact) -> tuple[Column, Bools]:
        """Return a fact for each host, as a text or a number, and which hosts report it as such."""

        def find(facts: Facts) -> object:
            value = find_fact(facts, fact.path)
            return value if isinstance(value, str if kind is str else int | float) else None

        values = self._hosts.objects_by_facts(("JsonFilter", kind, fact), find)
        known: Bools = np.not_equal(values, np.array(None, object)).astype(np.bool_)
        return np.where(known, values, kind()).astype(object if kind is str else np.float64), known

    def _once(self, key: object, find: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]


def _is(kind: type, operand: _Operand) -> bool:
    """Return whether an operand is a text, or texts, if that is the kind; else whether it is a number, or numbers."""
    is_text = operand.dtype == object if isinstance(operand, np.ndarray) else isinstance(operand, str)
    return bool(is_text) is (kind is str)

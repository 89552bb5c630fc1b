"""Regular expressions that users write, for SQLite: a match takes a time that grows with the length of the text only.

Python's own engine tries all ways in which repetitions can share a text. Five of them take half a minute for a name of
120 characters, and nothing else runs in the process meanwhile. So an expression becomes an automaton without
backtracking. Bit i of a number stands for position i of the expression, as in `http/access_rules.py`.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

MOST_POSITIONS: Final = 1000
"""Characters of an expression, those of what is repeated `{n}` times n times."""
MOST_KEPT: Final = 10_000
"""Transitions that are kept of an expression."""
_BEGIN, _END = "", "end"  # stand around the text, for ^ and $
_CATEGORIES: Final[dict[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda each: not each.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda each: not each.isspace(),
    "CATEGORY_WORD": lambda each: each.isalnum() or each == "_",
    "CATEGORY_NOT_WORD": lambda each: not (each.isalnum() or each == "_"),
}
_ANCHORS: Final = {
    "AT_BEGINNING": _BEGIN,
    "AT_BEGINNING_STRING": _BEGIN,
    "AT_END": _END,
    "AT_END_STRING": _END,
}

Test = Callable[[str], bool]


class _Part(NamedTuple):
    """A part of an expression: whether it stands for nothing, too, and the positions where it begins and ends."""

    empty: bool
    first: int
    last: int


_NOTHING: Final = _Part(True, 0, 0)


class Expression:
    """An expression that is found anywhere in a text."""

    def __init__(self, pattern: str) -> None:
        """Raise ValueError if the pattern is malformed, too long, or needs backtracking."""
        self._tests: list[Test] = []
        self._following: list[int] = []  # by position
        try:
            parsed: Any = re._parser.parse(pattern)  # type: ignore[attr-defined]
            if parsed.state.flags & ~re.UNICODE:
                raise ValueError("flags are not supported")
            self._whole = self._sequence(parsed)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        self._accepted: dict[str, int] = {}  # by character
        self._steps: dict[tuple[int, str], int] = {}

    def found_in(self, text: str) -> bool:
        """Return whether a part of the text matches."""
        if self._whole.empty:
            return True
        state = 0  # the positions that what was read can end at
        for character in (_BEGIN, *text, _END):
            state = self._step(state, character)
            if state & self._whole.last:
                return True
        return False

    def _step(self, state: int, character: str) -> int:
        key = state, character
        known = self._steps.get(key)
        if known is not None:
            return known
        reached, left = self._whole.first, state
        while left:
            lowest = left & -left
            reached |= self._following[lowest.bit_length() - 1]
            left ^= lowest
        if len(self._steps) >= MOST_KEPT:
            self._steps.clear()
            self._accepted.clear()
        accepted = self._accepted.get(character)
        if accepted is None:  # several threads read; each may do this
            accepted = sum(1 << number for number, test in enumerate(self._tests) if test(character))
            self._accepted[character] = accepted
        found = self._steps[key] = reached & accepted
        return found

    # --- making it ---

    def _position(self, test: Test) -> _Part:
        if len(self._tests) >= MOST_POSITIONS:
            raise ValueError("it is too long")
        bit = 1 << len(self._tests)
        self._tests.append(test)
        self._following.append(0)
        return _Part(False, bit, bit)

    def _sequence(self, items: Iterable[tuple[Any, Any]]) -> _Part:
        whole = _NOTHING
        for kind, argument in items:
            whole = self._joined(whole, self._item(str(kind), argument))
        return whole

    def _joined(self, left: _Part, right: _Part) -> _Part:
        self._follow(left.last, right.first)
        return _Part(
            left.empty and right.empty,
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
        )

    def _follow(self, last: int, first: int) -> None:
        while last:
            lowest = last & -last
            self._following[lowest.bit_length() - 1] |= first
            last ^= lowest

    def _item(self, kind: str, argument: Any) -> _Part:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._position(_test(kind, argument))
            case "BRANCH":
                parts = [self._sequence(each) for each in argument[1]]
                firsts, lasts = 0, 0
                for part in parts:
                    firsts, lasts = firsts | part.first, lasts | part.last
                return _Part(any(part.empty for part in parts), firsts, lasts)
            case "SUBPATTERN" if not (argument[1] or argument[2]):
                return self._sequence(argument[3])
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeated(*argument)
            case "AT" if str(argument) in _ANCHORS:
                place = _ANCHORS[str(argument)]
                return self._position(lambda each: each == place)
        raise ValueError("back-references, assertions other than ^ and $, and flags are not supported")

    def _repeated(self, least: int, most: int, items: Iterable[tuple[Any, Any]]) -> _Part:
        whole = _NOTHING
        unlimited = most is re._parser.MAXREPEAT  # type: ignore[attr-defined]
        for number in range(max(least, 1) if unlimited else most):
            part = self._sequence(items)
            if not (part.first or part.last):
                return _NOTHING
            if unlimited and number + 1 >= least:
                self._follow(part.last, part.first)
            whole = self._joined(whole, part if number < least else part._replace(empty=True))
        return whole


def _test(kind: str, argument: Any) -> Test:
    """Return what tells whether a character fits; what stands around a text fits none of these."""
    if kind == "LITERAL":
        wanted = chr(argument)
        return lambda each: each == wanted
    if kind == "NOT_LITERAL":
        other = chr(argument)
        return lambda each: len(each) == 1 and each != other
    if kind == "ANY":
        return lambda each: len(each) == 1 and each != "\n"
    negated = str(argument[0][0]) == "NEGATE"
    tests = [_in_class(str(part), value) for part, value in argument[negated:]]
    return lambda each: len(each) == 1 and any(test(each) for test in tests) != negated


def _in_class(kind: str, value: Any) -> Test:
    if kind == "LITERAL":
        return lambda each: ord(each) == value
    if kind == "RANGE":
        return lambda each: value[0] <= ord(each) <= value[1]
    return _CATEGORIES[str(value)]


expression = lru_cache(maxsize=16)(Expression)


def regexp(pattern: str, value: str | None) -> bool | None:
    """SQLite's function of this name: whether a value matches; NULL matches nothing."""
    return None if value is None else expression(pattern).found_in(str(value))

"""Interning: small integers for values that many rows of the host table share, and answers to questions about them."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V")

_MOST_ANSWERS = 256


class Interner(Generic[V]):
    """Codes for values by key, with a count of the rows that use each; an unused code gets another value."""

    def __init__(self) -> None:
        self._code_of: dict[Hashable, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []
        self._entries: list[tuple[Hashable, V] | None] = []  # by code: the key and the value; None if it is unused
        self.version = 0  # increases when a code gets a value

    def find(self, key: Hashable) -> int:
        """Return the code of a key, -1 if no row uses it."""
        return self._code_of.get(key, -1)

    def is_used(self, code: int) -> bool:
        """Return whether a row uses a code."""
        return self._entries[code] is not None

    def value(self, code: int) -> V:
        """Return the value of a code that a row uses."""
        return self._entry(code)[1]

    def take(self, key: Hashable, value: V) -> int:
        """Return the code of a key for one more row."""
        code = self._code_of.get(key)
        if code is None:
            self.version += 1
            if self._free:
                code = self._free.pop()
                self._entries[code] = (key, value)
            else:
                code = len(self._entries)
                self._entries.append((key, value))
                self._users.append(0)
            self._code_of[key] = code
        self._users[code] += 1
        return code

    def release(self, code: int) -> bool:
        """Let one row no longer use a code; return whether no row uses it any more."""
        self._users[code] -= 1
        if self._users[code]:
            return False
        del self._code_of[self._entry(code)[0]]
        self._entries[code] = None
        self._free.append(code)
        return True

    def _entry(self, code: int) -> tuple[Hashable, V]:
        entry = self._entries[code]
        if entry is None:
            raise KeyError(code)
        return entry


class SharedValues(Interner[V]):
    """Values with answers to questions about them: a question is asked once per value, however many rows share it."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[Hashable, tuple[int, Any]] = {}

    def passing(self, key: Hashable, passes: Callable[[V], bool]) -> npt.NDArray[np.bool_]:
        """Return whether each value passes, by code. Answers are kept by key until there are other values."""
        found: npt.NDArray[np.bool_] | None = self._known(key)
        if found is None:
            found = np.array([entry is not None and passes(entry[1]) for entry in self._entries], np.bool_)
            self._keep(key, found)
        return found

    def numbers(self, key: Hashable, number: Callable[[V], float]) -> npt.NDArray[np.float64] | float:
        """Return the number of each value, by code, or one number if all values have the same."""
        found: npt.NDArray[np.float64] | float | None = self._known(key)
        if found is None:
            each = [None if entry is None else float(number(entry[1])) for entry in self._entries]
            different = {one for one in each if one is not None}
            found = np.array([one or 0.0 for one in each]) if len(different) > 1 else max(different, default=0.0)
            self._keep(key, found)
        return found

    def objects(self, key: Hashable, find: Callable[[V], object]) -> npt.NDArray[Any]:
        """Return an object for each value, by code."""
        found: npt.NDArray[Any] | None = self._known(key)
        if found is None:
            found = np.empty(len(self._entries), object)
            for code, entry in enumerate(self._entries):
                found[code] = None if entry is None else find(entry[1])
            self._keep(key, found)
        return found

    def _known(self, key: Hashable) -> Any:
        known = self._answers.get(key)
        return known[1] if known is not None and known[0] == self.version else None

    def _keep(self, key: Hashable, found: object) -> None:
        if len(self._answers) >= _MOST_ANSWERS:
            self._answers.clear()
        self._answers[key] = (self.version, found)

"""Interning: small integers for values that many rows of the host table share."""

from collections.abc import Hashable
from typing import Any


class Interner:
    """Codes for values by key, with a count of the rows that use each; an unused code gets another value."""

    def __init__(self) -> None:
        self._code_of: dict[Hashable, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []
        self.values: list[Any] = []  # code -> (key, value), or None
        self.version = 0  # increases when a code gets a value

    def find(self, key: Hashable) -> int:
        """Return the code of a key, -1 if no row uses it."""
        return self._code_of.get(key, -1)

    def take(self, key: Hashable, value: Any) -> int:
        """Return the code of a key for one more row."""
        code = self._code_of.get(key)
        if code is None:
            self.version += 1
            if self._free:
                code = self._free.pop()
                self.values[code] = (key, value)
            else:
                code = len(self.values)
                self.values.append((key, value))
                self._users.append(0)
            self._code_of[key] = code
        self._users[code] += 1
        return code

    def release(self, code: int) -> None:
        """Let one row no longer use a code."""
        self._users[code] -= 1
        if not self._users[code]:
            del self._code_of[self.values[code][0]]
            self.values[code] = None
            self._free.append(code)

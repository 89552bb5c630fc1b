"""A cache whose size is counted in the characters of its keys: hosts report texts of any length."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SizedCache(Generic[T]):
    """Remembers what a function makes of texts. The text that was not asked for longest is dropped first."""

    def __init__(self, make: Callable[[str], T], *, most: int, longest: int) -> None:
        self._make = make
        self._most = most
        self._longest = longest  # of one text; longer ones are not kept
        self._known: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()  # transactions run in threads
        self.size = 0  # characters of all texts that are kept

    def __call__(self, text: str) -> T:
        """Return what the function makes of a text."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text]
        made = self._make(text)
        if len(text) <= self._longest:
            with self._lock:
                self._keep(text, made)
        return made

    def _keep(self, text: str, made: T) -> None:
        if text not in self._known:
            self.size += len(text)
        self._known[text] = made
        while self.size > self._most:
            dropped, _ = self._known.popitem(last=False)
            self.size -= len(dropped)

"""Ids of new objects, and the random source that they are made of."""

import os
import random
import re
import threading
import uuid
import weakref
from typing import Final

_DRAWN: Final = 4096  # bytes that are asked of the system at once


UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The form that ids have."""


def new_uuid(source: random.Random) -> str:
    """Return a new random UUID."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


class PooledSystemRandom(random.SystemRandom):
    """The system's random source, asked for many bytes at once: a request needs several ids, each of a few bytes.

    No byte is used twice, whichever threads ask, nor in a process that this one forks.
    """

    _lock: threading.Lock
    _drawn: bytes
    _used: int

    def __init__(self) -> None:
        super().__init__()
        self.forget()
        _POOLS.add(self)

    def getrandbits(self, k: int, /) -> int:
        """Return an integer of this many random bits."""
        count = (k + 7) // 8
        if k < 0 or count > _DRAWN:
            return super().getrandbits(k)
        return int.from_bytes(self._take(count)) >> (count * 8 - k)

    def random(self) -> float:
        """Return a number of the interval from 0 up to, but not including, 1."""
        return self.getrandbits(53) * 2.0**-53

    def _take(self, count: int) -> bytes:
        with self._lock:
            begin = self._used
            if begin + count > len(self._drawn):
                self._drawn, begin = os.urandom(_DRAWN), 0
            self._used = begin + count
            return self._drawn[begin : self._used]

    def forget(self) -> None:
        """Draw new bytes from now on."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._drawn, self._used = b"", 0


_POOLS: Final[weakref.WeakSet[PooledSystemRandom]] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in _POOLS:
        pool.forget()


os.register_at_fork(after_in_child=_forget_all)

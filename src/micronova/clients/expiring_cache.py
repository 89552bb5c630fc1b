"""A cache whose entries expire; callers that need the same missing entry share one request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringCache(Generic[K, V]):
    """Keeps values by key for some seconds of the event loop's time."""

    def __init__(self, seconds: float, max_entries: int = 4096) -> None:
        self._seconds = seconds
        self._max_entries = max_entries
        self._entries: dict[K, tuple[float, V]] = {}
        self._pending: dict[K, asyncio.Task[V]] = {}

    def peek(self, key: K) -> V | None:
        """Return the value of a key, or None if it is missing or has expired."""
        found = self._entries.get(key)
        if found is None or found[0] <= asyncio.get_running_loop().time():
            return None
        return found[1]

    def put(self, key: K, value: V) -> None:
        """Keep a value; a full cache is emptied first."""
        if len(self._entries) >= self._max_entries:
            self._entries.clear()
        self._entries[key] = (asyncio.get_running_loop().time() + self._seconds, value)

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key, or fetch it; failures are not kept."""
        found = self.peek(key)
        if found is not None:
            return found
        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.ensure_future(self._fetch(key, fetch))
        # Shielded, so that cancelling one caller does not cancel the others.
        return await asyncio.shield(task)

    async def _fetch(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        try:
            value = await fetch()
            self.put(key, value)
            return value
        finally:
            self._pending.pop(key, None)

"""Answers that stay good for some seconds; whoever asks while a question is under way waits for that answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Remembered:
    """Remembers answers by key; time is the event loop's."""

    def __init__(self, seconds: float, most: int = 4096) -> None:
        self._seconds = seconds
        self._most = most
        self._known: dict[Any, tuple[float, Any]] = {}
        self._asked: dict[Any, asyncio.Task[Any]] = {}

    def peek(self, key: Any) -> Any:
        """Return a remembered answer, or None."""
        found = self._known.get(key)
        if found is None or found[0] <= asyncio.get_running_loop().time():
            return None
        return found[1]

    def put(self, key: Any, value: Any) -> None:
        """Remember an answer."""
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[key] = (asyncio.get_running_loop().time() + self._seconds, value)

    async def get(self, key: Any, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the remembered answer, or ask; failures are not remembered."""
        found = self.peek(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.ensure_future(self._ask(key, ask))
        # Shielded: one caller's cancellation is not the others'.
        return await asyncio.shield(task)

    async def _ask(self, key: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
        try:
            value = await ask()
            self.put(key, value)
            return value
        finally:
            self._asked.pop(key, None)

"""Timers on the bus's clock: one task for all timers, because a task per call would cost more than the call."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from itertools import count

from micronova.objects.background import keep_running
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)


class Timer:
    """A callback at a given time, unless it is cancelled first."""

    __slots__ = ("callback", "fired")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback
        self.fired = False

    def cancel(self) -> None:
        """Do not call back."""
        self.callback = None


class Deadlines:
    """All timers of one bus, by the clock's monotonic time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._watcher: asyncio.Task[None] | None = None
        self._until = 0.0

    def after(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call back after a number of seconds."""
        when = self._clock.monotonic() + seconds
        timer = Timer(callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        if self._watcher is None or when < self._until:
            self._watch(when)
        return timer

    def close(self) -> None:
        """Cancel all timers."""
        self._heap.clear()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _watch(self, until: float) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._until = until
        self._watcher = keep_running(self._run, name="rpc-deadlines", clock=self._clock)

    async def _run(self) -> None:
        heap = self._heap
        while heap:
            when, _, timer = heap[0]
            if timer.callback is None:
                heapq.heappop(heap)
                continue
            wait = when - self._clock.monotonic()
            if wait > 0:
                self._until = when
                await self._clock.sleep(wait)
                continue
            heapq.heappop(heap)
            timer.fired = True
            try:
                timer.callback()
            except Exception:
                log.exception("a timer of the bus failed; the others go on")
        self._watcher = None

"""Time and chance as objects that are passed in, so that a simulation can own both."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where a role gets the time from."""

    def now(self) -> float:
        """Wall-clock time in seconds since the epoch (UTC)."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, for measuring durations."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def micros(seconds: float) -> int:
    """Seconds since the epoch as whole microseconds: the form in which the database keeps every time."""
    return int(seconds * 1_000_000)

"""The clock, passed to every role as an object so that a simulation can replace it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970 (UTC)."""

    def monotonic(self) -> float:
        """Return seconds that never go back, to measure durations."""

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def micros(seconds: float) -> int:
    """Return seconds as whole microseconds: the database keeps every time in this form."""
    return int(seconds * 1_000_000)


def seconds(micros: int) -> float:
    """Return microseconds, as the database keeps a time, in seconds."""
    return micros / 1_000_000

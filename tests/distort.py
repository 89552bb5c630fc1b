"""A wrapper around a bus that loses casts, delivers messages twice, delays and reorders them, for tests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, P, R, Target
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.wrapper import BusWrapper

log = logging.getLogger(__name__)


def every_method(method: Method[Any, Any]) -> bool:
    """Apply a distortion to all messages."""
    return True


@dataclass(frozen=True)
class Distortion:
    """What goes wrong, and with which methods."""

    drop_casts: bool = False
    twice: bool = False
    """Casts arrive twice; calls are handled twice, and the first answer counts."""
    longest_delay: float = 0.0
    """Each message is delayed by a random time up to these seconds, so that messages change their order."""
    applies: Callable[[Method[Any, Any]], bool] = every_method


class DistortedBus(BusWrapper):
    """Passes messages on to another bus, with a distortion."""

    def __init__(self, bus: Bus, distortion: Distortion, *, clock: Clock, random: Random) -> None:
        super().__init__(bus)
        self._distortion = distortion
        self._clock = clock
        self._random = random
        self._in_flight: set[asyncio.Task[Any]] = set()
        self.dropped: Counter[str] = Counter()

    async def stop(self) -> None:
        """Drop delayed messages and stop the wrapped bus."""
        for task in self._in_flight:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        await super().stop()

    async def arrived(self) -> None:
        """Wait until all delayed messages are sent and all second calls are answered."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message, with the distortion."""
        await self._hint(method, lambda: self._bus.cast(target, method, params, context=context))

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        """Send a message and return its first answer."""
        if not self._distortion.applies(method):
            return await super().call(target, method, params, context=context, timeout=timeout)

        async def ask(delay: float) -> R:
            if delay:
                await self._clock.sleep(delay)
            return await self._bus.call(target, method, params, context=context, timeout=timeout - delay)

        asked = [self._spawn(ask(self._delay())) for _ in range(2 if self._distortion.twice else 1)]
        try:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for task in asked:
                task.cancel()
            raise
        return next(task for task in asked if task in done).result()

    async def _hint(self, method: Method[Any, Any], send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._distortion.applies(method):
            await send()
            return
        if self._distortion.drop_casts:
            self.dropped[method.label] += 1
            return
        for _ in range(2 if self._distortion.twice else 1):
            if self._distortion.longest_delay:
                self._spawn(self._later(self._delay(), method, send))
            else:
                await send()

    async def _later(
        self, delay: float, method: Method[Any, Any], send: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        await self._clock.sleep(delay)
        try:
            await send()
        except BusUnavailable as error:
            log.warning("%s was delayed and then lost: %s", method.label, error)

    def _delay(self) -> float:
        return self._random.uniform(0.0, self._distortion.longest_delay)

    def _spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        task = asyncio.get_running_loop().create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the second answer may be an error

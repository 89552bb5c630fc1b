"""A bus that a test can stop, as a broker that stands still."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, P, R, Target
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.rpc.wrapper import BusWrapper
from tests.functional.cloud import Caller, Cloud


class PausedBus(BusWrapper):
    """Delivers nothing while it is paused, as a broker that stands still: senders wait, and give up in the end."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.running = asyncio.Event()
        self.running.set()
        self.decided: asyncio.Event | None = None  # if it is there, schedulers are reached also during a pause,
        self.reply = asyncio.Event()  # and the error of one waits for this

    @contextlib.asynccontextmanager
    async def outage(self, cloud: Cloud, user: Caller) -> AsyncIterator[None]:
        """Stand still while the context is open; it is entered when all hosts look dead."""
        self.running.clear()
        try:
            await cloud.until(lambda: look_dead(cloud, user), "all hosts to look dead")
            yield
        finally:
            self.running.set()

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        if not await self._delivers(0.2):
            raise BusUnavailable("The broker does not confirm.")
        await super().cast(target, method, params, context=context)

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        if method.label == "scheduler.select_destinations" and self.decided is not None:
            try:
                return await super().call(target, method, params, context=context, timeout=timeout)
            except NoValidHost:
                self.decided.set()
                await self.reply.wait()
                raise
        if not await self._delivers(min(timeout, 0.5)):
            raise CallTimeout(f"{method.label} did not answer in time")
        return await super().call(target, method, params, context=context, timeout=timeout)

    async def _delivers(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.running.wait(), seconds)
        except TimeoutError:
            return False
        return True


async def look_dead(cloud: Cloud, user: Caller) -> bool | None:
    """Return True if all hosts look dead, and all leases are over."""
    services = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
    now = micros(time.time())
    leased = [row for row in await cloud.open_operations() if row.owner and row.owner.startswith("host:")]
    over = all(row.lease_until < now for row in leased)
    return True if over and all(service["state"] == "down" for service in services) else None

"""Waiting by a clock that is passed in, which asyncio's own time-outs cannot do."""

import asyncio
from collections.abc import Iterable
from typing import Any

from micronova.objects.clock import Clock


async def wait_for_all(
    clock: Clock, futures: Iterable[asyncio.Future[Any]], seconds: float
) -> set[asyncio.Future[Any]]:
    """Wait until all are done or so many seconds have passed; cancel nothing, give those not done."""
    pending = {future for future in futures if not future.done()}
    if not pending or seconds <= 0:
        return pending
    everything = asyncio.ensure_future(asyncio.wait(pending))
    sleeper = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({everything, sleeper}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        everything.cancel()
        sleeper.cancel()
    return {future for future in pending if not future.done()}

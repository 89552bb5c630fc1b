"""Waiting with a time limit by a clock that is passed in; asyncio's own time-outs use the machine's clock."""

import asyncio
from collections.abc import Iterable
from typing import Any

from micronova.objects.clock import Clock


async def wait_for_all(clock: Clock, futures: Iterable[asyncio.Future[Any]], seconds: float) -> None:
    """Return when all futures are done or the seconds have passed; cancel none of them."""
    pending = {future for future in futures if not future.done()}
    if not pending or seconds <= 0:
        return
    everything = asyncio.ensure_future(asyncio.wait(pending))
    sleeper = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({everything, sleeper}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        everything.cancel()
        sleeper.cancel()

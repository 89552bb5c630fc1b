"""Tasks that go on for as long as their owner runs. An error that nobody expected must not end one unnoticed."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0  # seconds before the work begins again; twice as long after each further error
LONGEST_PAUSE = 30.0  # seconds; work that has run for longer than this begins with the first pause again


def keep_running(work: Callable[[], Awaitable[None]], *, name: str, clock: Clock) -> asyncio.Task[None]:
    """Start a task that runs until `work` returns or the task is cancelled.

    `work` handles the errors that it expects. After any other one, such as a lack of threads or memory in a place that
    nobody thought of, the error is logged and `work` is called again.
    """
    return asyncio.get_running_loop().create_task(_keep_running(work, name, clock), name=name)


async def end_tasks(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _keep_running(work: Callable[[], Awaitable[None]], name: str, clock: Clock) -> None:
    pause = FIRST_PAUSE
    while True:
        begun = clock.monotonic()
        try:
            return await work()
        except Exception:
            if clock.monotonic() - begun > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            with contextlib.suppress(Exception):  # there may be no memory for the log, either
                log.exception("the background task %s failed and begins again in %g s", name, pause)
        await clock.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)

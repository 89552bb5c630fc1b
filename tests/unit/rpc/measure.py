"""What a message costs: `python -m tests.unit.rpc.measure local://x` or `… amqp://…`; both ends in this process."""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

from micronova.objects.clock import SystemClock
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Context
from tests.unit.rpc.bus_suite import Job, Room

CONTEXT = Context(
    request_id="req-" + "a" * 36,
    user_id="u" * 32,
    project_id="p" * 32,
    roles=("member", "reader"),
    traceparent="00-" + "a" * 52,
)
JOB = Job(1, ["x" * 36] * 10)
"""With its context about 600 bytes."""


class Counter:
    """A handler that does nothing but count."""

    def __init__(self) -> None:
        self.count = 0
        self.target = 0
        self.reached = asyncio.Event()

    async def work(self, context: Context, params: Job) -> None:
        self.count += 1
        if self.count == self.target:
            self.reached.set()

    async def ask(self, context: Context, params: Job) -> Job:
        return params


async def main(url: str, number: int) -> None:
    ends = [connect(url, clock=SystemClock(), random=random.Random(), name=name) for name in ("a", "b")]
    for end in ends:
        await end.start()
    client, server = ends
    room = Room(f"measure-{random.getrandbits(32):x}")
    handler = Counter()
    await server.serve(room.interface, handler)

    async def cast(bus: Bus = client) -> None:
        await bus.cast(room.target(), room.work, JOB, context=CONTEXT)

    async def call(bus: Bus = client) -> None:
        await bus.call(room.target(), room.ask, JOB, context=CONTEXT, timeout=60)

    async def measure(what: str, send: Callable[[], Awaitable[None]], at_once: int, handled: bool) -> None:
        handler.count, handler.target = 0, number
        handler.reached.clear()
        cpu, wall = time.process_time(), time.perf_counter()

        async def sender() -> None:
            for _ in range(number // at_once):
                await send()

        await asyncio.gather(*(sender() for _ in range(at_once)))
        if handled:
            await handler.reached.wait()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(f"{what}, {at_once:3} at once: {cpu / number * 1e6:6.1f} us CPU, {wall / number * 1e6:7.1f} us each")

    for _ in range(3):
        for at_once in (1, 50):
            await measure("cast", cast, at_once, True)
            await measure("call", call, at_once, False)
    for end in reversed(ends):
        await end.stop()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5_000))

"""Our AMQP client against aio-pika: `python -m tests.perf.bus`, or `make bench-bus`.

The same work over both, alternately, through a private RabbitMQ: calls (request and reply) and casts (persistent, to a
quorum queue, confirmed to the sender, acknowledged by the receiver). Sender and receiver are two connections of this
process, so the CPU time is that of both ends; the broker's is not in it. Only the client library differs: envelopes,
deadlines and the dispatch to the handler are the same code.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import uvloop

from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.rpc.bus import DEFAULT_PREFETCH, Bus, connect
from micronova.rpc.contract import Interface
from tests.perf.aiopika import AioPikaBus
from tests.services.rabbitmq import RabbitMQ


class Job(msgspec.Struct):
    """What the messages carry; with its context about 600 bytes."""

    number: int
    tags: list[str]


CONTEXT = Context(
    request_id="req-" + "a" * 36,
    user_id="u" * 32,
    project_id="p" * 32,
    roles=("member", "reader"),
    traceparent="00-" + "a" * 52,
)
JOB = Job(1, ["x" * 36] * 10)


class Figures(NamedTuple):
    """One round: microseconds."""

    cpu: float
    p50: float
    p99: float


class Counter:
    """A handler that does nothing but count."""

    def __init__(self) -> None:
        self.left = 0
        self.done = asyncio.Event()

    async def work(self, context: Context, params: Job) -> None:
        """Count a cast."""
        self.left -= 1
        if not self.left:
            self.done.set()

    async def ask(self, context: Context, params: Job) -> Job:
        """Answer a call with what it carried."""
        return params


class Client:
    """One client library: a sender, a receiver, and what is sent between them."""

    def __init__(self, name: str, make: Callable[[], Bus | AioPikaBus]) -> None:
        self.name = name
        self._sender, self._receiver = make(), make()
        self._interface = Interface(f"bench-{name}")
        self._work = self._interface.method("work", Job)
        self._ask = self._interface.method("ask", Job, Job)
        self._counter = Counter()

    async def start(self) -> None:
        """Connect both ends."""
        await self._receiver.start()
        await self._sender.start()
        await self._receiver.serve(self._interface, self._counter)

    async def stop(self) -> None:
        """Disconnect both ends."""
        await self._sender.stop()
        await self._receiver.stop()

    async def call(self) -> None:
        """Ask and wait for the answer."""
        await self._sender.call(self._interface.target(), self._ask, JOB, context=CONTEXT, timeout=60)

    async def cast(self) -> None:
        """Send and wait for the broker's confirmation."""
        await self._sender.cast(self._interface.target(), self._work, JOB, context=CONTEXT)

    async def measure(self, work: str, number: int, at_once: int) -> Figures:
        """Do the work a number of times, so many at once; a cast's CPU time includes handling it."""
        send: Callable[[], Awaitable[None]] = getattr(self, work)
        times: list[float] = []
        self._counter.left = number if work == "cast" else 0
        self._counter.done.clear()

        async def client() -> None:
            for _ in range(number // at_once):
                begin = time.perf_counter()
                await send()
                times.append(time.perf_counter() - begin)

        cpu = time.process_time()
        await asyncio.gather(*(client() for _ in range(at_once)))
        if work == "cast":
            await self._counter.done.wait()
        cpu = time.process_time() - cpu
        times.sort()
        return Figures(cpu / number * 1e6, times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6)


async def compare(url: str, *, rounds: int, number: int) -> None:
    """Print the medians of the rounds, ours beside aio-pika's."""
    clients = [
        Client("ours", lambda: connect(url, clock=SystemClock(), random=random.Random(), grace=1.0)),
        Client("aio-pika", lambda: AioPikaBus(url, DEFAULT_PREFETCH)),
    ]
    for client in clients:
        await client.start()
    print(f"{'microseconds per message':<24} {'ours':^23} {'aio-pika':^23} {'ratio':^20}")
    print(f"{'':<24} {'CPU     p50     p99':>23} {'CPU     p50     p99':>23} {'CPU    p50    p99':>20}")
    for work in ("call", "cast"):
        for at_once in (1, 10, 100):
            await asyncio.gather(*(client.measure(work, at_once * 5, at_once) for client in clients))  # warm up
            found: list[list[Figures]] = [[], []]
            for _ in range(rounds):
                for client, figures in zip(clients, found, strict=True):
                    figures.append(await client.measure(work, number, at_once))
            ours, theirs = (Figures(*map(statistics.median, zip(*each, strict=True))) for each in found)
            columns = [" ".join(f"{value:>7.0f}" for value in figures) for figures in (ours, theirs)]
            ratios = " ".join(f"{b / a:>6.1f}" for a, b in zip(ours, theirs, strict=True))
            print(f"{work}, {at_once:>3} at once{'':<7} {columns[0]} {columns[1]} {ratios}", flush=True)
    for client in clients:
        await client.stop()


def main() -> None:
    """Start a broker and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.bus", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each client; the medians are shown")
    parser.add_argument("--number", type=int, default=2_000, help="messages in a round")
    parser.add_argument("--url", help="a broker that runs already; default: start a private one")
    arguments = parser.parse_args()
    if arguments.url:
        uvloop.run(compare(arguments.url, rounds=arguments.rounds, number=arguments.number))
        return
    with tempfile.TemporaryDirectory(prefix="micronova-bench-") as directory:
        broker = RabbitMQ.start(directory)
        try:
            uvloop.run(compare(broker.url, rounds=arguments.rounds, number=arguments.number))
        finally:
            broker.stop()


if __name__ == "__main__":
    main()

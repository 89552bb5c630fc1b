"""What a change of one port costs the embedded network service in a large cloud: `python -m tests.perf.network`.

One process of the service on PostgreSQL, in which the agents of all hosts wait. Ports of a project are on different
hosts, and their default group names itself as remote, so that the firewalls of all these hosts change with each port.
CPU time is that of the service, with the encoding of all answers, and of PostgreSQL. The agents' own work on their
hosts is not counted.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from micronova.embedded.network.tables import metadata
from micronova.objects.clock import SystemClock
from tests.network_rows import host_of, id_of, large_cloud
from tests.perf.processes import cpu_seconds
from tests.plans import fill
from tests.services.postgres import Postgres
from tests.unit.embedded.network.world import SERVICE, World, world

CHANGES = 20


class Meter:
    """Counts statements, and the CPU seconds of the service and of PostgreSQL."""

    def __init__(self, postgres: Postgres) -> None:
        assert postgres.process is not None
        self._postgres = {postgres.process.pid: "postgres"}
        self.statements = 0
        sa.event.listen(sa.Engine, "before_cursor_execute", self._note)

    def _note(self, *_: Any) -> None:
        self.statements += 1

    async def cost(self, work: Callable[[], Awaitable[Any]]) -> tuple[float, ...]:
        """Return statements, CPU milliseconds of the service and of PostgreSQL, and the elapsed milliseconds."""
        counted, before = self.statements, cpu_seconds(self._postgres)["postgres"]
        own, begun = time.process_time(), time.monotonic()
        await work()
        took, used = time.monotonic() - begun, time.process_time() - own
        database = cpu_seconds(self._postgres)["postgres"] - before
        return self.statements - counted, used * 1e3, database * 1e3, took * 1e3


@asynccontextmanager
async def filled(arguments: argparse.Namespace) -> AsyncIterator[tuple[World, Meter]]:
    """Run a service on a database with the rows of a large cloud."""
    with tempfile.TemporaryDirectory(prefix="micronova-network-") as name:
        place = Path(name)
        place.chmod(0o755)  # the user postgres has to get through
        postgres = Postgres.start(place / "postgres", durable=True)
        try:
            url = postgres.create_database("network")
            async with world(place, url, clock=SystemClock(), schema="network") as cloud:
                projects = arguments.ports // arguments.group
                rows = large_cloud(arguments.ports, projects, arguments.agents, min(projects, 1_000))
                await cloud.database.write(fill, metadata, rows)
                yield cloud, Meter(postgres)
        finally:
            postgres.stop()


async def ask(cloud: World, host: str, fingerprint: str = "", wait: float = 0) -> tuple[str, int]:
    """Return the fingerprint and the bytes of an answer to an agent."""
    path = f"/agent-states/{host}?parts=true&fingerprint={fingerprint}&wait={wait:g}"
    answer = await cloud.call("GET", path, token=SERVICE)
    assert answer.status == 200, answer.body
    return answer.json()["fingerprint"], len(answer.body)


class Agents:
    """The agents of all hosts; each waits for a change of its state."""

    def __init__(self, cloud: World) -> None:
        self._cloud = cloud
        self._known: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Task[tuple[str, int]]] = {}
        self._answered: asyncio.Queue[str] = asyncio.Queue()

    async def read(self, hosts: list[str]) -> None:
        """Read the state of each host."""
        for host in hosts:
            self._known[host] = (await ask(self._cloud, host))[0]

    def wait(self, hosts: Iterable[str]) -> None:
        """Let the agents of hosts wait."""
        for host in hosts:
            task = asyncio.create_task(ask(self._cloud, host, self._known[host], 60))
            task.add_done_callback(lambda _, host=host: self._answered.put_nowait(host))  # type: ignore[misc]
            self._waiting[host] = task

    async def answers(self, count: int) -> list[str]:
        """Return so many hosts whose agents have got an answer."""
        return [await self._answered.get() for _ in range(count)]

    def take(self, host: str) -> int:
        """Take the answer of a host; return its size."""
        self._known[host], size = self._waiting[host].result()
        return size

    async def stop(self) -> None:
        for task in self._waiting.values():
            task.cancel()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)


async def measure(arguments: argparse.Namespace) -> None:
    """Measure, and print a line for each figure."""
    async with filled(arguments) as (cloud, meter):
        hosts = [host_of(number) for number in range(arguments.agents)]
        agents = Agents(cloud)
        read = await meter.cost(lambda: agents.read(hosts))
        show("the first state of a host", [tuple(each / len(hosts) for each in read)])
        agents.wait(hosts)
        await asyncio.sleep(5)
        costs, sizes = [], []
        for number in range(CHANGES):
            answered: list[str] = []

            async def change(project: int = number, answered: list[str] = answered) -> None:
                port = {"network_id": id_of("network", project), "project_id": f"p{project}"}
                answer = await cloud.call("POST", "/ports", {"port": port}, token=SERVICE)
                assert answer.status == 201, answer.body
                answered += await agents.answers(arguments.group)

            costs.append(await meter.cost(change))
            sizes += [agents.take(host) for host in answered]
            agents.wait(answered)
            await asyncio.sleep(0)
        show(f"a port of a default group, with answers to {arguments.group} hosts", costs)
        print(f"bytes of an answer: {statistics.median(sizes):g}")
        show("an idle second, all agents waiting", [await meter.cost(lambda: asyncio.sleep(1)) for _ in range(10)])
        await agents.stop()


def show(name: str, costs: list[tuple[float, ...]]) -> None:
    """Print means: CPU time is counted in ticks of 10 ms."""
    statements, own, database, took = (statistics.fmean(column) for column in zip(*costs, strict=True))
    print(
        f"{name}: {statements:.1f} statements, {own:.1f} ms CPU of the service, {database:.1f} ms CPU of PostgreSQL, "
        f"{took:.1f} ms elapsed",
        flush=True,
    )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=100, help="ports of each default security group")
    parser.add_argument("--agents", type=int, default=10_000)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

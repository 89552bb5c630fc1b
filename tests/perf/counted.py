"""What requests cost, counted and compared with `counted.json`: `make bench-check`.

A cloud of one process with simulated hosts is asked by a caller in the same process, on SQLite and on PostgreSQL. The
figures of each request are means over a round:

| figure | what it counts |
|---|---|
| statements | SQL statements, without those that begin and end transactions |
| messages, bytes | messages of the bus, requests and replies, and their bytes |
| reference loads | CPU time of this process, in units of a fixed load that is measured just before |
| peak | KiB that are allocated at the most while a page of 100 servers with details is answered |

A figure that has grown by more than its tolerance fails the check. `--write` makes the present figures the new numbers,
which is for a change that has a reason to cost more, or that costs less. What PostgreSQL uses is not in the CPU time.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import sqlite3
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.http.client import ASGITransport
from micronova.rpc import envelope
from tests.functional.cloud import CloudOptions, OneProcess
from tests.perf.phases import progress
from tests.services.postgres import Postgres

NUMBERS = Path(__file__).with_name("counted.json")
# How much larger than its number a figure may be. Statements and messages of a request vary by what ends together.
TOLERANCES = {"statements": 1.03, "messages": 1.03, "bytes": 1.05, "reference loads": 1.3, "peak": 1.05}
ROUNDING = 0.2  # of the numbers, and of periodic work that fell into a round
ROUNDS = 5
SERVERS = 100  # of a page, and of a round of boots and deletes
SHOWS = 200
PAGES = 20
# Periodic work is rare in this cloud.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"report_interval": 300.0, "service_down_time": 3600.0},
    "conductor": {"lease": 600.0, "sweep_interval": 300.0},
    "scheduler": {"refresh_interval": 60.0},
    "fake": {"hosts": 20, "vcpus": 64, "memory_mb": 262144, "local_gb": 10000},
}

Figures = dict[str, float]


class Counters:
    """What the process has done since it began."""

    def __init__(self) -> None:
        self.statements = self.messages = self.bytes = 0

    def now(self) -> Figures:
        """Return the counts."""
        return {"statements": self.statements, "messages": self.messages, "bytes": self.bytes}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count statements of engines that are made meanwhile, and messages."""
        encode = envelope._encode

        def counted(message: Any) -> bytes:
            body = encode(message)
            self.messages += 1
            self.bytes += len(body)
            return body

        sa.event.listen(sa.Engine, "connect", self._connected)
        sa.event.listen(sa.Engine, "before_cursor_execute", self._executed)
        envelope._encode = counted
        try:
            yield
        finally:
            envelope._encode = encode
            sa.event.remove(sa.Engine, "connect", self._connected)
            sa.event.remove(sa.Engine, "before_cursor_execute", self._executed)

    def _connected(self, connection: Any, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.set_trace_callback(self._traced)

    def _traced(self, sql: str) -> None:
        if not sql.startswith(("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "--")):
            self.statements += 1

    def _executed(self, conn: sa.Connection, *_: object) -> None:
        if conn.dialect.name != "sqlite":  # its driver tells of all statements
            self.statements += 1


class Requests:
    """The requests that are measured, on one cloud."""

    def __init__(self, cloud: OneProcess, counters: Counters) -> None:
        self.cloud, self.counters = cloud, counters
        self.user = cloud.caller()
        self.ids: list[str] = []

    async def round(self) -> dict[str, Figures]:
        """Return the figures of one round, by request."""
        return {
            "boot": await self._measured(self.boot, SERVERS),
            "show": await self._measured(self.show, SHOWS),
            "detail": await self._measured(self.detail, PAGES),
            "delete": await self._measured(self.delete, SERVERS),
        }

    async def boot(self) -> None:
        """Boot servers, each by a request of its own; none waits for another."""
        self.ids = list(await asyncio.gather(*(self.user.create() for _ in range(SERVERS))))
        await self.cloud.settled()

    async def show(self) -> None:
        """Show servers."""
        for number in range(SHOWS):
            await self._get(f"/servers/{self.ids[number % SERVERS]}")

    async def detail(self) -> None:
        """Read pages of servers with details."""
        for _ in range(PAGES):
            await self._get(f"/servers/detail?limit={SERVERS}")

    async def delete(self) -> None:
        """Delete the servers."""
        await asyncio.gather(*(self.user.delete(f"/servers/{id}") for id in self.ids))
        await self.cloud.settled()

    async def peak(self) -> float:
        """Return the KiB that a page of details takes at the most while it is answered."""
        await self.boot()
        await self.detail()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await self._get(f"/servers/detail?limit={SERVERS}")
            return (tracemalloc.get_traced_memory()[1] - before) / 1024
        finally:
            tracemalloc.stop()

    async def _get(self, path: str) -> None:
        answer = await self.user.request("GET", path)  # `Caller.get` would parse it
        assert answer.status == 200, answer.body[:500]

    async def _measured(self, run: Callable[[], Awaitable[None]], count: int) -> Figures:
        gc.collect()
        reference = reference_load()
        before, cpu = self.counters.now(), time.process_time()
        await run()
        spent = time.process_time() - cpu
        figures = {name: (value - before[name]) / count for name, value in self.counters.now().items()}
        return {**figures, "reference loads": spent / reference / count}


def reference_load() -> float:
    """Return the seconds of CPU that a fixed load takes now: JSON, dictionaries, SQLite and calls, about 10 ms."""
    begin = time.process_time()
    with contextlib.closing(sqlite3.connect(":memory:")) as conn:
        conn.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)")
        for number in range(400):
            row = {"id": number, "name": f"server-{number}", "tags": ["a", "b"], "metadata": {"key": str(number)}}
            conn.execute("INSERT INTO t VALUES (?, ?)", (number, json.dumps(row)))
        for number in range(400):
            [(text,)] = conn.execute("SELECT text FROM t WHERE id = ?", (number,))
            row = json.loads(text)
            assert sorted((key, str(value)) for key, value in row.items())
    return time.process_time() - begin


@contextlib.asynccontextmanager
async def cloud_on(database: str, directory: Path) -> AsyncIterator[OneProcess]:
    """Run a cloud on the database of this URL, "" for SQLite."""
    settings: dict[str, dict[str, Any]] = {**SETTINGS, "database": {"connection": database}}
    cloud = OneProcess(directory, CloudOptions(hosts=20, settings=settings))
    await cloud.start()
    try:
        # Not the one that compares each answer with the document of the API.
        cloud.transport = ASGITransport(cloud.process.application(), "cloud:8774")
        yield cloud
    finally:
        await cloud.stop()


async def count(database: str, directory: Path) -> dict[str, Figures]:
    """Return the figures of all requests: the mean counts of all rounds, the least CPU time of any."""
    counters = Counters()
    with counters.counting():
        async with cloud_on(database, directory) as cloud:
            requests = Requests(cloud, counters)
            await requests.round()  # compiles statements, fills caches
            rounds = [await requests.round() for _ in range(ROUNDS)]
            peak = await requests.peak()
    figures = {
        request: {
            name: min(values) if name == "reference loads" else sum(values) / ROUNDS
            for name in rounds[0][request]
            for values in [[each[request][name] for each in rounds]]
        }
        for request in rounds[0]
    }
    figures["detail"]["peak"] = peak
    return figures


def compare(figures: dict[str, dict[str, Figures]], numbers: dict[str, dict[str, Figures]]) -> list[str]:
    """Print the figures beside their numbers; return those that have grown by more than their tolerance."""
    grown = []
    print(f"{'database':12}{'request':10}{'figure':18}{'number':>12}{'now':>12}")
    for database, requests in figures.items():
        for request, values in requests.items():
            for name, now in values.items():
                number = numbers.get(database, {}).get(request, {}).get(name, 0.0)
                print(f"{database:12}{request:10}{name:18}{number:12.2f}{now:12.2f}")
                if now > number * TOLERANCES[name] + ROUNDING:
                    grown.append(f"{request} on {database}: {name} {number:.2f} -> {now:.2f}")
    return grown


async def main() -> int:
    """Count, and compare with the numbers or write them."""
    parser = argparse.ArgumentParser(description="Count what requests cost, and compare it with counted.json.")
    parser.add_argument("--write", action="store_true", help="make the present figures the new numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="micronova-counted-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # PostgreSQL runs as a user of its own
        progress("on SQLite")
        figures = {"sqlite": await count("", directory / "sqlite")}
        progress("on PostgreSQL")
        postgres = Postgres.start(directory / "postgres")
        try:
            url = postgres.create_database("counted")
            figures["postgresql"] = await count(url, directory / "cloud")
        finally:
            postgres.stop()
    if arguments.write:
        rounded = msgspec.json.encode(
            {
                database: {
                    request: {name: round(value, 2) for name, value in values.items()}
                    for request, values in requests.items()
                }
                for database, requests in figures.items()
            }
        )
        NUMBERS.write_bytes(msgspec.json.format(rounded, indent=1) + b"\n")
    grown = compare(figures, json.loads(NUMBERS.read_text()))
    for line in grown:
        print(f"Grown: {line}", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))

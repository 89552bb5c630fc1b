"""The soak: `python -m tests.perf.soak --minutes 60`, or `make soak MINUTES=60`.

A cloud on PostgreSQL and RabbitMQ works at 80 % of the rate that it reaches at most, and one part of it fails each
minute. Clients create, show, list, stop, start and delete servers. At the end nobody may have seen an error, the audit
must find nothing, and memory, descriptors, tasks, queues and tables must be what they were after the first minutes.

A client does what a careful one does in front of a service that is being restarted: it tries again when the connection
breaks or the answer is a 503, and looks for its server by name when it does not know whether a POST arrived. Such
repetitions are counted, and are no errors.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncpg

from tests.perf.client import BenchError, Client
from tests.perf.clouds import Apart, start
from tests.perf.phases import Target, progress
from tests.perf.processes import members, memory

CLIENTS = 8
LOAD = 0.8  # of the peak
STANDING = 100  # servers that live all the time
PEAK_SECONDS = 30.0
PATIENCE = 120.0  # for one server to become what it should, faults included
STILL = 10.0  # seconds for which a fault stops a process
TOLERANCE = 0.05
RETENTION = {"keep_finished": 60.0, "keep_deleted": 60.0}  # seconds: what is kept is soon what is purged
FLOORS = {"memory": 30.0, "descriptors": 40, "tasks": 20, "messages": 50, "rows": 600}
"""What a figure may grow by in any case: MiB, numbers. Work under way at the moment of a sample is not growth."""


class Load:
    """The clients: each makes servers, uses them and deletes them, at a common pace."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rate: float | None = None  # stories per second; None: as many as possible
        self.done = 0
        self.repeated: Counter[str] = Counter()
        self.errors: list[str] = []
        self.stopped = False
        self._next = 0.0

    async def client(self, number: int) -> None:
        """Tell one story after the other."""
        connection = Client(self.target.endpoint())
        while not self.stopped:
            await self._pace()
            try:
                await self._story(connection, f"soak-{number}-{secrets.token_hex(4)}")
            except BenchError as error:
                self.errors.append(f"{time.strftime('%H:%M:%S')} {error}")
                progress(f"ERROR {error}")
            self.done += 1
        connection.close()

    async def _pace(self) -> None:
        if self.rate is None:
            return
        now = time.monotonic()
        self._next = max(self._next, now - 5.0) + 1 / self.rate  # what a fault cost is not made up for without end
        await asyncio.sleep(max(0.0, self._next - now))

    async def _story(self, client: Client, name: str) -> None:
        server = await self._create(client, name)
        await self._until(client, server, "ACTIVE")
        await self._send(client, "GET", "/servers/detail?limit=50")
        if random.random() < 0.2:
            await self._action(client, server, {"os-stop": None})
            await self._until(client, server, "SHUTOFF")
            await self._action(client, server, {"os-start": None})
            await self._until(client, server, "ACTIVE")
        await self._send(client, "DELETE", f"/servers/{server}", allowed=(404,))
        await self._until(client, server, None)

    async def _create(self, client: Client, name: str) -> str:
        sent = False
        while True:
            if sent:
                status, found = await self._send(client, "GET", f"/servers?name=^{name}$")
                if found["servers"]:
                    return str(found["servers"][0]["id"])
            sent = True
            answer = await self._once(client, "POST", "/servers", self.target.server(name))
            if answer is not None:
                status, document = answer
                if status != 202:
                    raise BenchError(f"POST /servers: {status} {document}")
                return str(document["server"]["id"])

    async def _action(self, client: Client, server: str, body: Mapping[str, Any]) -> None:
        # When the answer to an action was lost, its repetition may find that it has been done.
        await self._send(client, "POST", f"/servers/{server}/action", body, allowed=(409,))

    async def _until(self, client: Client, server: str, status: str | None) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            code, found = await self._send(client, "GET", f"/servers/{server}", allowed=(404,))
            now = found["server"]["status"] if code == 200 else None
            if now == status:
                return
            if now is None or now == "ERROR":
                raise BenchError(f"{server} is {now} instead of {status}: {found}")
            if time.monotonic() > deadline:
                raise BenchError(f"{server} is {now} instead of {status} after {PATIENCE:.0f} s")
            await asyncio.sleep(0.1)

    async def _send(
        self, client: Client, method: str, path: str, body: Any = None, allowed: tuple[int, ...] = ()
    ) -> tuple[int, Any]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = await self._once(client, method, path, body)
            if answer is None:
                continue
            if answer[0] >= 400 and answer[0] not in allowed:
                raise BenchError(f"{method} {path}: {answer[0]} {answer[1]}")
            return answer
        raise BenchError(f"{method} {path}: not answered within {PATIENCE:.0f} s")

    async def _once(self, client: Client, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        try:
            async with asyncio.timeout(60.0):
                status, data = await client.send(client.endpoint.encode(method, path, body))
        except (OSError, TimeoutError) as error:
            self.repeated[type(error).__name__] += 1
            client.close()
            await asyncio.sleep(0.5)
            return None
        if status == 503:
            self.repeated["503"] += 1
            await asyncio.sleep(1.0)
            return None
        return status, json.loads(data) if data else None


class Faults:
    """One fault each minute; each kind in turn."""

    def __init__(self, cloud: Apart) -> None:
        self._cloud = cloud
        cluster = cloud.cluster
        kills: list[tuple[str, Callable[[], Any]]] = [
            (f"{name} killed", lambda name=name: self._restart(name))  # type: ignore[misc]
            for name in cluster.processes
            if name not in ("image", "api")
        ]
        self.kinds = [
            *kills,
            ("an API worker killed", self._kill_worker),
            ("broker stopped for a while", lambda: self._still(cloud.rabbitmq.process)),
            ("broker killed", lambda: self._kill_service(cloud.rabbitmq)),
            ("database killed", lambda: self._kill_service(cloud.postgres)),
            ("conductor1 stopped for a while", lambda: self._still(cluster.processes["conductor1"])),
        ]
        self.count: Counter[str] = Counter()

    async def next(self) -> str:
        """Cause a fault, and return its name when all processes run again."""
        name, cause = self.kinds[sum(self.count.values()) % len(self.kinds)]
        self.count[name] += 1
        await cause()
        return name

    async def _restart(self, name: str) -> None:
        await asyncio.to_thread(self._cloud.cluster.kill, name)
        self._cloud.cluster.start(name)

    async def _kill_worker(self) -> None:
        root = self._cloud.cluster.processes["api"].pid
        workers = [pid for _, pid, _ in members({root: "api"}) if pid != root]
        os.kill(random.choice(workers), signal.SIGKILL)

    async def _still(self, process: Any) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(STILL)
        os.kill(process.pid, signal.SIGCONT)

    async def _kill_service(self, service: Any) -> None:
        await asyncio.to_thread(service.kill)
        await asyncio.to_thread(service.restart)


async def sample(cloud: Apart) -> dict[str, float]:
    """Return what must not grow."""
    figures: dict[str, float] = {}
    roots = cloud.roots()
    for name, used in memory(roots)["by_name"].items():
        if name not in ("postgres", "rabbitmq"):  # their caches are theirs to size
            figures[f"memory {name}"] = used["pss_mib"]
    descriptors: Counter[str] = Counter()
    for root, pid, _ in members(roots):
        with contextlib.suppress(OSError):
            descriptors[roots[root]] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    figures |= {f"descriptors {name}": number for name, number in descriptors.items()}
    for name, port in cloud.metrics.items():
        text = await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")
        for found in re.findall(r"^micronova_tasks (\S+)$", text, re.MULTILINE):
            figures[f"tasks {name}"] = float(found)
    lengths = await asyncio.to_thread(
        cloud.rabbitmq.eval,
        'lists:sum([begin {ok, N, _} = rabbit_amqqueue:stat(Q), N end || Q <- rabbit_amqqueue:list(<<"/">>)]).',
    )
    figures["messages in all queues"] = float(re.findall(r"\d+", lengths)[0])
    connection = await asyncpg.connect(cloud.database)
    for (table,) in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        figures[f"rows of {table}"] = float(await connection.fetchval(f'SELECT count(*) FROM "{table}"'))
    await connection.close()
    return figures


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def grown(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Return the figures that grew by more than the tolerance."""
    found = []
    for name, now in last.items():
        before = first.get(name, 0.0)
        floor = next((value for kind, value in FLOORS.items() if name.startswith(kind)), 0.0)
        if now > before * (1 + TOLERANCE) and now - before > floor:
            found.append(f"{name}: {before:.0f} after the first minutes, {now:.0f} at the end")
    return found


async def soak(minutes: int, settle: int) -> list[str]:
    """Run the soak and return what is wrong."""
    cloud = Apart(RETENTION)
    problems: list[str] = []
    try:
        _, target = await start(cloud)
        control = Client(target.endpoint())
        for _ in range(STANDING // 50):
            await control.json("POST", "/servers", target.server("standing", 50))
        control.close()
        load = Load(target)
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        await asyncio.sleep(PEAK_SECONDS)
        peak = load.done / PEAK_SECONDS
        load.rate = peak * LOAD
        progress(f"peak {peak:.1f} servers a second; the load is {load.rate:.1f}")
        faults = Faults(cloud)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        begin, before = time.monotonic(), 0
        for minute in range(1, minutes + 1):
            name = await faults.next()
            await asyncio.sleep(max(0.0, begin + 60 * minute - time.monotonic()))
            last = await sample(cloud)
            if minute == min(settle, minutes):
                first = last
            total = sum(value for key, value in last.items() if key.startswith("memory"))
            progress(
                f"minute {minute}: {name}; {load.done - before} servers, {len(load.errors)} errors, "
                f"{sum(load.repeated.values())} requests repeated, {total:.0f} MiB"
            )
            before = load.done
        load.stopped = True
        await asyncio.gather(*clients)
        await asyncio.sleep(5.0)
        problems += load.errors
        problems += grown(first, last)
        problems += [f"audit: {finding}" for finding in await asyncio.to_thread(cloud.cluster.audit)]
        _show(load, faults, first, last)
    finally:
        cloud.close()
    return problems


def _show(load: Load, faults: Faults, first: Mapping[str, float], last: Mapping[str, float]) -> None:
    print(f"\n{load.done} servers made and deleted, {len(load.errors)} errors")
    print("requests repeated:", ", ".join(f"{number} {name}" for name, number in load.repeated.items()) or "none")
    print("faults:", ", ".join(f"{number} times {name}" for name, number in faults.count.items()))
    print(f"{'':40}{'first':>10}{'end':>10}")
    for name in sorted(last):
        print(f"{name:40}{first.get(name, 0.0):10.0f}{last[name]:10.0f}")


def main() -> int:
    """Run it; exit 0 only if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--settle", type=int, default=5, help="the minutes after which the first figures are taken")
    arguments = parser.parse_args()
    problems = asyncio.run(soak(arguments.minutes, arguments.settle))
    for problem in problems:
        print(f"WRONG  {problem}")
    print("nothing is wrong" if not problems else f"{len(problems)} things are wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

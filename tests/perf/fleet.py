"""What a large fleet costs: `python -m tests.perf.fleet`, or `make bench-fleet`.

Separate processes on PostgreSQL and RabbitMQ, first with a few hosts and no servers, then with many hosts, living and
deleted servers. The hosts are played by `tests/perf/fleet_agents.py`, whose CPU time is not counted. From the CPU time
of every phase we take off what the heartbeats cost meanwhile; they have a row of their own.

On a machine that does other things as well, the same work takes more CPU time while the others use its caches. So reads
are measured in turn with requests for all flavors, which no fleet makes slower, and we compare how many times as much a
read costs. Only the processes that take part in reads are counted. Servers are shown to an administrator of another
project in both clouds: policy has more to decide than for the servers of one's own. Each is on another host, and there
are as many in both clouds. The statements of a read are those that read servers or services, less those that run in the
turns of the flavors, which are of heartbeats.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console
from rich.table import Table

from tests.cluster import Cluster
from tests.perf.client import BenchError, Client, Endpoint
from tests.perf.clouds import UNLIMITED, _get
from tests.perf.fleet_rows import Filler
from tests.perf.phases import Bench, Sizes, Target, progress
from tests.perf.processes import cpu_seconds
from tests.services.postgres import Postgres
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

PATIENCE = 300.0
GOAL_CORES = 0.5
GOAL_RATIO = 1.2
PER_GENERATOR = 5_000  # hosts that one process plays
ROUNDS = 8  # in which reads and requests for the flavors take turns
READERS = ("api", "postgres")  # the processes that take part in reads
MOST_SHOWN = 100  # servers
STATEMENTS = r"SELECT sum(calls) FROM pg_stat_statements WHERE query ~ '^SELECT .*\sFROM (instances|services)'"


class Fleet:
    """The control plane, and the processes that play the hosts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.place = Path(tempfile.mkdtemp(prefix="micronova-fleet-"))
        self.place.chmod(0o755)  # the user postgres has to get through
        self.generators: list[subprocess.Popen[str]] = []
        self.agents: list[dict[str, Any]] = []  # what the generators said at their end
        self.postgres = Postgres.start(self.place / "postgres", durable=True, counts_statements=True)
        try:
            self.rabbitmq = RabbitMQ.start(self.place / "rabbitmq")
        except BaseException:
            self.postgres.stop()
            raise
        self.database = self.postgres.create_database("micronova")
        self.images = f"http://127.0.0.1:{free_port()}/image"
        self.cluster = Cluster(
            self.place / "cloud",
            self.database,
            self.rabbitmq.url,
            default={
                "report_interval": 5.0,
                "service_down_time": arguments.down_time,
                "log_level": "WARNING",
            },
            conductor={"lease": max(20.0, arguments.down_time), "sweep_interval": 2.0},
            api={"workers": 2},
            quota=UNLIMITED,
            glance={"endpoint_override": self.images},
        )
        port = self.images.rpartition(":")[2].partition("/")[0]
        self.cluster.add("image", "image", MICRONOVA__API__PORT=port, MICRONOVA__API__WORKERS="1")
        self.cluster.add("api", "api")
        for number in (1, 2):
            for role in ("conductor", "scheduler"):
                self.cluster.add(f"{role}{number}", role, MICRONOVA__DEFAULT__HOST=f"{role}{number}")
        self.cluster.add("late", "scheduler", MICRONOVA__DEFAULT__HOST="late")

    def start(self) -> None:
        """Start the control plane."""
        self.cluster.start("image", "api", "conductor1", "conductor2", "scheduler1", "scheduler2")

    def play(self, first: int, last: int) -> None:
        """Play hosts, and return when each has had a reply."""
        started = []
        for begin in range(first, last, PER_GENERATOR):
            command = [sys.executable, "-m", "tests.perf.fleet_agents", "--url", self.rabbitmq.url]
            command += ["--first", str(begin), "--last", str(min(begin + PER_GENERATOR, last))]
            command += ["--open", str(self.arguments.open)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        self.generators += started
        for generator in started:
            assert generator.stdout is not None
            if not generator.stdout.readline():
                raise BenchError("the hosts did not come up")

    def roots(self) -> dict[int, str]:
        """Return the processes of the control plane, by role."""
        assert self.postgres.process is not None and self.rabbitmq.process is not None
        ours = {pid: name.rstrip("12") for pid, name in self.cluster.pids().items() if name != "late"}
        return ours | {self.postgres.process.pid: "postgres", self.rabbitmq.process.pid: "rabbitmq"}

    async def target(self) -> Target:
        """Wait until the API answers, and return what to boot."""
        url, token = f"http://127.0.0.1:{self.cluster.port}/compute", "admin:admin"
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                image = (await _get(self.images, token, "/v2/images"))["images"][0]["id"]
                await _get(url, token, "/v2.1/flavors/1")
                break
            except (OSError, LookupError, IndexError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        return Target(url=f"{url}/v2.1", token=token, image=image, floor=url, roots=self.roots())

    async def on_different_hosts(self, condition: str, most: int) -> list[str]:
        """Return servers that meet a condition, at most so many and at most one of each host."""
        connection = await asyncpg.connect(self.database)
        try:
            rows = await connection.fetch(
                f"SELECT DISTINCT ON (host) uuid FROM instances WHERE host IS NOT NULL AND {condition}"
            )
        finally:
            await connection.close()
        found = sorted(row["uuid"] for row in rows)
        return random.Random(1).sample(found, min(most, len(found)))

    async def statements(self) -> int:
        """Return how many statements that read servers or services the database has run."""
        connection = await asyncpg.connect(self.database)
        try:
            return int(await connection.fetchval(STATEMENTS))
        finally:
            await connection.close()

    def close(self) -> None:
        """Stop everything and remove it."""
        for generator in self.generators:
            generator.terminate()
        for generator in self.generators:
            try:
                said, _ = generator.communicate(timeout=60)
                if said:
                    self.agents.append(json.loads(said.splitlines()[-1]))
            except subprocess.TimeoutExpired:
                generator.kill()
                generator.wait()
        self.cluster.stop()
        self.rabbitmq.stop()
        self.postgres.stop()
        if not self.arguments.keep:
            shutil.rmtree(self.place, ignore_errors=True)


class Phases:
    """The phases, against one cloud."""

    def __init__(self, fleet: Fleet, target: Target, shown: list[str]) -> None:
        self.fleet, self.target, self.shown = fleet, target, shown
        self.sizes = Sizes(servers=fleet.arguments.boots, seconds=fleet.arguments.seconds / 6)
        self.bench = Bench(target, self.sizes)
        self.turns = Bench(target, Sizes(seconds=self.sizes.seconds / ROUNDS))
        self.page = min(100, self.sizes.servers)  # so many servers follow the marker in an empty cloud, too
        self.idle: dict[str, float] = {}

    async def run(self) -> dict[str, Any]:
        """Measure everything and return the figures."""
        figures: dict[str, Any] = {"heartbeats": await self.heartbeats()}
        await self.bench.boot()  # warms up: connections, compiled statements
        figures["boot"] = await self._measure("boot", self.bench.boot, lambda found: self.sizes.servers)
        servers = self.shown or await self.fleet.on_different_hosts(
            f"display_name LIKE '{self.bench.prefix}%'", MOST_SHOWN
        )
        figures["shown"] = len(servers)
        other = Endpoint(self.target.url, {"X-Auth-Token": "admin:other", "OpenStack-API-Version": "compute 2.90"})
        figures["show"] = await self._read("show", other, *(f"/servers/{server}" for server in servers))
        own = self.bench.endpoint
        figures["list"] = await self._read("list", own, f"/servers/detail?limit={self.page}&name=^{self.bench.prefix}")
        listed = self.shown or await self.bench._ids(self.bench.prefix)  # the newest first
        middle = listed[len(listed) // 2]
        deep = f"/servers/detail?all_tenants=1&limit={self.page}&marker={middle}"
        figures["deep"] = await self._read("deep", own, deep)
        figures["delete"] = await self._measure("delete", self.bench.delete, lambda found: found["servers"])
        figures["scheduler"] = await self.scheduler_start()
        figures["problems"] = self.bench.problems
        return figures

    async def heartbeats(self) -> dict[str, Any]:
        """Ask nothing for a while: only the heartbeats cost something."""
        before, begin = cpu_seconds(self.target.roots), time.perf_counter()
        await asyncio.sleep(self.fleet.arguments.seconds)
        seconds, after = time.perf_counter() - begin, cpu_seconds(self.target.roots)
        self.idle = {name: (after[name] - before[name]) / seconds for name in after}
        progress("heartbeats: " + ", ".join(f"{name} {cores:.3f}" for name, cores in self.idle.items()) + " cores")
        return {"cores": sum(self.idle.values()), "by_name": self.idle}

    async def _measure(
        self, name: str, phase: Callable[[], Awaitable[dict[str, Any]]], count: Callable[[dict[str, Any]], int]
    ) -> dict[str, Any]:
        before, begin = cpu_seconds(self.target.roots), time.perf_counter()
        found = await phase()
        seconds, after = time.perf_counter() - begin, cpu_seconds(self.target.roots)
        number = count(found)
        each = {
            process: (after[process] - before[process] - self.idle[process] * seconds) * 1000 / number
            for process in after
        }
        figures = {"cpu_ms": sum(each.values()), "per_s": number / seconds, "by_name": each}
        shown = ", ".join(f"{process} {ms:.2f}" for process, ms in each.items())
        progress(f"{name}: {figures['per_s']:.1f}/s, {figures['cpu_ms']:.2f} ms CPU each ({shown})")
        return figures

    async def _read(self, name: str, endpoint: Endpoint, *paths: str) -> dict[str, Any]:
        """Measure reads and requests for the flavors in turn."""
        requests = [endpoint.encode("GET", path) for path in paths]
        flavors = [endpoint.encode("GET", "/flavors/detail")]
        spent, number = {"read": 0.0, "flavors": 0.0}, {"read": 0, "flavors": 0}
        statements, took = {"read": 0, "flavors": 0}, {"read": 0.0, "flavors": 0.0}
        by_name = dict.fromkeys(READERS, 0.0)
        for turn in range(ROUNDS + 1):
            for kind, sent in (("flavors", flavors), ("read", requests)):
                earlier = await self.fleet.statements()
                before, begin = cpu_seconds(self.target.roots), time.perf_counter()
                found = await self.turns._hammer(sent)
                seconds, after = time.perf_counter() - begin, cpu_seconds(self.target.roots)
                if turn:  # the first one warms up
                    cost = {name: after[name] - before[name] - self.idle[name] * seconds for name in READERS}
                    spent[kind] += sum(cost.values())
                    if kind == "read":
                        by_name = {name: by_name[name] + cost[name] for name in READERS}
                    number[kind] += found["n"]
                    statements[kind] += await self.fleet.statements() - earlier
                    took[kind] += seconds
        each, unit = (spent[kind] * 1000 / number[kind] for kind in ("read", "flavors"))
        of_others = statements["flavors"] * took["read"] / took["flavors"]
        statements_each = (statements["read"] - of_others) / number["read"]
        shown = ", ".join(f"{process} {seconds * 1000 / number['read']:.2f}" for process, seconds in by_name.items())
        progress(
            f"{name}: {each:.2f} ms CPU ({shown}) and {statements_each:.2f} statements each, {each / unit:.2f} times"
            f" the flavors ({unit:.2f} ms)"
        )
        return {"cpu_ms": each, "flavors_ms": unit, "times_flavors": each / unit, "statements": statements_each}

    async def scheduler_start(self) -> dict[str, Any]:
        """Start one more scheduler, and wait until it has read all hosts."""
        control, begin = Client(self.bench.endpoint), time.perf_counter()
        self.fleet.cluster.start("late")
        pid = self.fleet.cluster.processes["late"].pid
        while True:
            found = await control.json("GET", "/os-services?binary=nova-scheduler&host=late")
            if any(service["state"] == "up" for service in found["services"]):
                break
            if time.perf_counter() - begin > PATIENCE:
                raise BenchError("the scheduler did not start")
            await asyncio.sleep(0.02)
        figures = {"seconds": time.perf_counter() - begin, "cpu_s": sum(cpu_seconds({pid: "late"}).values())}
        self.fleet.cluster.kill("late")
        await control.json("DELETE", f"/os-services/{found['services'][0]['id']}")
        control.close()
        progress(f"scheduler start: {figures['seconds']:.2f} s, {figures['cpu_s']:.2f} s CPU")
        return figures


async def fill(fleet: Fleet, target: Target) -> None:
    """Add hosts, living and deleted servers."""
    arguments = fleet.arguments
    bench = Bench(target, Sizes())
    server = (await bench._control.json("POST", "/servers", target.server("template")))["server"]["id"]
    await bench.active(server, time.perf_counter())
    if bench.problems:
        raise BenchError(f"the template: {bench.problems}")
    connection = await asyncpg.connect(fleet.database)
    try:
        filler = Filler(connection, server)
        begin = time.perf_counter()
        await filler.hosts(arguments.open, arguments.agents)
        await filler.living(arguments.living)
        progress(f"{arguments.living} living servers after {time.perf_counter() - begin:.0f} s")
        await filler.deleted(arguments.deleted)
        await filler.vacuum()
        progress(f"{arguments.deleted} deleted servers after {time.perf_counter() - begin:.0f} s")
    finally:
        await connection.close()


def show(empty: dict[str, Any], full: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Print the figures beside each other; return the goals that are missed."""
    table = Table(title=f"{arguments.agents} hosts, {arguments.living} living and {arguments.deleted} deleted servers")
    for column in ("", f"empty, {arguments.open} hosts", "full", "ratio", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    missed = []
    cores = full["heartbeats"]["cores"]
    good = cores <= GOAL_CORES
    table.add_row(
        "heartbeats alone: cores",
        f"{empty['heartbeats']['cores']:.3f}",
        f"{cores:.3f}",
        "",
        f"at most {GOAL_CORES}: {'held' if good else 'missed'}",
    )
    if not good:
        missed.append(f"heartbeats cost {cores:.2f} cores")
    rows = (
        ("boot: ms CPU", "boot", "cpu_ms", True),
        ("boot: servers/s", "boot", "per_s", False),
        ("show: ms CPU", "show", "cpu_ms", False),
        ("show: times the flavors", "show", "times_flavors", True),
        ("show: servers, each on another host", "shown", "", False),
        ("show: statements", "show", "statements", False),
        ("a page of the own project: ms CPU", "list", "cpu_ms", False),
        ("a page of the own project: times the flavors", "list", "times_flavors", True),
        ("a page in the middle of all: ms CPU", "deep", "cpu_ms", False),
        ("a page in the middle of all: times the flavors", "deep", "times_flavors", True),
        ("delete: ms CPU", "delete", "cpu_ms", False),
        ("scheduler start: s CPU", "scheduler", "cpu_s", False),
        ("scheduler start: s", "scheduler", "seconds", False),
    )
    for words, phase, name, has_goal in rows:
        before, after = (found[phase][name] if name else found[phase] for found in (empty, full))
        ratio, goal = after / before, ""
        if has_goal:
            held = ratio <= GOAL_RATIO
            goal = f"at most {GOAL_RATIO}: {'held' if held else 'missed'}"
            if not held:
                missed.append(f"{words}: {ratio:.2f} times")
        table.add_row(words, f"{before:.2f}", f"{after:.2f}", f"{ratio:.2f}", goal)
    Console(width=130).print(table)
    return missed


async def main() -> int:
    """Measure; exit 0 only if every server came to be what it should and the goals are held."""
    arguments = _arguments()
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)  # our processes are stopped, too
    fleet = Fleet(arguments)
    try:
        fleet.start()
        target = await fleet.target()
        progress(f"--- empty: {arguments.open} hosts")
        await asyncio.to_thread(fleet.play, 0, arguments.open)
        empty = await Phases(fleet, target, []).run()
        progress(f"--- full: {arguments.agents} hosts, {arguments.living} living, {arguments.deleted} deleted servers")
        await fill(fleet, target)
        shown = await fleet.on_different_hosts("project_id LIKE 'fleet%'", empty["shown"])
        await asyncio.to_thread(fleet.play, arguments.open, arguments.agents)
        progress("all hosts have had a reply")
        await asyncio.sleep(arguments.down_time / 2)  # until all hosts send heartbeats in the longer interval
        full = await Phases(fleet, target, shown).run()
    except BaseException:
        for name in fleet.cluster.processes:
            print(f"--- {name}\n{fleet.cluster.log(name)[-2000:]}", file=sys.stderr)
        raise
    finally:
        fleet.close()
    progress(f"agents: {fleet.agents}")
    missed = show(empty, full, arguments)
    problems = [*empty["problems"], *full["problems"], *missed]
    if any(each["unanswered"] for each in fleet.agents):
        problems.append(f"heartbeats without a reply: {sum(each['unanswered'] for each in fleet.agents)}")
    for problem in problems:
        print(problem)
    if arguments.json:
        document = {"loadavg": os.getloadavg(), "agents": fleet.agents, "empty": empty, "full": full}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=10_000, help="hosts, each with a heartbeat of its own")
    parser.add_argument("--open", type=int, default=100, help="hosts that take servers; the others are full")
    parser.add_argument("--living", type=int, default=99_000, help="servers that exist")
    parser.add_argument("--deleted", type=int, default=1_000_000, help="servers that were deleted")
    parser.add_argument("--boots", type=int, default=200, help="servers to boot")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long heartbeats are measured; lists a sixth")
    parser.add_argument("--down-time", type=float, default=60.0, help="service_down_time, as Nova has it by default")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

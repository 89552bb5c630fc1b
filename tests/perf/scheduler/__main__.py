"""How the scheduler scales, beside Nova's own code on the same fleet: `make bench-scheduler`.

    python -m tests.perf.scheduler [--hosts 100 1000 10000 100000] [--nova PYTHON | --without-nova] [--nova-hosts 10000]

For each fleet: decisions with few filters concerned (`plain`), with all default ones (`rich`), with all filters and
weighers there are (`all`) and with NUMA nodes and dedicated CPUs (`numa`); servers of one large request; memory; the
start of a scheduler from SQLite, and from PostgreSQL if it is installed; and Nova's decisions. Nova decides about
fleets of up to 10,000 hosts: larger ones take it minutes. PYTHON is that of an environment with Nova; without it, Nova
is installed into a temporary one. Times of decisions are CPU time; a start has both, of which CPU time is compared with
the goal, because other programs may be running.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from micronova.cli.private_services.process import ServiceError
from tests.nova_schemas.__main__ import NOVA, nova_environment
from tests.perf.scheduler import fleet, rows
from tests.services.postgres import Postgres

TIMES = "\N{MULTIPLICATION SIGN}"
GOALS = {"plain": 1.0, "rich": 1.0, "all": 3.0}  # milliseconds at GOAL_HOSTS
GOAL_HOSTS, GOAL_RATIO, GOAL_START = 10_000, 500.0, 2.0

Figures = dict[str, Any]


class Run:
    """One run: its progress, and what was measured."""

    def __init__(self, place: Path, nova: str | None, nova_hosts: int, progress: Progress) -> None:
        self._place = place
        self._nova = nova
        self._nova_hosts = nova_hosts
        self._progress = progress
        self._task = progress.add_task("")
        self.figures: dict[int, Figures] = {}

    def measure(self, hosts: int) -> None:
        """Measure one fleet: ours, then Nova."""
        url = f"sqlite:///{self._place}/fleet-{hosts}.db"
        self._fill(url, hosts)
        found = self._run(sys.executable, "-m", "tests.perf.scheduler.ours", url, *fleet.KINDS)
        if hosts == GOAL_HOSTS:
            found["postgresql"] = self._start_on_postgresql(hosts)
        if self._nova is not None and hosts <= self._nova_hosts:
            nova = ("-W", "ignore", "-m", "tests.perf.scheduler.nova_side", str(hosts))
            found["nova"] = self._run(self._nova, *nova)
        self.figures[hosts] = found

    def _fill(self, url: str, hosts: int) -> None:
        self._say(f"{hosts:,} hosts: rows of the database", total=hosts)
        asyncio.run(rows.fill(url, hosts, lambda done: self._progress.update(self._task, completed=done)))

    def _start_on_postgresql(self, hosts: int) -> Figures | None:
        try:
            with _postgresql() as server:
                url = server.create_database("fleet")
                self._fill(url, hosts)
                server.sql("ANALYZE", "fleet")
                return self._run(sys.executable, "-m", "tests.perf.scheduler.ours", url)
        except ServiceError as error:
            self._progress.console.print(f"Without PostgreSQL: {error}")
            return None

    def _run(self, *command: str) -> Figures:
        """Run a process that says on stderr what it does, and prints figures."""
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " hosts: " in line:
                    self._say(line.strip())
            if process.wait():
                sys.exit("".join(lines))
            out.seek(0)
            found: Figures = json.load(out)
            return found

    def _say(self, text: str, total: int | None = None) -> None:
        self._progress.reset(self._task, total=total, description=text)
        if not self._progress.console.is_terminal:
            self._progress.console.print(text)


@contextmanager
def _postgresql() -> Iterator[Postgres]:
    """Start a private server; its user needs a directory that it can reach."""
    with tempfile.TemporaryDirectory(prefix="micronova-bench-", dir="/tmp") as place:
        Path(place).chmod(0o755)
        server = Postgres.start(Path(place) / "postgres")
        try:
            yield server
        finally:
            server.stop()


def show(figures: dict[int, Figures], console: Console) -> None:
    """Print the figures as tables."""
    decisions = Table(title="One decision, ms of CPU; first: the slowest of the first of each request", **_TITLE)
    for title in ("hosts", "request", "p50", "p99", "first", "decisions/s", f"servers/s, {1000:,} in one request"):
        decisions.add_column(title, justify="left" if title == "request" else "right")
    for title in (f"Nova {NOVA}, p50", TIMES, f"{TIMES}, large request"):
        decisions.add_column(title, justify="right", style="bold" if title == TIMES else None)
    for hosts, found in figures.items():
        for kind in fleet.KINDS:
            ours, nova = found[kind], found.get("nova", {}).get(kind)
            bulk = ours["bulk_per_s"]
            cells = [f"{hosts:,}", kind, *(_number(ours[name]) for name in ("p50", "p99", "first", "per_s"))]
            cells.append(_number(bulk) if bulk else "no room")
            if nova is not None:
                cells += [_number(nova["p50"]), _number(nova["p50"] / ours["p50"])]
                cells.append(_number(nova["p50"] * bulk / 1000) if bulk else "")
            decisions.add_row(*cells)
        decisions.add_section()
    console.print(decisions)
    others = Table(title="The table of hosts", **_TITLE)
    starts = ("start from SQLite, s (CPU)", "start from PostgreSQL, s (CPU)")
    for title in ("hosts", "memory, MiB", *starts, "100 changed hosts, ms"):
        others.add_column(title, justify="right")
    for hosts, found in figures.items():
        cells = [_number(found["memory_mib"]), _start(found), _start(found.get("postgresql"))]
        others.add_row(f"{hosts:,}", *cells, _number(found["changes_ms"]))
    console.print(others)


def _start(found: Figures | None) -> str:
    return f"{_number(found['start_s'])} ({_number(found['start_cpu_s'])})" if found else ""


_TITLE: dict[str, Any] = {"title_justify": "left"}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def missed(figures: dict[int, Figures]) -> list[str]:
    """Return the goals that were missed."""
    found = figures.get(GOAL_HOSTS)
    if found is None:
        return []
    lines = []
    for kind, goal in GOALS.items():
        if found[kind]["p50"] >= goal:
            lines.append(f"{kind}: p50 {found[kind]['p50']:.2f} ms, the goal is below {goal:g} ms")
        nova = found.get("nova", {}).get(kind)
        if nova is not None and nova["p50"] / found[kind]["p50"] < GOAL_RATIO:
            lines.append(f"{kind}: {nova['p50'] / found[kind]['p50']:.0f} {TIMES} Nova, the goal is {GOAL_RATIO:.0f}")
    starts = {"SQLite": found, "PostgreSQL": found.get("postgresql") or {"start_cpu_s": 0.0}}
    lines += [
        f"start from {name}: {each['start_cpu_s']:.1f} s of CPU, the goal is {GOAL_START:g} s"
        for name, each in starts.items()
        if each["start_cpu_s"] > GOAL_START
    ]
    return lines


def main(hosts: Sequence[int], python: str | None, nova_hosts: int) -> int:
    """Measure all fleets and print the figures; return whether a goal was missed."""
    console, begin = Console(width=None if Console().is_terminal else 150), time.monotonic()
    load = os.getloadavg()[0]
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory(prefix="micronova-bench-") as place,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        run = Run(Path(place), python, nova_hosts, progress)
        for count in hosts:
            run.measure(count)
    show(run.figures, console)
    after = os.getloadavg()[0]
    console.print(f"{time.monotonic() - begin:.0f} s; load of the machine {load:.1f} before, {after:.1f} after")
    problems = missed(run.figures)
    for line in problems:
        console.print(f"[red]missed: {line}")
    return len(problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.perf.scheduler")
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], help="Sizes of fleets.")
    parser.add_argument("--nova", metavar="PYTHON", help="Python of an environment with Nova.")
    parser.add_argument("--without-nova", action="store_true", help="Measure only ours.")
    parser.add_argument("--nova-hosts", type=int, default=10_000, help="The largest fleet for Nova.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nova-") as place:
        python = None if given.without_nova else given.nova or nova_environment(place)
        sys.exit(main(given.hosts, python, given.nova_hosts) != 0)

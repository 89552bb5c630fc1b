"""`micronova status`: what runs in a cloud, counted, with the services that are down named."""

import importlib.metadata
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import sqlalchemy as sa

from micronova.cli.state import StateDirectory, ask, default_directory

if TYPE_CHECKING:
    from micronova.cli.wiring import Process

NAMED = 20  # services of one state that are named; a region may have thousands


def status(directory: Path | None, as_json: bool) -> None:
    """Print the state of the cloud that runs in DIR."""
    found = ask(StateDirectory(directory or default_directory()).control, "/status")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    for line in summarise(found):
        click.echo(line)


def summarise(found: dict[str, Any]) -> list[str]:
    """Return the lines that a person reads: services are counted by state, and those that are not up are named."""
    lines = [f"Micronova {found['version']}, process {found['pid']}, {found['memory_mib']} MiB"]
    services = found["services"]
    for binary in sorted({row["binary"] for row in services}):
        states = Counter(row["state"] for row in services if row["binary"] == binary)
        counts = ", ".join(f"{states[state]} {state}" for state in ("up", "down", "disabled") if states[state])
        lines.append(f"  {binary:<16} {counts}")
    for state in ("down", "disabled"):
        rows = [row for row in services if row["state"] == state]
        if rows:
            lines.append(f"{state}:")
        lines += [
            f"  {row['binary']:<16} {row['host']}, last seen {time_span(row['seconds_ago'])} ago"
            for row in rows[:NAMED]
        ]
        if len(rows) > NAMED:
            lines.append(f"  and {len(rows) - NAMED} more: micronova status --json lists all")
    counts = ", ".join(f"{number} {name}" for name, number in sorted(found["servers"].items()))
    lines.append(f"servers: {counts or 'none'}")
    operations, bus = found["operations"], found["bus"]
    stuck = operations["without_valid_lease"]
    lines.append(f"operations: {operations['open']} open, {stuck or 'none'} stuck (without a valid lease)")
    lines += _jobs(found["periodic_jobs"])
    if bus["connected"]:
        lines.append(f"bus: connected for {time_span(bus['connected_seconds'])}, {bus['dead_letters']} dead letters")
    else:
        lines.append("bus: NOT connected")
    if bus["blocked"]:
        lines.append(
            f"bus: BLOCKED by the broker for {time_span(bus['blocked_seconds'])} ({bus['blocked']}): "
            "no messages are sent; free memory or disk space at the broker"
        )
    return lines


def _jobs(jobs: list[dict[str, Any]]) -> list[str]:
    """Return a line for each periodic job."""
    lines = ["periodic jobs:"] if jobs else []
    return lines + [
        job_line(each["name"], each["began_seconds_ago"], each["ended_seconds_ago"], each["error"]) for each in jobs
    ]


def job_line(name: str, began: float | None, ended: float | None, error: str) -> str:
    """Return the line of a periodic job, by the seconds since its last run began and ended."""
    if began is None:
        last = "never ran"
    elif ended is None:
        last = f"begun {time_span(began)} ago, not ended"
    else:
        last = f"last run {time_span(ended)} ago, took {time_span(began - ended)}"
    return f"  {name:<18} {last}" + (f", FAILED: {error}" if error else "")


def time_span(seconds: float) -> str:
    """Return a number of seconds as a person says it: 90 s, 3 min, 2 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


async def collect_status(process: "Process") -> dict[str, Any]:
    """Return what `micronova status --json` prints."""
    assert process.database is not None and process.bus is not None
    now = process.clock.now()
    found = await process.database.read(_read_status, now, process.settings.default.service_down_time)
    stats = await process.bus.probe()
    broker = stats.broker
    return {
        "version": importlib.metadata.version("micronova"),
        "pid": os.getpid(),
        "roles": process.roles,
        "memory_mib": _memory(),
        **found,
        "bus": {
            "connected": broker.connected,
            "connected_seconds": round(process.clock.now() - broker.connected_since, 1)
            if broker.connected_since
            else None,
            "blocked": broker.blocked_reason,
            "blocked_seconds": round(process.clock.now() - broker.blocked_since, 1) if broker.blocked_since else None,
            "dead_letters": broker.dead_letters,
            "sent": sum(stats.sent.values()),
        },
    }


def _memory() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) // 1024
    return 0


def _read_status(conn: sa.Connection, now: float, down_time: float) -> dict[str, Any]:
    from micronova.db import periodic_jobs, services
    from micronova.db.tables import instances, operations
    from micronova.objects.clock import micros
    from micronova.objects.states import status as status_of

    at = micros(now)
    servers: Counter[str] = Counter()
    by_state = sa.select(instances.c.vm_state, instances.c.task_state, sa.func.count()).group_by(
        instances.c.vm_state, instances.c.task_state
    )
    for vm_state, task_state, number in conn.execute(by_state):
        servers[status_of(vm_state, task_state)] += number
    still_open = operations.c.finished_at.is_(None)
    unleased = sa.select(sa.func.count()).where(still_open, operations.c.lease_until < at)
    return {
        "services": [
            {
                "binary": row.binary,
                "host": row.host,
                "state": "disabled" if row.disabled else "up" if services.is_up(row, at, down_time) else "down",
                "seconds_ago": round(now - row.last_seen_at / 1e6, 1),
            }
            for row in services.list_(conn)
        ],
        "servers": dict(servers),
        "periodic_jobs": [
            {
                "name": row.name,
                "began_seconds_ago": None if row.began_at is None else round(now - row.began_at / 1e6, 1),
                "ended_seconds_ago": None if row.ended_at is None else round(now - row.ended_at / 1e6, 1),
                "error": row.error or "",
            }
            for row in periodic_jobs.list_(conn)
        ],
        "operations": {
            "open": conn.execute(sa.select(sa.func.count()).where(still_open)).scalar_one(),
            "without_valid_lease": conn.execute(unleased).scalar_one(),
        },
    }

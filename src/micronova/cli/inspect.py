"""Commands that look: status, audit, timeline. They ask the running cloud, or the database and the bus."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import sqlalchemy as sa

from micronova.cli.state import StateDirectory, ask, default_directory
from micronova.conf.settings import load
from micronova.objects.errors import NotFound

if TYPE_CHECKING:
    from micronova.cli.wiring import Process


def status(directory: Path | None, as_json: bool) -> None:
    """Show the running cloud's state."""
    found = ask(StateDirectory(directory or default_directory()).control, "/status")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Micronova {found['version']} (process {found['pid']}, {found['memory_mib']} MiB)")
    for name in ("service", "host", "state", "seen"):
        table.add_column(name)
    for row in found["services"]:
        table.add_row(row["binary"], row["host"], row["state"], f"{row['seconds_ago']:.0f} s ago")
    console.print(table)
    counts = ", ".join(f"{number} {state}" for state, number in found["servers"].items()) or "none"
    console.print(f"servers: {counts}")
    console.print(
        f"open operations: {found['operations']['open']} (without an owner: {found['operations']['waiting']})"
    )
    bus = found["bus"]
    console.print(f"bus: {'connected' if bus['connected'] else 'NOT connected'}, dead letters: {bus['dead_letters']}")


async def collect_status(process: "Process") -> dict[str, Any]:
    """Return what `micronova status` shows."""
    import importlib.metadata
    import os

    assert process.database is not None and process.bus is not None
    now = process.clock.now()
    found = await process.database.read(_status, now, process.settings.default.service_down_time)
    dead = await process.bus.count_dead_letters()
    stats = process.bus.stats()
    return {
        "version": importlib.metadata.version("micronova"),
        "pid": os.getpid(),
        "roles": process.roles,
        "memory_mib": _memory(),
        **found,
        "bus": {"connected": stats.connected, "dead_letters": dead, "sent": sum(stats.sent.values())},
    }


def _memory() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) // 1024
    return 0


def _status(conn: sa.Connection, now: float, down_time: float) -> dict[str, Any]:
    from micronova.compute.states import status as shown
    from micronova.db import services
    from micronova.db.tables import instances, operations

    counted: dict[str, int] = {}
    by_state = sa.select(instances.c.vm_state, instances.c.task_state, sa.func.count()).group_by(
        instances.c.vm_state, instances.c.task_state
    )
    for vm_state, task_state, number in conn.execute(by_state):
        name = shown(vm_state, task_state)
        counted[name] = counted.get(name, 0) + number
    still_open = operations.c.finished_at.is_(None)
    waiting = sa.select(sa.func.count()).where(still_open, operations.c.lease_until < int(now * 1e6))
    return {
        "services": [
            {
                "binary": row.binary,
                "host": row.host,
                "state": "disabled" if row.disabled else "up" if now - row.last_seen_at / 1e6 < down_time else "down",
                "seconds_ago": round(now - row.last_seen_at / 1e6, 1),
            }
            for row in services.list_(conn)
        ],
        "servers": counted,
        "operations": {
            "open": conn.execute(sa.select(sa.func.count()).where(still_open)).scalar_one(),
            "waiting": conn.execute(waiting).scalar_one(),
        },
    }


def audit(directory: Path | None, config: Path | None, as_json: bool) -> int:
    """Print the findings; return 0 only when there are none."""
    if config is None:
        findings = ask(StateDirectory(directory or default_directory()).control, "/audit")
    else:
        findings = _apart(config, directory, run_audit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    elif not findings:
        click.echo("nothing is wrong")
    else:
        for found in findings:
            click.echo(f"{found['kind']:<12} {found['subject']}  {found['message']}")
    return 1 if findings else 0


async def run_audit(process: "Process") -> list[dict[str, Any]]:
    """Audit with what a process has."""
    from micronova.compute.rpcapi import ComputeAPI
    from micronova.conductor.audit import audit as compare

    assert process.database is not None and process.bus is not None
    findings = await compare(
        process.database,
        ComputeAPI(process.bus),
        process.clock,
        service_down_time=process.settings.default.service_down_time,
        ports=process.neighbours.networks(),
    )
    builtins: list[dict[str, Any]] = msgspec.to_builtins(findings)
    return builtins


def _apart(config: Path, directory: Path | None, work: Callable[["Process"], Awaitable[Any]]) -> Any:
    """Connect to the database and the bus of a cloud of many processes, and do something."""
    from micronova.cli.wiring import Process

    settings = load(config)

    async def main() -> Any:
        place = StateDirectory(directory or Path(settings.default.state_path or default_directory()))
        place.create()
        process = Process(settings, ["conductor"], place)
        process.keys = place.keys()
        try:
            await process.connect()
            return await work(process)
        finally:
            await process.stop()

    return asyncio.run(main())


def timeline(server: str, directory: Path | None, config: Path | None) -> None:
    """Draw a server's boot as a waterfall."""
    if config is None:
        from urllib.parse import quote

        found = ask(StateDirectory(directory or default_directory()).control, f"/timeline?server={quote(server)}")
    else:

        async def read(process: "Process") -> Any:
            assert process.database is not None
            return await process.database.read(find_timeline, server)

        found = _apart(config, directory, read)
    from micronova.cli.waterfall import draw

    draw(found)


def find_timeline(conn: sa.Connection, server: str) -> dict[str, Any]:
    """Return a server's actions with their events and the steps of their operations."""
    from micronova.db.tables import deleted_instances, instance_action_events, instance_actions, instances, operations

    row = None
    for table in (instances, deleted_instances):
        query = sa.select(table).where(sa.or_(table.c.uuid == server, table.c.display_name == server))
        row = row or conn.execute(query.order_by(table.c.created_at.desc())).mappings().first()
    if row is None:
        raise NotFound(f"There is no server {server}.")
    actions = conn.execute(
        sa.select(instance_actions)
        .where(instance_actions.c.instance_uuid == row["uuid"])
        .order_by(instance_actions.c.start_time)
    ).mappings()
    events = conn.execute(
        sa.select(instance_action_events)
        .where(instance_action_events.c.instance_uuid == row["uuid"])
        .order_by(instance_action_events.c.start_time)
    ).mappings()
    return {
        "server": {
            "uuid": row["uuid"],
            "name": row["display_name"],
            "created_at": row["created_at"],
            "launched_at": row["launched_at"],
            "host": row["host"],
            "fault": row["fault"],
        },
        "actions": [dict(each) for each in actions],
        "events": [dict(each) for each in events],
        "operations": [
            _operation(each)
            for each in conn.execute(
                sa.select(operations).where(operations.c.instance_uuid == row["uuid"]).order_by(operations.c.created_at)
            ).mappings()
        ],
    }


def _operation(row: sa.RowMapping) -> dict[str, Any]:
    """Return of an operation what tells how it went; those that ended long ago are gone."""
    from micronova.conductor.build_payload import BuildPayload
    from micronova.rpc.contract import Context

    build = msgspec.msgpack.decode(row["payload"], type=BuildPayload) if row["kind"] == "build" else None
    return {
        "request_id": msgspec.msgpack.decode(row["context"], type=Context).request_id,
        "kind": row["kind"],
        "created_at": row["created_at"],
        "finished_at": row["finished_at"],
        "result": row["result"],
        "attempts": [msgspec.structs.asdict(attempt) for attempt in build.attempts] if build is not None else [],
        "explanation": row["explanation"],
    }

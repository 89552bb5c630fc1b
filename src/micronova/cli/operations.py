"""`micronova operation` and `micronova quota`: look at durable work, and repair what does not go on by itself."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from micronova.cli.maintain import with_database, with_process
from micronova.cli.status import time_span
from micronova.conf.settings import Settings
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import NotFound
from micronova.objects.operations import OperationRow, Payload

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.operation_repair import Listed

_COLUMNS = "{id:<38}{kind:<16}{step:<12}{owner:<26}{age:>8}  {next:<18}server"


def list_operations(
    directory: Path | None, config: Path | None, *, kind: str, server: str, owner: str, limit: int, as_json: bool
) -> None:
    """Print the open operations, the oldest first."""
    from micronova.db import operation_repair

    async def work(database: Database, process: "Process") -> None:
        found, total = await database.read(operation_repair.list_open, limit, kind=kind, server=server, owner=owner)
        now = micros(process.clock.now())
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode([_as_data(each) for each in found]), indent=2).decode())
            return
        if not found:
            click.echo("No operation is open.")
            return
        click.echo(_COLUMNS.format(id="id", kind="kind", step="step", owner="owner", age="age", next="next attempt"))
        for row, name in found:
            age, attempt = time_span((now - row["created_at"]) / 1e6), _next(row, now)
            line = _COLUMNS.format(
                id=row["id"], kind=row["kind"], step=row["step"], owner=row["owner"] or "-", age=age, next=attempt
            )
            click.echo(line.removesuffix("server") + f"{row['instance_uuid']} {name}".rstrip())
        if total > len(found):
            click.echo(f"and {total - len(found)} more: --limit {total} shows all")

    with_process(directory, config, work)


def show_operation(id: str, directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Print what is recorded of an operation."""
    from micronova.db import operation_repair

    async def work(database: Database, process: "Process") -> None:
        data = _as_data(await database.read(operation_repair.find, id))
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
            return
        for name, value in data.items():
            if value not in (None, ""):
                click.echo(f"{name:<16}{value}")

    with_process(directory, config, work)


def retry_operation(id: str, directory: Path | None, config: Path | None) -> None:
    """Let conductors try an operation again at once."""
    from micronova.db import operation_repair

    async def work(database: Database, settings: Settings) -> None:
        await database.write(operation_repair.retry, id)
        click.echo(f"A conductor tries it again within {settings.conductor.sweep_interval:g} s.")

    with_database(directory, config, work)


def cancel_operation(id: str, directory: Path | None, config: Path | None) -> None:
    """Let an operation fail."""
    from micronova.db import operation_repair

    async def work(database: Database, settings: Settings) -> None:
        await database.write(operation_repair.cancel, id)
        click.echo(
            f"A conductor ends it within {settings.conductor.sweep_interval:g} s, and its server gets the state that a "
            "failure of this kind leaves. If its step must be completed, it ends after that step. "
            f"See: micronova operation show {id}"
        )

    with_database(directory, config, work)


def recount_quota(project: str, directory: Path | None, config: Path | None) -> None:
    """Set the recorded usage of a project, or of all whose usage is wrong, to what exists."""
    from micronova.db import quotas

    async def work(database: Database, settings: Settings) -> None:
        if project and not await database.read(quotas.knows, project):
            raise NotFound(
                f"No server, server group or usage is recorded of a project {project}: name it by its id, as "
                "`openstack project list` shows it."
            )
        projects = [project] if project else sorted({each.project_id for each in await database.read(quotas.drift)})
        corrected = 0
        for each in projects:
            for wrong in await database.write(quotas.recount, each):
                corrected += 1
                whose = f"project {wrong.project_id}" if wrong.project_id else "no project"
                user = f", user {wrong.user_id}" if wrong.user_id else ""
                click.echo(f"{whose}{user}: {wrong.resource} was {wrong.recorded}, is {wrong.actual}")
        click.echo(f"{corrected} corrected" if corrected else "Every recorded usage is right.")

    with_database(directory, config, work)


def _as_data(listed: "Listed") -> dict[str, str | int | None]:
    """Return an operation as names and values; its payload and secrets stay where they are."""
    row, name = listed
    context = msgspec.msgpack.decode(row["context"], type=Context)
    return {
        "id": row["id"],
        "kind": row["kind"],
        "step": row["step"],
        "server": row["instance_uuid"],
        "server_name": name,
        "owner": row["owner"],
        "leases": row["leases"],
        "leased_until": _time(row["lease_until"]) if row["lease_until"] else None,
        "created_at": _time(row["created_at"]),
        "deadline": _deadline(row),
        "finished_at": None if row["finished_at"] is None else _time(row["finished_at"]),
        "result": row["result"],
        "last_error": Payload.decode(row["payload"]).last_error,
        "request_id": context.request_id,
        "user_id": context.user_id,
        "project_id": context.project_id,
    }


def _deadline(row: OperationRow) -> str:
    if row["deadline"] == operation_rows.CANCELLED:
        return "cancelled by an operator"
    endless = row["deadline"] == operation_rows.NO_DEADLINE
    return "none: it is repeated until it succeeds" if endless else _time(row["deadline"])


def _next(row: OperationRow, now: int) -> str:
    """Return when an open operation is continued."""
    if (row["owner"] or "").startswith("host:") and row["lease_until"] > now:
        return "the host has it"
    return f"in {time_span((row['lease_until'] - now) / 1e6)}" if row["lease_until"] > now else "at the next sweep"


def _time(at: int) -> str:
    return datetime.fromtimestamp(at / 1e6, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

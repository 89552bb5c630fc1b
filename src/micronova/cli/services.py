"""`micronova service`: the processes of the cloud, as they are recorded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from micronova.cli.maintain import with_process
from micronova.cli.status import time_span
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.service_names import COMPUTE

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.services import ServiceRow


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A process, as it is recorded."""

    id: str
    binary: str
    host: str
    state: Literal["up", "down"]
    status: Literal["enabled", "disabled"]
    reason: str
    seconds_ago: float  # since it was last heard of
    version: int


def list_services(directory: Path | None, config: Path | None, *, as_json: bool) -> None:
    """Print the conductors, schedulers, hosts and other processes that are recorded."""

    async def work(database: Database, process: "Process") -> None:
        found = await _all(database, process)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
            return
        click.echo(f"{'binary':<18}{'host':<28}{'state':<7}{'status':<10}last heard of")
        for each in found:
            ago = f"{time_span(each.seconds_ago)} ago"
            click.echo(f"{each.binary:<18}{each.host:<28}{each.state:<7}{each.status:<10}{ago}")

    with_process(directory, config, work)


def forget_service(name: str, directory: Path | None, config: Path | None) -> None:
    """Delete the record of a process that does not run any more."""

    async def work(database: Database, process: "Process") -> None:
        from micronova.db import services

        named = [each for each in await _all(database, process) if name in (each.id, each.host)]
        if not named:
            raise NotFound(f"There is no service {name}: `micronova service list` shows those that there are.")
        if len(named) > 1:
            ids = ", ".join(f"{each.id} ({each.binary})" for each in named)
            raise Conflict(f"{name} has several services: name one by its id: {ids}.")
        [found] = named
        if found.binary == COMPUTE:
            raise Conflict(
                f"{found.host} is a compute host, to which servers and claims belong: see `micronova host show "
                f"{found.host}`, then `micronova host remove {found.host}`, which prints how to delete it."
            )
        if found.state == "up":
            raise Conflict(
                f"{found.binary} on {found.host} was heard of {time_span(found.seconds_ago)} ago: stop it first."
            )
        await database.write(services.delete, found.id)
        click.echo(f"{found.binary} on {found.host} is forgotten. It is recorded again if it starts.")

    with_process(directory, config, work)


async def _all(database: Database, process: "Process") -> list[Listed]:
    from micronova.db import services

    now = micros(process.clock.now())
    down = process.settings.default.service_down_time
    rows: Sequence[ServiceRow] = await database.read(services.list_)
    return [
        Listed(
            id=row.uuid,
            binary=row.binary,
            host=row.host,
            state="up" if services.is_up(row, now, down) else "down",
            status="disabled" if row.disabled else "enabled",
            reason=row.disabled_reason or "",
            seconds_ago=round((now - row.last_seen_at) / 1e6, 1),
            version=row.version,
        )
        for row in sorted(rows, key=lambda row: (row.binary, row.host))
    ]

"""`micronova explain`: how the scheduler decided about a server, or would decide; and a map of the fleet."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec
import sqlalchemy as sa

from micronova.cli.state import StateDirectory, ask, default_directory
from micronova.objects.errors import Invalid, MicronovaError, Unavailable
from micronova.objects.explanation import counted
from micronova.objects.fleet import Fleet
from micronova.objects.scheduling import DryRunResult
from micronova.rpc.errors import CallTimeout, NoSuchMethod, VersionTooNew
from micronova.servers.dry_run import DryRunRequest

if TYPE_CHECKING:
    from micronova.cli.wiring import Process

ANSWER_SECONDS = 30.0  # seconds until a scheduler has answered


def explain(
    server: str | None,
    directory: Path | None,
    config: Path | None,
    *,
    dry_run: bool,
    heat_map: Path | None,
    by: str | None,
    as_json: bool,
    hints: tuple[str, ...],
    count: int | None,
    boot_from_volume: bool,
    **texts: str,
) -> int:
    """Do what the options ask for; `texts` are those of a dry run that are plain text. Return the exit code."""
    cloud = Cloud(directory, config)
    if not dry_run and (hints or count is not None or boot_from_volume or any(texts.values())):
        raise Invalid("--flavor, --image, --hint and the like describe the servers of a --dry-run: add that.")
    if by is not None and (heat_map is None or dry_run):
        raise Invalid("--by says what a --heat-map of the use of hosts is coloured by.")
    if server is not None:
        if dry_run or heat_map is not None:
            raise Invalid("Name a SERVER that exists, or ask for a --dry-run or a --heat-map; not both.")
        explain_server(cloud, server, as_json)
        return 0
    if dry_run:
        if not texts["flavor"]:
            raise Invalid("A --dry-run needs a --flavor: `openstack flavor list` has those that there are.")
        with_hosts = heat_map is not None
        request = DryRunRequest(
            hints=hints_of(hints),
            count=count or 1,
            boot_from_volume=boot_from_volume,
            with_hosts=with_hosts,
            **texts,
        )
        return explain_request(cloud, request, as_json, heat_map)
    if heat_map is None:
        raise Invalid("Name a SERVER, or ask for a --dry-run or a --heat-map.")
    if as_json:
        raise Invalid("--json is for a SERVER or a --dry-run; a --heat-map is an SVG.")
    draw_fleet(cloud, heat_map, by or "fullest")
    return 0


class Cloud:
    """The cloud that the command asks: one that runs in DIR, or the region of a settings file."""

    def __init__(self, directory: Path | None, config: Path | None) -> None:
        self._directory = directory
        self._place = StateDirectory(directory or default_directory())
        self._config = config

    def explanations(self, server: str) -> dict[str, Any]:
        """Return the scheduler's decisions about a server."""
        if self._config is None:
            found: dict[str, Any] = self._ask(f"/explain?server={quote(server, safe='')}")
        else:
            found = self._connected(partial(read_decisions, server=server))
        return found

    def dry_run(self, request: DryRunRequest) -> DryRunResult:
        """Return where servers would go."""
        if self._config is None:
            request = asyncio.run(_with_token(self._place, request))
            return msgspec.convert(self._ask("/dry-run", method="POST", body=request), DryRunResult)

        request = asyncio.run(_with_token(None, request))
        result: DryRunResult = self._connected(partial(dry_run, request=request))
        return result

    def fleet(self) -> Fleet:
        """Return all hosts."""
        if self._config is None:
            return msgspec.convert(self._ask("/hosts"), Fleet)
        fleet: Fleet = self._connected(list_hosts)
        return fleet

    def _ask(self, path: str, **options: Any) -> Any:
        return ask(self._place.control, path, **options)

    def _connected(self, work: "Callable[[Process], Awaitable[Any]]") -> Any:
        from micronova.cli.wiring import run_connected

        assert self._config is not None
        return run_connected(self._config, self._directory, work)


def explain_server(cloud: Cloud, server: str, as_json: bool) -> None:
    """Print how the scheduler decided about a server."""
    found = cloud.explanations(server)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    from micronova.cli.explain_text import server_lines

    click.echo("\n".join(server_lines(found)))


def explain_request(cloud: Cloud, request: DryRunRequest, as_json: bool, heat_map: Path | None) -> int:
    """Print where servers would go, and draw the map; return 0 only if there are hosts for all of them."""
    result = cloud.dry_run(request)
    drawn = ""
    if heat_map is not None and result.fleet is not None:
        servers = f"{counted(request.count, 'server')} of flavor {request.flavor}"
        drawn = _write_map(heat_map, result.fleet, "fullest", f"Dry run: where {servers} would go")
    if as_json:
        plain = msgspec.to_builtins(msgspec.structs.replace(result, fleet=None))
        del plain["fleet"]
        click.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
    else:
        from micronova.cli.explain_text import dry_run_lines

        click.echo("\n".join(dry_run_lines(request, result)))
        if drawn:
            click.echo(drawn)
    return 0 if result.selections else 1


def draw_fleet(cloud: Cloud, file: Path, by: str) -> None:
    """Draw a map of the fleet."""
    fleet = cloud.fleet()
    click.echo(_write_map(file, fleet, by, "Fleet"))


def _write_map(file: Path, fleet: Fleet, by: str, title: str) -> str:
    """Draw a map and return what to say of it."""
    from datetime import UTC, datetime

    from micronova.cli.heat_map import draw

    moment = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    try:
        file.write_text(draw(fleet, by=by, title=title, moment=moment), encoding="utf-8")
    except FileNotFoundError:
        raise MicronovaError(f"Cannot write {file}: there is no directory {file.parent}.") from None
    return f"{file} shows {len(fleet.hosts):,} hosts"


async def _with_token(place: StateDirectory | None, request: DryRunRequest) -> DryRunRequest:
    """Return a request with the token of an operator, who may see more images and projects than the service user.

    This is the admin of the cloud in DIR; of a region, the user of OS_CLOUD if that is set.
    """
    if not (request.image or request.project) or (place is None and not os.environ.get("OS_CLOUD")):
        return request
    from micronova.cli.user_session import open_session

    file = Path(os.environ.get("OS_CLIENT_CONFIG_FILE", "clouds.yaml")) if place is None else place.path / "clouds.yaml"
    async with open_session(file, os.environ["OS_CLOUD"] if place is None else "micronova") as session:
        return msgspec.structs.replace(request, token=await session.token())


def hints_of(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """Return scheduler hints from KEY=VALUE; a key that comes several times has several values."""
    hints: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise Invalid(f"A hint is KEY=VALUE, such as group=ID, and not {text}.")
        hints.setdefault(key, []).append(value)
    return hints


# --- what runs in a process of the cloud ------------------------------------------------------------------------------


async def read_decisions(process: "Process", server: str) -> dict[str, Any]:
    """Return the scheduler's decisions about a server."""
    assert process.database is not None
    return await process.database.read(find_decisions, server)


def find_decisions(conn: sa.Connection, server: str) -> dict[str, Any]:
    """Return the scheduler's decisions about a server, which is given by its id or name, as plain data."""
    from micronova.cli.timeline import find_server
    from micronova.db import explanations

    row = find_server(conn, server)
    return {
        "server": {
            "uuid": row["uuid"],
            "name": row["display_name"],
            "host": row["host"],
            "fault": row["fault"]["message"] if row["fault"] else None,
        },
        "requests": [
            {
                "request_id": each.request_id,
                "operation": each.kind,
                "ended": each.ended,
                "decisions": msgspec.to_builtins(each.explanations),
            }
            for each in explanations.of_server(conn, row["uuid"])
        ],
    }


@contextmanager
def _asking() -> Iterator[None]:
    """Say what to do if no scheduler can answer."""
    try:
        yield
    except CallTimeout:
        raise Unavailable(
            f"No scheduler answers within {ANSWER_SECONDS:g} s: `micronova status` shows which services are up."
        ) from None
    except (NoSuchMethod, VersionTooNew):
        raise Unavailable("The schedulers are of an older version, which cannot be asked: upgrade them.") from None


async def dry_run(process: "Process", request: DryRunRequest) -> DryRunResult:
    """Ask a running scheduler where servers would go."""
    from micronova.cli.unsupported import unsupported
    from micronova.objects.context import Context
    from micronova.scheduler.rpcapi import SchedulerAPI
    from micronova.servers.dry_run import DryRuns

    assert process.database is not None and process.bus is not None
    default = process.settings.default
    runs = DryRuns(
        database=process.database,
        scheduler=SchedulerAPI(process.bus),
        image_client=process.clients.image_client(),
        find_project=process.clients.find_project,
        unsupported=unsupported(process.settings),
        default_zone=default.default_availability_zone,
        default_schedule_zone=default.default_schedule_zone,
        timeout=ANSWER_SECONDS,
    )
    with _asking():
        return await runs.run(Context(request_id="req-explain", is_admin=True), request)


async def list_hosts(process: "Process") -> Fleet:
    """Ask a running scheduler for all hosts."""
    from micronova.objects.context import Context
    from micronova.scheduler.rpcapi import SchedulerAPI

    assert process.bus is not None
    with _asking():
        return await SchedulerAPI(process.bus).list_hosts(Context(request_id="req-explain"), timeout=ANSWER_SECONDS)

"""`micronova status --config FILE`: a region at a glance, even while its database or its broker is away.

It asks the database, the broker and each HTTP service by itself, changes nothing, and needs no process of the region.
"""

import asyncio
import importlib.metadata
import logging
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
import msgspec
import sqlalchemy as sa

from micronova.cli.maintain import place_of_databases
from micronova.cli.status import job_line, time_span
from micronova.conf.settings import Settings, load
from micronova.db import audits, periodic_jobs, processes, region_counts, schema
from micronova.db.clock import now_of
from micronova.db.region_counts import HostNotUp, OperationCount, ServiceCount
from micronova.objects.clock import SystemClock, micros
from micronova.objects.errors import MicronovaError
from micronova.objects.ids import PooledSystemRandom
from micronova.telemetry.logs import one_line

if TYPE_CHECKING:
    from micronova.db.engine import Database

WIDTH: Final = 80
PATIENCE: Final = 15.0  # seconds that the database, the broker or a service has to answer
SILENT_AFTER: Final = 90.0  # seconds without a sign of life after which a process counts as silent
NAMED: Final = 10  # hosts that are named
LATE: Final = 600.0  # seconds after which an operation is worth a look
ENDPOINTS: Final = {
    "identity": ("identity", "auth_url"),
    "compute": ("nova", "endpoint_override"),
    "placement": ("placement", "endpoint_override"),
    "image": ("glance", "endpoint_override"),
    "network": ("neutron", "endpoint_override"),
    "volume": ("cinder", "endpoint_override"),
    "metadata": ("neutron", "metadata_url"),
}
"""Section and name of the setting with the URL of each service."""


class RunningProcess(msgspec.Struct, frozen=True):
    """A process that records itself: any but hosts."""

    host: str
    pid: int
    roles: str
    release: str
    since_seconds: float
    seen_seconds_ago: float


class Job(msgspec.Struct, frozen=True):
    """The last run of a periodic job."""

    name: str
    began_seconds_ago: float | None  # none if it never ran
    ended_seconds_ago: float | None  # none while it runs
    error: str


class Audit(msgspec.Struct, frozen=True):
    """The last audit."""

    seconds_ago: float
    auditor: str
    findings: dict[str, int]


class DatabaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the database says; `error` is why it says nothing."""

    error: str = ""
    server: str = ""
    revision: str = ""
    newest_revision: str = ""
    processes: tuple[RunningProcess, ...] = ()
    services: tuple[ServiceCount, ...] = ()
    versions: dict[str, dict[int, int]] = {}
    hosts_not_up: tuple[HostNotUp, ...] = ()
    servers: dict[str, int] = {}
    operations: tuple[OperationCount, ...] = ()
    periodic_jobs: tuple[Job, ...] = ()
    last_audit: Audit | None = None


class BrokerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker says; `error` is why it says nothing."""

    error: str = ""
    place: str = ""
    blocked: str = ""
    dead_letters: int = 0
    waiting: dict[str, int] = {}  # messages by queue


class ServiceStatus(msgspec.Struct, frozen=True):
    """What an HTTP service says of itself."""

    service: str
    url: str
    error: str  # empty: it is ready


class RegionStatus(msgspec.Struct, frozen=True):
    """A region at a glance."""

    release: str  # of this command
    database: DatabaseStatus
    broker: BrokerStatus
    services: tuple[ServiceStatus, ...]


def region_status(config: Path, directory: Path | None, *, as_json: bool) -> int:
    """Print what is known of the region of a settings file; return 1 if something does not answer."""
    settings = load(config)
    logging.disable(logging.CRITICAL)  # what does not work is in the result
    try:
        found = asyncio.run(collect(settings, directory))
    finally:
        logging.disable(logging.NOTSET)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        click.echo("\n".join(lines(found)))
    answers = not found.database.error and not found.broker.error and not any(each.error for each in found.services)
    return 0 if answers else 1


async def collect(settings: Settings, directory: Path | None) -> RegionStatus:
    """Ask the database, the broker and the services, all at the same time."""
    database, broker, services = await asyncio.gather(
        _database(settings, directory), _broker(settings), asyncio.gather(*_questions(settings))
    )
    return RegionStatus(importlib.metadata.version("micronova"), database, broker, tuple(services))


async def _in_time(work: Awaitable[Any], failed: Callable[[str], Any]) -> Any:
    """Return the result of a question, or what `failed` makes of the reason for which there is none."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await work
    except TimeoutError:
        return failed(f"no answer within {PATIENCE:g} s")
    except MicronovaError as error:
        return failed(error.message)
    except (OSError, sa.exc.SQLAlchemyError) as error:
        return failed(str(getattr(error, "orig", None) or error).partition("\n")[0] or type(error).__name__)


# --- the database ----------------------------------------------------------------------------------------------------


async def _database(settings: Settings, directory: Path | None) -> DatabaseStatus:
    from micronova.cli.wiring import Process

    place = place_of_databases(directory, settings)
    if not settings.database.connection and not place.has_database("compute"):
        return DatabaseStatus(error=f"database.connection is empty, and there is no database in {place.path}")
    process = Process(settings, [], place)

    async def ask() -> DatabaseStatus:
        database = await process.open_database("compute")
        return await _ask_database(database, settings.default.service_down_time)

    try:
        found: DatabaseStatus = await _in_time(ask(), lambda reason: DatabaseStatus(error=reason))
        return found
    finally:
        await process.stop()


async def _ask_database(database: "Database", down_time: float) -> DatabaseStatus:
    newest = schema.head("micronova.db.migrations")
    at = await database.read(schema.current) or ""
    server = await database.read(_server)
    if not await database.read(schema.usable, "micronova.db.migrations"):
        what = "is empty" if not at else f"is at revision {at}"
        right = "use the release that runs" if at > newest else "run `micronova db upgrade --config FILE`"
        error = f"it {what}, and this release knows {newest}: {right}"
        return DatabaseStatus(error=error, server=server, revision=at, newest_revision=newest)
    return await database.snapshot(_read, server, at, down_time)


def _server(conn: sa.Connection) -> str:
    if conn.dialect.name != "postgresql":
        return "SQLite"
    return f"PostgreSQL {conn.execute(sa.text('SHOW server_version')).scalar_one()}".partition(" (")[0]


def _read(conn: sa.Connection, server: str, revision: str, down_time: float) -> DatabaseStatus:
    now = micros(now_of(conn))
    counts = region_counts.read(conn, now, down_time)
    audit = audits.last(conn)

    def ago(at: int) -> float:
        return max(0.0, (now - at) / 1e6)

    def maybe_ago(at: int | None) -> float | None:
        return None if at is None else ago(at)

    return DatabaseStatus(
        server=server,
        revision=revision,
        newest_revision=revision,
        processes=tuple(
            RunningProcess(row.host, row.pid, row.roles, row.release, ago(row.started_at), ago(row.seen_at))
            for row in processes.list_(conn)
        ),
        services=counts.services,
        versions=region_counts.versions(conn, now, down_time),
        hosts_not_up=tuple(region_counts.hosts_not_up(conn, now, down_time, NAMED)),
        servers=counts.servers,
        operations=counts.operations,
        periodic_jobs=tuple(
            Job(row.name, maybe_ago(row.began_at), maybe_ago(row.ended_at), row.error or "")
            for row in periodic_jobs.list_(conn)
        ),
        last_audit=None if audit is None else Audit(ago(audit.ended_at), audit.auditor, dict(audit.findings)),
    )


# --- the broker and the services -------------------------------------------------------------------------------------


async def _broker(settings: Settings) -> BrokerStatus:
    from micronova.rpc.bus import connect

    url = settings.default.transport_url
    if url.startswith("local:"):
        return BrokerStatus(place="local (within one process)")

    async def ask() -> BrokerStatus:
        from micronova.conductor.region_metrics import QUEUES
        from micronova.rpc.amqp.url import parse

        place = str(parse(url))
        bus = connect(url, clock=SystemClock(), random=PooledSystemRandom(), name="micronova status")
        await bus.start()
        try:
            broker = (await bus.probe()).broker
            waiting = await bus.queue_lengths(QUEUES)
            return BrokerStatus(
                place=place,
                blocked=broker.blocked_reason if broker.blocked else "",
                dead_letters=broker.dead_letters,
                waiting=waiting,
            )
        finally:
            await bus.stop()

    found: BrokerStatus = await _in_time(ask(), lambda reason: BrokerStatus(error=reason))
    return found


def _questions(settings: Settings) -> list[Awaitable[ServiceStatus]]:
    """Return a question to each HTTP service whose URL the settings have; services of one process are asked once."""
    names: dict[str, list[str]] = {}
    for service, (section, option) in ENDPOINTS.items():
        url = urlsplit(getattr(getattr(settings, section), option) or "")
        if url.scheme in ("http", "https") and url.netloc:
            names.setdefault(f"{url.scheme}://{url.netloc.rpartition('@')[2]}", []).append(service)
    return [_service(", ".join(services), url, settings.ssl.ca_file) for url, services in names.items()]


async def _service(name: str, url: str, ca_file: str) -> ServiceStatus:
    from micronova.http.client import HTTPTransport

    transport = HTTPTransport(url, timeout=PATIENCE, ca_file=ca_file)

    async def ask() -> str:
        answer = await transport.request("GET", "/healthcheck/ready", {"accept": "application/json"}, None)
        if answer.status == 200:
            return ""
        if answer.status != 503:
            return f"it answers {answer.status} to /healthcheck/ready"
        said = answer.body.decode("utf-8", "replace")
        try:
            checks = msgspec.json.decode(answer.body)["checks"]
            said = ", ".join(check for check, works in checks.items() if works != "ok")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            pass
        return f"not ready: {said[:200]} unavailable"

    try:
        return ServiceStatus(name, url, await _in_time(ask(), str))
    finally:
        await transport.close()


# --- what a person reads ---------------------------------------------------------------------------------------------


def lines(found: RegionStatus) -> list[str]:
    """Return the lines that a person reads, of at most WIDTH columns."""
    return [part for line in _lines(found) for part in _fitted(line)]


def _fitted(line: str) -> list[str]:
    line = one_line(line)  # hosts and administrators may have written parts of it
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True)


def _lines(found: RegionStatus) -> list[str]:
    database, broker = found.database, found.broker
    said = [f"Micronova {found.release}"]
    if database.error:
        said.append(f"database: AWAY: {database.error}")
        said.append("  so nothing is known of processes, hosts, servers, operations and audits")
    else:
        said.append(f"database: {database.server}, revision {database.revision}")
    said += _of_broker(broker)
    said += [
        f"{each.service}: {each.url} {f'DOES NOT WORK: {each.error}' if each.error else 'ready'}"
        for each in found.services
    ]
    return said if database.error else [*said, *_of_database(database)]


def _of_broker(broker: BrokerStatus) -> list[str]:
    if broker.error:
        return [f"broker: AWAY: {broker.error}"]
    waiting = {queue: number for queue, number in broker.waiting.items() if number}
    said = [f"broker: {broker.place}"]
    if broker.dead_letters:
        said.append(f"  {broker.dead_letters} DEAD LETTERS: messages that no process could handle; its log says why")
    if waiting:
        said.append(f"  waiting: {', '.join(f'{number} in {queue}' for queue, number in waiting.items())}")
    if broker.blocked:
        said.append(f"  BLOCKED ({broker.blocked}): free memory or disk space at the broker")
    return said


def _of_database(found: DatabaseStatus) -> list[str]:
    said = ["processes:" if found.processes else "processes: none has recorded itself"]
    for each in found.processes:
        silent = each.seen_seconds_ago > SILENT_AFTER
        since = f"SILENT for {time_span(each.seen_seconds_ago)}" if silent else f"for {time_span(each.since_seconds)}"
        said.append(f"  {each.host:<20} {each.release:<10} {since:<14} {each.roles} ({each.pid})")
    for binary in sorted({each.binary for each in found.services}):
        counts = {each.state: each.number for each in found.services if each.binary == binary}
        states = ", ".join(f"{counts[state]} {state}" for state in ("up", "down", "disabled") if counts.get(state))
        versions = found.versions.get(binary, {})
        several = ", ".join(f"{number} of version {version}" for version, number in versions.items())
        said.append(f"{binary}: {states}" + (f" ({several})" if len(versions) > 1 else ""))
    for host in found.hosts_not_up:
        reason = f": {host.reason}" if host.reason else ""
        said.append(f"  {host.host:<20} {host.state}, last seen {time_span(host.seconds_ago)} ago{reason}")
    not_up = sum(each.number for each in found.services if each.binary == "nova-compute" and each.state != "up")
    if not_up > len(found.hosts_not_up):
        said.append(f"  and {not_up - len(found.hosts_not_up)} more: micronova host list --config FILE")
    counted = ", ".join(f"{number} {status}" for status, number in sorted(found.servers.items()))
    said.append(f"servers: {counted or 'none'}")
    said += _of_operations(found.operations)
    said += ["periodic jobs:"] if found.periodic_jobs else []
    said += [
        job_line(each.name, each.began_seconds_ago, each.ended_seconds_ago, each.error) for each in found.periodic_jobs
    ]
    audit = found.last_audit
    if audit is None:
        said.append("last audit: never; run micronova audit --config FILE")
    else:
        findings = ", ".join(f"{number} {kind}" for kind, number in sorted(audit.findings.items()))
        said.append(
            f"last audit: {time_span(audit.seconds_ago)} ago by {audit.auditor}: {findings or 'nothing is wrong'}"
        )
    return said


def _of_operations(counts: tuple[OperationCount, ...]) -> list[str]:
    total = sum(each.number for each in counts)
    late = sum(each.late for each in counts)
    waiting = sum(each.unleased for each in counts)
    said = [f"operations: {total} open, {waiting} that nobody works on at the moment, {late} LATE" if total else
            "operations: none open"]  # fmt: skip
    for each in counts:
        if each.late or each.oldest_seconds > LATE or each.unleased:
            line = (
                f"  {each.kind:<18} {each.step:<12} {each.number:>5}, the oldest for {time_span(each.oldest_seconds)}"
            )
            said.append(line + (f", {each.late} LATE" if each.late else ""))
    return said

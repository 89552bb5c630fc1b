"""Commands that prepare and explain: db upgrade, db purge, config, check, policy check, token-key."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, load, options
from micronova.objects.clock import micros
from micronova.objects.errors import Invalid, MicronovaError

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.engine import Database

T = TypeVar("T")

SERVICE_TIMEOUT = 15.0  # seconds that `check` waits for the answer of a service

SCHEMAS = {
    "compute": ("micronova.db.tables", "micronova.db.migrations"),
    "identity": ("micronova.embedded.identity.tables", "micronova.embedded.identity.migrations"),
    "image": ("micronova.embedded.image.tables", "micronova.embedded.image.migrations"),
    "network": ("micronova.embedded.network.tables", "micronova.embedded.network.migrations"),
    "volume": ("micronova.embedded.volume.tables", "micronova.embedded.volume.migrations"),
}


def _place(directory: Path | None, settings: Settings) -> StateDirectory:
    return StateDirectory((directory or Path(settings.default.state_path or default_directory())).absolute())


def place_of_databases(directory: Path | None, settings: Settings) -> StateDirectory:
    """Return DIR for work on its SQLite files, which its owner does: SQLite opens them by name and follows links."""
    from micronova.cli.service_user import become_owner

    place = _place(directory, settings)
    become_owner(place)
    return place


def with_database(
    directory: Path | None, config: Path | None, work: Callable[["Database", Settings], Awaitable[T]]
) -> T:
    """Run `work` with the current compute database of a cloud."""

    async def with_settings(database: "Database", process: "Process") -> T:
        return await work(database, process.settings)

    return with_process(directory, config, with_settings)


def with_process(
    directory: Path | None, config: Path | None, work: Callable[["Database", "Process"], Awaitable[T]]
) -> T:
    """Run `work` with the current compute database of a cloud, and a process without roles that gives access to it."""
    settings = load(config)
    place = _place_of_cloud(directory, settings)

    async def main() -> T:
        from micronova.cli.wiring import Process

        process = Process(settings, [], place)
        try:
            return await work(await process.open_current_database(), process)
        finally:
            await process.stop()

    return asyncio.run(main())


def _place_of_cloud(directory: Path | None, settings: Settings) -> StateDirectory:
    """Return DIR as `place_of_databases` does; raise an error if there is no cloud."""
    place = place_of_databases(directory, settings)
    if not settings.database.connection and not place.path.exists():
        raise MicronovaError(f"There is no cloud in {place.path}: name its directory with --dir, or --config.")
    return place


def rotate_token_key(directory: Path | None, config: Path | None, after: int) -> None:
    """Make a new key for tokens, and print from when on it signs."""
    settings = load(config)
    place = _with_keys(_place(directory, settings))
    now = time.time()
    place.rotate_token_key(now, now + after, settings.identity.token_lifetime)
    when = datetime.fromtimestamp(now + after).astimezone().isoformat(sep=" ", timespec="seconds")
    click.echo(f"A new key signs tokens from {when} on. Tokens of the old one stay valid until they expire.")
    show_token_keys(place.path)


def show_token_keys(directory: Path | None) -> None:
    """Print the public keys of tokens, the oldest first."""
    place = _with_keys(_place(directory, load(None)))
    click.echo(f'identity.public_key = "{" ".join(key.public.hex() for key in place.token_keys())}"')


def _with_keys(place: StateDirectory) -> StateDirectory:
    if not place.has_keys():
        raise MicronovaError(f"There is no cloud in {place.path}: name its directory with --dir.")
    return place


def upgrade(directory: Path | None, config: Path | None) -> None:
    """Bring every database to the newest revision, and print the revisions."""
    settings = load(config)
    asyncio.run(_upgrade(settings, _place_of_cloud(directory, settings)))


async def _upgrade(settings: Settings, place: StateDirectory) -> None:
    import importlib

    from micronova.cli.wiring import Process
    from micronova.db import schema

    os.umask(0o077)
    place.create()
    process = Process(settings, [], place)
    try:
        for name, (tables, migrations) in SCHEMAS.items():
            database = await process.open_database(name)
            before = await database.read(schema.current)
            metadata = importlib.import_module(tables).metadata
            await schema.upgrade(database, metadata, migrations, schema=process.schema_of(name))
            after = await database.read(schema.current)
            click.echo(
                f"{name:<10} {before or 'empty'} → {after}" if before != after else f"{name:<10} {after} is current"
            )
    finally:
        await process.stop()


def purge(directory: Path | None, config: Path | None, before: float, dry_run: bool) -> None:
    """Delete what ended or was deleted before a time, in batches, and print the progress."""

    async def work(database: "Database", settings: Settings) -> None:
        await _purge(database, micros(before), dry_run)

    with_database(directory, config, work)


async def _purge(database: "Database", before: int, dry_run: bool) -> None:
    from micronova.db import retention, task_logs

    for what, count, delete in (
        ("finished operations", retention.count_operations, retention.purge_operations),
        ("deleted servers", retention.count_servers, retention.purge_servers),
        ("logs of usage audits", task_logs.count, task_logs.purge),
    ):
        total = await database.read(count, before)
        if dry_run:
            click.echo(f"{total} {what} would be purged")
            continue
        done = 0
        while batch := await database.write(delete, before):
            done += batch
            click.echo(f"{done} of {max(total, done)} {what}", err=True)
        click.echo(f"{done} {what} purged")


def show_settings(config: Path | None) -> None:
    """Print every option as TOML with its meaning, so that the output is a settings file."""
    settings = load(config)
    section = ""
    for name, default, description, _ in options():
        first, _, option = name.partition(".")
        if first != section:
            click.echo(f"{chr(10) if section else ''}[{first}]")
            section = first
        value = getattr(getattr(settings, first), option)
        click.echo(f"# {description}")
        changed = "" if value != default else "# "
        click.echo(f"{changed}{option} = {_toml(value)}")


def _toml(value: Any) -> str:
    if value is None:
        return '""'
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{','.join(_toml(each) for each in value)}]"
    return msgspec.json.encode(value).decode()


class CheckResult(NamedTuple):
    """What one check found."""

    name: str
    problem: str | None = None  # None: there is none
    unknown: bool = False  # the problem is only that something could not be found out


def check(directory: Path | None, config: Path | None) -> int:
    """Print one line for each check; return 1 if one fails. What could not be found out is marked and no failure."""
    failures = 0

    def say(result: CheckResult) -> None:
        nonlocal failures
        name, problem, unknown = result
        failures += problem is not None and not unknown
        mark = "ok  " if problem is None else "?   " if unknown else "FAIL"
        click.echo(f"{mark}  {name}: {problem}" if problem else f"{mark}  {name}")

    try:
        settings = load(config)
    except MicronovaError as error:
        say(CheckResult("settings", error.message))
        return 1
    say(CheckResult("settings"))
    for name, key in (
        ("default.secret_key", settings.default.secret_key),
        ("glance.ticket_key", settings.glance.ticket_key),
        ("neutron.ticket_key", settings.neutron.ticket_key),
    ):
        if key:
            constant = len(set(key)) == 1
            say(
                CheckResult(
                    name, "everybody can guess it: set the output of `openssl rand -hex 32`" if constant else None
                )
            )
    place = place_of_databases(directory, settings)
    try:
        parent = next(path for path in (place.path, *place.path.parents) if path.exists())
        place.has_keys()
    except PermissionError as error:
        say(CheckResult("state_path", f"this user may not look into {Path(error.filename).parent}: use sudo"))
        return 1
    free = shutil.disk_usage(parent).free
    say(CheckResult(f"disk space at {parent}", None if free > 1 << 30 else f"only {free >> 20} MiB are free"))
    for result in _check_extensions(settings):
        say(result)
    asyncio.run(_check_connections(settings, place, say))
    return 1 if failures else 0


def _check_extensions(settings: Settings) -> Iterator[CheckResult]:
    """Compose the API with the installed extensions, as its start does."""
    from micronova.api.installed_extensions import GROUP
    from micronova.plugins import entry_points

    if not (entry_points.registered(GROUP) or settings.api.required_extensions):
        return
    from micronova.api.compute.extensions import load_extensions
    from micronova.cli.openapi import composed_routes

    extensions = load_extensions()
    asyncio.run(composed_routes(settings, extensions))
    for installed in extensions.used:
        yield CheckResult(f"API extension {installed.title}")
    for title, problem in extensions.problems.items():
        yield CheckResult(f"API extension {title}", problem)
    try:
        extensions.check_required(settings.api.required_extensions)
    except Invalid as error:
        yield CheckResult("required API extensions", str(error))


async def _check_connections(settings: Settings, place: StateDirectory, say: Callable[[CheckResult], None]) -> None:
    from micronova.cli.names import COMPUTE_ROLES
    from micronova.cli.wiring import NO_CONTROL_USERS, Process

    process = Process(settings, COMPUTE_ROLES, place)
    if place.has_keys():
        process.keys = place.keys()
    try:
        if not settings.database.connection and not place.path.exists():
            host = settings.default.transport_url != "local://"  # agents alone have a broker and no database
            say(CheckResult(f"{place.path} would be made" if host else f"a new cloud would be made in {place.path}"))
        else:
            for name, (_, migrations) in SCHEMAS.items():
                say(await _check_database(process, name, migrations))
            if (hosts := await _hosts(process)) is not None:
                say(_check_heartbeats(settings, hosts))
        if settings.default.transport_url != "local://":
            say(await _check_bus(process))
            say(CheckResult("control users", None if settings.default.control_users else NO_CONTROL_USERS))
        identity = settings.identity
        if identity.auth_url and not identity.password and not place.has_keys():
            say(CheckResult("service identity", f"the user {identity.username} has no password: set identity.password"))
        else:
            for service, ask, left_open in process.clients.questions():
                say(await _check_service(f"service {service}", ask, left_open))
    finally:
        await process.stop()


async def _check_database(process: "Process", service: str, migrations: str) -> CheckResult:
    from micronova.db import schema

    name = f"database {service}"
    if not process.settings.database.connection and not process.directory.has_database(service):
        return CheckResult(f"{name} (the first start makes it)")
    try:
        database = await process.open_database(service)
        at, newest = await database.read(schema.current), schema.head(migrations)
    except MicronovaError as error:
        return CheckResult(name, error.message)
    behind = at not in (None, newest)
    return CheckResult(name, f"at {at}, {newest} is needed: run `micronova db upgrade`" if behind else None)


async def _hosts(process: "Process") -> int | None:
    """Return how many compute hosts were up within the last day; None if the database does not say."""
    from sqlalchemy.exc import SQLAlchemyError

    from micronova.db import services
    from micronova.objects.service_names import COMPUTE

    if not process.settings.database.connection and not process.directory.has_database("compute"):
        return None
    try:
        database = await process.open_database("compute")
        return await database.read(services.count_up, COMPUTE, micros(time.time()), 86_400.0)
    except (MicronovaError, SQLAlchemyError):  # the check of the database says why
        return None


def _check_heartbeats(settings: Settings, hosts: int) -> CheckResult:
    from micronova.conductor.heartbeat_interval import longest_interval, too_often

    longest = longest_interval(settings.default.service_down_time, settings.conductor.lease)
    problem = too_often(hosts, report_interval=settings.default.report_interval, longest=longest)
    return CheckResult(f"heartbeats of {hosts} hosts", problem)


async def _check_bus(process: "Process") -> CheckResult:
    try:
        process.bus = await process.connect_bus()
        broker = (await process.bus.probe()).broker
    except MicronovaError as error:
        return CheckResult("bus", error.message)
    if broker.blocked:
        reason = f"the broker accepts no messages ({broker.blocked_reason}): free memory or disk space there"
        return CheckResult("bus", reason)
    if broker.probe_error:
        return CheckResult(
            "bus", f"the login works, but the broker cannot be asked: {broker.probe_error}", unknown=True
        )
    return CheckResult("bus")


async def _check_service(name: str, ask: Callable[[], Awaitable[object]], left_open: str) -> CheckResult:
    try:
        async with asyncio.timeout(SERVICE_TIMEOUT):
            await ask()
    except MicronovaError as error:
        return CheckResult(name, error.message)
    except TimeoutError:
        return CheckResult(name, f"it does not answer within {SERVICE_TIMEOUT:g} s")
    return CheckResult(name, left_open, unknown=True) if left_open else CheckResult(name)


def check_policy(roles: tuple[str, ...], prefix: str, policy_file: Path | None) -> None:
    """Print which rules, also of API extensions, a user with these roles passes: in its own project, and in others."""
    from micronova.api.compute.extensions import load_extensions
    from micronova.objects.context import RequestContext
    from micronova.policies.enforcer import Enforcer

    enforcer = Enforcer(load_extensions().rules, policy_file)
    context = RequestContext(request_id="", user_id="u", project_id="p", roles=roles or ("member", "reader"))
    click.echo(f"{'own':<6}{'others':<8}rule   (roles: {', '.join(context.roles)})")
    for rule in sorted(enforcer.rules):
        if rule.startswith(prefix):
            own = enforcer.allows(rule, context)
            others = enforcer.allows(rule, context, {"project_id": "q", "user_id": "v"})
            click.echo(f"{'yes' if own else '-':<6}{'yes' if others else '-':<8}{rule}")

"""Commands that prepare and explain: db upgrade, current and purge, config, policy check, token-key."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, example, load, options, shown
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.engine import Database

T = TypeVar("T")

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
    """Run `work` with the current compute database of a cloud, and a process without roles that gives access to it.

    The clock of the process is that of the database, whose times `work` compares with it.
    """
    settings = load(config)
    place = _place_of_cloud(directory, settings)

    async def main() -> T:
        from micronova.cli.wiring import Process

        process = Process(settings, [], place)
        try:
            database = await process.open_current_database()
            await process.use_clock_of(database)
            return await work(database, process)
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


def show_revisions(directory: Path | None, config: Path | None, as_json: bool) -> int:
    """Print at which revision each database is, and which one this release needs; return 1 if it cannot use one."""
    settings = load(config)
    found, usable = asyncio.run(_revisions(settings, _place_of_cloud(directory, settings)))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        for name, (at, needed) in found.items():
            what = "is current" if at == needed else f"this release needs {needed}"
            if at != needed and name in usable:
                what = f"is of a later release; this one knows {needed}, and works with it"
            click.echo(f"{name:<10} {at or 'empty':<8} {what}")
    return 0 if usable == found.keys() else 1


async def _revisions(settings: Settings, place: StateDirectory) -> tuple[dict[str, tuple[str | None, str]], set[str]]:
    """Return where each database is and should be, and which of them this release can use as they are."""
    from micronova.cli.wiring import Process
    from micronova.db import schema

    process = Process(settings, [], place)
    try:
        found: dict[str, tuple[str | None, str]] = {}
        usable = set()
        for name, (_, migrations) in SCHEMAS.items():
            database = await process.open_database(name)
            found[name] = (await database.read(schema.current), schema.head(migrations))
            if await database.read(schema.usable, migrations):
                usable.add(name)
        return found, usable
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


def show_settings(config: Path | None, *, secrets: bool = False) -> None:
    """Print every option as TOML with its meaning; with `secrets` the output is a whole settings file."""
    settings = load(config)
    section = ""
    for name, default, description, _ in options():
        first, _, option = name.partition(".")
        if first != section:
            click.echo(f"{chr(10) if section else ''}[{first}]")
            section = first
        value = getattr(getattr(settings, first), option)
        printed = value if secrets else shown(name, value)
        click.echo(f"# {description}")
        if (sample := example(name)) is not None:
            click.echo(f"# Example: {_toml(sample)}")
        # What is hidden cannot be read back, and is a comment.
        changed = "" if value != default and printed == value else "# "
        click.echo(f"{changed}{option} = {_toml(printed)}")


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

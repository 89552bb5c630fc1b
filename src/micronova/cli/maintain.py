"""Commands that prepare and explain: db upgrade, config, check, policy check."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import click
import msgspec

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, load, options
from micronova.objects.errors import MicronovaError

SCHEMAS = {
    "compute": ("micronova.db.tables", "micronova.db.migrations"),
    "identity": ("micronova.neighbours.identity.tables", "micronova.neighbours.identity.migrations"),
    "image": ("micronova.neighbours.image.tables", "micronova.neighbours.image.migrations"),
    "network": ("micronova.neighbours.network.tables", "micronova.neighbours.network.migrations"),
}


def _place(directory: Path | None, settings: Settings) -> StateDirectory:
    return StateDirectory((directory or Path(settings.default.state_path or default_directory())).absolute())


def upgrade(directory: Path | None, config: Path | None) -> None:
    """Bring every database to the newest revision, saying which."""
    settings = load(config)
    asyncio.run(_upgrade(settings, _place(directory, settings)))


async def _upgrade(settings: Settings, place: StateDirectory) -> None:
    import importlib

    from micronova.cli.wiring import Process
    from micronova.db import schema

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
    return msgspec.json.encode(list(value) if isinstance(value, tuple) else value).decode()


def check(directory: Path | None, config: Path | None) -> int:
    """Print a line for each thing that must be right; return 1 if one is not."""
    failures = 0

    def say(name: str, problem: str | None) -> None:
        nonlocal failures
        failures += problem is not None
        click.echo(f"{'ok  ' if problem is None else 'FAIL'}  {name}{': ' + problem if problem else ''}")

    try:
        settings = load(config)
    except MicronovaError as error:
        say("settings", error.message)
        return 1
    say("settings", None)
    place = _place(directory, settings)
    parent = next(path for path in (place.path, *place.path.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    say(f"disk space at {parent}", None if free > 1 << 30 else f"only {free >> 20} MiB are free")
    for name, problem in asyncio.run(_check_connections(settings, place)):
        say(name, problem)
    return 1 if failures else 0


async def _check_connections(settings: Settings, place: StateDirectory) -> list[tuple[str, str | None]]:
    from micronova.cli.names import COMPUTE_ROLES
    from micronova.cli.wiring import Process
    from micronova.db import schema

    if not settings.database.connection and not place.path.exists():
        return [(f"a new cloud would be made in {place.path}", None)]
    results: list[tuple[str, str | None]] = []
    process = Process(settings, COMPUTE_ROLES, place)
    try:
        for name, (_, migrations) in SCHEMAS.items():
            try:
                database = await process.open_database(name)
                at, newest = await database.read(schema.current), schema.head(migrations)
                behind = at not in (None, newest)
                results.append(
                    (f"database {name}", f"at {at}, {newest} is needed: run `micronova db upgrade`" if behind else None)
                )
            except MicronovaError as error:
                results.append((f"database {name}", error.message))
        if settings.default.transport_url != "local://":
            try:
                process.keys = place.keys()
                process.bus = await process.connect_bus()
                results.append(("bus", None))
            except MicronovaError as error:
                results.append(("bus", error.message))
    finally:
        await process.stop()
    return results


def check_policy(roles: tuple[str, ...], prefix: str, policy_file: Path | None) -> None:
    """Print which rules a user with these roles passes: in its own project, and in others."""
    from micronova.http.context import RequestContext
    from micronova.policies.compute import RULES
    from micronova.policies.enforcer import Enforcer

    enforcer = Enforcer(RULES, policy_file)
    context = RequestContext(request_id="", user_id="u", project_id="p", roles=roles or ("member", "reader"))
    click.echo(f"{'own':<6}{'others':<8}rule   (roles: {', '.join(context.roles)})")
    for rule in sorted(enforcer.rules):
        if rule.startswith(prefix):
            own = enforcer.allows(rule, context)
            others = enforcer.allows(rule, context, {"project_id": "q", "user_id": "v"})
            click.echo(f"{'yes' if own else '-':<6}{'yes' if others else '-':<8}{rule}")

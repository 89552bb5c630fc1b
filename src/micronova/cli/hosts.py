"""`micronova host`: the compute hosts of a cloud."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, load
from micronova.db.engine import Database
from micronova.objects.errors import MicronovaError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)  # it is printed into commands and settings


def _with_database(
    directory: Path | None, config: Path | None, work: Callable[[Database, Settings], Awaitable[Any]]
) -> Any:
    settings = load(config)
    place = StateDirectory((directory or Path(settings.default.state_path or default_directory())).absolute())
    if not settings.database.connection and not place.path.exists():
        raise MicronovaError(f"There is no cloud in {place.path}: name its directory with --dir, or --config.")

    async def main() -> Any:
        from micronova.cli.wiring import Process
        from micronova.db import schema

        process = Process(settings, [], place)
        try:
            database = await process.open_database("compute")
            if await database.read(schema.current) is None:
                raise MicronovaError("There is no cloud yet: its database is empty. Start it, or name it with --dir.")
            return await work(database, settings)
        finally:
            await process.stop()

    return asyncio.run(main())


def list_hosts(directory: Path | None, config: Path | None) -> None:
    """Print the hosts with their state."""
    import time

    from micronova.db import services

    async def work(database: Database, settings: Settings) -> None:
        rows = await database.read(services.list_, binary="nova-compute")
        click.echo(f"{'host':<30}{'state':<10}{'status':<10}reason")
        for row in rows:
            up = time.time() - row.last_seen_at / 1e6 < settings.default.service_down_time and not row.forced_down
            status = "disabled" if row.disabled else "enabled"
            click.echo(f"{row.host:<30}{'up' if up else 'down':<10}{status:<10}{row.disabled_reason or ''}")

    _with_database(directory, config, work)


def disable(name: str, reason: str, directory: Path | None, config: Path | None) -> None:
    """Let a host take no new servers."""
    import time

    from micronova.db import services

    async def work(database: Database, settings: Settings) -> None:
        row = await database.read(services.find, name, "nova-compute")
        values = {"disabled": True, "disabled_reason": reason or None}
        await database.write(services.update, row.uuid, values, int(time.time() * 1e6))

    _with_database(directory, config, work)
    click.echo(f"{name} takes no new servers; its servers run on.")


def add(name: str, directory: Path | None, config: Path | None) -> None:
    """Register a host and print what its agent's settings need: a broker user of its own."""
    import time

    from micronova.db import services
    from micronova.rpc.amqp.permissions import for_host
    from micronova.rpc.amqp.url import parse

    if not _NAME.fullmatch(name):
        raise MicronovaError(f"{name[:64]!r} is no name for a host: use letters, digits, dots, dashes and underscores.")

    async def work(database: Database, settings: Settings) -> Settings:
        if settings.default.transport_url.startswith("local:"):
            raise MicronovaError("This cloud's bus is local://: more hosts need default.transport_url = amqp://….")
        if name in (parse(settings.default.transport_url).user, *settings.default.control_users):
            raise MicronovaError(f"{name} is a broker user of the cloud's own: a host needs one that nobody else has.")
        await database.write(services.register_host_user, name, int(time.time() * 1e6))
        return settings

    settings: Settings = _with_database(directory, config, work)
    broker = parse(settings.default.transport_url)
    password = secrets.token_urlsafe(18)
    allowed = for_host(name, name)
    click.echo("# On the broker:")
    click.echo(f"rabbitmqctl add_user {name} {password}")
    patterns = " ".join(f"'{pattern}'" for pattern in (allowed.configure, allowed.write, allowed.read))
    click.echo(f"rabbitmqctl set_permissions -p '{broker.vhost}' {name} {patterns}")
    users = ", ".join(f'"{user}"' for user in settings.default.control_users or (broker.user,))
    click.echo(f"\n# On {name}, the settings of `micronova run compute network-agent --config FILE`.")
    click.echo("# The password in transport_url is all that the host has; let nobody but its owner read FILE.")
    click.echo(f'[default]\nhost = "{name}"\ntransport_url = "{broker.for_user(f"{name}:{password}")}"')
    click.echo(f"control_users = [{users}]")
    click.echo('\n[compute]\ncompute_driver = "libvirt"')
    click.echo("\n# For network-agent. Where a real Neutron has its own agents, run compute alone.\n[neutron]")
    for option, path, role in (("endpoint_override", "/network", "network"), ("metadata_url", "/metadata", "metadata")):
        click.echo(_address(option, getattr(settings.neutron, option), settings.api.public_url, path, role))


def _address(option: str, given: str, public_url: str | None, path: str, role: str) -> str:
    """Return the line of a setting that names a service, as far as we know where that is."""
    if given or public_url:
        return f'{option} = "{given or f"{public_url}{path}"}"'
    return f'# {option} = "http://…{path}"  # where `micronova run {role}` listens'


def remove(name: str, directory: Path | None, config: Path | None) -> None:
    """Let a host be heard no more, whatever it is up to; its servers stay as they are."""
    import time

    from micronova.db import services
    from micronova.http.host_keys import LIFETIME

    async def work(database: Database, settings: Settings) -> None:
        await database.write(services.forget_host_user, name, int(time.time() * 1e6))

    _with_database(directory, config, work)
    click.echo("# On the broker, which lets the host in until then:")
    click.echo(f"rabbitmqctl delete_user {name}")
    click.echo(f"rabbitmqctl close_all_user_connections {name} 'removed from the cloud'")
    click.echo(f"\n# {name} counts as dead. What it got from a conductor runs out within {LIFETIME / 60:g} minutes.")


def drain(name: str, directory: Path | None, config: Path | None) -> None:
    """Let a host take no new servers, and say which it still has: moving them away is not possible yet."""
    from micronova.db.tables import instances

    disable(name, "draining", directory, config)

    async def work(database: Database, settings: Settings) -> list[Any]:
        query = instances.select().where(instances.c.host == name).order_by(instances.c.created_at)
        return await database.read(lambda conn: list(conn.execute(query).mappings()))

    rows = _with_database(directory, config, work)
    click.echo(f"{len(rows)} servers are left on {name}; servers cannot be moved yet, so delete or wait for these:")
    for row in rows:
        click.echo(f"  {row['uuid']}  {row['display_name']}")

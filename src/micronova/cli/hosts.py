"""`micronova host`: the compute hosts of a cloud."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, load
from micronova.db.engine import Database
from micronova.objects.errors import MicronovaError


def _with_database(
    directory: Path | None, config: Path | None, work: Callable[[Database, Settings], Awaitable[Any]]
) -> Any:
    settings = load(config)
    place = StateDirectory((directory or Path(settings.default.state_path or default_directory())).absolute())
    if not settings.database.connection and not place.path.exists():
        raise MicronovaError(f"There is no cloud in {place.path}: name its directory with --dir, or --config.")

    async def main() -> Any:
        from micronova.cli.wiring import Process

        process = Process(settings, [], place)
        try:
            return await work(await process.open_database("compute"), settings)
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

    from micronova.db.tables import hosts
    from micronova.db.upsert import PerDialect

    insert = PerDialect(lambda make: make(hosts).on_conflict_do_nothing())

    async def work(database: Database, settings: Settings) -> str:
        row = {"name": name, "cell": "", "draining": False, "created_at": int(time.time() * 1e6)}
        await database.write(lambda conn: conn.execute(insert.on(conn), row) and None)
        return settings.default.transport_url

    url = urlsplit(_with_database(directory, config, work))
    if url.scheme == "local":
        raise MicronovaError("This cloud's bus is local://: more hosts need default.transport_url = amqp://….")
    password = secrets.token_urlsafe(18)
    vhost = url.path.lstrip("/") or "/"
    pattern = rf"^micronova\.(compute[./]{name}|conductor.*|reply\..*)$|^micronova$"
    click.echo("# On the broker:")
    click.echo(f"rabbitmqctl add_user {name} {password}")
    click.echo(f"rabbitmqctl set_permissions -p '{vhost}' {name} '{pattern}' '{pattern}' '{pattern}'")
    click.echo(f"\n# On {name}, the settings of `micronova run compute --config FILE`:")
    place = f"{url.hostname}:{url.port or 5672}{url.path or '/'}"
    click.echo(f'[default]\nhost = "{name}"\ntransport_url = "amqp://{name}:{password}@{place}"')

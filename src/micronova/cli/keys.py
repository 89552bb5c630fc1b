"""`micronova key rotate`: seal what is stored with a new key."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import sqlalchemy as sa

from micronova.cli.maintain import place_of_databases
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings, load
from micronova.objects.errors import MicronovaError
from micronova.objects.resealed import Resealed

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.engine import Database


def rotate(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Seal secrets of operations, credentials and volume keys with the present key; print how many there are.

    A secret that none of the keys opens stays as it is: it is named, and the exit code is 1.
    """
    settings = load(config)
    place = place_of_databases(directory, settings)
    lost: list[str] = []
    own = not settings.default.secret_key  # the key is in keys.json of DIR
    if own:
        if not place.has_keys():
            raise MicronovaError(f"There is no cloud in {place.path}: name its directory with --dir, or --config.")
        if settings.database.connection:
            raise MicronovaError(
                "default.secret_key is empty: each process has a key of its own. Set it in the settings of all first."
            )
        if place.running_pid() is not None:
            raise MicronovaError(f"The cloud in {place.path} runs: stop it with `micronova down`, and start it then.")
        with place.unused_secret_key():
            place.rotate_secret_key()
            counted = asyncio.run(_reseal(settings, place, lost))
            place.forget_other_secret_keys()
    else:
        counted = asyncio.run(_reseal(settings, place, lost))
    if as_json:
        click.echo(msgspec.json.encode({**counted, "unreadable": lost}).decode())
        sys.exit(1 if lost else 0)
    for what, (found, changed) in counted.items():
        click.echo(f"{found} {what}, of which {changed} had another key")
    rest = "The others" if lost else "All"
    if own:
        click.echo(f"{rest} are encrypted with a new key; the old one is forgotten.")
    elif settings.default.other_secret_keys:
        click.echo(
            f"{rest} are encrypted with default.secret_key: take default.other_secret_keys out of the settings now."
        )

    if lost:
        click.echo(f"{len(lost)} cannot be opened with any of the keys, and stay as they are:", err=True)
        for each in lost:
            click.echo(f"  {each}", err=True)
        click.echo(
            "Name the key that they were encrypted with in default.other_secret_keys and rotate again; if nobody has "
            "it, cancel these operations, and delete these credentials, volumes, snapshots and backups.",
            err=True,
        )
        sys.exit(1)


async def _reseal(settings: Settings, place: StateDirectory, lost: list[str]) -> dict[str, tuple[int, int]]:
    from micronova.cli.wiring import Process
    from micronova.db import reseal
    from micronova.db.secrets import SecretBox
    from micronova.embedded.identity.blobs import BlobBox
    from micronova.embedded.identity.reseal import reseal as reseal_blobs
    from micronova.embedded.volume.backend.keys import KeyBox
    from micronova.embedded.volume.store import key_queries

    process = Process(settings, [], place)
    try:
        if not settings.default.secret_key:
            process.keys = place.keys()
        key, *others = process.secret_keys()
        compute = await process.open_current_database()
        box = SecretBox(key, others)
        counted = {"waiting operations with secrets": await _all(compute, reseal.of_operations, box, lost)}
        counted["keys of volumes of servers"] = await _all(compute, reseal.of_devices, box, lost)
        identity = await process.open_database("identity")
        if await _has(process, identity, "identity", "credentials", "blob"):
            counted["credentials of users"] = await _all(identity, reseal_blobs, BlobBox(key, others), lost)
        volume = await process.open_database("volume")
        if await _has(process, volume, "volume", "backups", "sealed_key"):
            counted["keys of volumes, snapshots and backups"] = await _all(
                volume, key_queries.reseal, KeyBox(key, others), lost
            )
        return counted
    finally:
        await process.stop()


async def _has(process: "Process", database: "Database", service: str, table: str, column: str) -> bool:
    """Return whether the database of a service has a column: it may be of another service, or of an older release."""
    schema = process.schema_of(service)

    def look(conn: sa.Connection) -> bool:
        inspector = sa.inspect(conn)
        if not inspector.has_table(table, schema=schema):
            return False
        return any(each["name"] == column for each in inspector.get_columns(table, schema=schema))

    return await database.read(look)


async def _all(database: "Database", reseal: Callable[..., Resealed], box: object, lost: list[str]) -> tuple[int, int]:
    """Seal all, some in each transaction; return how many there are, and how many had another key; add the lost."""
    after, total, done = "", 0, 0
    while True:
        found: Resealed = await database.write(reseal, box, after)
        after, total, done = found.after, total + found.read, done + found.changed
        lost += found.lost
        if not after:
            return total, done

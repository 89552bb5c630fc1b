"""Server actions that move a server: resize, confirmResize, revertResize, migrate, os-migrateLive, evacuate."""

from dataclasses import replace
from typing import Literal

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, UnsetType, field

from micronova.api import inputs
from micronova.api.compute.action_routes import ActionRoute, action_routes, bare_body
from micronova.api.compute.server_inputs import disk_config, given, id_in
from micronova.api.compute.server_lookup import authorized_server
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.objects.errors import Invalid
from micronova.servers.moves import ServerMoves

MIGRATE = "os_compute_api:os-migrate-server:migrate"
MIGRATE_LIVE = "os_compute_api:os-migrate-server:migrate_live"


class Resize(msgspec.Struct, forbid_unknown_fields=True):
    """The new size."""

    flavor_ref: str | int = field(name="flavorRef")
    disk_config: str | UnsetType = field(default=UNSET, name="OS-DCF:diskConfig")


class ResizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Resize."""

    resize: Resize


class Destination(msgspec.Struct, forbid_unknown_fields=True):
    """Where to migrate to."""

    host: inputs.HostName | None = None


class MigrateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Migrate, perhaps to a certain host."""

    migrate: Destination | None


class Evacuate(msgspec.Struct, forbid_unknown_fields=True):
    """Where to, and how."""

    host: inputs.HostName | UnsetType = UNSET
    admin_pass: str | UnsetType = field(default=UNSET, name="adminPass")
    on_shared_storage: inputs.Flag | UnsetType = field(default=UNSET, name="onSharedStorage")
    force: inputs.Flag | UnsetType = UNSET

    versions = {"onSharedStorage": until(13), "force": Range(29, 67)}


class EvacuateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Evacuate a server from a host that is down."""

    evacuate: Evacuate


class MigrateLive(msgspec.Struct, forbid_unknown_fields=True):
    """Where to, and how the disks are sent."""

    host: inputs.HostName | None
    block_migration: inputs.Flag | Literal["auto"]
    disk_over_commit: inputs.Flag | UnsetType = UNSET
    force: inputs.Flag | UnsetType = UNSET

    versions = {"disk_over_commit": until(24), "force": Range(30, 67)}


class MigrateLiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """Migrate a server while it runs."""

    value: MigrateLive = field(name="os-migrateLive")


class MoveHandlers:
    """The handlers of the actions."""

    def __init__(self, database: Database, moves: ServerMoves, shows_passwords: bool) -> None:
        self._database = database
        self._moves = moves
        self._shows_passwords = shows_passwords

    async def resize(self, request: Request, id: str) -> None:
        """Give a server another flavor."""
        row = await authorized_server(self._database, request, id)
        wanted: Resize = request.body.resize
        config = None if isinstance(wanted.disk_config, UnsetType) else disk_config(wanted.disk_config)
        await self._moves.resize(request.context, row, id_in(wanted.flavor_ref), config)

    async def confirm_resize(self, request: Request, id: str) -> None:
        """Keep the new size of a server; the old one is removed."""
        await self._moves.confirm(request.context, await authorized_server(self._database, request, id))

    async def revert_resize(self, request: Request, id: str) -> None:
        """Return a server to the size and the host that it had."""
        await self._moves.revert(request.context, await authorized_server(self._database, request, id))

    async def migrate(self, request: Request, id: str) -> None:
        """Move a server to another host; who names the host needs another rule."""
        asked = request.body.migrate if isinstance(request.body, MigrateBody) else None
        host = None if asked is None else asked.host
        row = await authorized_server(self._database, request, id, rule=MIGRATE if host is None else f"{MIGRATE}:host")
        await self._moves.migrate(request.context, row, host)

    async def migrate_live(self, request: Request, id: str) -> None:
        """Move a server to another host while it runs; who names the host needs another rule."""
        asked: MigrateLive = request.body.value
        rule = MIGRATE_LIVE if asked.host is None else f"{MIGRATE_LIVE}:host"
        row = await authorized_server(self._database, request, id, rule=rule)
        if request.minor <= 24 and isinstance(asked.disk_over_commit, UnsetType):
            raise Invalid("Invalid input for field/attribute os-migrateLive: disk_over_commit is a required property.")
        if request.minor <= 24 and asked.block_migration == "auto":
            raise Invalid("Invalid input for field/attribute block_migration: it is true or false at this version.")
        if inputs.flag(asked.disk_over_commit):
            raise Invalid("Claims never overcommit the disks of hosts: disk_over_commit must be false.")
        forced = inputs.flag(asked.force)
        if forced and asked.host is None:
            raise Invalid("Can't force to a non-provided destination")
        if asked.block_migration != "auto" and not inputs.flag(asked.block_migration):
            await self._database.read(_check_has_no_disk, row["uuid"])
        await self._moves.live_migrate(
            request.context,
            row,
            asked.host,
            forced=forced or request.minor <= 29,
            answers_after_checks=request.minor <= 33,
        )

    async def evacuate(self, request: Request, id: str) -> dict[str, str] | None:
        """Build a server again, whose host is down, on another host."""
        row = await authorized_server(self._database, request, id)
        asked: Evacuate = request.body.evacuate
        host = given(asked.host)
        if request.minor <= 13 and isinstance(asked.on_shared_storage, UnsetType):
            raise Invalid("Invalid input for field/attribute evacuate: onSharedStorage is a required property.")
        if inputs.flag(asked.on_shared_storage):
            raise Invalid("The hosts of this cloud share no storage: onSharedStorage must be false.")
        forced = inputs.flag(asked.force)
        if forced and host is None:
            raise Invalid("Can't force to a non-provided destination")
        password = await self._moves.evacuate(
            request.context,
            row,
            host=host,
            forced=forced or request.minor <= 28,
            password=given(asked.admin_pass),
            stops=request.minor >= 95,
        )
        return {"adminPass": password} if request.minor <= 13 and self._shows_passwords else None


def _check_has_no_disk(conn: sa.Connection, uuid: str) -> None:
    """Raise Invalid if a server has a disk on its host, which the next host does not reach."""
    if any(device.volume_id is None for device in instances.devices_of(conn, uuid)):
        raise Invalid("The hosts of this cloud share no storage: block_migration must be true or auto.")


def routes(database: Database, moves: ServerMoves, *, shows_passwords: bool) -> list[Route]:
    """Return the routes of the actions."""
    handlers = MoveHandlers(database, moves, shows_passwords)
    migrating = ActionRoute(name="migrate", handler=handlers.migrate, policy=MIGRATE, body=MigrateBody)
    evacuate = ActionRoute(
        name="evacuate", handler=handlers.evacuate, policy="os_compute_api:os-evacuate", body=EvacuateBody, status=200
    )
    return action_routes(
        [
            ActionRoute(
                name="resize", handler=handlers.resize, policy="os_compute_api:servers:resize", body=ResizeBody
            ),
            ActionRoute(
                name="confirmResize",
                handler=handlers.confirm_resize,
                policy="os_compute_api:servers:confirm_resize",
                body=bare_body("confirmResize"),
                status=204,
            ),
            ActionRoute(
                name="revertResize",
                handler=handlers.revert_resize,
                policy="os_compute_api:servers:revert_resize",
                body=bare_body("revertResize"),
            ),
            replace(migrating, body=bare_body("migrate"), versions=until(55)),
            replace(migrating, versions=since(56)),
            ActionRoute(
                name="os-migrateLive", handler=handlers.migrate_live, policy=MIGRATE_LIVE, body=MigrateLiveBody
            ),
            replace(evacuate, versions=until(13), answer={"adminPass": str} if shows_passwords else None),
            replace(evacuate, versions=since(14)),
        ]
    )

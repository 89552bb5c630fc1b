"""Actions that attach and detach volumes without the resource `attachments`, for clients older than 3.27."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from micronova.embedded.volume import states
from micronova.embedded.volume.api.action_routes import action_route, change_row
from micronova.embedded.volume.api.attachments import check_unused
from micronova.embedded.volume.api.request_bodies import Body, Text, Uuid, uuid
from micronova.embedded.volume.backend.exports import Connection
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.export_manager import ExportManager, as_action_answer, check_mode
from micronova.embedded.volume.model import ATTACHED, AVAILABLE, Attachment, ResourceColumns, Volume
from micronova.embedded.volume.store import attachment_queries, connection_queries
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid


class Attach(Body):
    """The arguments of os-attach."""

    mountpoint: Annotated[str, Meta(min_length=1, max_length=255)]
    instance_uuid: Uuid | None = None
    host_name: Text | None = None
    mode: Literal["rw", "ro"] = "rw"


class Detach(Body):
    """The arguments of os-detach."""

    attachment_id: Uuid | None = None


class ForceDetach(Body):
    """The arguments of os-force_detach."""

    attachment_id: Uuid | None = None
    connector: dict[str, Any] | None = None


class WithConnector(Body):
    """The arguments of os-initialize_connection."""

    connector: dict[str, Any]


class MaybeConnector(Body):
    """The arguments of os-terminate_connection."""

    connector: dict[str, Any] | None


class AttachActions:
    """The handlers of these actions."""

    def __init__(self, core: Core, export_manager: ExportManager) -> None:
        self._core = core
        self._export_manager = export_manager

    def routes(self) -> list[Route]:
        """Return the routes."""
        user, act = "volume_extension:volume_actions:", action_route
        force, connect = "volume_extension:volume_admin_actions:force_detach", f"{user}initialize_connection"
        return [
            act("os-reserve", self.reserve, f"{user}reserve"),
            act("os-unreserve", self.unreserve, f"{user}unreserve"),
            act("os-begin_detaching", self.begin_detaching, f"{user}begin_detaching"),
            act("os-roll_detaching", self.roll_detaching, f"{user}roll_detaching"),
            act("os-attach", self.attach, f"{user}attach", Attach),
            act("os-detach", self.detach, f"{user}detach", Detach | None),
            act("os-force_detach", self.force_detach, force, ForceDetach),
            act("os-initialize_connection", self.initialize_connection, connect, WithConnector, 200),
            act("os-terminate_connection", self.terminate_connection, f"{user}terminate_connection", MaybeConnector),
        ]

    async def reserve(self, request: Request, volume_id: str) -> None:
        """Reserve a volume for a server."""
        await change_row(
            self._core, request, volume_id, lambda old: {"status": states.check_volume(old, "reserve").during}
        )

    async def unreserve(self, request: Request, volume_id: str) -> None:
        """End the reservation of a volume; do nothing if it is not reserved."""

        def change(volume: Volume) -> ResourceColumns:
            if volume.status not in states.VOLUME_ACTIONS["unreserve"].starts:
                return {}
            return {"status": attachment_queries.status_with(volume.attachments)}

        await change_row(self._core, request, volume_id, change)

    async def begin_detaching(self, request: Request, volume_id: str) -> None:
        """Record that a server begins to give the volume back."""
        name = "begin_detaching"
        await change_row(self._core, request, volume_id, lambda old: {"status": states.check_volume(old, name).during})

    async def roll_detaching(self, request: Request, volume_id: str) -> None:
        """Record that a server keeps the volume; do nothing if it is not being detached."""

        def change(volume: Volume) -> ResourceColumns:
            entry = states.VOLUME_ACTIONS["roll_detaching"]
            return {"status": entry.during} if volume.status in entry.starts else {}

        await change_row(self._core, request, volume_id, change)

    async def attach(self, request: Request, volume_id: str) -> None:
        """Record that a server or a host has the volume."""
        asked: Attach = request.body.arguments
        if (asked.instance_uuid is None) == (asked.host_name is None):
            raise Invalid("Name either instance_uuid or host_name.")
        new_id = self._core.new_id()

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            states.check_volume(volume, "attach")
            now = self._core.now()
            attachment = Attachment(
                id=new_id,
                volume_id=volume.id,
                project_id=volume.project_id,
                instance_uuid=None if asked.instance_uuid is None else uuid(asked.instance_uuid),
                attached_host=asked.host_name,
                mountpoint=asked.mountpoint,
                attach_status=ATTACHED,
                attach_mode=check_mode(volume, asked.mode),
                connector=None,
                connection_info=None,
                attached_at=now,
                created_at=now,
                updated_at=None,
            )
            await self._core.database.write(attachment_queries.add, volume, attachment, now)

        await retry_or_conflict(f"volume {volume_id}", try_once)

    async def detach(self, request: Request, volume_id: str) -> None:
        """Record that a server or a host has given the volume back."""
        await self._detach(request, volume_id, check=True)

    async def force_detach(self, request: Request, volume_id: str) -> None:
        """Detach a volume in any status."""
        await self._detach(request, volume_id, check=False)

    async def _detach(self, request: Request, volume_id: str, *, check: bool) -> None:
        asked: Detach | ForceDetach | None = request.body.arguments
        named = None if asked is None or asked.attachment_id is None else uuid(asked.attachment_id)

        async def try_once() -> None:
            volume = await self._core.load_volume(request, volume_id)
            if check and volume.status != AVAILABLE:  # one that is detached already needs nothing
                states.check_volume(volume, "detach")
            if named is None and len(volume.attachments) > 1:
                raise Invalid(f"Volume {volume_id} has several attachments: name one in attachment_id.")
            ids = [each.id for each in volume.attachments if named in (None, each.id)]
            if named is not None and not ids:
                raise Invalid(f"Volume {volume_id} has no attachment {named}.")
            await check_unused(request, [each for each in volume.attachments if each.id in ids])
            await self._core.database.write(attachment_queries.remove_by_action, volume, ids, self._core.now())

        await retry_or_conflict(f"volume {volume_id}", try_once)
        await self._export_manager.stop_serving_unused(volume_id)

    async def initialize_connection(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Let a host connect to the volume."""
        connector = request.body.arguments.connector

        async def try_once() -> Connection:
            volume = await self._core.load_volume(request, volume_id)
            mode = check_mode(volume, connector.get("mode"))
            connection = await self._export_manager.describe(volume, connector, mode)
            await self._core.database.write(connection_queries.add, volume.id, connector["host"][:255])
            await self._export_manager.serve(volume)
            return connection

        return {"connection_info": as_action_answer(await retry_or_conflict(f"volume {volume_id}", try_once))}

    async def terminate_connection(self, request: Request, volume_id: str) -> None:
        """End the connection of a host, or all without a connector; those of attachments stay."""
        volume = await self._core.load_volume(request, volume_id)
        host = (request.body.arguments.connector or {}).get("host")
        await self._core.database.write(
            connection_queries.end, volume.id, host[:255] if isinstance(host, str) else None
        )
        await self._export_manager.stop_serving_unused(volume.id)

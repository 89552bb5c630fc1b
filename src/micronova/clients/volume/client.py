"""The client of the volume service, over the API v3 that Cinder and the embedded service share.

The API asks with the token of its user: what the user may not do there, compute does not do for them. A conductor has
no user's token. It asks as the service user, and shows the token of the service user a second time as
`X-Service-Token`: Cinder deletes attachments that are in use only then.
"""

import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from micronova.clients.volume.as_user import VolumesAsUser
from micronova.http.client import ServiceClient
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.volume import Connection, ISCSIConnection, connection_of, initiator_of

VERSION: Final = "3.44"
"""The microversion of requests: attachments with `os-complete`."""
REIMAGE_VERSION: Final = "3.68"
"""The first microversion with `os-reimage`."""
PAGE: Final = 1000
"""Attachments that are read at once."""
CREATING: Final = frozenset({"creating", "downloading"})
"""The statuses of a volume that is being made."""
WORKING: Final = CREATING | {"extending", "uploading", "backing-up"}
"""The statuses of a volume that the volume service works on: they end without a request."""
IN_USE: Final = "in-use"
"""The status of a volume that a server has."""
_FOR_IMAGE: Final = "image_id"  # in the metadata of snapshots
_FOR_DEVICE: Final = "micronova_device"
"""In the metadata of volumes that are made for a server: the uuid of its block device."""


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume, as far as compute needs it."""

    id: str
    status: str
    size: int  # GiB
    bootable: bool = False
    multiattach: bool = False
    encrypted: bool = False
    migrating: bool = False  # the volume service moves it to another back end
    availability_zone: str | None = None
    image_metadata: dict[str, str] = {}
    attached_to: tuple[str, ...] = ()  # servers


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a volume."""

    id: str
    status: str
    size: int
    volume_id: str


class VolumeClient:
    """Calls the volume service; without a token, as the service user."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service

    def as_user(self, token: str) -> VolumesAsUser:
        """Return the volume service as one user has it; raise Unauthorized without a token."""
        return VolumesAsUser(self._send, token)

    # --- volumes -------------------------------------------------------------------------------------------------

    async def volume(self, volume_id: str, token: str | None = None) -> Volume:
        """Return a volume; raise NotFound."""
        return _volume((await self._send("GET", f"/volumes/{_quoted(volume_id)}", token=token))["volume"])

    async def create_for(self, instance_uuid: str, device: BlockDevice, token: str) -> Volume:
        """Create the volume of a server's block device, as a user; it is there when its status says so.

        `made_for` finds it by the device, if the answer is lost.
        """
        wanted: dict[str, Any] = {"size": device.size_gb, "name": "", "metadata": {_FOR_DEVICE: device.uuid}}
        if device.volume_type is not None:
            wanted["volume_type"] = device.volume_type
        if device.source_type == "image":
            wanted["imageRef"] = device.image_id
        elif device.source_type == "snapshot":
            wanted["snapshot_id"] = device.snapshot_id
        else:
            wanted["name"] = f"{instance_uuid}-blank-vol"
        return _volume((await self._send("POST", "/volumes", {"volume": wanted}, token=token))["volume"])

    async def made_for(self, device_uuid: str, token: str | None = None) -> Volume | None:
        """Return the volume that was created for a block device; with a token the user must see it."""
        wanted = {"metadata": str({_FOR_DEVICE: device_uuid}), "sort": "created_at:asc,id:asc"}
        query = urllib.parse.urlencode(wanted if token is not None else {**wanted, "all_tenants": "1"})
        found = (await self._send("GET", f"/volumes/detail?{query}", token=token))["volumes"]
        # What a service does not filter by, it ignores.
        return next((_volume(each) for each in found if each.get("metadata", {}).get(_FOR_DEVICE) == device_uuid), None)

    async def delete(self, volume_id: str, token: str | None = None) -> None:
        """Delete a volume."""
        await self._send("DELETE", f"/volumes/{_quoted(volume_id)}", token=token)

    async def begin_detaching(self, volume_id: str, token: str | None = None) -> None:
        """Say that a server gives a volume back; raise Invalid if it is not in use."""
        await self._act(volume_id, "os-begin_detaching", token=token)

    async def roll_detaching(self, volume_id: str) -> None:
        """Say that a server keeps a volume after all."""
        await self._act(volume_id, "os-roll_detaching")

    async def reimage(self, volume_id: str, image_id: str) -> None:
        """Begin to replace the content of a volume, which is reserved and not connected, by an image.

        Raise Invalid if its status does not allow it.
        """
        body = {"os-reimage": {"image_id": image_id, "reimage_reserved": True}}
        path = f"/volumes/{_quoted(volume_id)}/action"
        await self._send("POST", path, body, version=REIMAGE_VERSION)

    async def _act(self, volume_id: str, action: str, token: str | None = None) -> None:
        await self._send("POST", f"/volumes/{_quoted(volume_id)}/action", {action: {}}, token=token)

    # --- snapshots and types -------------------------------------------------------------------------------------

    async def snapshot(self, snapshot_id: str, token: str | None = None) -> Snapshot:
        """Return a snapshot; raise NotFound."""
        found = (await self._send("GET", f"/snapshots/{_quoted(snapshot_id)}", token=token))["snapshot"]
        return msgspec.convert(found, Snapshot)

    async def snapshots_left(self, token: str) -> int | None:
        """Return how many more snapshots the quota of a user's project allows; None if it has no limit."""
        absolute = (await self._send("GET", "/limits", token=token))["limits"]["absolute"]
        most = int(absolute.get("maxTotalSnapshots", -1))
        return None if most < 0 else most - int(absolute.get("totalSnapshotsUsed", 0))

    async def create_snapshot(self, volume_id: str, name: str, token: str, *, image_id: str) -> str:
        """Begin a snapshot of a volume, which may be in use, as a user; return its id.

        `image_id` is the image that it is made for; `snapshots_for` finds it by that.
        """
        wanted = {"volume_id": volume_id, "name": name, "force": True, "metadata": {_FOR_IMAGE: image_id}}
        return str((await self._send("POST", "/snapshots", {"snapshot": wanted}, token=token))["snapshot"]["id"])

    async def snapshots_for(self, volume_id: str, image_id: str) -> list[str]:
        """Return the ids of the snapshots of a volume that were made for an image."""
        wanted = {"all_tenants": "1", "volume_id": volume_id, "metadata": str({_FOR_IMAGE: image_id})}
        found = (await self._send("GET", f"/snapshots/detail?{urllib.parse.urlencode(wanted)}"))["snapshots"]
        # What a service does not filter by, it ignores.
        return [
            each["id"]
            for each in found
            if each["volume_id"] == volume_id and each.get("metadata", {}).get(_FOR_IMAGE) == image_id
        ]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; raise Invalid if it is being made."""
        await self._send("DELETE", f"/snapshots/{_quoted(snapshot_id)}")

    async def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        """Say how a snapshot ends that a host was to make or to delete; raise Invalid if it is not being made."""
        body = {"os-update_snapshot_status": {"status": status}}
        await self._send("POST", f"/snapshots/{_quoted(snapshot_id)}/action", body)

    async def volume_types(self, token: str) -> dict[str, str]:
        """Return the names of the volume types that a user may see, by their ids."""
        found = (await self._send("GET", "/types?is_public=None", token=token))["volume_types"]
        return {each["id"]: each["name"] for each in found}

    # --- attachments ---------------------------------------------------------------------------------------------

    async def reserve(self, volume_id: str, instance_uuid: str, token: str | None = None) -> str:
        """Reserve a volume for a server; return the id of the attachment, which has no connection yet.

        Raise Invalid if the status of the volume does not allow it.
        """
        body = {"attachment": {"volume_uuid": volume_id, "instance_uuid": instance_uuid}}
        return str((await self._send("POST", "/attachments", body, token=token))["attachment"]["id"])

    async def connect(self, attachment_id: str, host: str, device_name: str | None) -> Connection:
        """Let a host reach a volume; return how it does."""
        connector = {
            "host": host,
            "initiator": initiator_of(host),
            "multipath": False,
            **({"mountpoint": device_name} if device_name else {}),
        }
        body = {"attachment": {"connector": connector}}
        answer = await self._send("PUT", f"/attachments/{_quoted(attachment_id)}", body)
        connection = connection_of(answer["attachment"]["connection_info"])
        if isinstance(connection, ISCSIConnection):
            connection = msgspec.structs.replace(connection, initiator=connector["initiator"])
        return connection

    async def encryption_key(self, volume_id: str) -> str:
        """Return the passphrase of an encrypted volume; raise NotSupported if the service does not tell its keys."""
        try:
            answer = await self._send("GET", f"/volumes/{_quoted(volume_id)}/encryption_key")
        except NotFound as error:
            raise NotSupported(
                f"Volume {volume_id} is encrypted, and the volume service keeps its key elsewhere: only keys of the "
                "embedded volume service can be used."
            ) from error
        return str(answer["encryption_key"]["passphrase"])

    async def complete(self, attachment_id: str) -> None:
        """Say that a server has a volume; do nothing if the attachment is gone."""
        try:
            await self._send("POST", f"/attachments/{_quoted(attachment_id)}/action", {"os-complete": {}})
        except NotFound:
            pass

    async def delete_attachment(self, attachment_id: str, token: str | None = None) -> None:
        """Delete an attachment, if it exists."""
        try:
            await self._send("DELETE", f"/attachments/{_quoted(attachment_id)}", token=token)
        except NotFound:
            pass

    async def attachments_of(self, instance_uuid: str, volume_id: str | None = None) -> dict[str, str]:
        """Return the volumes that are reserved for a server or attached to it, by the ids of the attachments.

        Users can write the id of any server into attachments of their own volumes. So who knows the volume names it.
        """
        query = {"instance_id": instance_uuid} | ({"volume_id": volume_id} if volume_id is not None else {})
        found = [each async for each in self._attachments(query) if each["instance"] == instance_uuid]
        return {each["id"]: each["volume_id"] for each in found if volume_id in (None, each["volume_id"])}

    async def server_attachments(self) -> dict[str, tuple[str, str]]:
        """Return volume and server of every attachment of a server, by its id."""
        return {
            each["id"]: (each["volume_id"], each["instance"])
            async for each in self._attachments({})
            if each["instance"]
        }

    async def _attachments(self, filters: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yield attachments of all projects, read page by page."""
        query: str | None = urllib.parse.urlencode({**filters, "all_tenants": "1", "limit": PAGE, "sort": "id:asc"})
        while query is not None:
            page = await self._send("GET", f"/attachments?{query}")
            for each in page["attachments"]:
                yield each
            following = next(
                (each["href"] for each in page.get("attachments_links", ()) if each["rel"] == "next"), None
            )
            query = None if following is None else urllib.parse.urlsplit(following).query

    async def _send(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, version: str = VERSION
    ) -> Any:
        headers = {"openstack-api-version": f"volume {version}"}
        return await self._service.request(
            method, f"/v3{path}", body, token=token, headers=headers, proves_service=token is None
        )


def _volume(document: Mapping[str, Any]) -> Volume:
    return Volume(
        id=document["id"],
        status=document["status"],
        size=document["size"],
        bootable=str(document.get("bootable", "false")).lower() == "true",
        multiattach=bool(document.get("multiattach")),
        encrypted=bool(document.get("encrypted")),
        migrating=bool(document.get("os-vol-mig-status-attr:migstat")),
        availability_zone=document.get("availability_zone"),
        image_metadata={key: str(value) for key, value in (document.get("volume_image_metadata") or {}).items()},
        attached_to=tuple(each["server_id"] for each in document.get("attachments", ()) if each.get("server_id")),
    )


def _quoted(id: str) -> str:
    if id in ("", ".", ".."):  # they would change the path
        raise Invalid(f"'{id}' is not an id.")
    return urllib.parse.quote(id, safe="")

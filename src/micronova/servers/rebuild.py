"""Rebuilding a server: the checks, and the transaction that accepts the request.

The server keeps its id, flavor, host, ports and claim. Its row has the new image from the acceptance on; a rebuild that
fails before its host has the order puts the image back.
"""

from dataclasses import dataclass, field, replace

import msgspec
import sqlalchemy as sa

from micronova.clients.volume.client import IN_USE
from micronova.db import instances, quotas
from micronova.db.secrets import Secrets
from micronova.objects import states
from micronova.objects.block_device import BlockDevice, root_volume
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import CpuRequest, cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.instance import ImageData, InstanceChanges, InstanceRow
from micronova.objects.operations import RebuildPayload
from micronova.objects.orders import InjectedFile
from micronova.servers.action_recorder import ActionRecorder
from micronova.servers.actions import check_capability, check_lock, check_state
from micronova.servers.create_rules import (
    check_bootable,
    check_disk_config,
    check_hardware,
    check_item_limits,
    image_needs_config_drive,
    make_password,
)
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.image_refs import named_image
from micronova.servers.lookups import public_key

KIND = "rebuild"


@dataclass(kw_only=True)
class RebuildRequest:
    """A request to rebuild a server, as the API has read and validated it."""

    image_id: str
    changes: InstanceChanges  # of what the request names and the server shows: its name, metadata, user data…
    injected_files: list[InjectedFile] = field(default_factory=list)
    admin_password: str | None = None
    preserve_ephemeral: bool = False
    allow_zero_disk: bool = True  # policy allows local root disks without a size limit
    reimages_volumes: bool = False  # a root disk that is a volume gets the image: since 2.93


@dataclass(frozen=True, kw_only=True)
class _Accepted:
    """A request that passed the checks that need other services."""

    context: RequestContext
    request: RebuildRequest
    image: ImageMeta
    password: str
    root: BlockDevice | None  # the root disk, if it is a volume


class ServerRebuilder:
    """Accepts requests to rebuild servers."""

    def __init__(self, dependencies: RequestDependencies) -> None:
        self._dependencies = dependencies
        self._database = dependencies.database
        self._random = dependencies.random
        self._conductor = dependencies.conductor
        self._quota_defaults = dependencies.quota_defaults
        self._image_client = dependencies.image_client
        self._unsupported = dependencies.unsupported
        self._signatures = dependencies.signatures
        self._boot_images = dependencies.boot_images
        self._recorder = ActionRecorder(dependencies)

    async def rebuild(
        self, context: RequestContext, row: InstanceRow, request: RebuildRequest
    ) -> tuple[InstanceRow, str]:
        """Accept a request; return the server as it is then, and the password of its administrator."""
        check_lock(context, row)
        devices = await self._database.read(instances.volumes, [row["uuid"]])
        root = root_volume(devices.get(row["uuid"], ()))
        _check(row, root)
        image = await named_image(self._image_client, context, request.image_id)
        if image.block_device_mapping:
            raise Invalid(f"Image {image.id} is unacceptable: it is a snapshot of volumes, and has no disk of its own.")
        self._check_image(row, image, request, root)
        if "trusted_certs" in request.changes:
            request.changes["trusted_certs"] = self._signatures.trusted(request.changes["trusted_certs"])
        trusted = request.changes.get("trusted_certs", row["trusted_certs"])
        if root is None:
            image = await self._boot_images.complete(
                image, trusted, ram=row["flavor"]["ram"], user_token=context.token, image_token=context.token
            )
        else:
            if trusted:
                raise Invalid("Image certificate validation is not supported for servers that boot from volumes.")
            await self._check_volume(context, root, image, request)
        password = request.admin_password or make_password(self._random)
        accepted = _Accepted(context=context, request=request, image=image, password=password, root=root)
        operations, rebuilt = await self._database.write(self._begin, row["uuid"], accepted)
        await self._conductor.run_operations(context.for_bus(), operations)
        return rebuilt, password

    async def _check_volume(
        self, context: RequestContext, root: BlockDevice, image: ImageMeta, request: RebuildRequest
    ) -> None:
        """Raise Invalid if the volume that a server boots from cannot get an image, or may not get another one."""
        client = self._dependencies.require_volume_client()
        try:
            volume = await client.volume(root.volume_id or "", context.token)
        except NotFound:
            raise Invalid(f"Invalid volume: volume {root.volume_id} could not be found.") from None
        if not request.reimages_volumes:
            if volume.image_metadata.get("image_id") != image.id:
                raise Invalid(
                    f"Image {image.id} is unacceptable: Unable to rebuild with a different image for a volume-backed "
                    "server. Since 2.93 its volume gets the image."
                )
            return
        # One that an earlier rebuild has left without an image can get one.
        if volume.status != IN_USE and root.connected_host is not None:
            raise Invalid(f"Invalid volume: volume '{volume.id}' status must be '{IN_USE}'. Currently {volume.status}.")
        if len(volume.attached_to) > 1:
            raise Invalid(
                f"Invalid volume: volume '{volume.id}' is attached to other servers, too: it keeps its image."
            )
        if image.min_disk > volume.size or image.size > volume.size << 30:
            raise Invalid(
                f"Image {image.id} is unacceptable: it does not fit into volume {volume.id} of {volume.size} GB."
            )

    def _check_image(
        self, row: InstanceRow, image: ImageMeta, request: RebuildRequest, root: BlockDevice | None
    ) -> None:
        """Raise Invalid or Forbidden if the server cannot have this image."""
        flavor = msgspec.convert(row["flavor"], Flavor)
        local = flavor if root is None else msgspec.structs.replace(flavor, disk=0)  # a volume has its own size
        check_bootable(image, local, allow_zero_disk=root is not None or request.allow_zero_disk)
        self._unsupported.check_properties(image, flavor)
        check_hardware(flavor, image)
        self._unsupported.check_devices(flavor, image)
        if "disk_config" in request.changes:
            check_disk_config(request.changes["disk_config"], image)
        before = msgspec.convert(row["image"], ImageMeta) if row["image"] else None
        # The server keeps its host, so it keeps the CPUs and NUMA nodes that it was placed with.
        if _placed_cpus(flavor, before) != _placed_cpus(flavor, image):
            raise Invalid(
                "An instance's NUMA topology cannot be changed as part of a rebuild. The image provided is invalid for "
                f"this instance: image {image.id} asks for other CPUs or NUMA nodes than the server's present image."
            )
        if request.preserve_ephemeral and flavor.ephemeral:
            raise Invalid("Ephemeral disks cannot be kept by a rebuild: leave preserve_ephemeral out.")

    def _begin(self, conn: sa.Connection, id: str, accepted: _Accepted) -> tuple[tuple[str, ...], InstanceRow]:
        """Record the request; return the operations to start, and the server as it is then."""
        context, request, image = accepted.context, accepted.request, accepted.image
        row = instances.lock_existing(conn, id)
        check_lock(context, row)
        _check(row, accepted.root)
        check_capability(conn, states.ACTIONS[KIND], row)
        limits = quotas.limits_for(conn, row["project_id"], self._quota_defaults, row["user_id"])
        check_item_limits(request.changes.get("metadata", {}), request.injected_files, limits)
        changes: InstanceChanges = {
            **request.changes,
            **self._key(conn, context, request.changes),
            "task_state": states.ACTIONS[KIND].task_state,
            "progress": 0,
            "image_ref": image.id if accepted.root is None else row["image_ref"],
            "image": msgspec.to_builtins(image),
        }
        if request.injected_files or image_needs_config_drive(image):
            changes["config_drive"] = True
        secrets = Secrets(admin_password=accepted.password, injected_files=tuple(request.injected_files))
        operations = self._recorder.record(conn, context, row, KIND, changes, _payload(row, accepted), secrets=secrets)
        instances.change_image(conn, id, image)
        return operations, instances.lock_existing(conn, id)

    def _key(self, conn: sa.Connection, context: RequestContext, wanted: InstanceChanges) -> InstanceChanges:
        """Return the public key of the key pair that the request names; it is one of the caller's."""
        if "key_name" not in wanted:
            return {}
        name = wanted["key_name"]
        if name is None:
            return {"key_data": None}
        return {"key_data": public_key(conn, context, name)}


def _check(row: InstanceRow, root: BlockDevice | None) -> None:
    """Raise Conflict if the server's state does not allow a rebuild, Invalid if it has no image to replace."""
    check_state(states.ACTIONS[KIND], row)
    if row["launched_at"] is None:
        raise Conflict(f"Cannot 'rebuild' instance {row['uuid']} while it has never been active")
    if row["image_ref"] is None and root is None:
        raise Invalid("The server was not made from an image: it cannot be rebuilt with one.")


def _placed_cpus(flavor: Flavor, image: ImageMeta | None) -> CpuRequest:
    """Return what decides where on a host a guest is placed; how it sees its CPUs may change."""
    wanted = cpu_request(GuestProperties(flavor, image), flavor.vcpus, flavor.ram)
    return replace(wanted, sockets=1, cores=1, threads=1)


def _payload(row: InstanceRow, accepted: _Accepted) -> RebuildPayload:
    previous: ImageData | None = row["image"]
    return RebuildPayload(
        previous_image_ref=row["image_ref"],
        previous_image=previous,
        stopped=row["vm_state"] == states.STOPPED,
        reimage=accepted.root is not None and accepted.request.reimages_volumes,
    )

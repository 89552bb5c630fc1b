"""Rescuing servers: the checks of the rescue image, and the operation."""

import msgspec

from micronova.clients.volume.client import IN_USE
from micronova.db import instances, nodes
from micronova.db.secrets import Secrets
from micronova.objects import states
from micronova.objects.block_device import root_volume
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.guest_properties import check_image_properties
from micronova.objects.image import MOST_PROPERTY_BYTES, NO_DISKS, ImageMeta
from micronova.objects.instance import FlavorData, InstanceRow
from micronova.objects.operations import RescuePayload
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.create_rules import make_password
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.image_devices import NEW_FORM

STABLE_PROPERTIES = ("hw_rescue_device", "hw_rescue_bus")
"""With one of these the guest's disks keep their places, and the rescue disk comes last."""
LUN = "lun"
_DEVICES = ("disk", "cdrom", "floppy", LUN)
ACTION = "rescue"


class ServerRescue:
    """Accepts requests to rescue servers."""

    def __init__(self, dependencies: RequestDependencies, actions: ServerActions, *, rescue_image_id: str) -> None:
        """`rescue_image_id` is the image of requests that name none; empty: the server's own."""
        self._dependencies = dependencies
        self._database = dependencies.database
        self._random = dependencies.random
        self._actions = actions
        self._image_client = dependencies.image_client
        self._boot_images = dependencies.boot_images
        self._rescue_image_id = rescue_image_id

    async def rescue(
        self,
        context: RequestContext,
        row: InstanceRow,
        *,
        image_id: str | None,
        password: str | None,
        allows_volumes: bool,
    ) -> str:
        """Accept a rescue; return the password that the guest gets. `allows_volumes`: since 2.87."""
        action = states.ACTIONS[ACTION]
        check_lock(context, row)
        check_state(action, row)
        image = await self._image(context, row, image_id)
        await self._check_volumes(context, row, image, allows_volumes)
        password = password or make_password(self._random)
        payload = RescuePayload(action=ACTION, image=image)
        await self._actions.begin(context, row, ACTION, action, payload, secrets=Secrets(admin_password=password))
        return password

    async def _image(self, context: RequestContext, row: InstanceRow, requested: str | None) -> ImageMeta:
        """Return the image of the request, of the settings, or of the server."""
        if not (requested or self._rescue_image_id) and row["image_ref"] is None and row["image"] is not None:
            # What the server knows of the image its volume was made of is what the volume's owner wrote.
            requested = row["image"]["id"] or None
        wanted = requested or self._rescue_image_id
        if not wanted:
            if row["image_ref"] is None:
                raise Invalid(
                    f"Instance {row['uuid']} cannot be rescued: it has no image of its own. Name a rescue_image_ref."
                )
            image = msgspec.convert(row["image"], ImageMeta)
        elif self._image_client is None:
            image = ImageMeta(id=wanted)
        else:
            try:
                # The operator's image need not be one that the user can see.
                image = await self._image_client.get(wanted, context.token if requested else None)
            except NotFound:
                raise Invalid(f"Requested rescue image '{wanted}' is not supported: it could not be found.") from None
        check_rescue_image(image, row["flavor"])
        await self._check_device(row, image)
        return image if not wanted else await self._signed(context, row, image, requested)

    async def _check_device(self, row: InstanceRow, image: ImageMeta) -> None:
        """Raise Invalid if the server's host cannot attach the rescue disk as the image wants it."""
        if image.properties.get("hw_rescue_device") != LUN:
            return
        if await self._database.read(nodes.lacks, row["node_uuid"], "rescue_lun"):
            raise Invalid(
                f"Requested rescue image '{image.id}' is not supported: its hw_rescue_device is {LUN}, and disks of "
                "the server's host are files, which cannot be LUNs. Use disk."
            )

    async def _signed(
        self, context: RequestContext, row: InstanceRow, image: ImageMeta, requested: str | None
    ) -> ImageMeta:
        """Return an image that is not the server's own with its signature, if that has to be verified, and its kernel.

        As in Nova, an image that names no kernel is booted with that of the server, if that has one.
        """
        image_token = context.token if requested else None
        image = await self._boot_images.complete(
            image, row["trusted_certs"], ram=row["flavor"]["ram"], user_token=context.token, image_token=image_token
        )
        if image.properties.get("kernel_id") or row["image"] is None:
            return image
        own = msgspec.convert(row["image"], ImageMeta)
        return msgspec.structs.replace(image, kernel=own.kernel, ramdisk=own.ramdisk)

    async def _check_volumes(
        self, context: RequestContext, row: InstanceRow, image: ImageMeta, allows_volumes: bool
    ) -> None:
        """Raise Invalid if the server boots from a volume and the image does not leave its disks in their places.

        Raise Conflict if a volume is not in use, as it is while it is being detached or extended.
        """
        devices = await self._database.read(instances.devices_of, row["uuid"])
        if root_volume(devices) is not None and not (
            allows_volumes and all(name in image.properties for name in STABLE_PROPERTIES)
        ):
            raise Invalid(
                f"Instance {row['uuid']} cannot be rescued: Cannot rescue a volume-backed instance. Since 2.87 an "
                f"image with {' and '.join(STABLE_PROPERTIES)} can."
            )
        for device in devices:
            if device.is_volume and device.volume_id:
                volume = await self._dependencies.require_volume_client().volume(device.volume_id, context.token)
                if volume.status != IN_USE:
                    raise Conflict(
                        f"Invalid volume: volume '{volume.id}' status must be '{IN_USE}'. Currently in "
                        f"'{volume.status}' status"
                    )


def check_rescue_image(image: ImageMeta, flavor: FlavorData) -> None:
    """Raise Invalid if a server with this flavor cannot be rescued with an image."""
    refused = f"Requested rescue image '{image.id}' is not supported: "
    properties = image.properties
    if image.block_device_mapping or properties.get(NEW_FORM):
        raise Invalid(f"{refused}it is a snapshot of volumes.")
    if image.status != "active":
        raise Invalid(f"{refused}it is {image.status}, not active.")
    if image.disk_format in NO_DISKS:
        raise Invalid(f"{refused}it is a kernel or a ramdisk ({image.disk_format}), and has no disk to boot from.")
    if image.property_bytes > MOST_PROPERTY_BYTES:
        raise Invalid(f"{refused}its properties have more than {MOST_PROPERTY_BYTES} bytes.")
    check_image_properties(properties)
    device = properties.get("hw_rescue_device")
    if device is not None and device not in _DEVICES:
        raise Invalid(f"{refused}its hw_rescue_device is {device}, and not one of {', '.join(_DEVICES)}.")
    if flavor["ram"] < image.min_ram:
        raise Invalid(f"{refused}it needs {image.min_ram} MB of memory, and the flavor has {flavor['ram']} MB.")
    # The disk that is made of it takes room on the host like the server's own.
    if flavor["disk"] and (flavor["disk"] < image.min_disk or image.size > flavor["disk"] << 30):
        raise Invalid(f"{refused}it is larger than the flavor's disk of {flavor['disk']} GB.")

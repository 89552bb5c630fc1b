"""Reading the images that a request names, and the kernel and the ramdisk that an image names."""

from collections.abc import Sequence

import msgspec

from micronova.clients.image.client import ImageClient
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.image import KERNEL_FORMATS, RAMDISK_FORMATS, ImageMeta
from micronova.servers.image_signatures import ImageSignatures

NO_KERNEL = "nokernel"
"""The `kernel_id` of an image that boots from its disk."""


async def named_image(image_client: ImageClient | None, context: RequestContext, id: str) -> ImageMeta:
    """Return the image with this id, as the user sees it; raise Invalid if there is none."""
    if image_client is None:
        return ImageMeta(id=id)
    try:
        return await image_client.get(id, context.token)
    except NotFound:
        raise Invalid(f"Invalid imageRef provided: image {id} could not be found.") from None


class BootImages:
    """Finds the kernels and ramdisks of images."""

    def __init__(self, image_client: ImageClient | None, signatures: ImageSignatures, most_mb: int) -> None:
        """`most_mb` is how large the kernel and the ramdisk of an image may be together."""
        self._image_client = image_client
        self._signatures = signatures
        self._most_mb = most_mb

    async def complete(
        self,
        image: ImageMeta,
        trusted: Sequence[str] | None,
        *,
        ram: int,
        user_token: str,
        image_token: str | None,
    ) -> ImageMeta:
        """Return an image with its signature, and with the kernel and the ramdisk that its properties name.

        Raise Invalid if one of them cannot be used: the guest has both in its memory of `ram` MB, and its host copies
        them beside the disks, which alone are claimed.
        The user with `image_token`, or without it the service user, must see them; `trusted` and `user_token` are as in
        `ImageSignatures.signed`.
        """
        image = await self._signatures.signed(image, trusted, user_token=user_token, image_token=image_token)
        kernel_id, ramdisk_id = (image.properties.get(f"{what}_id") for what in ("kernel", "ramdisk"))
        if not kernel_id or kernel_id == NO_KERNEL:
            if ramdisk_id and kernel_id != NO_KERNEL:
                raise Invalid(f"Image {image.id} has a ramdisk_id and no kernel_id: give it both, or none.")
            return msgspec.structs.replace(image, kernel=None, ramdisk=None)
        kernel = await self._find(image, "kernel", str(kernel_id), KERNEL_FORMATS, image_token)
        ramdisk = None
        if ramdisk_id:
            ramdisk = await self._find(image, "ramdisk", str(ramdisk_id), RAMDISK_FORMATS, image_token)
        found = [each for each in (kernel, ramdisk) if each is not None]
        size = sum(each.size for each in found)
        if size > ram << 20:
            raise Invalid(f"The kernel and the ramdisk of image {image.id} do not fit into the {ram} MB of the flavor.")
        if size > self._most_mb << 20:
            raise Invalid(
                f"The kernel and the ramdisk of image {image.id} have {size} bytes: {self._most_mb} MB are allowed "
                "(glance.max_kernel_images_mb)."
            )
        signed = [
            await self._signatures.signed(each, trusted, user_token=user_token, image_token=image_token)
            for each in found
        ]
        return msgspec.structs.replace(image, kernel=signed[0], ramdisk=signed[1] if ramdisk is not None else None)

    async def _find(
        self, image: ImageMeta, what: str, id: str, formats: Sequence[str], image_token: str | None
    ) -> ImageMeta:
        assert self._image_client is not None  # it knows the properties of the image
        try:
            found = await self._image_client.get(id, image_token)
        except NotFound:
            raise Invalid(f"The {what} {id} of image {image.id} could not be found.") from None
        if found.status != "active":
            raise Invalid(f"The {what} {id} of image {image.id} is not active: it is {found.status}.")
        if found.disk_format not in formats:
            known = " or ".join(formats)
            raise Invalid(f"The {what} {id} of image {image.id} has the format {found.disk_format}, and not {known}.")
        # Nothing else of it counts, and the server keeps it in its row.
        return msgspec.structs.replace(found, properties={}, block_device_mapping="")

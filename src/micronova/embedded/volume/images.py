"""What the volume service needs from an image service."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from micronova.embedded.volume.model import GIB
from micronova.imageformat.inspector import RAW_FORMATS
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.ids import UUID

# Attributes of an image that a volume made from it keeps besides the image's properties, as Cinder does.
_KEPT = ("name", "min_disk", "min_ram", "size", "disk_format", "container_format", "checksum")
# Attributes of an image that are not properties.
_ATTRIBUTES = frozenset(_KEPT) | {
    "id", "status", "visibility", "protected", "os_hidden", "owner", "tags", "virtual_size", "created_at", "updated_at",
    "self", "file", "schema", "locations", "direct_url", "stores", "os_hash_algo", "os_hash_value",
}  # fmt: skip
DISK_FORMATS = ("raw", "qcow2", "vmdk", "vhd", "vhdx", "vdi", "iso", "ami")
_DATA_PREFIXES = ("os_glance_", "img_signature")  # of properties that describe the data of one image
_LONGEST_VALUE = 255  # characters of a property that a volume keeps

Document = Mapping[str, Any]


class Images(Protocol):
    """An image service."""

    async def show(self, image_id: str, token: str) -> Document:
        """Return an image that the user may see; raise NotFound."""

    async def show_as_service(self, image_id: str) -> Document:
        """Return an image without the user's token. The caller has checked that the user may see it. Raise NotFound."""

    async def named(self, name: str, token: str) -> list[Document]:
        """Return the images of this name that the user may see."""

    def download(self, image_id: str) -> AsyncIterator[bytes]:
        """Yield the data of an image. The caller has checked that the user may see it."""

    async def convert(self, source: Path, source_format: str, target: Path, size: int) -> None:
        """Convert an image of at most `size` bytes, which was inspected, to a raw file.

        Raise OSError if the disk is full, Invalid if the image cannot be read.
        """

    async def create(self, document: Document, token: str) -> Document:
        """Create an image without data as the user."""

    async def status(self, image_id: str) -> str | None:
        """Return the status of an image that its user has created; None if it is gone."""

    async def upload(self, image_id: str, chunks: AsyncGenerator[bytes, None], size: int) -> None:
        """Upload the data of an image that its user has created."""


async def find(images: Images, reference: str, token: str) -> Document:
    """Return the image that a client names by its id, by a URL that ends with the id, or by its name.

    Raise Invalid if there is none, Conflict if there are several.
    """
    image_id = reference.rpartition("/")[2]
    if UUID.fullmatch(image_id):
        try:
            return await images.show(image_id, token)
        except NotFound:
            pass
    found = await images.named(reference, token)
    if len(found) > 1:
        raise Conflict(f"There are {len(found)} images with the name '{reference[:64]}': give the id of one.")
    if not found:
        raise Invalid(f"There is no image '{reference[:64]}' that you can see: give the id of one.")
    return found[0]


def check_fits(image: Document, size: int) -> None:
    """Raise Invalid unless a volume of `size` GiB can be made from an image."""
    if image["status"] != "active":
        raise Invalid(f"Image {image['id']} is not active: it is {image['status']}.")
    if image.get("disk_format") not in DISK_FORMATS or image.get("container_format") not in (None, "bare"):
        raise Invalid(
            f"Image {image['id']} is not a disk image: its disk_format must be one of "
            f"{', '.join(DISK_FORMATS)}, and its container_format bare."
        )
    if (image.get("min_disk") or 0) > size:
        raise Invalid(f"A volume of {size} GiB is smaller than the image's min_disk of {image['min_disk']} GiB.")
    least = max(image.get("size") or 0 if image["disk_format"] in RAW_FORMATS else 0, image.get("virtual_size") or 0)
    if least > size * GIB:
        raise Invalid(f"A volume of {size} GiB is smaller than the image, which has {least} bytes.")


def properties_of(image_metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that the image of a volume gets from the image that the volume was made from."""
    own = _ATTRIBUTES | {"image_id", "image_name"}
    return {
        name: value for name, value in image_metadata.items() if name not in own and not name.startswith(_DATA_PREFIXES)
    }


def metadata_of(image: Document) -> dict[str, str]:
    """Return what a volume keeps of the image that it is made from."""
    kept = {"image_id": image["id"], "image_name": image.get("name") or ""}
    kept |= {name: str(image[name]) for name in _KEPT[1:] if image.get(name) is not None}
    properties = {name: value for name, value in image.items() if name not in _ATTRIBUTES and value is not None}
    return kept | {name: str(value)[:_LONGEST_VALUE] for name, value in properties.items()}

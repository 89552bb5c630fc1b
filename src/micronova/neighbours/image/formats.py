"""Images are hostile: what is uploaded must be what it says it is, and name nothing outside of itself."""

from micronova.imageformat.inspector import check
from micronova.neighbours.image.data import Uploaded
from micronova.objects.errors import Invalid

MAX_VIRTUAL_SIZE = 16 << 40
"""The largest file that an ordinary file system on a host can hold: a disk past it could only be an attack."""

# What the disk format is about lies inside of these, so there is nothing to compare it with. Compute boots none.
_WRAPPED = ("ova", "docker", "compressed")


def check_format(uploaded: Uploaded) -> int | None:
    """Refuse an upload whose content is unsafe or not of the declared format; return its virtual size."""
    if uploaded.container_format in _WRAPPED:
        return None
    if not uploaded.size:  # a snapshot of a server that boots from a volume has no data, and any format
        return 0
    if uploaded.disk_format is None:
        raise Invalid("Set 'disk_format' of the image before uploading its data.")
    return check(uploaded.path, uploaded.disk_format, max_virtual_size=MAX_VIRTUAL_SIZE).virtual_size

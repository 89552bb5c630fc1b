"""The check of uploaded data: it must have the declared format and refer to no other file."""

from micronova.embedded.image.data import Uploaded
from micronova.imageformat.inspector import check
from micronova.objects.errors import Invalid

MAX_VIRTUAL_SIZE = 16 << 40
"""The largest file that ext4 can hold: a larger disk cannot be used, and may be an attack."""

# These contain the disk, so there is nothing to compare with the disk format. Compute does not boot them.
_WRAPPED = ("ova", "docker", "compressed")


def check_format(uploaded: Uploaded) -> int | None:
    """Return the virtual size of an upload; raise Invalid if it is unsafe or does not have the declared format."""
    if uploaded.container_format in _WRAPPED:
        return None
    if not uploaded.size:  # such as the snapshot of a server that boots from a volume
        return 0
    if uploaded.disk_format is None:
        raise Invalid("Set 'disk_format' of the image before uploading its data.")
    return check(uploaded.path, uploaded.disk_format, max_virtual_size=MAX_VIRTUAL_SIZE).virtual_size

"""Which images fit into a volume."""

from typing import Any

import pytest

from micronova.embedded.volume.images import DISK_FORMATS, check_fits
from micronova.embedded.volume.model import GIB
from micronova.imageformat.inspector import RAW_FORMATS
from micronova.objects.errors import Invalid


def _image(disk_format: str, **fields: int | None) -> dict[str, Any]:
    return {"id": "an-id", "status": "active", "disk_format": disk_format, "container_format": "bare", **fields}


@pytest.mark.parametrize("disk_format", DISK_FORMATS)
def test_the_disk_of_an_image_fits(disk_format: str) -> None:
    check_fits(_image(disk_format, size=GIB, virtual_size=GIB), 1)
    with pytest.raises(Invalid, match="smaller than the image"):
        check_fits(_image(disk_format, size=GIB, virtual_size=3 * GIB), 1)


@pytest.mark.parametrize("disk_format", DISK_FORMATS)
def test_only_the_data_of_a_raw_image_is_that_of_its_disk(disk_format: str) -> None:
    """A service that does not know the virtual size leaves it out; compressed data may be larger than the disk."""
    image = _image(disk_format, size=3 * GIB, virtual_size=None)
    if disk_format in RAW_FORMATS:
        with pytest.raises(Invalid, match="smaller than the image"):
            check_fits(image, 1)
    else:
        check_fits(image, 1)

"""The block devices of images: what a server's devices become, and which of a request and an image a server gets."""

import msgspec
import pytest

from micronova.objects.block_device import BlockDevice, blank_device
from micronova.objects.errors import Invalid
from micronova.objects.image import ImageMeta
from micronova.servers.image_devices import devices_of, mapping_of, merged

ROOT = BlockDevice(
    uuid="1", source_type="image", destination_type="volume", image_id="i", volume_id="v", device_name="/dev/vda",
    size_gb=3, disk_bus="scsi", delete_on_termination=True, attachment_id="a", tag="t",
)  # fmt: skip


def image(mapping: str, **properties: str) -> ImageMeta:
    return ImageMeta(id="i", properties=properties, block_device_mapping=mapping)


def test_a_volume_becomes_one_of_its_snapshot_and_a_local_disk_stays_one() -> None:
    mapping = [mapping_of(ROOT, "s"), mapping_of(blank_device("2", 1, "swap"), None)]
    root, swap = devices_of(image(msgspec.json.encode(mapping).decode(), bdm_v2="True"))
    assert (root.source_type, root.destination_type, root.snapshot_id) == ("snapshot", "volume", "s")
    assert (root.volume_id, root.image_id, root.attachment_id, root.tag) == (None, None, None, None)
    assert (root.boot_index, root.device_name, root.size_gb, root.disk_bus) == (0, "/dev/vda", 3, "scsi")
    assert root.delete_on_termination
    assert (swap.source_type, swap.destination_type, swap.guest_format, swap.size_gb) == ("blank", "local", "swap", 1)


def test_devices_that_are_left_out() -> None:
    assert devices_of(image("")) == []
    assert devices_of(image('[{"device_name": "vdb", "no_device": true}]')) == []


@pytest.mark.parametrize(
    ("mapping", "new_form"),
    [
        ("{", "True"),
        ("7", "True"),
        ('[{"source_type": "zork"}]', "True"),
        ('[{"source_type": "volume", "destination_type": "moon", "volume_id": "v"}]', "True"),
        ('[{"source_type": "snapshot"}]', "True"),
        ('[{"source_type": "blank", "volume_size": 0}]', "True"),
        ('[{"device_name": "vda", "virtual_name": "ephemeral0"}]', "False"),
        ('[{"device_name": "vda"}]', ""),
    ],
)
def test_what_is_refused(mapping: str, new_form: str) -> None:
    with pytest.raises(Invalid, match="block_device_mapping of image i"):
        devices_of(image(mapping, bdm_v2=new_form))


def test_the_oldest_form_knows_the_root_disk_by_its_name() -> None:
    mapping = '[{"device_name": "vda", "snapshot_id": "s"}, {"device_name": "/dev/vdb", "volume_id": "v"}]'
    root, data = devices_of(image(mapping))
    assert (root.source_type, root.boot_index, data.source_type, data.boot_index) == ("snapshot", 0, "volume", -1)
    root, data = devices_of(image(mapping, root_device_name="/dev/vdb"))
    assert (root.boot_index, data.boot_index) == (-1, 0)


def test_the_request_wins() -> None:
    local = BlockDevice(uuid="", image_id="i")
    own = BlockDevice(
        uuid="", source_type="volume", destination_type="volume", volume_id="o", device_name="vdb", boot_index=-1
    )
    other = msgspec.structs.replace(own, volume_id="p", device_name="/dev/vdb")
    third = msgspec.structs.replace(own, volume_id="q", device_name=None)
    assert merged([local, own], [ROOT, other, third]) == [own, ROOT, third]
    assert merged([local, own], [other, third]) == [local, own, third], "its root disk stays, if the image has none"

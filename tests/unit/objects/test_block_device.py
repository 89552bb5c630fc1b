"""The disks of a server that gets another flavor."""

from typing import Any

from micronova.objects.block_device import BlockDevice, attached_volumes, resized, root_volume, with_names
from micronova.objects.flavor import Flavor
from micronova.objects.volume import NBDConnection

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
ROOT = BlockDevice(uuid="root", image_id="i")


def _flavor(ephemeral: int = 0, swap: int = 0) -> Flavor:
    return Flavor(id="f", name="f", ram=1, vcpus=1, disk=1, ephemeral=ephemeral, swap=swap)


def _blank(uuid: str, size: int, **more: Any) -> BlockDevice:
    return BlockDevice(uuid=uuid, source_type="blank", boot_index=-1, size_gb=size, **more)


def test_swap_and_ephemeral_disks_follow_the_flavor() -> None:
    disks = (ROOT, _blank("e", 5), _blank("s", 1, guest_format="swap"))
    old, new = _flavor(ephemeral=5, swap=1024), _flavor(ephemeral=8, swap=2000)
    larger = resized(disks, UUID, old, new)
    assert [(disk.uuid, disk.size_gb) for disk in larger] == [("root", None), ("e", 8), ("s", 2)]
    assert resized(larger, UUID, new, old) == disks


def test_disks_come_and_go_with_the_flavor() -> None:
    none, both = _flavor(), _flavor(ephemeral=3, swap=512)
    more = resized((ROOT,), UUID, none, both)
    assert [(disk.guest_format, disk.size_gb, disk.boot_index) for disk in more[1:]] == [("swap", 1, -1), (None, 3, -1)]
    assert more == resized((ROOT,), UUID, none, both), "an order that is made again has the same disks"
    assert len({disk.uuid for disk in more}) == 3
    assert resized(more, UUID, both, none) == (ROOT,)


def test_disks_that_the_user_has_chosen_stay() -> None:
    disks = (ROOT, _blank("one", 2), _blank("two", 3))
    assert resized(disks, UUID, _flavor(ephemeral=5), _flavor(ephemeral=9)) == disks


def _volume(uuid: str, **fields: Any) -> BlockDevice:
    return BlockDevice(uuid=uuid, source_type="volume", destination_type="volume", volume_id=uuid, **fields)


def test_volumes_get_the_names_that_are_free() -> None:
    root = BlockDevice(uuid="root", image_id="i")
    devices = (root, _volume("a", boot_index=None), _volume("b", boot_index=None, device_name="vdb"))
    assert [each.device_name for each in with_names(devices)] == [None, "/dev/vdc", "/dev/vdb"]
    many = with_names([root, *(_volume(str(number), boot_index=None) for number in range(30))])
    assert [each.device_name for each in many[-6:]] == [
        f"/dev/vd{name}" for name in ("z", "aa", "ab", "ac", "ad", "ae")
    ]
    scsi = with_names([root, _volume("a", boot_index=None, disk_bus="scsi")])
    assert scsi[1].device_name == "/dev/sda"


def test_the_volume_that_a_server_boots_from_is_the_first() -> None:
    devices = with_names([_volume("data", boot_index=None), _volume("root", boot_index=0)])
    assert {each.uuid: each.device_name for each in devices} == {"root": "/dev/vda", "data": "/dev/vdb"}
    found = root_volume(devices)
    assert found is not None and found.uuid == "root"


def test_only_volumes_that_are_connected_are_in_orders() -> None:
    connection = NBDConnection(export_name="e", socket_path="/s", access_mode="ro")
    connected = _volume("a", attachment_id="x", device_name="/dev/vdb", connection=connection, boot_index=None)
    [found] = attached_volumes([BlockDevice(uuid="root"), connected, _volume("b", attachment_id="y")])
    assert (found.volume_id, found.serial, found.read_only, found.device_name) == ("a", "a", True, "/dev/vdb")

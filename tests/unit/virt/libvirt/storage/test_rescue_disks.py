"""The disks of a guest that is rescued, and where its definition puts them."""

from typing import Any

import msgspec
import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice
from micronova.virt.libvirt.definition.guest_xml import domain
from micronova.virt.libvirt.storage.disks import plan_disks, plan_rescue_disks
from micronova.virt.libvirt.storage.records import DiskRecord, RescueRecord
from tests.unit.virt.libvirt.world import IMAGE, composed, facts, flavor, plan

DEVICES = (
    BlockDevice(uuid="d0", boot_index=0),
    BlockDevice(uuid="d1", source_type="blank", size_gb=1, boot_index=-1),
    BlockDevice(uuid="d2", source_type="blank", size_gb=1, boot_index=-1, guest_format="swap"),
)


def _rescued(images_type: Any = "qcow2", disk_format: str = "qcow2", **properties: str) -> tuple[DiskRecord, ...]:
    settings = LibvirtSettings(images_type=images_type)
    own = plan_disks(plan(devices=DEVICES, config_drive=True, flavor=flavor(ephemeral=1, swap=512)), settings)
    image = msgspec.structs.replace(IMAGE, id="rescue", disk_format=disk_format, properties=properties)
    return plan_rescue_disks(own, image, settings)


def _placed(disks: tuple[DiskRecord, ...], **more: Any) -> list[tuple[str, str, str, str | None]]:
    """Return file, place, bus and boot order of each disk in the definition."""
    rescue = RescueRecord(epoch=4, disks=disks)
    buses = frozenset({"ide", "scsi", "virtio", "usb", "sata", "fdc"})
    root = domain(composed(config_drive=True, record={"rescue": rescue}, host=facts(disk_buses=buses), **more))
    found = []
    for disk in root.findall("./devices/disk"):
        source, target, boot = disk.find("source"), disk.find("target"), disk.find("boot")
        assert source is not None and target is not None
        file = str(source.get("file")).rpartition("/")[2]
        order = None if boot is None else boot.get("order")
        found.append((file, str(target.get("dev")), str(target.get("bus")), order))
    return found


def test_the_rescue_disk_is_first_and_the_root_disk_second() -> None:
    disks = _rescued()
    assert _placed(disks) == [
        ("disk.rescue", "vda", "virtio", "1"),
        ("disk", "vdb", "virtio", None),
        ("disk.config.rescue", "hda", "ide", None),
    ]
    [rescue, root, _] = disks
    assert (rescue.format, rescue.backing) == ("qcow2", f"rescue.{'ab' * 16}")
    assert root.backing is not None and root.backing != rescue.backing


def test_each_overlay_has_its_own_link_to_a_cached_image() -> None:
    rescue = RescueRecord(epoch=4, disks=_rescued())
    root = domain(composed(record={"rescue": rescue}))
    links = [str(source.get("file")) for source in root.findall("./devices/disk/backingStore/source")]
    assert [link.rpartition("/")[2] for link in links] == ["disk.rescue.base", "disk.base"]


@pytest.mark.parametrize(
    ("properties", "place"),
    [
        ({"hw_rescue_device": "disk"}, ("disk.rescue", "vdd", "virtio", "1")),
        ({"hw_rescue_bus": "usb"}, ("disk.rescue", "sda", "usb", "1")),
        ({"hw_rescue_device": "cdrom"}, ("disk.rescue", "hdb", "ide", "1")),
        ({"hw_rescue_device": "cdrom", "hw_rescue_bus": "sata"}, ("disk.rescue", "sda", "sata", "1")),
        ({"hw_rescue_device": "floppy"}, ("disk.rescue", "fda", "fdc", "1")),
    ],
)
def test_a_stable_rescue_disk_is_the_last(properties: dict[str, str], place: tuple[str, ...]) -> None:
    disks = _rescued(**properties)
    assert _placed(disks) == [
        ("disk", "vda", "virtio", None),
        ("disk.eph0", "vdb", "virtio", None),
        ("disk.swap", "vdc", "virtio", None),
        ("disk.config.rescue", "hda", "ide", None),
        place,
    ]
    device = properties.get("hw_rescue_device", "disk")
    assert (disks[-1].device, disks[-1].backing is None) == (device, device != "disk")


def test_the_image_says_on_which_bus_its_system_looks_for_it() -> None:
    assert _placed(_rescued(hw_disk_bus="scsi"))[:2] == [
        ("disk.rescue", "sda", "scsi", "1"),
        ("disk", "vda", "virtio", None),
    ]
    assert _placed(_rescued(disk_format="iso"))[0] == ("disk.rescue", "hda", "ide", "1")


def test_without_overlays_the_disk_is_a_copy() -> None:
    [rescue, *_] = _rescued(images_type="raw")
    assert (rescue.format, rescue.backing) == ("raw", None)

"""Mediated devices by libvirt's descriptions. The machines that run the tests have none: the documents are written."""

from typing import Any

import pytest

from micronova.objects.mediated_devices import CapableDevice
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client import node_devices
from micronova.virt.libvirt.client.node_devices import Mdev, mdev_xml, parse_capable, parse_mdev
from micronova.virt.libvirt.client.xmltree import parse
from tests.unit.virt.libvirt.node_devices import GPU, MTTY, Described, NodeDevices, mdev_document

FIRST = Mdev(uuid="4b20d080-1b54-4048-85b3-a6a62d165c01", parent="pci_0000_84_00_0", mdev_type="nvidia-35")


def test_devices_that_offer_mediated_devices() -> None:
    found = parse_capable(parse(GPU.format(name="pci_0000_84_00_0", available=16)))
    assert found == CapableDevice(name="pci_0000_84_00_0", available={"nvidia-35": 16})
    assert parse_capable(parse(MTTY)) == CapableDevice(name="mtty_mtty", available={"mtty-1": 24})
    assert parse_capable(parse("<device><name>pci_0000_00_00_0</name><capability type='pci'/></device>")) is None


def test_mediated_devices() -> None:
    for named_only in (False, True):
        assert parse_mdev(parse(mdev_document(FIRST, named_only=named_only))) == FIRST
    assert parse_mdev(parse("<device><name>mdev_x</name><parent>p</parent><capability type='pci'/></device>")) is None
    assert parse_mdev(parse(mdev_document(FIRST, named_only=True).replace("mdev_", "mdev_?"))) is None


def test_what_is_made_is_what_was_asked_for() -> None:
    host: Any = NodeDevices(2)
    node_devices.make(host, FIRST)
    assert list(host.mdevs.values()) == [FIRST] == node_devices.list_mdevs(host)
    assert node_devices.list_offers(host) == (
        [CapableDevice(name="pci_0000_84_00_0", available={"nvidia-35": 1})],
        [FIRST],
    )
    node_devices.remove(host, {FIRST.uuid, "another"})
    assert not host.mdevs
    removed = []

    class Old(NodeDevices):
        """It chooses the uuid itself."""

        def nodeDeviceCreateXML(self, xml: str, flags: int = 0) -> Described:
            other = Mdev(uuid="00000000-1b54-4048-85b3-a6a62d165c01", parent=FIRST.parent, mdev_type=FIRST.mdev_type)
            return Described(mdev_document(other), lambda: removed.append(other.uuid))

    old: Any = Old(2)
    with pytest.raises(DriverFailed, match="too old"):
        node_devices.make(old, FIRST)
    assert len(removed) == 1


def test_devices_of_all_guests() -> None:
    host: Any = NodeDevices(2, used=FIRST.uuid)
    assert node_devices.used_by_guests(host) == {FIRST.uuid}


def test_a_count_during_a_change_is_repeated() -> None:
    class Busy(NodeDevices):
        """A device is made after the first list of those that exist."""

        lists = 0

        def listAllDevices(self, flags: int = 0) -> list[Described]:
            self.lists += 1
            if self.lists == 2:
                self.mdevs[FIRST.uuid] = FIRST
            return super().listAllDevices(flags)

    host: Any = Busy(4)
    [capable], existing = node_devices.list_offers(host)
    assert capable.available["nvidia-35"] + len(existing) == 4


def test_the_document_of_a_new_device() -> None:
    assert mdev_xml(FIRST) == (
        '<device><parent>pci_0000_84_00_0</parent><capability type="mdev"><type id="nvidia-35" />'
        "<uuid>4b20d080-1b54-4048-85b3-a6a62d165c01</uuid></capability></device>"
    )

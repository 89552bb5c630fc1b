"""A libvirt with devices that offer mediated devices: it answers with XML documents, as a real one does."""

from collections.abc import Callable
from functools import partial
from typing import Any

from micronova.virt.libvirt.client.node_devices import CAPABLE, MDEVS, Mdev
from micronova.virt.libvirt.client.xmltree import parse

GPU = """<device>
  <name>{name}</name><path>/sys/devices/pci0000:80/0000:84:00.0</path><parent>pci_0000_80_02_0</parent>
  <driver><name>nvidia</name></driver>
  <capability type='pci'>
    <class>0x030000</class><domain>0</domain><bus>132</bus><slot>0</slot><function>0</function>
    <product id='0x13f2'>GM204GL [Tesla M60]</product><vendor id='0x10de'>NVIDIA Corporation</vendor>
    <capability type='mdev_types'>
      <type id='nvidia-35'><name>GRID M60-0B</name><deviceAPI>vfio-pci</deviceAPI>
        <availableInstances>{available}</availableInstances></type>
      <type id='nvidia-99'><name>other</name><deviceAPI>vfio-ccw</deviceAPI>
        <availableInstances>3</availableInstances></type>
    </capability>
    <numa node='0'/>
  </capability>
</device>"""
MTTY = """<device><name>mtty_mtty</name><path>/sys/devices/virtual/mtty/mtty</path><parent>computer</parent>
  <capability type='mdev_types'><type id='mtty-1'><name>Single port serial</name><deviceAPI>vfio-pci</deviceAPI>
  <availableInstances>24</availableInstances></type></capability></device>"""
MDEV = """<device><name>mdev_{name}</name><path>/sys/devices/pci0000:80/0000:84:00.0/{uuid}</path>
  <parent>{parent}</parent><driver><name>vfio_mdev</name></driver>
  <capability type='mdev'><type id='{type}'/>{more}<iommuGroup number='12'/></capability></device>"""
DOMAIN = """<domain><devices><hostdev mode='subsystem' type='pci'><source><address domain='0x0000' bus='0x5e'/></source>
  </hostdev><hostdev mode='subsystem' type='mdev' model='vfio-pci'><source><address uuid='{uuid}'/></source></hostdev>
  </devices></domain>"""


def mdev_document(mdev: Mdev, *, named_only: bool = False) -> str:
    """Return libvirt's description of a mediated device; old versions have the uuid in the name alone."""
    name = mdev.uuid.replace("-", "_") + ("" if named_only else "_0000_84_00_0")
    more = "" if named_only else f"<uuid>{mdev.uuid}</uuid>"
    return MDEV.format(name=name, uuid=mdev.uuid, parent=mdev.parent, type=mdev.mdev_type, more=more)


class Described:
    """A device or a guest that has a description."""

    def __init__(self, text: str, destroy: Callable[[], None] | None = None) -> None:
        self._text = text
        self._destroy = destroy

    def XMLDesc(self, flags: int = 0) -> str:
        return self._text

    def destroy(self) -> int:
        assert self._destroy is not None
        self._destroy()
        return 0


class NodeDevices:
    """A connection to a libvirt whose GPU is divided into so many."""

    def __init__(self, total: int, *mdevs: Mdev, used: str = "") -> None:
        self.mdevs = {each.uuid: each for each in mdevs}
        self._total = total
        self._used = used

    def listAllDevices(self, flags: int = 0) -> list[Described]:
        if flags == CAPABLE:
            return [Described(GPU.format(name="pci_0000_84_00_0", available=self._total - len(self.mdevs)))]
        assert flags == MDEVS
        return [Described(mdev_document(each), partial(self._remove, each.uuid)) for each in self.mdevs.values()]

    def _remove(self, uuid: str) -> None:
        del self.mdevs[uuid]

    def nodeDeviceCreateXML(self, xml: str, flags: int = 0) -> Described:
        device = parse(xml)
        kind = device.find("./capability[@type='mdev']/type")
        assert device.tag == "device" and kind is not None and len(self.mdevs) < self._total
        made = Mdev(
            uuid=device.findtext("./capability/uuid", ""),
            parent=device.findtext("parent", ""),
            mdev_type=kind.get("id", ""),
        )
        self.mdevs[made.uuid] = made
        return Described(mdev_document(made), lambda: None)

    def listAllDomains(self, flags: int = 0) -> list[Described]:
        return [Described(DOMAIN.format(uuid=self._used))] if self._used else []


class Direct:
    """Calls libvirt at once, without threads."""

    def __init__(self, connection: NodeDevices) -> None:
        self._connection: Any = connection

    async def read(self, function: Callable[[Any], Any], what: str = "") -> Any:
        return function(self._connection)

    async def change(self, guest: str, function: Callable[[Any], Any], what: str) -> Any:
        return function(self._connection)

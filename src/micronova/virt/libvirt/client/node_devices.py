"""Mediated devices of this host by libvirt: which devices offer them, which exist, making and removing them.

Libvirt makes and removes them with mdevctl. They last until the machine is restarted. Functions block.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from micronova.objects.mediated_devices import CapableDevice
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.library import has_code
from micronova.virt.libvirt.client.xmltree import Element, child, element, parse, unparse

CAPABLE: Final = 8192  # VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV_TYPES
MDEVS: Final = 16384  # VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV
API: Final = "vfio-pci"
"""How guests see mediated devices: as PCI devices. Types with another interface are not offered."""


class Mdev(msgspec.Struct, frozen=True, kw_only=True):
    """A mediated device."""

    uuid: str
    parent: str  # the device that was divided, as libvirt names it
    mdev_type: str


def list_offers(connection: Connect) -> tuple[list[CapableDevice], list[Mdev]]:
    """Return the devices that offer mediated devices, and those that exist, at one moment."""
    for _ in range(5):
        before = list_mdevs(connection)
        devices = [parse_capable(each) for each in _described(connection.listAllDevices(CAPABLE))]
        after = list_mdevs(connection)
        # One that is made or removed meanwhile would count twice, or not at all.
        if before == after:
            return [each for each in devices if each is not None], after
    raise DriverFailed("Mediated devices of this host are made and removed faster than they can be counted.")


def list_mdevs(connection: Connect) -> list[Mdev]:
    """Return the mediated devices that exist, in the order of their uuids."""
    found = [parse_mdev(each) for each in _described(connection.listAllDevices(MDEVS))]
    return sorted((each for each in found if each is not None), key=lambda each: each.uuid)


def used_by_guests(connection: Connect) -> set[str]:
    """Return the uuids of mediated devices that any guest of this libvirt has, also of other owners."""
    found = set()
    for domain in _described(connection.listAllDomains()):
        for address in domain.findall("./devices/hostdev[@type='mdev']/source/address"):
            found.add(address.get("uuid", ""))
    return found


def make(connection: Connect, wanted: Mdev) -> None:
    """Make a mediated device; raise DriverFailed if libvirt makes another one."""
    device = connection.nodeDeviceCreateXML(mdev_xml(wanted), 0)
    found = parse_mdev(parse(device.XMLDesc(0)))
    if found != wanted:
        device.destroy()
        raise DriverFailed(f"Libvirt made the mediated device {found}, and not {wanted}: it is too old.")


def remove(connection: Connect, uuids: set[str]) -> None:
    """Remove mediated devices; those that do not exist are not an error."""
    for device in connection.listAllDevices(MDEVS):
        for description in _described([device]):
            found = parse_mdev(description)
            if found is not None and found.uuid in uuids:
                device.destroy()


def _described(listed: Sequence[Any]) -> Iterator[Element]:
    """Yield the descriptions of guests or devices; those that went meanwhile are left out."""
    for each in listed:
        try:
            yield parse(each.XMLDesc(0))
        except Exception as error:
            if not has_code(error, "VIR_ERR_NO_DOMAIN", "VIR_ERR_NO_NODE_DEVICE"):
                raise


def parse_capable(device: Element) -> CapableDevice | None:
    """Return a device that offers mediated devices, from libvirt's description; None if it offers none to guests."""
    name, available = device.findtext("name"), {}
    # PCI devices have the types below their own capability, others have them at the top.
    for each in device.findall(".//capability[@type='mdev_types']/type"):
        count = each.findtext("availableInstances", "")
        if each.findtext("deviceAPI") == API and count.isdecimal():
            available[each.get("id", "")] = int(count)
    return CapableDevice(name=name, available=available) if name and available else None


def parse_mdev(device: Element) -> Mdev | None:
    """Return a mediated device from libvirt's description; None if the description lacks something."""
    found, parent = device.find("./capability[@type='mdev']"), device.findtext("parent")
    kind = None if found is None else found.find("type")
    if found is None or kind is None or not parent:
        return None
    # Older versions say the uuid only in the name: mdev_, and the uuid with underscores.
    text = found.findtext("uuid") or device.findtext("name", "").removeprefix("mdev_")[:36].replace("_", "-")
    try:
        return Mdev(uuid=str(UUID(text)), parent=parent, mdev_type=kind.get("id", ""))
    except ValueError:
        return None


def mdev_xml(mdev: Mdev) -> str:
    """Return the description of a mediated device that is to be made."""
    device = element("device")
    child(device, "parent", mdev.parent)
    capability = child(device, "capability", type="mdev")
    child(capability, "type", id=mdev.mdev_type)
    child(capability, "uuid", mdev.uuid)
    return unparse(device)

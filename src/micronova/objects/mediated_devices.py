"""Mediated devices by their settings: which types of them a host offers, and on which of its devices.

A device that can be divided, such as a GPU, offers types of mediated devices. The settings have Nova's names:
`devices.enabled_mdev_types` lists the types that guests may have, and the section `mdev_TYPE` of a type says on which
devices (`device_addresses`), as which resource class (`mdev_class`) and how many of them at most (`max_instances`).
Each device offers one type. A type without addresses is that of all devices that no other type names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID, uuid5

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.host_limits import MOST_MDEV_TYPES
from micronova.objects.topology import AssignedMdev, MdevParent, NodeTopology

VGPU: Final = "VGPU"
_PROVIDERS: Final = UUID("d1b6c7a4-0f43-4c52-8d3f-6d6963726f6e")
"""Namespace of the uuids of resource providers: the same device has the same one after every restart."""
_TYPE: Final = re.compile(r"[A-Za-z0-9_.+-]{1,128}")
_CLASS: Final = re.compile(r"VGPU|CUSTOM_[A-Z0-9_]{1,240}")
_ADDRESS: Final = re.compile(r"([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class MdevType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of mediated devices that guests may have."""

    name: str
    resource_class: str = VGPU
    max_instances: int | None = None  # on the whole host


class MdevTypes(msgspec.Struct, frozen=True, kw_only=True):
    """The types that a host offers."""

    by_device: dict[str, MdevType] = {}  # by the name of the device
    default: MdevType | None = None  # of all other devices

    def of(self, device: str) -> MdevType | None:
        """Return the type that a device offers, None if it offers none."""
        return self.by_device.get(device, self.default)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.by_device) or self.default is not None


NO_TYPES: Final = MdevTypes()


class CapableDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a host that can be divided: how many more mediated devices of each type it can have now."""

    name: str  # as libvirt names it, such as pci_0000_84_00_0
    available: dict[str, int]


def parse_mdev_types(enabled: Sequence[str], sections: Mapping[str, Mapping[str, Any]]) -> MdevTypes:
    """Return the types by the settings; raise Invalid if they contradict each other."""
    if len(enabled) > MOST_MDEV_TYPES:
        raise Invalid(
            f"The setting devices.enabled_mdev_types has {len(enabled)} types: {MOST_MDEV_TYPES} are allowed."
        )
    for name in enabled:
        if not _TYPE.fullmatch(name) or enabled.count(name) > 1:
            raise Invalid(f"The setting devices.enabled_mdev_types is wrong: {name!r} is no type, or is there twice.")
    for name in sections:
        if name not in enabled:
            raise _wrong(
                name, f"the type is not in devices.enabled_mdev_types, which has {', '.join(enabled) or 'none'}"
            )
    by_device: dict[str, MdevType] = {}
    default: MdevType | None = None
    for name in enabled:
        section = sections.get(name, {})
        resource_class = section.get("mdev_class", VGPU)
        if not _CLASS.fullmatch(resource_class):
            raise _wrong(name, f"mdev_class is VGPU, or begins with CUSTOM_, and not {resource_class!r}")
        known = MdevType(name=name, resource_class=resource_class, max_instances=section.get("max_instances"))
        addresses = section.get("device_addresses", ())
        if not addresses:
            if default is not None:
                raise _wrong(name, f"it needs device_addresses, because {default.name} has none already")
            default = known
        for address in addresses:
            device = device_name(address)
            if device is None:
                raise _wrong(name, f"the address {address!r} should be like 0000:84:00.0")
            if device in by_device:
                raise _wrong(name, f"the device {address} has the type {by_device[device].name} already")
            by_device[device] = known
    return MdevTypes(by_device=by_device, default=default)


def device_name(address: str) -> str | None:
    """Return libvirt's name of a device by its PCI address; a device that is not on PCI is named as libvirt does."""
    parts = _ADDRESS.fullmatch(address.lower())
    if parts is not None:
        return "_".join(("pci", *parts.groups()))
    return address if _NAME.fullmatch(address) else None


def offered(
    devices: Iterable[CapableDevice], existing: Mapping[tuple[str, str], int], types: MdevTypes
) -> tuple[MdevParent, ...]:
    """Return what the devices of a host offer, in the order of their names.

    `existing` counts the mediated devices by device and type: they are part of what a device offers.
    """
    found: list[tuple[str, MdevType, int, int]] = []
    for device in sorted(devices, key=lambda each: each.name):
        known = types.of(device.name)
        if known is not None and known.name in device.available:
            made = existing.get((device.name, known.name), 0)
            found.append((device.name, known, made, device.available[known.name]))
    left: dict[str, int] = {}  # how many more of a type there may be
    for _, known, made, _ in found:
        if known.max_instances is not None:
            left[known.name] = left.get(known.name, known.max_instances) - made
    parents = []
    for name, known, made, available in found:
        more = available
        if known.name in left:
            more = max(0, min(available, left[known.name]))
            left[known.name] -= more
        parents.append(
            MdevParent(name=name, mdev_type=known.name, total=made + more, resource_class=known.resource_class)
        )
    return tuple(parents)


def provider_uuid(node_uuid: str, device: str) -> str:
    """Return the uuid of the resource provider that a device is, below its compute node."""
    return str(uuid5(_PROVIDERS, f"{node_uuid}/{device}"))


def trait_of(mdev_type: str) -> str:
    """Return the trait that a provider has by the type of its mediated devices."""
    return f"CUSTOM_{re.sub('[^A-Z0-9]', '_', mdev_type.upper())}"


def assigned(
    node_uuid: str, topology: NodeTopology, taken: Mapping[str, Mapping[str, int]]
) -> tuple[AssignedMdev, ...]:
    """Return the mediated devices that an instance gets by the amounts that it takes of each resource provider."""
    found: list[AssignedMdev] = []
    for parent in topology.mdevs:
        amount = taken.get(provider_uuid(node_uuid, parent.name), {}).get(parent.resource_class, 0)
        found += [AssignedMdev(parent=parent.name, mdev_type=parent.mdev_type)] * amount
    return tuple(found)


def _wrong(name: str, reason: str) -> Invalid:
    return Invalid(f"The settings of mediated devices, section mdev_{name}, are wrong: {reason}.")

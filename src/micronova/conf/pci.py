"""Settings of PCI devices and of mediated devices."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class PCISettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PCI devices of hosts that servers may have."""

    alias: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Names of kinds of devices, for the extra spec pci_passthrough:alias: tables with name, "
            "vendor_id, product_id, device_type (type-PCI, type-PF or type-VF), numa_policy (legacy, "
            "preferred, required or socket) and live_migratable (yes: only devices whose hosts say so, "
            "and live migrations are allowed; no: only devices whose hosts say no; without it any "
            "device, and no live migration). API, conductors and schedulers read it, so it must be the "
            "same there. Set it if flavors ask for PCI devices.",
            examples=[[{"name": "gpu", "vendor_id": "10de", "product_id": "1eb8"}]],
        ),
    ] = ()
    device_spec: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Devices of a libvirt host that servers may have: tables with vendor_id, product_id and "
            "address, in which * stands for any part, and live_migratable (yes or no). The first table "
            "that names a device counts. Without a table there are none. Set it on hosts with PCI "
            "devices for guests.",
            examples=[[{"vendor_id": "10de", "product_id": "1eb8"}]],
        ),
    ] = ()


class MdevTypeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One type of mediated devices: the section mdev_TYPE."""

    device_addresses: tuple[str, ...] = ()
    mdev_class: str = "VGPU"
    max_instances: Annotated[int, Meta(ge=1)] | None = None


class DevicesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mediated devices of hosts, such as virtual GPUs, that servers may have."""

    enabled_mdev_types: Annotated[
        tuple[str, ...],
        Meta(
            description="Types of mediated devices of a host that servers may have, by the names that the kernel "
            "gives them. With more than one type all but one need a section mdev_TYPE with "
            "device_addresses. Set it on hosts with virtual GPUs for guests.",
            examples=[["nvidia-35"]],
        ),
    ] = ()
    mdev: Annotated[
        dict[str, MdevTypeSettings],
        Meta(
            description="What the sections mdev_TYPE say: device_addresses (PCI addresses of the devices that "
            "offer the type; without them all that no other type names), mdev_class (the resource "
            "class: VGPU, or one that begins with CUSTOM_) and max_instances (on the whole host). Set "
            "it if several types are enabled.",
            examples=[{"nvidia-35": {"max_instances": 8}}],
        ),
    ] = {}

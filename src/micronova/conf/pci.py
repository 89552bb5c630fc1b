"""Settings of PCI devices."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class PCISettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PCI devices of hosts that servers may have."""

    alias: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Names of kinds of devices, for the extra spec pci_passthrough:alias: tables with name, "
            "vendor_id, product_id, device_type (type-PCI, type-PF or type-VF) and numa_policy (legacy, preferred, "
            "required or socket). API, conductors and schedulers read it, so it must be the same there."
        ),
    ] = ()
    device_spec: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Devices of a libvirt host that servers may have: tables with vendor_id, product_id and "
            "address, in which * stands for any part. Without a table there are none."
        ),
    ] = ()

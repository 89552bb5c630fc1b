"""The data that a guest's metadata documents are made from.

The documents are the same on a config drive (`drive`) and over HTTP (the metadata service). They are pure functions of
these facts; only `vendordata` makes requests, to the operator's services.
"""

from typing import Any

import msgspec

from micronova.objects.block_device import BlockDevice
from micronova.objects.network import VIF
from micronova.objects.orders import InjectedFile, InstanceSpec


class VendorData(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's data for a guest."""

    static: Any = msgspec.field(default_factory=dict)  # the same for all guests; None: not offered
    dynamic: dict[str, Any] = {}  # by the name of the service that answered

    def together(self) -> dict[str, Any]:
        """Return the content of vendor_data2.json; `static` wins over a service of that name."""
        return {**self.dynamic, **({} if self.static is None else {"static": self.static})}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A guest with its interfaces and disks."""

    instance: InstanceSpec
    vifs: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    address: str = ""  # the address that it asks from, for guests whose network is not known to us
    # These two are never stored, so only a config drive has them.
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()

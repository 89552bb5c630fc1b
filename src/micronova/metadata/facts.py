"""What a guest may be told about itself: all that the documents of this room are made of.

The documents are the same on a config drive (`drive`) and by HTTP (the metadata service), and are pure; only
`vendordata` asks somebody, the operator's services.
"""

from typing import Any

import msgspec

from micronova.objects.block_device import BlockDevice
from micronova.objects.network import VIF
from micronova.objects.orders import InjectedFile, InstanceSpec


class VendorData(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator tells guests."""

    static: Any = msgspec.field(default_factory=dict)  # the same for all guests; None: no such thing is offered
    dynamic: dict[str, Any] = {}  # by the name of the service that was asked about this guest

    def together(self) -> dict[str, Any]:
        """Return it as vendor_data2.json has it; a service cannot take the name of what is the same for all."""
        return {**self.dynamic, **({} if self.static is None else {"static": self.static})}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A guest, with what belongs to it."""

    instance: InstanceSpec
    vifs: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    address: str = ""  # from which it asks; what it has when its network is not known to us
    # These two are never stored: only a config drive has them.
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()

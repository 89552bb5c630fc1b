"""What the back end can do, and whether that is what the extra specs of a volume type ask for."""

from collections.abc import Mapping
from typing import Final

BACKEND: Final = "files"
"""The name of the only back end, which is also that of its only pool."""
CAPABILITIES: Final[Mapping[str, str | bool]] = {
    "vendor_name": "Micronova",
    "volume_backend_name": BACKEND,
    "driver_version": "1",
    "storage_protocol": "nbd",
    "pool_name": BACKEND,
    "thin_provisioning_support": True,
    "thick_provisioning_support": False,
    "multiattach": True,
    "QoS_support": False,
    "replication_enabled": False,
}
_SCOPE: Final = "capabilities"


def satisfy(extra_specs: Mapping[str, str]) -> bool:
    """Return whether volumes of a type with these extra specs can be here.

    As in Cinder, specs without a scope and those of the scope `capabilities` are about the back end. Others are not.
    """
    for key, wanted in extra_specs.items():
        scope, colon, name = key.partition(":")
        if not colon:
            name = key
        elif scope != _SCOPE:
            continue
        if name not in CAPABILITIES or not _matches(CAPABILITIES[name], wanted):
            return False
    return True


def _matches(value: str | bool, wanted: str) -> bool:
    operator, _, rest = wanted.strip().partition(" ")
    if operator == "<is>":
        return str(value).lower() == rest.strip().lower()
    if operator == "<or>":
        return str(value) in [choice.strip() for choice in rest.split("<or>")]
    if operator == "<in>":
        return rest.strip() in str(value)
    return str(value).lower() == wanted.strip().lower()

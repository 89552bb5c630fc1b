"""EC2's metadata: a tree for each dated version."""

from collections.abc import Mapping
from typing import Any, Final

from micronova.metadata.facts import Facts
from micronova.objects.block_device import BlockDevice

LATEST: Final = "latest"
VERSIONS: Final = (
    "1.0",
    "2007-01-19",
    "2007-03-01",
    "2007-08-29",
    "2007-10-10",
    "2007-12-15",
    "2008-02-01",
    "2008-09-01",
    "2009-04-04",
)


def meta_data(facts: Facts, version: str = LATEST) -> dict[str, Any]:
    """Return the tree below meta-data/ of a version; a mapping is a directory."""
    instance = facts.instance
    at = VERSIONS[-1] if version == LATEST else version
    addresses = [fixed for vif in facts.vifs for fixed in vif.fixed_ips if fixed.version == 4]
    found: dict[str, Any] = {
        "ami-id": _short_id("ami", instance.image.id) if instance.image else "",
        "ami-launch-index": instance.launch_index,
        "ami-manifest-path": "",
        "hostname": instance.hostname,
        "instance-id": _short_id("i", instance.uuid),
        "local-ipv4": addresses[0].address if addresses else facts.address,
        "reservation-id": instance.reservation_id,
        "security-groups": list(instance.security_groups),
    }
    if instance.key_name and instance.key_data:
        found["public-keys"] = {"0": {"openssh-key": instance.key_data}}
    if at >= "2007-01-19":
        found["local-hostname"] = found["public-hostname"] = instance.hostname
        found["public-ipv4"] = next((floating for fixed in addresses for floating in fixed.floating), "")
    if at >= "2007-08-29":
        found["instance-type"] = instance.flavor.name
    if at >= "2007-12-15":
        found["block-device-mapping"] = block_device_mapping(instance.root_device_name, facts.block_devices)
        properties: Mapping[str, Any] = instance.image.properties if instance.image else {}
        for name, prefix in (("kernel", "aki"), ("ramdisk", "ari")):
            if properties.get(f"{name}_id"):
                found[f"{name}-id"] = _short_id(prefix, str(properties[f"{name}_id"]))
    if at >= "2008-02-01":
        found["placement"] = {"availability-zone": instance.availability_zone or ""}
    if at >= "2008-09-01":
        found["instance-action"] = "none"
    return found


def block_device_mapping(root: str, devices: tuple[BlockDevice, ...]) -> dict[str, str]:
    """Return the device names by role; volumes are numbered by device name, other disks in the order of the request."""
    found = {"ami": root.removeprefix("/dev/"), "root": root}
    volumes = sorted(device.device_name or "" for device in devices if device.destination_type == "volume")
    found |= {f"ebs{number}": name for number, name in enumerate(volumes)}
    blank = [each for each in devices if each.is_blank]  # also a root disk, as in Nova
    found |= {f"ephemeral{number}": device.device_name or "" for number, device in enumerate(blank)}
    swap = [each.device_name or "" for each in devices if each.source_type == "blank" and each.guest_format == "swap"]
    return found | ({"swap": swap[0]} if swap else {})


def _short_id(prefix: str, uuid: str) -> str:
    """Return an id in EC2's form, which is shorter than a uuid and has a prefix."""
    return f"{prefix}-{uuid.replace('-', '')[:17]}"

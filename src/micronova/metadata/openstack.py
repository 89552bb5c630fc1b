"""OpenStack's documents in each dated version; a guest reads the newest version that it knows."""

import base64
import binascii
import json
import posixpath
from typing import Any, Final

from micronova.metadata.cpus import dedicated_cpus
from micronova.metadata.facts import Facts, VendorData
from micronova.metadata.networks import network_data

LATEST: Final = "latest"
FOLSOM: Final = "2012-08-10"
GRIZZLY: Final = "2013-04-04"
HAVANA: Final = "2013-10-17"
LIBERTY: Final = "2015-10-15"
NEWTON: Final = "2016-06-30"
NEWTON_2: Final = "2016-10-06"
OCATA: Final = "2017-02-22"
ROCKY: Final = "2018-08-27"
VICTORIA: Final = "2020-10-14"
EPOXY: Final = "2025-04-04"
VERSIONS: Final = (FOLSOM, GRIZZLY, HAVANA, LIBERTY, NEWTON, NEWTON_2, OCATA, ROCKY, VICTORIA, EPOXY)

META_DATA: Final = "meta_data.json"
USER_DATA: Final = "user_data"
VENDOR_DATA: Final = "vendor_data.json"
VENDOR_DATA_2: Final = "vendor_data2.json"
NETWORK_DATA: Final = "network_data.json"
SEED_BYTES: Final = 512

# The version that introduced each document.
_SINCE: Final = {
    META_DATA: FOLSOM,
    USER_DATA: FOLSOM,
    VENDOR_DATA: HAVANA,
    NETWORK_DATA: LIBERTY,
    VENDOR_DATA_2: NEWTON_2,
}


def names(facts: Facts, version: str, *, static_vendor_data: bool = True) -> list[str]:
    """Return the names of the documents that a version has for this guest."""
    missing = set() if decoded(facts.instance.user_data) is not None else {USER_DATA}
    if not static_vendor_data:
        missing.add(VENDOR_DATA)
    return [name for name, since in _SINCE.items() if name not in missing and _at(version) >= since]


def document(facts: Facts, version: str, name: str, vendor_data: VendorData, seed: bytes) -> bytes:
    """Return the content of a document that `names` lists."""
    if name == USER_DATA:
        return decoded(facts.instance.user_data) or b""
    if name == META_DATA:
        return as_json(meta_data(facts, version, seed))
    if name == NETWORK_DATA:
        return as_json(network_data(facts.vifs))
    return as_json(vendor_data.static if name == VENDOR_DATA else vendor_data.together())


def meta_data(facts: Facts, version: str, seed: bytes) -> dict[str, Any]:
    """Return the content of meta_data.json; `seed` is random data for the guest."""
    instance, at = facts.instance, _at(version)
    found: dict[str, Any] = {
        "uuid": instance.uuid,
        "name": instance.name,
        "hostname": instance.hostname,
        "launch_index": instance.launch_index,
        "availability_zone": instance.availability_zone,
    }
    if instance.metadata:
        found["meta"] = instance.metadata
    if instance.key_name and instance.key_data:
        found["public_keys"] = {instance.key_name: instance.key_data}
        found["keys"] = [{"name": instance.key_name, "type": _key_type(instance.key_data), "data": instance.key_data}]
    if facts.injected_files:
        found["files"] = [
            {"content_path": f"/{content_path(number)}", "path": posixpath.join("/", file.path)}
            for number, file in enumerate(facts.injected_files)
        ]
    if at >= GRIZZLY:
        if facts.admin_password is not None:
            found["admin_pass"] = facts.admin_password
        found["random_seed"] = base64.b64encode(seed).decode()
    if at >= LIBERTY:
        found["project_id"] = instance.project_id
    if at >= NEWTON:
        found["devices"] = [*_interfaces(facts, at), *_disks(facts)]
    if at >= VICTORIA:
        found["dedicated_cpus"] = dedicated_cpus(instance)
    return found


def content_path(number: int) -> str:
    """Return the path of an injected file on a config drive."""
    return f"content/{number:04}"


def decoded(user_data: str | None) -> bytes | None:
    """Return the user data as the guest sees it; the API accepts it in base64."""
    if not user_data:
        return None
    try:
        return base64.b64decode(user_data, validate=False)
    except (binascii.Error, ValueError):
        return user_data.encode()


def _interfaces(facts: Facts, at: str) -> list[dict[str, Any]]:
    """Return the interfaces that have a tag; the guest finds their bus and address by MAC address."""
    trusted = {"vf_trusted": False} if at >= ROCKY else {}
    return [
        {"type": "nic", "bus": "none", "address": "none", "mac": vif.mac_address, "tags": [vif.tag], **trusted}
        for vif in facts.vifs
        if vif.tag
    ]


def _disks(facts: Facts) -> list[dict[str, Any]]:
    """Return the disks that have a tag."""
    found = []
    for device in facts.block_devices:
        if device.tag:
            disk: dict[str, Any] = {"type": "disk", "bus": "none", "address": "none", "tags": [device.tag]}
            if device.volume_id:
                disk["serial"] = device.volume_id
            if device.device_name:
                disk["path"] = device.device_name
            found.append(disk)
    return found


def _at(version: str) -> str:
    return VERSIONS[-1] if version == LATEST else version


def _key_type(data: str) -> str:
    return "x509" if data.startswith("-----BEGIN CERTIFICATE") else "ssh"


def as_json(data: object) -> bytes:
    """Return a document as JSON, always the same bytes for the same content."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False).encode()

"""What a server looks like, field by field and version by version."""

from dataclasses import dataclass, field
from typing import Any

from micronova.api.links import Links, host_id
from micronova.api.view import OMIT, Field, View
from micronova.compute.states import status
from micronova.http.paging import iso, iso_micros
from micronova.http.versions import Range, since, until

_WITH_PROGRESS = frozenset({"ACTIVE", "BUILD", "REBUILD", "RESIZE", "VERIFY_RESIZE", "MIGRATING"})
_WITH_FAULT = frozenset({"ERROR", "DELETED"})


@dataclass(slots=True)
class Shown:
    """What the fields of one answer need besides the rows."""

    links: Links
    admin: bool  # may see the details of faults
    host_status: dict[str, str] = field(default_factory=dict)  # host -> UP | DOWN | MAINTENANCE
    groups: dict[str, list[str]] = field(default_factory=dict)  # server -> its groups


def _status(row: Any, _: Shown) -> str:
    return status(row["vm_state"], row["task_state"])


def _progress(row: Any, _: Shown) -> Any:
    return row["progress"] if status(row["vm_state"], row["task_state"]) in _WITH_PROGRESS else OMIT


def _fault(row: Any, shown: Shown) -> Any:
    fault = row["fault"]
    if not fault or status(row["vm_state"], row["task_state"]) not in _WITH_FAULT:
        return OMIT
    visible = {"code": fault["code"], "created": iso(fault["created"]), "message": fault["message"]}
    if fault.get("details") and (shown.admin or fault["code"] != 500):
        visible["details"] = fault["details"]
    return visible


def _image(row: Any, shown: Shown) -> Any:
    if not row["image_ref"]:
        return ""
    return {"id": row["image_ref"], "links": [_bookmark(shown, "images", row["image_ref"])]}


def _image_with_properties(row: Any, shown: Shown) -> Any:
    image = _image(row, shown)
    if image:
        image["properties"] = (row["image"] or {}).get("properties", {})
    return image


def _bookmark(shown: Shown, collection: str, id: str) -> dict[str, str]:
    return {"rel": "bookmark", "href": f"{shown.links.bookmark}/{collection}/{id}"}


def _flavor(row: Any, shown: Shown) -> Any:
    return {"id": row["flavor_id"], "links": [_bookmark(shown, "flavors", row["flavor_id"])]}


def _embedded_flavor(row: Any, shown: Shown) -> Any:
    flavor = row["flavor"]
    return {
        "vcpus": flavor["vcpus"],
        "ram": flavor["ram"],
        "disk": flavor["disk"],
        "ephemeral": flavor.get("ephemeral", 0),
        "swap": flavor.get("swap", 0),
        "original_name": flavor["name"],
        "extra_specs": flavor.get("extra_specs", {}),
    }


def addresses(row: Any, _: Any = None) -> dict[str, list[dict[str, Any]]]:
    """Return a server's addresses by network."""
    found: dict[str, list[dict[str, Any]]] = {}
    for vif in row["network_info"]:
        listed = found.setdefault(vif["network_label"], [])
        for fixed in vif["fixed_ips"]:
            mac = vif["mac_address"]
            listed.append(_address(fixed["address"], fixed["version"], mac, "fixed"))
            listed.extend(_address(text, 4, mac, "floating") for text in fixed.get("floating", ()))
    return found


def _address(text: str, version: int, mac: str, kind: str) -> dict[str, Any]:
    return {"version": version, "addr": text, "OS-EXT-IPS:type": kind, "OS-EXT-IPS-MAC:mac_addr": mac}


def _security_groups(row: Any, _: Shown) -> Any:
    names = row["security_groups"]
    return [{"name": name} for name in names] if names else OMIT


def _from_image(name: str) -> Any:
    def get(row: Any, _: Shown) -> Any:
        return ((row["image"] or {}).get("properties") or {}).get(name) or ""

    return get


_IDENTITY = (
    Field("id", "uuid"),
    Field("name", "display_name"),
    Field("links", lambda row, shown: shown.links.of("servers", row["uuid"])),
)
BRIEF = View(*_IDENTITY, keyed=True)

# What every full answer has; an update's answer had only this until 2.74.
_CORE = (
    Field("status", _status),
    Field("tenant_id", "project_id"),
    Field("user_id", "user_id"),
    Field("metadata", "metadata"),
    Field("hostId", lambda row, _: host_id(row["project_id"], row["host"])),
    Field("image", _image, until(97)),
    Field("image", _image_with_properties, since(98)),
    Field("flavor", _flavor, until(46)),
    Field("flavor", _embedded_flavor, since(47)),
    Field("created", lambda row, _: iso(row["created_at"])),
    Field("updated", lambda row, _: iso(row["updated_at"])),
    Field("addresses", addresses),
    Field("accessIPv4", lambda row, _: row["access_ip_v4"] or ""),
    Field("accessIPv6", lambda row, _: row["access_ip_v6"] or ""),
    Field("OS-DCF:diskConfig", "disk_config"),
    Field("progress", _progress, optional=True),
    Field("fault", _fault, optional=True),
    Field("locked", lambda row, _: row["locked_by"] is not None, since(9)),
    Field("locked_reason", "locked_reason", since(73)),
    Field("description", "display_description", since(19)),
    Field("tags", "tags", since(26)),
    Field("trusted_image_certificates", "trusted_certs", since(63)),
    Field("pinned_availability_zone", "pinned_availability_zone", since(96)),
    Field("scheduler_hints", lambda row, _: _shown_hints(row["hints"]), since(100)),
)
_EXTENDED = (
    Field("OS-EXT-AZ:availability_zone", lambda row, _: row["availability_zone"] or ""),
    Field("config_drive", lambda row, _: "True" if row["config_drive"] else ""),
    Field("key_name", "key_name"),
    Field("OS-SRV-USG:launched_at", lambda row, _: _usage_time(row["launched_at"])),
    Field("OS-SRV-USG:terminated_at", lambda row, _: _usage_time(row["terminated_at"])),
    Field("security_groups", _security_groups, optional=True),
    Field("OS-EXT-STS:task_state", "task_state"),
    Field("OS-EXT-STS:vm_state", "vm_state"),
    Field("OS-EXT-STS:power_state", "power_state"),
    Field("os-extended-volumes:volumes_attached", lambda row, _: []),
    Field(
        "host_status", lambda row, shown: shown.host_status.get(row["host"] or "", ""), since(16), when="host_status"
    ),
    Field("OS-EXT-SRV-ATTR:host", "host", when="attributes"),
    Field("OS-EXT-SRV-ATTR:hypervisor_hostname", "node", when="attributes"),
    Field("OS-EXT-SRV-ATTR:instance_name", lambda row, _: f"instance-{row['uuid'][:8]}", when="attributes"),
    Field("OS-EXT-SRV-ATTR:reservation_id", "reservation_id", since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:launch_index", "launch_index", since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:kernel_id", _from_image("kernel_id"), since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:ramdisk_id", _from_image("ramdisk_id"), since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:root_device_name", "root_device_name", since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:user_data", "user_data", since(3), when="attributes"),
    Field("OS-EXT-SRV-ATTR:hostname", "hostname", Range(3, 89), when="attributes"),
    Field("OS-EXT-SRV-ATTR:hostname", "hostname", since(90)),
)
_GROUPS = Field("server_groups", lambda row, shown: shown.groups.get(row["uuid"], []), since(71))


def _shown_hints(hints: dict[str, list[str]]) -> dict[str, Any]:
    """Show hints as they were sent: one value as itself, several as a list."""
    return {name: values[0] if len(values) == 1 else values for name, values in hints.items()}


def _usage_time(micros: int | None) -> str | None:
    return iso_micros(micros)


DETAIL = View(*_IDENTITY, *_CORE, *_EXTENDED, keyed=True)
SHOW = View(*_IDENTITY, *_CORE, *_EXTENDED, _GROUPS, keyed=True)
# The answer of an update: the core alone until 2.74, everything from 2.75 on.
UPDATED = View(
    *_IDENTITY,
    *_CORE,
    *(
        Field(each.name, each.get, Range(max(75, each.versions.since), each.versions.until), each.when, each.optional)
        for each in _EXTENDED
    ),
    _GROUPS,
    keyed=True,
)

"""The JSON form of servers: each field with its microversions."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from micronova.api.links import LINKS, Links, host_id
from micronova.api.view import OMIT, Field, View
from micronova.http.paging import iso, iso_micros
from micronova.http.versions import Range, since, until
from micronova.objects.block_device import BlockDevice
from micronova.objects.instance import InstanceRow, InstanceWithService
from micronova.objects.states import status

_WITH_PROGRESS = frozenset({"ACTIVE", "BUILD", "REBUILD", "RESIZE", "VERIFY_RESIZE", "MIGRATING"})
_WITH_FAULT = frozenset({"ERROR", "DELETED"})


@dataclass(slots=True)
class ViewContext:
    """What the fields of one response need besides the rows."""

    links: Links
    is_admin: bool  # may see the details of faults
    shows_extra_specs: bool  # policy shows the extra specs of the flavor
    up_since: int = 0  # a host that was heard of since this time is up
    all_host_states: bool = False  # policy shows other states of the host than UNKNOWN
    server_groups: dict[str, list[str]] = field(default_factory=dict)  # by server
    volumes: dict[str, tuple[BlockDevice, ...]] = field(default_factory=dict)  # by server


def _status(row: InstanceRow, _: ViewContext) -> str:
    return status(row["vm_state"], row["task_state"])


def _progress(row: InstanceRow, _: ViewContext) -> Any:
    return row["progress"] if status(row["vm_state"], row["task_state"]) in _WITH_PROGRESS else OMIT


def _fault(row: InstanceRow, context: ViewContext) -> Any:
    fault = row["fault"]
    if not fault or status(row["vm_state"], row["task_state"]) not in _WITH_FAULT:
        return OMIT
    visible = {"code": fault["code"], "created": iso(fault["created"]), "message": fault["message"]}
    if fault.get("details") and (context.is_admin or fault["code"] != 500):
        visible["details"] = fault["details"]
    return visible


def _host_status(row: InstanceWithService, context: ViewContext) -> str:
    """Return the state of the server's host.

    The host is up by the rule of `db.services.is_up`.
    """
    if row["service_seen_at"] is None:
        return ""
    if row["service_disabled"]:
        found = "MAINTENANCE"
    elif row["service_forced_down"]:
        found = "DOWN"
    else:
        found = "UP" if row["service_seen_at"] >= context.up_since else "UNKNOWN"
    return found if context.all_host_states or found == "UNKNOWN" else ""


def _image(row: InstanceRow, context: ViewContext) -> Any:
    if not row["image_ref"]:
        return ""
    return {"id": row["image_ref"], "links": [_bookmark(context, "images", row["image_ref"])]}


def _image_with_properties(row: InstanceRow, context: ViewContext) -> Any:
    image = _image(row, context)
    if image:
        image["properties"] = row["image"]["properties"] if row["image"] else {}
    return image


def _bookmark(context: ViewContext, collection: str, id: str) -> dict[str, str]:
    return {"rel": "bookmark", "href": f"{context.links.bookmark}/{collection}/{id}"}


def _flavor(row: InstanceRow, context: ViewContext) -> Any:
    return {"id": row["flavor_id"], "links": [_bookmark(context, "flavors", row["flavor_id"])]}


def _embedded_flavor(row: InstanceRow, context: ViewContext) -> Any:
    flavor = row["flavor"]
    shown = {
        "vcpus": flavor["vcpus"],
        "ram": flavor["ram"],
        "disk": flavor["disk"],
        "ephemeral": flavor.get("ephemeral", 0),
        "swap": flavor.get("swap", 0),
        "original_name": flavor["name"],
    }
    if context.shows_extra_specs:
        shown["extra_specs"] = flavor.get("extra_specs", {})
    return shown


def addresses(row: InstanceRow, _: Any = None) -> dict[str, list[dict[str, Any]]]:
    """Return a server's addresses by network."""
    found: dict[str, list[dict[str, Any]]] = {}
    for vif in row["network_info"]:
        listed = found.setdefault(vif["network_label"], [])
        for fixed in vif["fixed_ips"]:
            mac = vif["mac_address"]
            listed.append(_address(fixed["address"], fixed["version"], mac, "fixed"))
            listed.extend(_address(text, 4, mac, "floating") for text in fixed.get("floating", ()))
    return found


def plain_addresses(row: InstanceRow, _: Any = None) -> dict[str, list[dict[str, Any]]]:
    """Return a server's addresses by network as old answers show them: only version and address."""
    return {
        label: [{"version": each["version"], "addr": each["addr"]} for each in listed]
        for label, listed in addresses(row).items()
    }


def _address(text: str, version: int, mac: str, kind: str) -> dict[str, Any]:
    return {"version": version, "addr": text, "OS-EXT-IPS:type": kind, "OS-EXT-IPS-MAC:mac_addr": mac}


def _security_groups(row: InstanceRow, _: ViewContext) -> Any:
    names = row["security_groups"]
    return [{"name": name} for name in names] if names else OMIT


def _from_image(name: str) -> Any:
    def get(row: InstanceRow, _: ViewContext) -> Any:
        return (row["image"]["properties"].get(name) if row["image"] else None) or ""

    return get


_ADDRESS = {"version": int, "addr": str}
_PLAIN_ADDRESSES = {"*": [_ADDRESS]}
_ADDRESSES = {"*": [{**_ADDRESS, "OS-EXT-IPS:type": Literal["fixed", "floating"], "OS-EXT-IPS-MAC:mac_addr": str}]}
_FLAVOR = {
    **dict.fromkeys(("vcpus", "ram", "disk", "ephemeral", "swap"), int),
    "original_name": str,
    "extra_specs?": dict[str, str],
}
_FAULT = {"code": int, "created": str, "message": str, "details?": str}
_IDENTITY = (
    Field("id", "uuid", type=str),
    Field("name", "display_name", type=str),
    Field("links", lambda row, context: context.links.of("servers", row["uuid"]), type=LINKS),
)
BRIEF = View(*_IDENTITY, keyed=True)

# In every full response; the response of an update has only these until 2.74.
_CORE = (
    Field("status", _status, type=str),
    Field("tenant_id", "project_id", type=str),
    Field("user_id", "user_id", type=str),
    Field("metadata", "metadata", type=dict[str, str]),
    Field("hostId", lambda row, _: host_id(row["project_id"], row["host"]), type=str),
    Field("image", _image, until(97), type=({"id": str, "links": LINKS}, Literal[""])),
    Field(
        "image",
        _image_with_properties,
        since(98),
        type=({"id": str, "links": LINKS, "properties": dict[str, Any]}, Literal[""]),
    ),
    Field("flavor", _flavor, until(46), type={"id": str, "links": LINKS}),
    Field("flavor", _embedded_flavor, since(47), type=_FLAVOR),
    Field("created", lambda row, _: iso(row["created_at"]), type=str),
    Field("updated", lambda row, _: iso(row["updated_at"]), type=str | None),
    Field("addresses", addresses, type=_ADDRESSES),
    Field("accessIPv4", lambda row, _: row["access_ip_v4"] or "", type=str),
    Field("accessIPv6", lambda row, _: row["access_ip_v6"] or "", type=str),
    Field("OS-DCF:diskConfig", "disk_config", type=Literal["AUTO", "MANUAL"]),
    Field("progress", _progress, optional=True, type=int),
    Field("fault", _fault, optional=True, type=_FAULT),
    Field("locked", lambda row, _: row["locked_by"] is not None, since(9), type=bool),
    Field("locked_reason", "locked_reason", since(73), type=str | None),
    Field("description", "display_description", since(19), type=str | None),
    Field("tags", "tags", since(26), type=list[str]),
    Field("trusted_image_certificates", "trusted_certs", since(63), type=list[str] | None),
    Field("pinned_availability_zone", "pinned_availability_zone", since(96), type=str | None),
    Field("scheduler_hints", "hints", since(100), type=dict[str, list[str]]),
)


def _volume_ids(row: InstanceRow, context: ViewContext) -> Any:
    return [{"id": device.volume_id} for device in context.volumes.get(row["uuid"], ())]


def _volumes(row: InstanceRow, context: ViewContext) -> Any:
    return [
        {"id": device.volume_id, "delete_on_termination": device.delete_on_termination}
        for device in context.volumes.get(row["uuid"], ())
    ]


_EXTENDED = (
    Field("OS-EXT-AZ:availability_zone", lambda row, _: row["availability_zone"] or "", type=str),
    Field("config_drive", lambda row, _: "True" if row["config_drive"] else "", type=Literal["True", ""]),
    Field("key_name", "key_name", type=str | None),
    Field("OS-SRV-USG:launched_at", lambda row, _: _usage_time(row["launched_at"]), type=str | None),
    Field("OS-SRV-USG:terminated_at", lambda row, _: _usage_time(row["terminated_at"]), type=str | None),
    Field("security_groups", _security_groups, optional=True, type=[{"name": str}]),
    Field("OS-EXT-STS:task_state", "task_state", type=str | None),
    Field("OS-EXT-STS:vm_state", "vm_state", type=str),
    Field("OS-EXT-STS:power_state", "power_state", type=int),
    Field("os-extended-volumes:volumes_attached", _volume_ids, until(2), type=[{"id": str}]),
    Field(
        "os-extended-volumes:volumes_attached",
        _volumes,
        since(3),
        type=[{"id": str, "delete_on_termination": bool}],
    ),
    Field("host_status", _host_status, since(16), when="host_status", type=str),
    Field("OS-EXT-SRV-ATTR:host", "host", when="attributes", type=str | None),
    Field("OS-EXT-SRV-ATTR:hypervisor_hostname", "node", when="attributes", type=str | None),
    Field("OS-EXT-SRV-ATTR:instance_name", lambda row, _: f"instance-{row['uuid'][:8]}", when="attributes", type=str),
    Field("OS-EXT-SRV-ATTR:reservation_id", "reservation_id", since(3), when="attributes", type=str),
    Field("OS-EXT-SRV-ATTR:launch_index", "launch_index", since(3), when="attributes", type=int),
    Field("OS-EXT-SRV-ATTR:kernel_id", _from_image("kernel_id"), since(3), when="attributes", type=str),
    Field("OS-EXT-SRV-ATTR:ramdisk_id", _from_image("ramdisk_id"), since(3), when="attributes", type=str),
    Field("OS-EXT-SRV-ATTR:root_device_name", "root_device_name", since(3), when="attributes", type=str | None),
    Field("OS-EXT-SRV-ATTR:user_data", "user_data", since(3), when="attributes", type=str | None),
    Field("OS-EXT-SRV-ATTR:hostname", "hostname", Range(3, 89), when="attributes", type=str),
    Field("OS-EXT-SRV-ATTR:hostname", "hostname", since(90), type=str),
)
_GROUPS = Field(
    "server_groups", lambda row, context: context.server_groups.get(row["uuid"], []), since(71), type=list[str]
)


def _usage_time(micros: int | None) -> str | None:
    return iso_micros(micros)


DETAIL = View(*_IDENTITY, *_CORE, *_EXTENDED, keyed=True)
SHOW = View(*_IDENTITY, *_CORE, *_EXTENDED, _GROUPS, keyed=True)
_CORE_WITH_PLAIN_ADDRESSES = (
    *(each for each in _CORE if each.name != "addresses"),
    Field("addresses", plain_addresses, until(74), type=_PLAIN_ADDRESSES),
    Field("addresses", addresses, since(75), type=_ADDRESSES),
)
_EXTENDED_SINCE_75 = tuple(
    replace(each, versions=Range(max(75, each.versions.since), each.versions.until)) for each in _EXTENDED
)
# The response of an update: only the core with plain addresses until 2.74, all fields since 2.75.
UPDATED = View(*_IDENTITY, *_CORE_WITH_PLAIN_ADDRESSES, *_EXTENDED_SINCE_75, _GROUPS, keyed=True)
# The response of a rebuild has what a rebuild can change as well, and user data for everybody under another name.
REBUILT = View(
    *_IDENTITY,
    *_CORE_WITH_PLAIN_ADDRESSES,
    *(each for each in _EXTENDED_SINCE_75 if each.name != "OS-EXT-SRV-ATTR:user_data"),
    _GROUPS,
    Field("key_name", "key_name", Range(54, 74), type=str | None),
    Field("user_data", "user_data", since(57), type=str | None),
    Field("adminPass", "admin_password", when="password", type=str),  # with api.enable_instance_password
    keyed=True,
)

"""Payloads of unversioned ("legacy") notifications: the flat dictionaries that Ceilometer's meters are made from."""

from collections.abc import Mapping
from typing import Any

import msgspec

from micronova.notifications.times import spaced, with_fraction
from micronova.notifications.versioned import flavor_data
from micronova.objects.instance import Fault, ImageData, InstanceRow, VIFData
from micronova.objects.scheduling import RequestSpec

_NAMES = {
    "resize_prep": "resize.prep",
    "resize_confirm": "resize.confirm",
    "resize_revert": "resize.revert",
    "resize_finish": "finish_resize",
    "live_migration_pre": "live_migration.pre",
    "live_migration_post": "live_migration._post",
    "live_migration_post_dest": "live_migration.post.dest",
    "live_migration_rollback": "live_migration._rollback",
    "live_migration_rollback_dest": "live_migration.rollback.dest",
    "live_migration_abort": "live.migration.abort",
    "live_migration_force_complete": "live.migration.force.complete",
}
"""Actions whose names differ from those of versioned notifications."""
_ENDS = {"volume_attach.end": "volume.attach", "volume_detach.end": "volume.detach"}
"""Events of actions of which only the end is told, under a name without a phase."""
_ONLY_VERSIONED = frozenset({"lock", "unlock", "interface_attach", "interface_detach", "volume_swap"})


def event_name(event: str) -> str | None:
    """Return the name of an event, such as `finish_resize.end` for `resize_finish.end`; None if it has none."""
    action, dot, phase = event.partition(".")
    if action in _ONLY_VERSIONED or action in ("volume_attach", "volume_detach"):
        return _ENDS.get(event)
    return f"{_NAMES.get(action, action)}{dot}{phase}"


def instance_payload(
    event: str, row: InstanceRow, fault: Fault | None, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the payload of `compute.instance.EVENT`; `details` are what only this event has."""
    flavor = row["flavor"]
    image = row["image"]
    properties = image["properties"] if image is not None else {}
    payload = {
        "tenant_id": row["project_id"],
        "user_id": row["user_id"],
        "instance_id": row["uuid"],
        "display_name": row["display_name"],
        "reservation_id": row["reservation_id"],
        "hostname": row["hostname"],
        "instance_type": flavor["name"],
        "instance_type_id": flavor["id"],
        "instance_flavor_id": flavor["id"],
        "architecture": properties.get("hw_architecture") or properties.get("architecture"),
        "memory_mb": flavor["ram"],
        "disk_gb": flavor["disk"] + flavor["ephemeral"],
        "vcpus": flavor["vcpus"],
        "root_gb": flavor["disk"],
        "ephemeral_gb": flavor["ephemeral"],
        "host": row["host"],
        "node": row["node"],
        "availability_zone": row["availability_zone"],
        "cell_name": "",
        "created_at": spaced(row["created_at"]),
        "terminated_at": with_fraction(row["terminated_at"]),
        "deleted_at": with_fraction(row.get("deleted_at")),
        "launched_at": with_fraction(row["launched_at"]),
        # The id instead of a URL, as in Nova without a service catalog.
        "image_ref_url": row["image_ref"] or "",
        "os_type": properties.get("os_type"),
        "kernel_id": properties.get("kernel_id") or "",
        "ramdisk_id": properties.get("ramdisk_id") or "",
        "state": row["vm_state"],
        "state_description": row["task_state"] or "",
        "progress": row["progress"] or "",
        "access_ip_v4": row["access_ip_v4"],
        "access_ip_v6": row["access_ip_v6"],
        "image_meta": _image_meta(image, row["image_ref"]),
        "metadata": row["metadata"],
    }
    if event in ("create.start", "rebuild.start", "rebuild.scheduled"):
        payload["image_name"] = image["name"] if image is not None else None
    elif event == "create.end":
        payload["fixed_ips"] = _fixed_ips(row["network_info"])
        payload["message"] = "Success"
    elif event.startswith("rescue."):
        payload["rescue_image_name"] = (details or {}).get("rescue_image_name", "")
    elif event in _ENDS:
        payload["volume_id"] = (details or {}).get("volume_id")
    if fault is not None:
        payload |= {"message": fault["message"], "exception": fault["message"], "code": fault["code"]}
    return payload


def request_spec_payload(spec: RequestSpec, instances: tuple[str, ...]) -> dict[str, Any]:
    """Return the payload of the scheduler's notifications."""
    flavor = flavor_data(msgspec.structs.asdict(spec.flavor))
    wanted = {name: flavor[name] for name in ("root_gb", "ephemeral_gb", "memory_mb", "vcpus")}
    return {
        "request_spec": {
            "num_instances": len(instances),
            "image": {} if spec.image is None else msgspec.to_builtins(spec.image),
            "instance_properties": {
                "uuid": instances[0] if instances else None,
                "project_id": spec.project_id,
                "user_id": spec.user_id,
                "availability_zone": spec.availability_zone,
                "numa_topology": None,
                "pci_requests": None,
                **wanted,
            },
            "instance_type": flavor,
        }
    }


def _image_meta(image: ImageData | None, image_ref: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if image is not None:
        found = {
            "min_disk": str(image["min_disk"]),
            "min_ram": str(image["min_ram"]),
            "disk_format": image["disk_format"],
            "container_format": image["container_format"],
        }
        found.update((name, str(value)) for name, value in image["properties"].items())
    return {**found, "base_image_ref": image_ref or ""}


def _fixed_ips(network_info: list[VIFData]) -> list[dict[str, Any]]:
    return [
        {
            "address": address["address"],
            "version": address["version"],
            "type": "fixed",
            "meta": {},
            "floating_ips": list(address.get("floating", ())),  # absent in old rows
            "label": vif["network_label"],
            "vif_mac": vif["mac_address"],
        }
        for vif in network_info
        for address in vif["fixed_ips"]
    ]

"""Payloads of versioned notifications, as Nova publishes them: objects with a name, a version and data.

Names, versions and fields are Nova's, so its consumers (Ceilometer, Watcher, Masakari, designate-sink …) work with them
unchanged. A field that we have no value for is null where Nova allows it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from micronova.notifications.times import instant
from micronova.objects import power_state
from micronova.objects.context import Context
from micronova.objects.image import ImageMeta
from micronova.objects.instance import Fault, InstanceRow
from micronova.objects.scheduling import GroupSpec, RequestSpec


def as_object(name: str, version: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return data as the object of Nova's with this name and version."""
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": version,
        "nova_object.data": data,
    }


_ACTION_PAYLOADS = {
    "rescue": ("InstanceActionRescuePayload", "1.4"),
    "rebuild": ("InstanceActionRebuildPayload", "1.10"),
    "snapshot": ("InstanceActionSnapshotPayload", "1.10"),
    "resize_prep": ("InstanceActionResizePrepPayload", "1.4"),
    "volume_attach": ("InstanceActionVolumePayload", "1.7"),
    "volume_detach": ("InstanceActionVolumePayload", "1.7"),
    "volume_swap": ("InstanceActionVolumeSwapPayload", "1.9"),
}
"""The payloads of actions that have fields of their own; the others are of InstanceActionPayload."""
_ONLY_UNVERSIONED = {"rescue_image_name"}


def instance_payload(
    action: str, row: InstanceRow, context: Context, fault: Fault | None, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the payload of an action on a server, with the fields that only this action has.

    That of its creation has more fields.
    """
    properties = row["image"]["properties"] if row["image"] is not None else {}
    data: dict[str, Any] = {
        "uuid": row["uuid"],
        "user_id": row["user_id"],
        "tenant_id": row["project_id"],
        "reservation_id": row["reservation_id"],
        "display_name": row["display_name"],
        "display_description": row["display_description"],
        "host_name": row["hostname"],
        "host": row["host"],
        "node": row["node"],
        "os_type": properties.get("os_type"),
        "architecture": properties.get("hw_architecture") or properties.get("architecture"),
        "availability_zone": row["availability_zone"],
        "flavor": _flavor(row["flavor"]),
        "image_uuid": row["image_ref"],
        "key_name": row["key_name"],
        "kernel_id": properties.get("kernel_id") or "",
        "ramdisk_id": properties.get("ramdisk_id") or "",
        "created_at": instant(row["created_at"]),
        "launched_at": instant(row["launched_at"]),
        "terminated_at": instant(row["terminated_at"]),
        "deleted_at": instant(row.get("deleted_at")),
        "updated_at": instant(row["updated_at"]),
        "state": row["vm_state"],
        "power_state": power_state.NAMES.get(row["power_state"], "pending"),
        "task_state": row["task_state"],
        "progress": row["progress"],
        "ip_addresses": [
            as_object(
                "IpPayload",
                "1.0",
                {
                    "label": vif["network_label"],
                    "mac": vif["mac_address"],
                    "meta": {},
                    "port_uuid": vif["port_id"],
                    "version": address["version"],
                    "address": address["address"],
                    "device_name": f"tap{vif['port_id'][:11]}",
                },
            )
            for vif in row["network_info"]
            for address in vif["fixed_ips"]
        ],
        "block_devices": [],  # volumes only, and there are none yet
        "metadata": row["metadata"],
        "locked": row["locked_by"] is not None,
        "locked_reason": row["locked_reason"],
        "auto_disk_config": row["disk_config"],
        "request_id": context.request_id or None,
        "action_initiator_user": context.user_id or None,
        "action_initiator_project": context.project_id or None,
        "shares": None,
        "fault": None if fault is None else exception(fault),
    }
    if action == "rebuild":
        data["trusted_image_certificates"] = row["trusted_certs"]
    if action != "create":
        name, version = _ACTION_PAYLOADS.get(action, ("InstanceActionPayload", "1.9"))
        own = {field: value for field, value in (details or {}).items() if field not in _ONLY_UNVERSIONED}
        if "new_flavor" in own:
            own["new_flavor"] = _flavor(own["new_flavor"])
        return as_object(name, version, {**data, **own})
    data["keypairs"] = [_keypair(row)] if row["key_name"] else []
    data["tags"] = row["tags"]
    data["trusted_image_certificates"] = row["trusted_certs"]
    data["instance_name"] = f"instance-{row['uuid'][:8]}"
    return as_object("InstanceCreatePayload", "1.13", data)


def request_spec_payload(spec: RequestSpec, instances: tuple[str, ...]) -> dict[str, Any]:
    """Return the payload of the scheduler's notifications."""
    destination = None
    if spec.requested_host is not None:
        place = {"host": spec.requested_host, "node": spec.requested_node, "cell": None, "aggregates": None}
        destination = as_object("DestinationPayload", "1.0", place)
    retry = None
    if spec.ignore_hosts:
        tried = {"num_attempts": len(spec.ignore_hosts) + 1, "hosts": spec.ignore_hosts}
        retry = as_object("SchedulerRetriesPayload", "1.0", tried)
    image = None if spec.image is None else _image(spec.image)
    return as_object(
        "RequestSpecPayload",
        "1.1",
        {
            "instance_uuid": instances[0] if instances else None,
            "num_instances": len(instances),
            "project_id": spec.project_id,
            "user_id": spec.user_id,
            "availability_zone": spec.availability_zone,
            "flavor": _flavor(msgspec.structs.asdict(spec.flavor)),
            "image": image,
            "force_hosts": spec.force_host,
            "force_nodes": spec.force_node,
            "ignore_hosts": spec.ignore_hosts or None,
            "instance_group": None if spec.server_group is None else _group(spec.server_group),
            "numa_topology": None,
            "pci_requests": None,
            "requested_destination": destination,
            "retry": retry,
            "scheduler_hints": spec.hints,
            "security_groups": [],
        },
    )


def flavor_data(flavor: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flavor with the names of its fields in notifications of both formats."""
    return {
        "flavorid": flavor["id"],
        "name": flavor["name"],
        "memory_mb": flavor["ram"],
        "vcpus": flavor["vcpus"],
        "root_gb": flavor["disk"],
        "ephemeral_gb": flavor["ephemeral"],
        "swap": flavor["swap"],
        "rxtx_factor": flavor["rxtx_factor"],
        "vcpu_weight": 0,
        "disabled": flavor["disabled"],
        "is_public": flavor["is_public"],
        "extra_specs": flavor["extra_specs"],
        "description": flavor["description"],
    }


def _flavor(flavor: Mapping[str, Any]) -> dict[str, Any]:
    return as_object("FlavorPayload", "1.4", {**flavor_data(flavor), "projects": None})


def _keypair(row: InstanceRow) -> dict[str, Any]:
    facts = {"user_id": row["user_id"], "name": row["key_name"], "public_key": row["key_data"]}
    return as_object("KeypairPayload", "1.0", {**facts, "fingerprint": None, "type": "ssh"})


def exception(fault: Fault) -> dict[str, Any]:
    """Return a fault as a payload."""
    return as_object(
        "ExceptionPayload",
        "1.1",
        {
            "module_name": "micronova",
            "function_name": "unknown",
            "exception": fault.get("type") or "MicronovaError",
            "exception_message": fault["message"],
            "traceback": fault.get("details") or "",
        },
    )


def _image(image: ImageMeta) -> dict[str, Any]:
    data = {
        "id": image.id,
        "name": image.name,
        "status": image.status,
        "visibility": None,
        "protected": None,
        "checksum": image.checksum,
        "owner": image.owner,
        "size": image.size,
        "virtual_size": None,
        "container_format": image.container_format,
        "disk_format": image.disk_format,
        "created_at": None,
        "updated_at": None,
        "tags": None,
        "direct_url": None,
        "min_ram": image.min_ram,
        "min_disk": image.min_disk,
        "properties": as_object("ImageMetaPropsPayload", "1.20", image.properties),
    }
    return as_object("ImageMetaPayload", "1.0", data)


def _group(group: GroupSpec) -> dict[str, Any]:
    data = {
        "uuid": group.id,
        "name": None,
        "user_id": None,
        "project_id": None,
        "policies": None,
        "members": None,
        "hosts": list(group.hosts),
        "policy": group.policy,
        "rules": {"max_server_per_host": str(group.max_server_per_host)},
    }
    return as_object("ServerGroupPayload", "1.1", data)

"""The payloads of versioned notifications in Nova 34: names, versions, fields, types, and what may be null.

`check(payload)` fails unless a payload, with all that is in it, is such an object. A name before a colon is a field;
`?` allows null, `[…]` is a list, `{…}` an object with any names, `any` is not looked at, and a name with a capital
letter is another payload.
"""

from typing import Any

_INSTANCE = """
    uuid:str user_id:str? tenant_id:str? reservation_id:str? display_name:str? display_description:str? host_name:str?
    host:str? node:str? os_type:str? architecture:str? availability_zone:str? flavor:FlavorPayload image_uuid:str?
    key_name:str? kernel_id:str? ramdisk_id:str? created_at:str? launched_at:str? terminated_at:str? deleted_at:str?
    updated_at:str? state:str? power_state:str? task_state:str? progress:int? ip_addresses:[IpPayload]
    block_devices:[BlockDevicePayload]? metadata:{str} locked:bool locked_reason:str? auto_disk_config:str?
    request_id:str? action_initiator_user:str? action_initiator_project:str? shares:[SharePayload]?
"""
_ACTION = _INSTANCE + "fault:ExceptionPayload?"
PAYLOADS = {
    "AggregateCachePayload 1.0": "id:int uuid:str name:str host:str images_cached:[str] images_failed:[str] index:int "
    "total:int",
    "AggregatePayload 1.1": "id:int? uuid:str name:str hosts:[str]? metadata:{str}?",
    "AuditPeriodPayload 1.0": "audit_period_beginning:str audit_period_ending:str",
    "BlockDevicePayload 1.0": "device_name:str? boot_index:int? delete_on_termination:bool volume_id:str tag:str?",
    "ComputeTaskPayload 1.0": "instance_uuid:str request_spec:RequestSpecPayload? state:str? reason:ExceptionPayload",
    "DestinationPayload 1.0": "host:str node:str? cell:any? aggregates:[str]?",
    "ExceptionPayload 1.1": "module_name:str function_name:str exception:str exception_message:str traceback:str",
    "FlavorPayload 1.4": "flavorid:str? memory_mb:int? vcpus:int? root_gb:int? ephemeral_gb:int? name:str swap:int "
    "rxtx_factor:float? vcpu_weight:int? disabled:bool is_public:bool extra_specs:{str}? projects:[str]? "
    "description:str?",
    "ImageMetaPayload 1.0": "id:str? name:str? status:str? visibility:str? protected:any? checksum:str? owner:str? "
    "size:int? virtual_size:int? container_format:str? disk_format:str? created_at:str? updated_at:str? tags:[str]? "
    "direct_url:str? min_ram:int? min_disk:int? properties:ImageMetaPropsPayload",
    "ImageMetaPropsPayload 1.20": "*",
    "InstanceActionPayload 1.9": _ACTION,
    "InstanceActionRebuildPayload 1.10": _ACTION + " trusted_image_certificates:[str]?",
    "InstanceActionRescuePayload 1.4": _ACTION + " rescue_image_ref:str?",
    "InstanceActionResizePrepPayload 1.4": _ACTION + " new_flavor:FlavorPayload",
    "InstanceActionSharePayload 1.0": _ACTION + " share_id:str?",
    "InstanceActionSnapshotPayload 1.10": _ACTION + " snapshot_image_id:str",
    "InstanceActionVolumePayload 1.7": _ACTION + " volume_id:str?",
    "InstanceActionVolumeSwapPayload 1.9": _ACTION + " old_volume_id:str? new_volume_id:str?",
    "InstanceCreatePayload 1.13": _ACTION + " keypairs:[KeypairPayload] tags:[str] trusted_image_certificates:[str]? "
    "instance_name:str?",
    "InstanceExistsPayload 2.1": _INSTANCE + "audit_period:AuditPeriodPayload",
    "InstanceStateUpdatePayload 1.0": "old_state:str? state:str? old_task_state:str? new_task_state:str?",
    "InstanceUpdatePayload 2.1": _INSTANCE + "state_update:InstanceStateUpdatePayload audit_period:AuditPeriodPayload "
    "old_display_name:str? tags:[str]",
    "IpPayload 1.0": "label:str mac:str meta:{str} port_uuid:str? version:int address:str device_name:str?",
    "KeypairPayload 1.0": "user_id:str? name:str fingerprint:str? public_key:str? type:str",
    "LibvirtErrorPayload 1.0": "ip:str reason:ExceptionPayload",
    "MetricPayload 1.0": "name:str value:int numa_membw_values:{int}? timestamp:str source:str",
    "MetricsPayload 1.0": "host:str host_ip:str nodename:str metrics:[MetricPayload]",
    "RequestSpecPayload 1.1": "instance_uuid:str project_id:str? user_id:str? availability_zone:str? "
    "flavor:FlavorPayload? force_hosts:any? force_nodes:any? ignore_hosts:[str]? image:ImageMetaPayload? "
    "instance_group:ServerGroupPayload? num_instances:int? numa_topology:any? pci_requests:any? "
    "requested_destination:DestinationPayload? retry:SchedulerRetriesPayload? scheduler_hints:{[str]}? "
    "security_groups:[str]",
    "SchedulerRetriesPayload 1.0": "num_attempts:int hosts:[str]",
    "ServerGroupPayload 1.1": "uuid:str name:str? user_id:str? project_id:str? policies:[str]? members:[str]? "
    "hosts:[str]? policy:str? rules:{str}",
    "ServiceStatusPayload 1.1": "host:str? binary:str? topic:str? report_count:int disabled:bool disabled_reason:str? "
    "availability_zone:str? last_seen_up:str? forced_down:bool version:int uuid:str",
    "VolumeUsagePayload 1.0": "volume_id:str project_id:str? user_id:str? availability_zone:str? instance_uuid:str? "
    "last_refreshed:str? reads:int read_bytes:int writes:int write_bytes:int",
    "SharePayload 1.0": "share_mapping_uuid:str share_id:str status:str tag:str",
}
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def check(payload: Any, name: str = "") -> dict[str, Any]:
    """Assert that a payload is one of Nova's, this one if it is named; return its data."""
    assert isinstance(payload, dict), payload
    assert set(payload) == {"nova_object.name", "nova_object.namespace", "nova_object.version", "nova_object.data"}
    assert payload["nova_object.namespace"] == "nova"
    given, version = payload["nova_object.name"], payload["nova_object.version"]
    assert name in ("", given), f"{given}, not {name}"
    assert f"{given} {version}" in PAYLOADS, f"{given} {version} is not a payload of Nova's"
    declared, data = PAYLOADS[f"{given} {version}"], payload["nova_object.data"]
    if declared != "*":
        fields = dict(field.split(":", 1) for field in declared.split())
        assert set(data) == set(fields), f"{given}: {sorted(set(data) ^ set(fields))}"
        for field, kind in fields.items():
            _check(data[field], kind, f"{given}.{field}")
    found: dict[str, Any] = data
    return found


def _check(value: Any, kind: str, where: str) -> None:
    if kind.endswith("?"):
        if value is None:
            return
        kind = kind[:-1]
    if kind == "any":
        return
    assert value is not None, f"{where} is null"
    if kind.startswith("["):
        assert isinstance(value, list | tuple), f"{where}: {value!r} is not a list"
        for each in value:
            _check(each, kind[1:-1], where)
    elif kind.startswith("{"):
        assert isinstance(value, dict), f"{where}: {value!r} is not an object"
        for each in value.values():
            _check(each, kind[1:-1], where)
    elif kind[0].isupper():
        check(value, kind)
    else:
        assert isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool)), (
            f"{where}: {value!r}"
        )

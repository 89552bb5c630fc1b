"""Instances as rows: what the database keeps of a server, and what most of the program works with.

A row is a plain dictionary, which costs nothing to make from a cursor and nothing to encode as JSON; these types say
what is in it. A test compares them with the columns of `micronova.db.tables`.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

from micronova.objects.errors import MicronovaError


class FlavorData(TypedDict):
    """The flavor that an instance was booted with: `objects.flavor.Flavor` as plain data."""

    id: str
    name: str
    ram: int
    vcpus: int
    disk: int
    ephemeral: int
    swap: int
    rxtx_factor: float
    is_public: bool
    disabled: bool
    description: str | None
    extra_specs: dict[str, str]
    root_on_volume: NotRequired[bool]  # absent in old rows


class ImageData(TypedDict):
    """The image that an instance was booted from: `objects.image.ImageMeta` as plain data."""

    id: str
    name: str
    status: str
    disk_format: str
    container_format: str
    size: int
    min_disk: int
    min_ram: int
    checksum: str | None
    os_hash_algo: str | None
    os_hash_value: str | None
    owner: str | None
    properties: dict[str, Any]
    signature: NotRequired[dict[str, Any] | None]  # rows of older versions have none
    kernel: NotRequired[dict[str, Any] | None]
    ramdisk: NotRequired[dict[str, Any] | None]
    block_device_mapping: NotRequired[str]


class FixedIPData(TypedDict):
    """An address of an interface: `objects.network.FixedIP` as plain data."""

    address: str
    version: int
    subnet_id: str | None
    floating: list[str]


class VIFData(TypedDict):
    """One interface: `objects.network.VIF` as plain data."""

    port_id: str
    network_id: str
    network_label: str
    mac_address: str
    fixed_ips: list[FixedIPData]
    vif_type: str
    vnic_type: str
    status: str
    mtu: int | None
    tag: str | None
    preserve_on_delete: bool
    details: dict[str, Any]
    subnets: list[dict[str, Any]]


class Fault(TypedDict):
    """Why the last action failed, as users see it; `created` is in microseconds."""

    code: int
    message: str
    details: str
    created: int
    type: NotRequired[str]  # set if the same part of the program takes the fault back


class InstanceRow(TypedDict):
    """A row of `instances`, or of `deleted_instances`. Times are microseconds since 1970 (UTC)."""

    uuid: str
    project_id: str
    user_id: str
    reservation_id: str
    launch_index: int
    display_name: str
    display_description: str | None
    hostname: str
    vm_state: str
    task_state: str | None
    power_state: int
    progress: int
    epoch: int
    host: str | None
    node: str | None
    node_uuid: str | None
    availability_zone: str | None
    pinned_availability_zone: str | None
    image_ref: str | None
    image: ImageData | None
    flavor_id: str
    flavor: FlavorData
    key_name: str | None
    key_data: str | None
    user_data: str | None
    config_drive: bool
    access_ip_v4: str | None
    access_ip_v6: str | None
    disk_config: str
    root_device_name: str | None
    locked_by: str | None
    locked_reason: str | None
    metadata: dict[str, str]
    tags: list[str]
    network_info: list[VIFData]
    security_groups: list[str]
    hints: dict[str, list[str]]
    server_group_id: str | None
    trusted_certs: list[str] | None
    system_metadata: dict[str, str] | None  # properties that its images get, and what `objects.shelved` keeps there
    fault: Fault | None
    created_at: int
    updated_at: int
    launched_at: int | None
    terminated_at: int | None
    deleted_at: int | None  # of a server that is soft-deleted or deleted; such servers are not charged to the quota


class InstanceWithService(InstanceRow):
    """A row of `instances` with the state of the compute service on its host; None if it has no host."""

    service_disabled: bool | None
    service_forced_down: bool | None
    service_seen_at: int | None  # microseconds since 1970 (UTC)


class InstanceChanges(TypedDict, total=False):
    """The columns of an instance that change after it was created."""

    display_name: str
    display_description: str | None
    hostname: str
    vm_state: str
    task_state: str | None
    power_state: int
    progress: int
    epoch: int
    host: str | None
    node: str | None
    node_uuid: str | None
    availability_zone: str | None
    pinned_availability_zone: str | None
    image_ref: str | None
    image: ImageData | None
    key_name: str | None
    key_data: str | None
    user_data: str | None
    flavor_id: str
    flavor: FlavorData
    access_ip_v4: str | None
    access_ip_v6: str | None
    disk_config: str
    config_drive: bool
    locked_by: str | None
    locked_reason: str | None
    metadata: dict[str, str]
    tags: list[str]
    network_info: list[VIFData]
    security_groups: list[str]
    trusted_certs: list[str] | None
    system_metadata: dict[str, str] | None
    fault: Fault | None
    launched_at: int | None
    terminated_at: int | None
    deleted_at: int | None


def changed(row: InstanceRow, changes: InstanceChanges) -> InstanceRow:
    """Return an instance with some columns changed."""
    return cast(InstanceRow, {**row, **changes})


def _in_words(value: Any) -> str:
    """Return a detail of an error as people read it: lists and tables without quotes and brackets."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        tables = any(isinstance(each, Mapping) for each in value)
        return ("; " if tables else ", ").join(_in_words(each) for each in value) or "none"
    return str(value)


def fault_of(error: BaseException | str, now: int, code: int = 500) -> Fault:
    """Return the fault that users see on the server. The text of an unexpected error is for admins only."""
    if isinstance(error, MicronovaError):
        details = "; ".join(f"{key}: {_in_words(value)}" for key, value in error.details.items())
        return {"code": code, "message": error.message[:255], "details": details[:4000], "created": now}
    if isinstance(error, str):
        return {"code": code, "message": error[:255], "details": "", "created": now}
    return {
        "code": code,
        "message": "An unexpected error happened; the log has the reason under the request id of this action.",
        "details": f"{type(error).__name__}: {error}"[:1000],
        "created": now,
    }

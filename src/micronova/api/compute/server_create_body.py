"""The body of POST /servers; `versions` says at which microversions a field exists."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import Certificates, File, Id, SecurityGroup, Tag, UserData
from micronova.http.versions import Range, Ranges, since, until
from micronova.objects.block_device import DestinationType, SourceType

Count = Annotated[int, Meta(ge=1)] | str
DeviceName = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=r"^[a-zA-Z0-9._/-]*\Z", title="letters, digits and . _ / -")
]
Size = (
    Annotated[int, Meta(ge=1)] | Annotated[str, Meta(title="a whole number", pattern=r"^[0-9]+\Z", max_length=20)]
)  # in GB


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={}):
    pass


class Network(_Strict):
    """A requested interface."""

    uuid: Id | UnsetType = UNSET
    port: Id | None | UnsetType = UNSET
    fixed_ip: str | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET

    versions = {"tag": Ranges((Range(32, 36), since(42)))}


class DeviceV1(_Strict):
    """A block device in the oldest form."""

    device_name: DeviceName | UnsetType = UNSET
    volume_id: Id | UnsetType = UNSET
    snapshot_id: Id | UnsetType = UNSET
    volume_size: Size | UnsetType = UNSET
    delete_on_termination: inputs.Flag | UnsetType = UNSET
    no_device: Any = None
    virtual_name: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    connection_info: str | UnsetType = UNSET


class Device(DeviceV1):
    """A block device."""

    boot_index: int | str | None = None
    uuid: (
        Annotated[
            str, Meta(min_length=1, max_length=255, pattern=r"^[a-zA-Z0-9._-]*\Z", title="letters, digits and . _ -")
        ]
        | UnsetType
    ) = UNSET
    image_id: Id | UnsetType = UNSET
    source_type: SourceType | UnsetType = UNSET
    destination_type: DestinationType | UnsetType = UNSET
    disk_bus: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    device_type: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    guest_format: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET
    volume_type: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET

    versions = {"tag": Ranges((Range(32, 32), since(42))), "volume_type": since(67)}


class NewServer(
    _Strict,
    rename={
        "image_ref": "imageRef",
        "flavor_ref": "flavorRef",
        "admin_pass": "adminPass",
        "access_ip_v4": "accessIPv4",
        "access_ip_v6": "accessIPv6",
        "disk_config": "OS-DCF:diskConfig",
        "hints": "os:scheduler_hints",
    },
):
    """The requested server."""

    name: inputs.Text
    flavor_ref: str | int
    image_ref: str | UnsetType = UNSET
    admin_pass: str | UnsetType = UNSET
    metadata: dict[inputs.Key, Annotated[str, Meta(max_length=255)]] | UnsetType = UNSET
    networks: list[Network] | str | UnsetType = UNSET
    access_ip_v4: str | UnsetType = UNSET
    access_ip_v6: str | UnsetType = UNSET
    personality: list[File] | UnsetType = UNSET
    availability_zone: inputs.Text | UnsetType = UNSET
    block_device_mapping: list[DeviceV1] | UnsetType = UNSET
    block_device_mapping_v2: list[Device] | UnsetType = UNSET
    config_drive: inputs.Flag | UnsetType = UNSET
    key_name: inputs.Text | UnsetType = UNSET
    min_count: Count | UnsetType = UNSET
    max_count: Count | UnsetType = UNSET
    return_reservation_id: inputs.Flag | UnsetType = UNSET
    security_groups: list[SecurityGroup] | UnsetType = UNSET
    user_data: UserData | None | UnsetType = UNSET
    disk_config: str | UnsetType = UNSET
    hints: dict[str, Any] | UnsetType = UNSET
    description: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    tags: Annotated[list[Tag], Meta(max_length=50)] | UnsetType = UNSET
    trusted_image_certificates: Certificates | None | UnsetType = UNSET
    host: inputs.HostName | UnsetType = UNSET
    hypervisor_hostname: inputs.HostName | UnsetType = UNSET
    hostname: inputs.Text | UnsetType = UNSET

    versions = {
        "description": since(19),
        "personality": until(56),
        "tags": since(52),
        "trusted_image_certificates": since(63),
        "host": since(74),
        "hypervisor_hostname": since(74),
        "hostname": since(90),
    }


class Body(_Strict, rename={"hints": "os:scheduler_hints", "prefixed_hints": "OS-SCH-HNT:scheduler_hints"}):
    """The body; scheduler hints are beside the server."""

    server: NewServer
    hints: dict[str, Any] | UnsetType = UNSET
    prefixed_hints: dict[str, Any] | UnsetType = UNSET

"""The request to create servers, and those of its rules that need neither the database nor other services."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from micronova.db import quotas
from micronova.objects import block_device, power_state, states
from micronova.objects.block_device import ROOT_DEVICE, BlockDevice, bad_mapping, blank_device, root_volume
from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden, Invalid, PortLimitExceeded, QuotaExceeded
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import (
    GuestProperties,
    check_image_properties,
    disk_config_of,
    root_device_of,
    serial_ports,
    wants_queues,
)
from micronova.objects.image import LONGEST_PROPERTY, MOST_PROPERTY_BYTES, NO_DISKS, ImageMeta
from micronova.objects.instance import InstanceRow
from micronova.objects.network import NetworkPlan, RequestedNetworks
from micronova.objects.orders import InjectedFile
from micronova.objects.scheduling import RequestSpec
from micronova.servers.image_devices import merged

LONGEST_SERVER_NAME = 255


@dataclass(kw_only=True)
class CreateRequest:
    """A request to create servers, as the API has read and validated it."""

    name: str
    flavor_id: str
    image_id: str | None
    description: str | None = None
    networks: RequestedNetworks = None
    security_groups: list[str]
    key_name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    user_data: str | None = None
    injected_files: list[InjectedFile] = field(default_factory=list)
    config_drive: bool = False
    availability_zone: str | None = None
    force_host: str | None = None
    force_node: str | None = None
    requested_host: str | None = None
    requested_node: str | None = None
    min_count: int = 1
    max_count: int = 1
    block_devices: list[BlockDevice] = field(default_factory=list)
    hints: dict[str, list[str]] = field(default_factory=dict)
    access_ip_v4: str | None = None
    access_ip_v6: str | None = None
    admin_password: str | None = None
    disk_config: str | None = None  # None: what the image says
    tags: list[str] = field(default_factory=list)
    trusted_certs: list[str] | None = None
    hostname: str | None = None
    allow_zero_disk: bool = True  # policy allows local root disks without a size limit
    may_attach_external: bool = False  # policy allows ports on external networks
    may_share_volumes: bool = False  # volumes that allow several servers may be used
    may_claim_for_ports: bool = False  # ports may ask for resources, such as a guaranteed bandwidth


@dataclass(frozen=True)
class Created:
    """The servers of an accepted request."""

    uuids: list[str]
    reservation_id: str
    admin_password: str
    disk_config: str


def parse_zone(text: str | None) -> tuple[str | None, str | None, str | None]:
    """Return the availability zone, the host and the node that a request names as ZONE:HOST:NODE."""
    if not text:
        return None, None, None
    zone, *rest = text.split(":")
    if len(rest) > 2:
        raise Invalid("Unable to parse availability_zone: it is ZONE, ZONE:HOST or ZONE:HOST:NODE.")
    host = rest[0] if rest else ""
    node = rest[1] if len(rest) > 1 else ""
    return zone or None, host or None, node or None


def check_boot_source(
    image: ImageMeta | None, flavor: Flavor, request: CreateRequest, devices: Sequence[BlockDevice]
) -> None:
    """Refuse a request without an image or a bootable volume, and an image that cannot be booted with this flavor."""
    if image is None:
        if not any(device.boot_index == 0 for device in devices):
            raise Invalid("Invalid imageRef provided: a server needs an image or a bootable volume.")
        return
    if root_volume(devices) is not None:
        flavor = msgspec.structs.replace(flavor, disk=0)  # the volume has its own size
        check_bootable(image, flavor, allow_zero_disk=True)
        return
    check_bootable(image, flavor, allow_zero_disk=request.allow_zero_disk)


def check_bootable(image: ImageMeta, flavor: Flavor, *, allow_zero_disk: bool) -> None:
    """Refuse an image that cannot be booted, or not with this flavor; policy decides about disks without a limit."""
    if flavor.disk == 0 and not allow_zero_disk:
        raise Forbidden("Only volume-backed servers are allowed for flavors with zero disk.")
    if image.status != "active":
        raise Invalid(f"Image {image.id} is not active: it is {image.status}.")
    if image.disk_format in NO_DISKS:
        raise Invalid(f"Image {image.id} is a kernel or a ramdisk ({image.disk_format}), and has no disk to boot from.")
    if image.property_bytes > MOST_PROPERTY_BYTES:
        raise Invalid(
            f"Image {image.id} has properties of {image.property_bytes} bytes: a server keeps at most "
            f"{MOST_PROPERTY_BYTES}."
        )
    check_flavor_fits(image, flavor)


def check_flavor_fits(image: ImageMeta, flavor: Flavor) -> None:
    """Refuse a flavor that is too small for an image."""
    if flavor.ram < image.min_ram:
        raise Invalid(
            f"Flavor's memory is too small for requested image: it has {flavor.ram} MB, the image needs "
            f"{image.min_ram} MB."
        )
    if flavor.disk and flavor.disk < image.min_disk:
        raise Invalid(
            f"The created instance's disk would be too small: the flavor has {flavor.disk} GB, the image needs "
            f"{image.min_disk} GB."
        )
    if flavor.disk and image.size > flavor.disk << 30:
        raise Invalid(
            f"Flavor's disk is too small for requested image: it has {flavor.disk << 30} bytes, the image has "
            f"{image.size}."
        )


def check_hardware(flavor: Flavor, image: ImageMeta | None) -> None:
    """Refuse properties of the image that are wrong, and those that the flavor does not allow."""
    if image is not None:
        check_image_properties(image.properties)
    properties = GuestProperties(flavor, image)
    cpu_request(properties, flavor.vcpus, flavor.ram)
    serial_ports(properties)
    wants_queues(properties, flavor.vcpus)
    properties.agreed_flag("pmu")
    properties.agreed("secure_boot", "os")


def chosen_disk_config(request: CreateRequest, image: ImageMeta | None) -> str:
    """Return AUTO or MANUAL: what the request asks for, or else the image; raise Invalid if the image forbids AUTO."""
    if request.disk_config is None:
        return disk_config_of(_auto_disk_config(image))
    check_disk_config(request.disk_config, image)
    return request.disk_config


def check_disk_config(wanted: str, image: ImageMeta | None) -> None:
    """Raise Invalid if the image forbids what a request asks for."""
    if wanted == "AUTO" and image is not None and _auto_disk_config(image) == "disabled":
        raise Invalid(f"Requested image {image.id} has automatic disk resize disabled.")


def _auto_disk_config(image: ImageMeta | None) -> str:
    return "" if image is None else str(image.properties.get("auto_disk_config") or "").strip().lower()


def needs_config_drive(request: CreateRequest, image: ImageMeta | None) -> bool:
    """Return whether a server gets a config drive on every host. Injected files reach a guest only this way."""
    return request.config_drive or bool(request.injected_files) or image_needs_config_drive(image)


def image_needs_config_drive(image: ImageMeta | None) -> bool:
    """Return whether an image asks for a config drive."""
    return image is not None and image.properties.get("img_config_drive") == "mandatory"


def merge_devices(
    requested: Sequence[BlockDevice], flavor: Flavor, image: ImageMeta | None, of_image: Sequence[BlockDevice] = ()
) -> list[BlockDevice]:
    """Return the disks that the request, the image and the flavor ask for.

    `of_image` are the block devices of the image, or of the image from which the server's boot volume is made.
    """
    devices = merged(requested, of_image)
    if len(devices) > block_device.MOST_DISKS:
        raise bad_mapping(f"a server may have {block_device.MOST_DISKS} disks and volumes, not {len(devices)}.")
    for device in devices:
        if not device.is_volume and device.source_type in ("volume", "snapshot"):
            raise bad_mapping(f"a device of source_type {device.source_type} has the destination_type volume.")
    if image is not None and not any(device.boot_index == 0 for device in devices):
        devices.insert(0, BlockDevice(uuid="", image_id=image.id, boot_index=0))
    check_sequence(devices)
    root = next(device for device in devices if device.boot_index == 0)
    if image is not None and root.image_id not in (None, image.id):
        raise bad_mapping("the boot device's image is not the server's imageRef.")
    asked = sum(d.size_gb or 0 for d in devices if d.is_blank)  # also a root disk, as in Nova
    if asked > flavor.ephemeral:
        raise Invalid(
            f"Ephemeral disks requested are larger than the instance type allows: {asked} GB of {flavor.ephemeral} GB."
        )
    if asked == 0 and flavor.ephemeral:
        devices.append(blank_device("", flavor.ephemeral))
    swap = [d for d in devices if d.guest_format == "swap"]
    if any((d.size_gb or 0) * 1024 > flavor.swap for d in swap):
        raise Invalid(f"Swap drive requested is larger than instance type allows: at most {flavor.swap} MB.")
    if flavor.swap and not swap:
        devices.append(blank_device("", flavor.swap_gb, "swap"))
    return devices


def check_sequence(devices: Sequence[BlockDevice]) -> None:
    """Raise Invalid unless the boot indexes of devices are 0, 1, 2…, and each volume and each tag is named once."""
    boots = sorted(device.boot_index for device in devices if device.boot_index is not None and device.boot_index >= 0)
    if not boots or boots != list(range(len(boots))):
        raise bad_mapping("Boot sequence for the instance and image/block device mapping combination is not valid.")
    for what in ("volume_id", "tag"):
        named = [value for device in devices if (value := getattr(device, what))]
        if len(set(named)) != len(named):
            raise bad_mapping(f"a {what} is given twice.")


def allowed_count(request: CreateRequest, plan: NetworkPlan) -> int:
    """Return how many of the servers the port quota allows; refuse several servers with one port or address."""
    if request.max_count > 1 and isinstance(plan.ports, list):
        for port in plan.ports:
            if port.port_id and isinstance(request.networks, list):
                raise Invalid("Unable to launch multiple instances with a single configured port ID.")
            if port.fixed_ip:
                raise Invalid("max_count cannot be greater than 1 if an fixed_ip is specified.")
    if plan.max_servers is not None and plan.max_servers < request.max_count:
        if plan.max_servers < request.min_count:
            raise PortLimitExceeded("Maximum number of ports exceeded")
        return plan.max_servers
    return request.max_count


def check_item_limits(metadata: Mapping[str, str], files: Sequence[InjectedFile], limits: Mapping[str, int]) -> None:
    """Check the quotas that limit one server: metadata items and injected files."""
    checks = [
        ("metadata_items", len(metadata), "Quota exceeded, too many metadata items: at most {}."),
        ("injected_files", len(files), "Quota exceeded, too many injected files: at most {}."),
    ]
    for item in files:
        checks.append(
            ("injected_file_content_bytes", len(item.contents), "Quota exceeded, a file has more than {} bytes.")
        )
        checks.append(
            ("injected_file_path_bytes", len(item.path.encode()), "Quota exceeded, a path has more than {} bytes.")
        )
    for resource, amount, message in checks:
        if quotas.exceeds(limits, resource, amount):
            raise QuotaExceeded(message.format(limits[resource]))


def _numbered(name: str, number: int) -> str:
    """Return the name of one of several servers; a long one is cut, so that it is still a name of a server."""
    suffix = f"-{number}"
    return name[: LONGEST_SERVER_NAME - len(suffix)] + suffix


def instance_row(
    context: RequestContext,
    request: CreateRequest,
    spec: RequestSpec,
    *,
    public_key: str | None,
    security_groups: list[str],
    reservation_id: str,
    disk_config: str,
    trusted_certs: list[str] | None,
    id: str,
    index: int,
    count: int,
    now: int,
) -> InstanceRow:
    """Return the row of one of the `count` servers of a request."""
    name = request.name if count == 1 else _numbered(request.name, index + 1)
    hostname = request.hostname if request.hostname else _hostname(name, id)
    return {
        "uuid": id,
        "project_id": context.project_id,
        "user_id": context.user_id,
        "reservation_id": reservation_id,
        "launch_index": index,
        "display_name": name,
        "display_description": request.description,
        "hostname": hostname,
        "vm_state": states.BUILDING,
        "task_state": states.SCHEDULING,
        "power_state": power_state.NOSTATE,
        "progress": 0,
        "epoch": 1,
        "host": None,
        "node": None,
        "node_uuid": None,
        "availability_zone": None,
        "pinned_availability_zone": spec.availability_zone,
        # The image of a volume is not that of the server, unless the request names it.
        "image_ref": spec.image.id if spec.image and request.image_id else None,
        "image": msgspec.to_builtins(spec.image) if spec.image else None,
        "flavor_id": spec.flavor.id,
        "flavor": msgspec.to_builtins(spec.flavor),
        "key_name": request.key_name,
        "key_data": public_key,
        "user_data": request.user_data,
        "config_drive": needs_config_drive(request, spec.image),
        "access_ip_v4": request.access_ip_v4,
        "access_ip_v6": request.access_ip_v6,
        "disk_config": disk_config,
        "root_device_name": root_device_of(spec.image) or ROOT_DEVICE,
        "locked_by": None,
        "locked_reason": None,
        "metadata": request.metadata,
        "tags": sorted(set(request.tags)),
        "network_info": [],
        "security_groups": security_groups,
        "hints": request.hints,
        "server_group_id": spec.server_group.id if spec.server_group else None,
        "trusted_certs": trusted_certs,
        "system_metadata": _creator(context),
        "fault": None,
        "created_at": now,
        "updated_at": now,
        "launched_at": None,
        "terminated_at": None,
        "deleted_at": None,
    }


def _creator(context: RequestContext) -> dict[str, str]:
    """Return who creates a server, in the words of Nova's images."""
    facts = {
        "owner_user_name": context.user_name,
        "owner_project_name": context.project_name,
        "boot_roles": ",".join(context.roles),
    }
    return {name: value[:LONGEST_PROPERTY] for name, value in facts.items() if value}


def make_password(source: random.Random) -> str:
    """Return a random password without characters that look alike."""
    return "".join(source.choices("23456789abcdefghjkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ", k=12))


def _hostname(name: str, id: str) -> str:
    """Return a host name for a server's name: at most 63 letters, digits and dashes."""
    text = re.sub(r"[\s_.]+", "-", name.strip().lower())
    text = re.sub(r"[^a-z0-9-]", "", text).strip("-")[:63].strip("-")
    return text or f"server-{id}"

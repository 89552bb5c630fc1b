"""POST /servers: checks what the types of the body cannot say, and turns it into a CreateRequest."""

import re
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from micronova.api import inputs
from micronova.api.compute.action_routes import PATH, with_old_path
from micronova.api.compute.server_create_body import Body, Device, DeviceV1, NewServer
from micronova.api.compute.server_inputs import (
    UUID,
    access_address,
    certificates,
    disk_config,
    given,
    hostname,
    id_in,
    injected_files,
    ip_address,
    user_data,
)
from micronova.api.links import LINKS, Links
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.block_device import (
    BlockDevice,
    DestinationType,
    SourceType,
    bad_mapping,
    check_source,
    default_deletion,
    default_destination,
)
from micronova.objects.errors import Invalid
from micronova.objects.network import NetworkRequest, RequestedNetworks
from micronova.objects.scheduling import GROUP_HINT, SERVER_HINTS
from micronova.servers.create import ServerCreator
from micronova.servers.create_rules import Created, CreateRequest, parse_zone

MOST_SERVERS: Final = 100_000  # in one request, independent of quota
MOST_HINT_BYTES: Final = 8192
"""Bytes that the scheduler hints of a request may have as JSON, about 200 ids.

Each server stores them twice: in its row and in its request spec."""

_CREATED = {
    "id": str,
    "links": LINKS,
    "OS-DCF:diskConfig": Literal["AUTO", "MANUAL"],
    "security_groups": [{"name": str}],
    "adminPass?": str,  # with api.enable_instance_password
}


def routes(creator: ServerCreator, *, shows_passwords: bool) -> list[Route]:
    """Return the route."""

    async def create(request: Request) -> Response:
        """Create servers."""
        wanted = _create_request(request)
        _authorize(request, wanted)
        by_reservation = inputs.flag(request.body.server.return_reservation_id)
        return _answer(request, wanted, await creator.create(request.context, wanted), by_reservation, shows_passwords)

    policy = "os_compute_api:servers:create"
    route = Route(
        method="POST",
        path=PATH,
        handler=create,
        policy=policy,
        status=202,
        body=Body,
        answer=({"server": _CREATED}, {"reservation_id": str}),
        has_location=True,
        errors=(501,),  # it asks for volumes, and there is no service that has them
    )
    return with_old_path([route])


def _authorize(request: Request, wanted: CreateRequest) -> None:
    if wanted.force_host or wanted.force_node:
        request.authorize(rule="os_compute_api:servers:create:forced_host")
    if wanted.requested_host or wanted.requested_node:
        request.authorize(rule="compute:servers:create:requested_destination")
    if isinstance(wanted.networks, list) and wanted.networks:
        request.authorize(rule="os_compute_api:servers:create:attach_network")
    if wanted.trusted_certs:
        request.authorize(rule="os_compute_api:servers:create:trusted_certs")


def _answer(
    request: Request, wanted: CreateRequest, created: Created, by_reservation: bool, shows_passwords: bool
) -> Response:
    if by_reservation:
        return Response(body={"reservation_id": created.reservation_id})
    first = created.uuids[0]
    links = Links(request).of("servers", first)
    return Response(
        body={
            "server": {
                "id": first,
                "links": links,
                "OS-DCF:diskConfig": created.disk_config,
                "security_groups": [{"name": name} for name in wanted.security_groups],
                **({"adminPass": created.admin_password} if shows_passwords else {}),
            }
        },
        headers={"location": links[0]["href"]},
    )


def _security_groups(server: NewServer) -> list[str]:
    """Return the requested security groups, each once; the default one if none is requested."""
    requested = server.security_groups if server.security_groups is not UNSET else []
    return list(dict.fromkeys(group.name for group in requested)) or ["default"]


def _create_request(request: Request) -> CreateRequest:
    """Return the CreateRequest for a body; raise Invalid where a rule is broken that a type cannot say."""
    body: Body = request.body
    server, minor = body.server, request.minor
    zone, force_host, force_node = parse_zone(given(server.availability_zone))
    least, most = _counts(server)
    if server.hostname is not UNSET and most > 1:
        raise Invalid("Invalid input for field/attribute hostname: only one server may be made with a hostname.")
    host, node = given(server.host), given(server.hypervisor_hostname)
    if (host or node) and (force_host or force_node):
        raise Invalid(
            "Invalid input for field/attribute host: a host in availability_zone and host or hypervisor_hostname "
            "exclude each other."
        )
    return CreateRequest(
        name=inputs.name(server.name, strip=request.is_v2),
        flavor_id=id_in(server.flavor_ref),
        image_id=_image_id(server),
        description=inputs.printable(given(server.description), "description") if minor >= 19 else server.name.strip(),
        networks=_networks(server, minor),
        security_groups=_security_groups(server),
        key_name=given(server.key_name),
        metadata=server.metadata if server.metadata is not UNSET else {},
        user_data=_user_data(server, request.is_v2),
        injected_files=[] if server.personality is UNSET else injected_files(server.personality),
        config_drive=inputs.flag(server.config_drive),
        availability_zone=zone,
        force_host=force_host,
        force_node=force_node,
        requested_host=host,
        requested_node=node,
        min_count=least,
        max_count=most,
        block_devices=_devices(server),
        hints=_hints(body),
        access_ip_v4=access_address("accessIPv4", server.access_ip_v4, 4),
        access_ip_v6=access_address("accessIPv6", server.access_ip_v6, 6),
        admin_password=given(server.admin_pass),
        disk_config=None if server.disk_config is UNSET else disk_config(server.disk_config),
        tags=list(server.tags) if server.tags is not UNSET else [],
        trusted_certs=certificates(given(server.trusted_image_certificates)),
        hostname=None if server.hostname is UNSET else hostname(server.hostname, minor),
        allow_zero_disk=request.allows(rule="os_compute_api:servers:create:zero_disk_flavor"),
        may_share_volumes=minor >= 60,
        may_claim_for_ports=minor >= 72,
        may_attach_external=request.allows(rule="network:attach_external_network"),
    )


def _counts(server: NewServer) -> tuple[int, int]:
    least = inputs.integer(server.min_count, "min_count") if server.min_count is not UNSET else 1
    most = inputs.integer(server.max_count, "max_count") if server.max_count is not UNSET else least
    for field, value in (("min_count", least), ("max_count", most)):
        if not 1 <= value <= MOST_SERVERS:
            wrong = f"it must be from 1 to {MOST_SERVERS}, not {str(value)[:32]}"
            raise Invalid(f"Invalid input for field/attribute {field}: {wrong}.")
    if least > most:
        raise Invalid("min_count must be <= max_count")
    return least, most


def _image_id(server: NewServer) -> str | None:
    if server.image_ref is UNSET or not server.image_ref:
        found = [d for d in _devices_v2(server) if d.boot_index in (0, "0") and d.source_type == "image"]
        if found and found[0].destination_type in (UNSET, "local"):
            named: str | None = given(found[0].uuid) or given(found[0].image_id)
            return named
        return None
    image = id_in(server.image_ref)
    if not re.match(UUID, image):
        raise Invalid("Invalid imageRef provided: it must be the id of an image.")
    return image


def _networks(server: NewServer, minor: int) -> RequestedNetworks:
    wanted = server.networks
    if wanted is UNSET:
        if minor >= 37:
            raise Invalid("Invalid input for field/attribute server: 'networks' is a required property.")
        return None
    if isinstance(wanted, str):
        if minor < 37 or wanted not in ("auto", "none"):
            raise Invalid("Invalid input for field/attribute networks: it is a list, or from 2.37 on auto or none.")
        return "auto" if wanted == "auto" else "none"
    if not wanted and minor < 37:
        return None
    found: list[NetworkRequest] = []
    for item in wanted:
        port, network = given(item.port), given(item.uuid)
        address = given(item.fixed_ip)
        if address is not None:
            ip_address("networks.fixed_ip", address)
            if port:
                raise Invalid(
                    f"Specified Fixed IP '{address}' cannot be used with port '{port}': the two together "
                    f"are not supported."
                )
        if not port and not network:
            raise Invalid("Bad networks format: network uuid or port is needed in each of networks.")
        if port and any(other.port_id == port for other in found):
            raise Invalid(f"Invalid input for field/attribute networks: port {port} is asked for twice.")
        found.append(
            NetworkRequest(network_id=None if port else network, port_id=port, fixed_ip=address, tag=given(item.tag))
        )
    return found


def _user_data(server: NewServer, is_v2: bool) -> str | None:
    data = given(server.user_data)
    if server.user_data is None and not is_v2:
        raise Invalid("Invalid input for field/attribute user_data: it must be base64, not null.")
    return None if data is None else user_data(data)


def _devices_v2(server: NewServer) -> list[Device]:
    return server.block_device_mapping_v2 if server.block_device_mapping_v2 is not UNSET else []


def _devices(server: NewServer) -> list[BlockDevice]:
    if server.block_device_mapping is not UNSET:
        if server.block_device_mapping_v2 is not UNSET:
            raise Invalid("Using different block_device_mapping syntaxes is not allowed in the same request.")
        for item in server.block_device_mapping:
            if item.volume_size is not UNSET:
                inputs.whole(item.volume_size, "block_device_mapping.volume_size", 1)
        found = [_device_v1(item) for item in server.block_device_mapping if not item.no_device]
        if server.image_ref in (UNSET, ""):
            root = next((device for device in found if device.source_type != "blank"), None)
            found = [msgspec.structs.replace(each, boot_index=0) if each is root else each for each in found]
        return found
    for item in _devices_v2(server):
        if item.virtual_name is not UNSET:
            raise bad_mapping("virtual_name is a field of block_device_mapping, not of block_device_mapping_v2.")
    return [_device(item) for item in _devices_v2(server) if not item.no_device]


def _device_v1(item: DeviceV1) -> BlockDevice:
    name = given(item.virtual_name) or ""
    blank = re.fullmatch(r"swap|ephemeral(0|[1-9][0-9]*)", name) is not None
    if name and not blank:
        raise bad_mapping(f"a virtual_name is swap or ephemeral with a number, not {name[:32]}.")
    source: SourceType = "blank" if blank else "volume" if item.snapshot_id is UNSET else "snapshot"
    destination = default_destination(source)
    device = BlockDevice(
        uuid="",
        source_type=source,
        destination_type=destination,
        volume_id=given(item.volume_id),
        snapshot_id=given(item.snapshot_id),
        boot_index=-1,
        device_name=given(item.device_name),
        size_gb=None if item.volume_size is UNSET else int(item.volume_size),
        guest_format="swap" if name == "swap" else None,
        # Nova deletes these local disks whatever the request says; of volumes it keeps those that do not say it.
        delete_on_termination=blank
        or (
            default_deletion(destination)
            if item.delete_on_termination is UNSET
            else inputs.flag(item.delete_on_termination)
        ),
    )
    check_source(device)
    return device


def _device(item: Device) -> BlockDevice:
    where = "block_device_mapping_v2"
    source: SourceType | None = given(item.source_type)
    if source is None:
        raise Invalid(f"Invalid input for field/attribute {where}.source_type: it must be given.")
    uuid = given(item.uuid)
    if source == "blank" and uuid:
        raise Invalid(f"Invalid input for field/attribute {where}.uuid: a blank device has none.")
    ids = {"image": given(item.image_id), "volume": given(item.volume_id), "snapshot": given(item.snapshot_id)}
    if uuid is not None:
        if ids[source] not in (None, uuid):
            raise bad_mapping(f"a device has the uuid {uuid[:64]} and the {source}_id {ids[source]}.")
        ids[source] = uuid
    destination: DestinationType = given(item.destination_type) or default_destination(source)
    volume_type = given(item.volume_type)
    if volume_type and (destination == "local" or source == "volume"):
        what = "destination_type local" if destination == "local" else "an existing volume"
        raise bad_mapping(f"a volume_type for {what} is not supported.")
    boot = None if item.boot_index is None else inputs.integer(item.boot_index, f"{where}.boot_index")
    device = BlockDevice(
        uuid="",
        source_type=source,
        destination_type=destination,
        image_id=ids["image"],
        volume_id=ids["volume"],
        snapshot_id=ids["snapshot"],
        boot_index=boot if boot is not None else -1,
        device_name=given(item.device_name),
        size_gb=None if item.volume_size is UNSET else inputs.whole(item.volume_size, f"{where}.volume_size", 1),
        guest_format=given(item.guest_format),
        disk_bus=given(item.disk_bus),
        device_type=given(item.device_type),
        tag=given(item.tag),
        volume_type=volume_type,
        delete_on_termination=default_deletion(destination)
        if item.delete_on_termination is UNSET
        else inputs.flag(item.delete_on_termination),
    )
    check_source(device)
    return device


def _hints(body: Body) -> dict[str, list[str]]:
    """Return the hints of a request as lists. Nova keeps names that begin with _nova for itself and drops them."""
    raw = next((each for each in (body.hints, body.prefixed_hints, body.server.hints) if each is not UNSET), {})
    found: dict[str, list[str]] = {}
    for name, value in raw.items():
        if name.startswith("_nova"):
            continue
        values = (
            [str(part) for part in value]
            if isinstance(value, list)
            else [value if isinstance(value, str) else msgspec.json.encode(value).decode()]
        )
        if name == GROUP_HINT and (len(values) != 1 or not re.match(UUID, values[0])):
            raise Invalid("Invalid input for field/attribute os:scheduler_hints.group: it must be one uuid.")
        if name in SERVER_HINTS and not all(re.match(UUID, each) for each in values):
            raise Invalid(f"Invalid input for field/attribute os:scheduler_hints.{name}: it must be uuids of servers.")
        if name == "build_near_host_ip":
            if len(values) != 1:
                raise Invalid(
                    "Invalid input for field/attribute os:scheduler_hints.build_near_host_ip: "
                    "it must be one IP address."
                )
            ip_address("os:scheduler_hints.build_near_host_ip", values[0])
        found[name] = values
    if len(msgspec.json.encode(found)) > MOST_HINT_BYTES:
        raise Invalid(
            "Invalid input for field/attribute os:scheduler_hints: scheduler hints may have "
            f"{MOST_HINT_BYTES} bytes as JSON, because each server of the request keeps them."
        )
    return found

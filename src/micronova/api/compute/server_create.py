"""POST /servers: the body, its rules by microversion, and what is handed to compute."""

import base64
import binascii
import ipaddress
import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.compute.api import API
from micronova.compute.new_servers import Created, CreateRequest
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Invalid
from micronova.objects.network import NetworkRequest
from micronova.objects.orders import InjectedFile

UUID = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}\Z"

Name = Annotated[str, Meta(min_length=1, max_length=255)]
Id = Annotated[str, Meta(pattern=UUID)]
Tag = Annotated[str, Meta(min_length=1, max_length=60, pattern=r"^[^/,]*\Z")]
Count = Annotated[int, Meta(ge=1)] | str
MOST_SERVERS = 100_000  # that one request may ask for, whatever the quota says
Flag = bool | str | int


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={}):
    pass


class Network(_Strict):
    """One interface that is wanted."""

    uuid: Id | UnsetType = UNSET
    port: Id | None | UnsetType = UNSET
    fixed_ip: str | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET

    # Tags of interfaces were lost for a while (2.33 to 2.41) and restored.
    versions = {"tag": since(32)}


class SecurityGroup(_Strict):
    """A security group by name or id."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]


class File(_Strict):
    """A file to be injected, until 2.56."""

    path: Annotated[str, Meta(min_length=1)]
    contents: str


class DeviceV1(msgspec.Struct, kw_only=True):
    """A block device in the oldest form; what volumes need besides is kept as it comes."""

    device_name: str | None = None
    volume_id: str | None = None
    snapshot_id: str | None = None
    volume_size: int | str | None = None
    delete_on_termination: Flag | None = None
    no_device: Any = None
    virtual_name: str | None = None


class Device(_Strict):
    """A block device."""

    boot_index: int | str | None = None
    uuid: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    image_id: Id | None = None
    source_type: str | UnsetType = UNSET
    destination_type: str | None = None
    volume_id: str | None = None
    snapshot_id: str | None = None
    volume_size: int | str | None = None
    device_name: Annotated[str, Meta(max_length=255, pattern=r"^(/dev/)?[a-zA-Z0-9/_-]*\Z")] | None = None
    disk_bus: str | None = None
    device_type: str | None = None
    guest_format: str | None = None
    delete_on_termination: Flag | None = None
    no_device: Any = None
    virtual_name: str | None = None
    tag: Tag | UnsetType = UNSET
    volume_type: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET

    versions = {"tag": since(32), "volume_type": since(67)}


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
    """The server that is asked for."""

    name: Name
    flavor_ref: str | int
    image_ref: str | UnsetType = UNSET
    admin_pass: str | UnsetType = UNSET
    metadata: dict[inputs.Key, Annotated[str, Meta(max_length=255)]] | UnsetType = UNSET
    networks: list[Network] | str | UnsetType = UNSET
    access_ip_v4: str | UnsetType = UNSET
    access_ip_v6: str | UnsetType = UNSET
    personality: list[File] | UnsetType = UNSET
    availability_zone: Annotated[str, Meta(min_length=1, max_length=255)] | None | UnsetType = UNSET
    block_device_mapping: list[DeviceV1] | UnsetType = UNSET
    block_device_mapping_v2: list[Device] | UnsetType = UNSET
    config_drive: Flag | None | UnsetType = UNSET
    key_name: Annotated[str, Meta(min_length=1, max_length=255)] | None | UnsetType = UNSET
    min_count: Count | UnsetType = UNSET
    max_count: Count | UnsetType = UNSET
    return_reservation_id: Flag | UnsetType = UNSET
    security_groups: list[SecurityGroup] | UnsetType = UNSET
    user_data: Annotated[str, Meta(max_length=65535)] | None | UnsetType = UNSET
    disk_config: str | UnsetType = UNSET
    hints: dict[str, Any] | UnsetType = UNSET
    description: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    tags: Annotated[list[Tag], Meta(max_length=50)] | UnsetType = UNSET
    trusted_image_certificates: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=50)] | None | UnsetType
    ) = UNSET
    host: inputs.HostName | UnsetType = UNSET
    hypervisor_hostname: inputs.HostName | UnsetType = UNSET
    hostname: Annotated[str, Meta(min_length=1, max_length=255)] | UnsetType = UNSET

    versions = {
        "description": since(19),
        "personality": until(56),
        "tags": since(52),
        "trusted_image_certificates": since(63),
        "host": since(74),
        "hypervisor_hostname": since(74),
        "hostname": since(90),
    }


class Body(_Strict, rename={"hints": "os:scheduler_hints", "hints2": "OS-SCH-HNT:scheduler_hints"}):
    """The request's body; scheduler hints stand beside the server."""

    server: NewServer
    hints: dict[str, Any] | UnsetType = UNSET
    hints2: dict[str, Any] | UnsetType = UNSET


def routes(api: API) -> list[Route]:
    """Return the route."""

    async def create(request: Request) -> Response:
        wanted = to_request(request)
        wanted.allow_zero_disk = request.allows("os_compute_api:servers:create:zero_disk_flavor")
        _authorize(request, wanted)
        asked = request.body.server.return_reservation_id
        by_reservation = asked is not UNSET and boolean("return_reservation_id", asked)
        return _answer(request, await api.create(request.context, wanted), by_reservation)

    policy = "os_compute_api:servers:create"
    common = {"method": "POST", "handler": create, "policy": policy, "status": 202, "body": Body}
    return [
        Route(path="/servers", **common),  # type: ignore[arg-type]
        Route(path="/os-volumes_boot", versions=Range(0, 102), **common),  # type: ignore[arg-type]
    ]


def _authorize(request: Request, wanted: CreateRequest) -> None:
    if wanted.force_host or wanted.force_node:
        request.authorize(rule="os_compute_api:servers:create:forced_host")
    if wanted.requested_host or wanted.requested_node:
        request.authorize(rule="compute:servers:create:requested_destination")
    if isinstance(wanted.networks, list) and wanted.networks:
        request.authorize(rule="os_compute_api:servers:create:attach_network")
    if wanted.trusted_certs:
        request.authorize(rule="os_compute_api:servers:create:trusted_certs")


def _answer(request: Request, created: Created, by_reservation: bool) -> Response:
    server = request.body.server
    if by_reservation:
        return Response(body={"reservation_id": created.reservation_id})
    first = created.uuids[0]
    href = f"{request.base_url}/servers/{first}"
    bookmark = f"{request.base_url.removesuffix('/v2.1')}/servers/{first}"
    return Response(
        body={
            "server": {
                "id": first,
                "links": [{"rel": "self", "href": href}, {"rel": "bookmark", "href": bookmark}],
                "OS-DCF:diskConfig": created.disk_config,
                "security_groups": [{"name": name} for name in (server_groups_asked(server) or ["default"])],
                "adminPass": created.admin_password,
            }
        },
        headers={"location": href},
    )


def server_groups_asked(server: NewServer) -> list[str]:
    """Return the names of the security groups that the request names."""
    if server.security_groups is UNSET:
        return []
    return list(dict.fromkeys(group.name for group in server.security_groups))


def to_request(request: Request) -> CreateRequest:
    """Turn a body into what compute is asked, with every rule that a type cannot say."""
    body: Body = request.body
    server, minor = body.server, request.minor
    zone, force_host, force_node = _zone(server)
    least, most = _counts(server)
    if server.hostname is not UNSET and most > 1 and minor >= 90 and minor < 94:
        raise Invalid("Invalid input for field/attribute hostname: only one server may be made with a hostname.")
    host, node = _unset(server.host), _unset(server.hypervisor_hostname)
    if (host or node) and (force_host or force_node):
        raise Invalid(
            "Invalid input for field/attribute host: a host in availability_zone and host or hypervisor_hostname "
            "exclude each other."
        )
    return CreateRequest(
        name=inputs.name(server.name, relaxed=request.relaxed),
        flavor_id=str(server.flavor_ref).rstrip("/").rpartition("/")[2],
        image_id=_image_id(server),
        description=inputs.printable(_unset(server.description), "description") if minor >= 19 else server.name.strip(),
        networks=_networks(server, minor),
        legacy_networks=minor < 37,
        security_groups=server_groups_asked(server) or ["default"],
        key_name=_unset(server.key_name),
        metadata=server.metadata if server.metadata is not UNSET else {},
        user_data=_user_data(server),
        files=_files(server),
        config_drive=_unset(server.config_drive) not in (None, "") and boolean("config_drive", server.config_drive),
        availability_zone=zone,
        force_host=force_host,
        force_node=force_node,
        requested_host=host,
        requested_node=node,
        min_count=least,
        max_count=most,
        block_devices=_devices(server, minor),
        hints=_hints(body),
        access_ip_v4=_address("accessIPv4", server.access_ip_v4, 4),
        access_ip_v6=_address("accessIPv6", server.access_ip_v6, 6),
        admin_password=_unset(server.admin_pass),
        disk_config=_disk_config(server.disk_config),
        tags=list(server.tags) if server.tags is not UNSET else [],
        trusted_certs=_certificates(_unset(server.trusted_image_certificates)),
        hostname=_hostname(server, minor),
    )


def _unset(value: Any) -> Any:
    return None if value is UNSET else value


def _certificates(ids: list[str] | None) -> list[str] | None:
    if ids is not None and len(set(ids)) != len(ids):
        raise Invalid("Invalid input for field/attribute trusted_image_certificates: each may be named once.")
    return ids


def boolean(field: str, value: Any) -> bool:
    """Read a flag as OpenStack's clients write it."""
    text = str(value).strip().lower()
    if text in ("true", "1", "on", "yes", "t", "y"):
        return True
    if text in ("false", "0", "off", "no", "f", "n"):
        return False
    raise Invalid(f"Invalid input for field/attribute {field}: {str(value)[:64]!r} is neither true nor false.")


def _integer(field: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise Invalid(f"Invalid input for field/attribute {field}: {str(value)[:64]!r} is not a number.") from None


def _counts(server: NewServer) -> tuple[int, int]:
    least = _integer("min_count", server.min_count) if server.min_count is not UNSET else 1
    most = _integer("max_count", server.max_count) if server.max_count is not UNSET else least
    for field, value in (("min_count", least), ("max_count", most)):
        if not 1 <= value <= MOST_SERVERS:
            wrong = f"it must be from 1 to {MOST_SERVERS}, not {str(value)[:32]}"
            raise Invalid(f"Invalid input for field/attribute {field}: {wrong}.")
    if least > most:
        raise Invalid("min_count must be <= max_count")
    return least, most


def _zone(server: NewServer) -> tuple[str | None, str | None, str | None]:
    text = _unset(server.availability_zone)
    if not text:
        return None, None, None
    zone, *rest = text.split(":")
    if len(rest) > 2:
        raise Invalid("Unable to parse availability_zone: it is ZONE, ZONE:HOST or ZONE:HOST:NODE.")
    host = rest[0] if rest else ""
    node = rest[1] if len(rest) > 1 else ""
    return zone or None, host or None, node or None


def _image_id(server: NewServer) -> str | None:
    if server.image_ref is UNSET or not server.image_ref:
        found = [d for d in _v2(server) if d.boot_index in (0, "0") and d.source_type == "image"]
        if found and found[0].destination_type in (None, "local"):
            return found[0].uuid or found[0].image_id
        return None
    image = server.image_ref.rstrip("/").rpartition("/")[2]
    if not re.match(UUID, image):
        raise Invalid("Invalid imageRef provided: it must be the id of an image.")
    return image


def _networks(server: NewServer, minor: int) -> list[NetworkRequest] | str | None:
    wanted = server.networks
    if wanted is UNSET:
        if minor >= 37:
            raise Invalid("Invalid input for field/attribute server: 'networks' is a required property.")
        return None
    if isinstance(wanted, str):
        if minor < 37 or wanted not in ("auto", "none"):
            raise Invalid("Invalid input for field/attribute networks: it is a list, or from 2.37 on auto or none.")
        return wanted
    if not wanted and minor < 37:
        return None
    found: list[NetworkRequest] = []
    for item in wanted:
        port, network = _unset(item.port), _unset(item.uuid)
        address = _unset(item.fixed_ip)
        if address is not None:
            _parse_address("networks.fixed_ip", address)
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
            NetworkRequest(network_id=None if port else network, port_id=port, fixed_ip=address, tag=_unset(item.tag))
        )
    return found


def _parse_address(field: str, text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise Invalid(f"Invalid input for field/attribute {field}: {text[:64]!r} is not an IP address.") from None


def _address(field: str, value: Any, version: int) -> str | None:
    if value is UNSET or not value:
        return None
    parsed = _parse_address(field, value)
    if parsed.version != version:
        raise Invalid(f"Invalid input for field/attribute {field}: {value} is not an IPv{version} address.")
    return str(parsed)


def _user_data(server: NewServer) -> str | None:
    data = _unset(server.user_data)
    if data is None:
        return None
    try:
        base64.b64decode(data, validate=False)
        if not re.match(r"^[A-Za-z0-9+/\s]*={0,2}\s*$", data):
            raise binascii.Error
    except (binascii.Error, ValueError):
        raise Invalid("Invalid input for field/attribute user_data: it must be base64.") from None
    return str(data)


def _files(server: NewServer) -> list[InjectedFile]:
    if server.personality is UNSET:
        return []
    files = []
    for item in server.personality:
        try:
            contents = base64.b64decode(re.sub(r"\s", "", item.contents), validate=True)
        except (binascii.Error, ValueError):
            raise Invalid(f"Personality content for {item.path[:64]} cannot be decoded: it must be base64.") from None
        files.append(InjectedFile(item.path, contents))
    return files


def _v2(server: NewServer) -> list[Device]:
    return server.block_device_mapping_v2 if server.block_device_mapping_v2 is not UNSET else []


_SOURCES = ("image", "volume", "snapshot", "blank")


def _devices(server: NewServer, minor: int) -> list[BlockDevice]:
    if server.block_device_mapping is not UNSET:
        if server.block_device_mapping_v2 is not UNSET:
            raise Invalid("Using different block_device_mapping syntaxes is not allowed in the same request.")
        return [
            BlockDevice(
                uuid="",
                source_type="snapshot" if item.snapshot_id else "volume",
                destination_type="volume",
                volume_id=item.volume_id,
                snapshot_id=item.snapshot_id,
                device_name=item.device_name,
                boot_index=0 if number == 0 and server.image_ref in (UNSET, "") else -1,
            )
            for number, item in enumerate(server.block_device_mapping)
        ]
    return [_device(item) for item in _v2(server) if not item.no_device]


def _device(item: Device) -> BlockDevice:
    source = _unset(item.source_type)
    where = "block_device_mapping_v2"
    if source not in _SOURCES:
        raise Invalid(f"Invalid input for field/attribute {where}.source_type: it is one of {', '.join(_SOURCES)}.")
    destination = item.destination_type or ("local" if source in ("image", "blank") else "volume")
    if destination not in ("local", "volume"):
        raise Invalid(f"Invalid input for field/attribute {where}.destination_type: it is local or volume.")
    boot = None if item.boot_index is None else _integer(f"{where}.boot_index", item.boot_index)
    size = None if item.volume_size is None else _integer(f"{where}.volume_size", item.volume_size)
    if size is not None and size < 1:
        raise Invalid(f"Invalid input for field/attribute {where}.volume_size: it must be at least 1.")
    if source == "blank" and item.uuid:
        raise Invalid(f"Invalid input for field/attribute {where}.uuid: a blank device has none.")
    if source != "blank" and not (item.uuid or item.image_id or item.volume_id or item.snapshot_id):
        raise Invalid(f"Block Device Mapping is Invalid: a device of source_type {source} needs a uuid.")
    delete = item.delete_on_termination
    return BlockDevice(
        uuid="",
        source_type=str(source),
        destination_type=destination,
        image_id=(item.uuid or item.image_id) if source == "image" else None,
        volume_id=(item.uuid or item.volume_id) if source == "volume" else None,
        snapshot_id=(item.uuid or item.snapshot_id) if source == "snapshot" else None,
        boot_index=boot if boot is not None else -1,
        device_name=item.device_name,
        size_gb=size,
        guest_format=item.guest_format,
        disk_bus=item.disk_bus,
        device_type=item.device_type,
        tag=_unset(item.tag),
        volume_type=_unset(item.volume_type),
        delete_on_termination=boolean(f"{where}.delete_on_termination", delete) if delete is not None else True,
    )


_HINT_LISTS = ("same_host", "different_host")


def _hints(body: Body) -> dict[str, list[str]]:
    raw = next((each for each in (body.hints, body.hints2, body.server.hints) if each is not UNSET), {})
    found: dict[str, list[str]] = {}
    for name, value in raw.items():
        values = (
            [str(part) for part in value]
            if isinstance(value, list)
            else [value if isinstance(value, str) else msgspec.json.encode(value).decode()]
        )
        if name == "group" and (len(values) != 1 or not re.match(UUID, values[0])):
            raise Invalid("Invalid input for field/attribute os:scheduler_hints.group: it must be one uuid.")
        if name in _HINT_LISTS and not all(re.match(UUID, each) for each in values):
            raise Invalid(f"Invalid input for field/attribute os:scheduler_hints.{name}: it must be uuids of servers.")
        if name == "build_near_host_ip":
            _parse_address("os:scheduler_hints.build_near_host_ip", values[0])
        found[name] = values
    return found


def _disk_config(value: Any) -> str:
    if value is UNSET:
        return "MANUAL"
    if value not in ("AUTO", "MANUAL"):
        raise Invalid("Invalid input for field/attribute OS-DCF:diskConfig: it is AUTO or MANUAL.")
    return str(value)


_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"


def _hostname(server: NewServer, minor: int) -> str | None:
    name = _unset(server.hostname)
    if name is None:
        return None
    form = rf"{_LABEL}(\.{_LABEL})*" if minor >= 94 else _LABEL
    if not re.fullmatch(form, name):
        raise Invalid("Invalid input for field/attribute hostname: letters, digits and dashes, at most 63.")
    return str(name)

"""What a guest may know about itself, as the files of a config drive: OpenStack's layout, and EC2's.

Pure: from the order to paths and contents. `latest` and each dated version are directories of their own; a guest reads
the newest that it knows.
"""

import base64
import binascii
import ipaddress
import json
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, Final

from micronova.objects.network import VIF
from micronova.objects.orders import InjectedFile, InstanceSpec
from micronova.virt.libvirt.interfaces import tap_name

FOLSOM: Final = "2012-08-10"
GRIZZLY: Final = "2013-04-04"
HAVANA: Final = "2013-10-17"
LIBERTY: Final = "2015-10-15"
NEWTON: Final = "2016-06-30"
NEWTON_2: Final = "2016-10-06"
VICTORIA: Final = "2020-10-14"
OPENSTACK_VERSIONS: Final = (
    FOLSOM,
    GRIZZLY,
    HAVANA,
    LIBERTY,
    NEWTON,
    NEWTON_2,
    "2017-02-22",
    "2018-08-27",
    VICTORIA,
    "2025-04-04",
)
EC2_VERSIONS: Final = ("2009-04-04",)
LATEST: Final = "latest"


def documents(
    instance: InstanceSpec,
    vifs: tuple[VIF, ...] = (),
    *,
    admin_password: str | None = None,
    injected_files: tuple[InjectedFile, ...] = (),
    vendor_data: Mapping[str, Any] | None = None,
    seed: bytes = b"",
) -> dict[str, bytes]:
    """Give all files by their paths."""
    files: dict[str, bytes] = {}
    user_data = decoded(instance.user_data)
    contents = {f"content/{number:04}": file for number, file in enumerate(injected_files)}
    for version in (*OPENSTACK_VERSIONS, LATEST):
        folder = f"openstack/{version}"
        newest = "9999" if version == LATEST else version
        meta = meta_data(instance, vifs, newest, admin_password=admin_password, contents=contents, seed=seed)
        files[f"{folder}/meta_data.json"] = _json(meta)
        if user_data is not None:
            files[f"{folder}/user_data"] = user_data
        if newest >= HAVANA:
            files[f"{folder}/vendor_data.json"] = _json(vendor_data or {})
        if newest >= LIBERTY:
            files[f"{folder}/network_data.json"] = _json(network_data(vifs))
        if newest >= NEWTON_2:
            files[f"{folder}/vendor_data2.json"] = _json({"static": vendor_data} if vendor_data else {})
    for path, file in contents.items():
        files[f"openstack/{path}"] = file.contents
    for version in (*EC2_VERSIONS, LATEST):
        files[f"ec2/{version}/meta-data.json"] = _json(ec2_data(instance, vifs))
        if user_data is not None:
            files[f"ec2/{version}/user-data"] = user_data
    return files


def meta_data(
    instance: InstanceSpec,
    vifs: Iterable[VIF],
    version: str,
    *,
    admin_password: str | None = None,
    contents: Mapping[str, InjectedFile] | None = None,
    seed: bytes = b"",
) -> dict[str, Any]:
    """Give meta_data.json as a version has it."""
    found: dict[str, Any] = {
        "uuid": instance.uuid,
        "name": instance.name,
        "hostname": instance.hostname,
        "launch_index": instance.launch_index,
        "availability_zone": instance.availability_zone,
    }
    if instance.metadata:
        found["meta"] = instance.metadata
    if instance.key_name and instance.key_data:
        found["public_keys"] = {instance.key_name: instance.key_data}
        found["keys"] = [{"name": instance.key_name, "type": _key_type(instance.key_data), "data": instance.key_data}]
    if contents:
        found["files"] = [
            {"content_path": f"/{name}", "path": posixpath.join("/", file.path)} for name, file in contents.items()
        ]
    if version >= GRIZZLY:
        if admin_password is not None:
            found["admin_pass"] = admin_password
        found["random_seed"] = base64.b64encode(seed).decode()
    if version >= LIBERTY:
        found["project_id"] = instance.project_id
    if version >= NEWTON:
        found["devices"] = [
            {"type": "nic", "bus": "none", "address": "none", "mac": vif.mac_address, "tags": [vif.tag]}
            for vif in vifs
            if vif.tag
        ]
    if version >= VICTORIA:
        found["dedicated_cpus"] = []
    return found


def network_data(vifs: Iterable[VIF]) -> dict[str, Any]:
    """Give network_data.json: links, the networks on them, and name servers."""
    links: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    services: list[dict[str, Any]] = []
    for vif in vifs:
        link = tap_name(vif.port_id)
        links.append(
            {
                "id": link,
                "vif_id": vif.port_id,
                "type": vif.vif_type,
                "mtu": vif.mtu,
                "ethernet_mac_address": vif.mac_address,
            }
        )
        for subnet in vif.subnets:
            network = _network(vif, subnet, link, f"network{len(networks)}")
            networks.append(network)
            services += [service for service in network["services"] if service not in services]
    return {"links": links, "networks": networks, "services": services}


def _network(vif: VIF, subnet: Mapping[str, Any], link: str, name: str) -> dict[str, Any]:
    version = int(subnet.get("ip_version") or 4)
    cidr = ipaddress.ip_network(str(subnet["cidr"]), strict=False)
    address = next((fixed.address for fixed in vif.fixed_ips if fixed.subnet_id == subnet["id"]), None)
    name_servers = [{"type": "dns", "address": server} for server in subnet.get("dns_nameservers") or ()]
    found: dict[str, Any] = {
        "id": name,
        "link": link,
        "network_id": vif.network_id,
        "type": _kind(subnet, version),
        "services": name_servers,
    }
    if found["type"].endswith("_dhcp"):
        return found
    routes = []
    if subnet.get("gateway_ip"):
        everything = ("0.0.0.0", "0.0.0.0") if version == 4 else ("::", "::")  # noqa: S104
        routes.append({"network": everything[0], "netmask": everything[1], "gateway": subnet["gateway_ip"]})
    for route in subnet.get("host_routes") or ():
        target = ipaddress.ip_network(str(route["destination"]), strict=False)
        routes.append(
            {"network": str(target.network_address), "netmask": str(target.netmask), "gateway": route["nexthop"]}
        )
    return found | {"ip_address": address, "netmask": str(cidr.netmask), "routes": routes}


def _kind(subnet: Mapping[str, Any], version: int) -> str:
    if version == 4:
        return "ipv4_dhcp" if subnet.get("enable_dhcp") else "ipv4"
    mode = subnet.get("ipv6_address_mode")
    if mode:
        return f"ipv6_{mode}"
    return "ipv6_dhcp" if subnet.get("enable_dhcp") else "ipv6"


def ec2_data(instance: InstanceSpec, vifs: Iterable[VIF]) -> dict[str, Any]:
    """Give the metadata in EC2's terms."""
    addresses = [fixed for vif in vifs for fixed in vif.fixed_ips if fixed.version == 4]
    public = next((floating for fixed in addresses for floating in fixed.floating), "")
    found: dict[str, Any] = {
        "ami-id": f"ami-{instance.image.id.replace('-', '')[:17]}" if instance.image else "None",
        "ami-launch-index": instance.launch_index,
        "ami-manifest-path": "",
        "block-device-mapping": {"ami": "vda", "root": "/dev/vda"},
        "hostname": instance.hostname,
        "instance-action": "none",
        "instance-id": f"i-{instance.uuid.replace('-', '')[:17]}",
        "instance-type": instance.flavor.name,
        "local-hostname": instance.hostname,
        "local-ipv4": addresses[0].address if addresses else None,
        "placement": {"availability-zone": instance.availability_zone},
        "public-hostname": instance.hostname,
        "public-ipv4": public,
        "reservation-id": instance.reservation_id,
        "security-groups": [],
    }
    if instance.key_name and instance.key_data:
        found["public-keys"] = {"0": {"openssh-key": instance.key_data}}
    return found


def decoded(user_data: str | None) -> bytes | None:
    """Give the user data as the guest is to see it: the API takes it in base64."""
    if not user_data:
        return None
    try:
        return base64.b64decode(user_data, validate=False)
    except (binascii.Error, ValueError):
        return user_data.encode()


def _key_type(data: str) -> str:
    return "x509" if data.startswith("-----BEGIN CERTIFICATE") else "ssh"


def _json(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, ensure_ascii=False).encode()

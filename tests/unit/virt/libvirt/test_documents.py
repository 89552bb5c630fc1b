"""What a guest is told about itself."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from micronova.objects.network import FixedIP
from micronova.objects.orders import InjectedFile
from micronova.virt.libvirt import documents as documents_module
from micronova.virt.libvirt.config_drive import make_config_drive
from micronova.virt.libvirt.documents import OPENSTACK_VERSIONS, decoded, documents, network_data
from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.pool import Pool
from tests.unit.virt.libvirt.world import UUID, instance, plan, vif

KEY = "ssh-ed25519 AAAA me"
SERVER: dict[str, Any] = {
    "metadata": {"role": "web"},
    "key_name": "mine",
    "key_data": KEY,
    "user_data": base64.b64encode(b"#!/bin/sh\necho hello\n").decode(),
    "availability_zone": "nova",
    "hostname": "server-1",
}


def read(files: dict[str, bytes], path: str) -> Any:
    return json.loads(files[path])


def test_latest() -> None:
    files = documents(
        instance(**SERVER),
        (vif(tag="front"),),
        admin_password="s3cret",
        injected_files=(InjectedFile("/etc/motd", b"welcome"),),
        seed=b"seed",
    )
    meta = read(files, "openstack/latest/meta_data.json")
    assert meta["uuid"] == UUID and meta["name"] == "server-1" and meta["hostname"] == "server-1"
    assert meta["meta"] == {"role": "web"}
    assert meta["public_keys"] == {"mine": KEY}
    assert meta["keys"] == [{"name": "mine", "type": "ssh", "data": KEY}]
    assert meta["admin_pass"] == "s3cret"
    assert meta["random_seed"] == base64.b64encode(b"seed").decode()
    assert meta["project_id"] == "project-1"
    assert meta["devices"][0]["tags"] == ["front"]
    assert meta["files"] == [{"content_path": "/content/0000", "path": "/etc/motd"}]
    assert files["openstack/content/0000"] == b"welcome"
    assert files["openstack/latest/user_data"] == b"#!/bin/sh\necho hello\n"
    assert read(files, "openstack/latest/vendor_data.json") == {}
    assert read(files, "openstack/latest/network_data.json")["links"][0]["ethernet_mac_address"] == "fa:16:3e:00:00:01"


def test_every_dated_version_has_what_it_had() -> None:
    files = documents(instance(**SERVER), (vif(),), admin_password="s3cret")
    assert {path.split("/")[1] for path in files if path.startswith("openstack/")} == {*OPENSTACK_VERSIONS, "latest"}
    first = read(files, f"openstack/{documents_module.FOLSOM}/meta_data.json")
    assert "admin_pass" not in first and "random_seed" not in first and "project_id" not in first
    assert f"openstack/{documents_module.GRIZZLY}/vendor_data.json" not in files
    assert f"openstack/{documents_module.HAVANA}/network_data.json" not in files
    assert f"openstack/{documents_module.LIBERTY}/network_data.json" in files
    assert "devices" not in read(files, f"openstack/{documents_module.LIBERTY}/meta_data.json")


def test_ec2() -> None:
    floating = FixedIP(address="10.0.0.1", floating=("203.0.113.9",), subnet_id="sub-1")
    files = documents(instance(**SERVER), (vif(fixed_ips=(floating,)),))
    for version in ("latest", "2009-04-04"):
        meta = read(files, f"ec2/{version}/meta-data.json")
        assert meta["instance-id"].startswith("i-") and meta["instance-type"] == "tiny"
        assert meta["local-ipv4"] == "10.0.0.1" and meta["public-ipv4"] == "203.0.113.9"
        assert meta["public-keys"] == {"0": {"openssh-key": KEY}}
        assert files[f"ec2/{version}/user-data"] == b"#!/bin/sh\necho hello\n"


def test_networks() -> None:
    subnets: tuple[dict[str, Any], ...] = (
        {
            "id": "four",
            "cidr": "10.1.0.0/16",
            "ip_version": 4,
            "gateway_ip": "10.1.0.1",
            "dns_nameservers": ["10.1.0.2"],
            "host_routes": [{"destination": "192.168.0.0/24", "nexthop": "10.1.0.9"}],
            "enable_dhcp": False,
        },
        {"id": "six", "cidr": "2001:db8::/64", "ip_version": 6, "enable_dhcp": True, "ipv6_address_mode": "slaac"},
        {"id": "dhcp", "cidr": "10.2.0.0/24", "ip_version": 4, "enable_dhcp": True},
    )
    addresses = (
        FixedIP(address="10.1.0.5", subnet_id="four"),
        FixedIP(address="2001:db8::5", version=6, subnet_id="six"),
    )
    found = network_data([vif(subnets=subnets, fixed_ips=addresses)])
    four, six, dhcp = found["networks"]
    assert four["type"] == "ipv4" and four["ip_address"] == "10.1.0.5" and four["netmask"] == "255.255.0.0"
    assert four["routes"] == [
        {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.1.0.1"},
        {"network": "192.168.0.0", "netmask": "255.255.255.0", "gateway": "10.1.0.9"},
    ]
    assert six["type"] == "ipv6_slaac" and six["ip_address"] == "2001:db8::5"
    assert dhcp["type"] == "ipv4_dhcp" and "ip_address" not in dhcp
    assert found["services"] == [{"type": "dns", "address": "10.1.0.2"}]
    assert found["links"][0]["id"] == four["link"]


def test_a_server_with_little_to_say() -> None:
    files = documents(instance())
    assert not any(path.endswith(("user_data", "user-data")) for path in files)
    assert "public_keys" not in read(files, "openstack/latest/meta_data.json")
    assert read(files, "openstack/latest/network_data.json") == {"links": [], "networks": [], "services": []}


def test_user_data() -> None:
    assert decoded(None) is None and decoded("") is None
    assert decoded(base64.b64encode(b"\x00\xff").decode()) == b"\x00\xff"
    assert decoded("a") == b"a"  # no base64, passed on as it is


@pytest.mark.skipif(shutil.which("genisoimage") is None, reason="genisoimage is not installed")
async def test_the_cd_holds_it_all(tmp_path: Path) -> None:
    layout, files = Layout(tmp_path), Pool("files", 1)
    layout.prepare()
    layout.guest(UUID).mkdir()
    a_plan = plan(vifs=(vif(),), **SERVER)
    a_plan.admin_password = "s3cret"
    await make_config_drive(a_plan, layout, files)
    disc = layout.guest(UUID) / "disk.config"
    listed = subprocess.run(["isoinfo", "-R", "-f", "-i", disc], capture_output=True, text=True, check=True).stdout
    assert "/openstack/latest/meta_data.json" in listed.splitlines()
    assert "/ec2/2009-04-04/meta-data.json" in listed.splitlines()
    about = subprocess.run(["isoinfo", "-d", "-i", disc], capture_output=True, text=True, check=True).stdout
    assert "Volume id: config-2" in about
    inside = subprocess.run(
        ["isoinfo", "-R", "-i", disc, "-x", "/openstack/latest/meta_data.json"], capture_output=True, check=True
    ).stdout
    assert json.loads(inside)["admin_pass"] == "s3cret"
    assert sorted(path.name for path in layout.guest(UUID).iterdir()) == ["disk.config"]

"""OpenStack's documents, at each version, and on a config drive."""

import base64
import json
from typing import Any

import msgspec
import pytest

from micronova.metadata import drive, openstack
from micronova.metadata.facts import Facts, VendorData
from micronova.metadata.networks import network_data
from micronova.metadata.openstack import VERSIONS, decoded, meta_data
from micronova.objects.block_device import BlockDevice
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import FixedIP
from micronova.objects.orders import InjectedFile
from tests.unit.metadata.world import KEY, SCRIPT, UUID, facts, instance, vif


def files(about: Facts, vendor_data: VendorData | None = None) -> dict[str, bytes]:
    return drive.files(about, vendor_data or VendorData(), b"seed")


def read(found: dict[str, bytes], path: str) -> Any:
    return json.loads(found[path])


def test_latest_on_a_config_drive() -> None:
    about = msgspec.structs.replace(
        facts((vif(tag="front"),)), admin_password="s3cret", injected_files=(InjectedFile("/etc/motd", b"welcome"),)
    )
    found = files(about)
    meta = read(found, "openstack/latest/meta_data.json")
    assert meta["uuid"] == UUID and meta["name"] == "Server 1" and meta["hostname"] == "server-1"
    assert meta["meta"] == {"role": "web"}
    assert meta["public_keys"] == {"mine": KEY}
    assert meta["keys"] == [{"name": "mine", "type": "ssh", "data": KEY}]
    assert meta["admin_pass"] == "s3cret"
    assert meta["random_seed"] == base64.b64encode(b"seed").decode()
    assert meta["project_id"] == "project-1"
    assert meta["availability_zone"] == "nova" and meta["launch_index"] == 0
    assert meta["files"] == [{"content_path": "/content/0000", "path": "/etc/motd"}]
    assert found["openstack/content/0000"] == b"welcome"
    assert found["openstack/latest/user_data"] == SCRIPT
    assert read(found, "openstack/latest/vendor_data.json") == {}
    assert read(found, "openstack/latest/vendor_data2.json") == {"static": {}}
    assert read(found, "openstack/latest/network_data.json")["links"][0]["ethernet_mac_address"] == "fa:16:3e:00:00:01"
    assert found["ec2/latest/user-data"] == found["ec2/2009-04-04/user-data"] == SCRIPT
    assert read(found, "ec2/latest/meta-data.json")["public-keys"] == {"0": {"openssh-key": KEY}}


FIRST = {"meta_data.json", "user_data"}
EVERY = FIRST | {"vendor_data.json", "network_data.json", "vendor_data2.json"}


@pytest.mark.parametrize(
    ("version", "documents", "fields"),
    [
        ("2012-08-10", FIRST, set()),
        ("2013-04-04", FIRST, {"random_seed"}),
        ("2013-10-17", FIRST | {"vendor_data.json"}, {"random_seed"}),
        ("2015-10-15", FIRST | {"vendor_data.json", "network_data.json"}, {"random_seed", "project_id"}),
        ("2016-06-30", FIRST | {"vendor_data.json", "network_data.json"}, {"random_seed", "project_id", "devices"}),
        *(
            (version, EVERY, {"random_seed", "project_id", "devices"})
            for version in ("2016-10-06", "2017-02-22", "2018-08-27")
        ),
        *(
            (version, EVERY, {"random_seed", "project_id", "devices", "dedicated_cpus"})
            for version in ("2020-10-14", "2025-04-04", "latest")
        ),
    ],
)
def test_every_dated_version_has_what_it_had(version: str, documents: set[str], fields: set[str]) -> None:
    always = {"uuid", "name", "hostname", "launch_index", "availability_zone", "meta", "public_keys", "keys"}
    assert set(openstack.names(facts(), version)) == documents
    assert set(meta_data(facts(), version, b"")) == always | fields
    found = files(facts())
    assert {path.split("/")[2] for path in found if path.startswith(f"openstack/{version}/")} == documents


def test_all_versions_are_on_a_config_drive() -> None:
    found = files(facts())
    assert {path.split("/")[1] for path in found if path.startswith("openstack/")} == {*VERSIONS, "latest"}
    assert {path.split("/")[1] for path in found if path.startswith("ec2/")} == {"2009-04-04", "latest"}


def test_tagged_devices() -> None:
    disk = BlockDevice(uuid="b", tag="db", volume_id="v-1", device_name="/dev/vdb", destination_type="volume")
    about = Facts(instance=instance(), vifs=(vif(tag="front"), vif()), block_devices=(disk, BlockDevice(uuid="c")))
    card = {"type": "nic", "bus": "none", "address": "none", "mac": "fa:16:3e:00:00:01", "tags": ["front"]}
    drive = {"type": "disk", "bus": "none", "address": "none", "serial": "v-1", "path": "/dev/vdb", "tags": ["db"]}
    assert meta_data(about, "2017-02-22", b"")["devices"] == [card, drive]
    assert meta_data(about, "2018-08-27", b"")["devices"] == [{**card, "vf_trusted": False}, drive]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ({}, []),
        ({"hw:cpu_policy": "shared"}, []),
        ({"hw:cpu_policy": "dedicated"}, [0, 1, 2, 3]),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "1-2"}, [1, 2]),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "^0,^1"}, [2, 3]),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-2,^1"}, [0, 2]),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-2,^1,99"}, []),
        ({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "zork"}, []),
    ],
)
def test_dedicated_cpus(specs: dict[str, str], expected: list[int]) -> None:
    flavor = Flavor(id="1", name="tiny", ram=256, vcpus=4, disk=1, extra_specs=specs)
    assert meta_data(facts(flavor=flavor), "latest", b"")["dedicated_cpus"] == expected


def test_an_image_may_ask_for_dedicated_cpus() -> None:
    image = ImageMeta(id="i", properties={"hw_cpu_policy": "dedicated"})
    assert meta_data(facts(image=image), "latest", b"")["dedicated_cpus"] == [0, 1, 2, 3]


def test_certificates_are_told_from_keys() -> None:
    about = facts(key_data="-----BEGIN CERTIFICATE-----\nAAAA")
    assert meta_data(about, "latest", b"")["keys"][0]["type"] == "x509"


def test_vendor_data() -> None:
    found = files(facts(), VendorData(static={"a": 1}, dynamic={"join": {"b": 2}}))
    assert read(found, "openstack/latest/vendor_data.json") == {"a": 1}
    assert read(found, "openstack/latest/vendor_data2.json") == {"static": {"a": 1}, "join": {"b": 2}}
    found = files(facts(), VendorData(static=None))
    assert "openstack/latest/vendor_data.json" not in found
    assert read(found, "openstack/latest/vendor_data2.json") == {}


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
    assert found["links"][0]["type"] == "bridge"


def test_a_link_of_a_kind_that_guests_do_not_know_is_a_plain_card() -> None:
    assert network_data([vif(vif_type="unbound")])["links"][0]["type"] == "phy"


def test_a_server_with_little_to_say() -> None:
    found = files(facts((), user_data=None, key_name=None, key_data=None, metadata={}))
    assert not any(path.endswith(("user_data", "user-data")) for path in found)
    meta = read(found, "openstack/latest/meta_data.json")
    assert not {"public_keys", "keys", "meta", "admin_pass", "files"} & set(meta)
    assert read(found, "openstack/latest/network_data.json") == {"links": [], "networks": [], "services": []}


def test_user_data() -> None:
    assert decoded(None) is None and decoded("") is None
    assert decoded(base64.b64encode(b"\x00\xff").decode()) == b"\x00\xff"
    assert decoded("a") == b"a"  # no base64, passed on as it is

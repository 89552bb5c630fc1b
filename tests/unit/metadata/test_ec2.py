"""EC2's tree at each version."""

import pytest

from micronova.metadata.ec2 import VERSIONS, block_device_mapping, meta_data
from micronova.metadata.facts import Facts
from micronova.objects.block_device import BlockDevice
from micronova.objects.image import ImageMeta
from micronova.objects.network import FixedIP
from tests.unit.metadata.world import KEY, facts, instance, vif

FIRST = {
    "ami-id", "ami-launch-index", "ami-manifest-path", "hostname", "instance-id", "local-ipv4", "public-keys",
    "reservation-id", "security-groups",
}  # fmt: skip
NAMES = FIRST | {"local-hostname", "public-hostname", "public-ipv4"}
SINCE = [
    ("1.0", FIRST),
    ("2007-01-19", NAMES),
    ("2007-03-01", NAMES),
    ("2007-08-29", NAMES | {"instance-type"}),
    ("2007-10-10", NAMES | {"instance-type"}),
    ("2007-12-15", NAMES | {"instance-type", "block-device-mapping"}),
    ("2008-02-01", NAMES | {"instance-type", "block-device-mapping", "placement"}),
    ("2008-09-01", NAMES | {"instance-type", "block-device-mapping", "placement", "instance-action"}),
    ("2009-04-04", NAMES | {"instance-type", "block-device-mapping", "placement", "instance-action"}),
    ("latest", NAMES | {"instance-type", "block-device-mapping", "placement", "instance-action"}),
]


def test_all_versions_are_tried() -> None:
    assert [version for version, _ in SINCE] == [*VERSIONS, "latest"]


@pytest.mark.parametrize(("version", "expected"), SINCE)
def test_every_dated_version_has_what_it_had(version: str, expected: set[str]) -> None:
    assert set(meta_data(facts(), version)) == expected


def test_what_is_said() -> None:
    floating = FixedIP(address="10.0.0.1", floating=("203.0.113.9",), subnet_id="sub-1")
    six = FixedIP(address="2001:db8::1", version=6)
    found = meta_data(facts((vif(fixed_ips=(six, floating)),)))
    assert found["instance-id"].startswith("i-") and found["ami-id"].startswith("ami-")
    assert found["instance-type"] == "tiny" and found["hostname"] == found["local-hostname"] == "server-1"
    assert found["local-ipv4"] == "10.0.0.1" and found["public-ipv4"] == "203.0.113.9"
    assert found["public-keys"] == {"0": {"openssh-key": KEY}}
    assert found["security-groups"] == ["default", "web"] and found["reservation-id"] == "r-1"
    assert found["placement"] == {"availability-zone": "nova"}


def test_a_guest_whose_network_we_do_not_know_has_the_address_it_asks_from() -> None:
    assert meta_data(Facts(instance=instance(), address="10.9.9.9"))["local-ipv4"] == "10.9.9.9"


def test_kernels() -> None:
    found = meta_data(facts(image=ImageMeta(id="i", properties={"kernel_id": "k-1", "ramdisk_id": "r-1"})))
    assert found["kernel-id"] == "aki-k1" and found["ramdisk-id"] == "ari-r1"


def test_disks() -> None:
    devices = (
        BlockDevice(uuid="a", device_name="/dev/vda"),
        BlockDevice(uuid="b", device_name="/dev/vdd", destination_type="volume", source_type="volume"),
        BlockDevice(uuid="c", device_name="/dev/vdb", source_type="blank"),
        BlockDevice(uuid="d", device_name="/dev/vdc", source_type="blank", guest_format="swap"),
    )
    assert block_device_mapping("/dev/vda", devices) == {
        "ami": "vda", "root": "/dev/vda", "ebs0": "/dev/vdd", "ephemeral0": "/dev/vdb", "swap": "/dev/vdc",
    }  # fmt: skip

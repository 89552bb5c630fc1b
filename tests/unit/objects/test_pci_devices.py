"""The settings of PCI devices, and what a flavor asks for."""

from typing import Any

import pytest

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.image import ImageMeta
from micronova.objects.pci_devices import device_requests, parse_aliases, parse_device_specs
from micronova.objects.topology import PciDevice

GPU = {"name": "gpu", "vendor_id": "10de", "product_id": "1eb8"}
NIC = {"name": "nic", "vendor_id": "8086", "product_id": "154c", "device_type": "type-VF", "numa_policy": "required"}


def asked(alias: str, image: str | None = None, **specs: str) -> GuestProperties:
    extra = {"pci_passthrough:alias": alias} | {f"hw:{name}": value for name, value in specs.items()}
    properties = {} if image is None else {"hw_pci_numa_affinity_policy": image}
    flavor = Flavor(id="1", name="f", ram=512, vcpus=1, disk=1, extra_specs=extra)
    return GuestProperties(flavor, ImageMeta(id="i", properties=properties))


def test_what_a_flavor_asks_for() -> None:
    aliases = parse_aliases([GPU, NIC, {**GPU, "product_id": "20b5"}])
    gpu, nic = device_requests(asked("gpu:2, nic:1"), aliases)
    assert (gpu.alias, gpu.count, gpu.policy) == ("gpu", 2, "legacy")
    assert gpu.specs == ({"vendor_id": "10de", "product_id": "1eb8"}, {"vendor_id": "10de", "product_id": "20b5"})
    assert (nic.count, nic.policy, nic.specs[0]["dev_type"]) == (1, "required", "type-VF")
    [gpu] = device_requests(asked("gpu:1", pci_numa_affinity_policy="socket"), aliases)
    assert gpu.policy == "socket"
    assert device_requests(asked(""), aliases) == ()


@pytest.mark.parametrize(
    ("given", "spec", "migratable"),
    [({}, {}, False), ({"live_migratable": "Yes"}, {"live_migratable": "true"}, True)]
    + [({"live_migratable": value}, {"live_migratable": "false"}, False) for value in ("no", False)],
)
def test_devices_that_can_be_live_migrated(given: dict[str, Any], spec: dict[str, str], migratable: bool) -> None:
    [gpu] = device_requests(asked("gpu:1"), parse_aliases([GPU | given]))
    assert gpu.specs == ({"vendor_id": "10de", "product_id": "1eb8"} | spec,) and gpu.live_migratable is migratable
    # All definitions of an alias have to say it.
    [gpu] = device_requests(asked("gpu:1"), parse_aliases([GPU | given, {**GPU, "product_id": "20b5"}]))
    assert not gpu.live_migratable


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        (asked("other:1"), "PCI alias other is not defined"),
        (asked("gpu"), "NAME:COUNT"),
        (asked("gpu:0"), "NAME:COUNT"),
        (asked("gpu:65"), "NAME:COUNT"),
        (asked("gpu:x"), "NAME:COUNT"),
        (asked("gpu:1", pci_numa_affinity_policy="near"), "one of legacy"),
        (asked("gpu:1", image="required", pci_numa_affinity_policy="legacy"), "they have to be the same"),
    ],
)
def test_wrong_requests(properties: GuestProperties, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        device_requests(properties, parse_aliases([GPU]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"vendor_id": "10de", "product_id": "1eb8"}], "needs a name"),
        ([{**GPU, "name": "a:b"}], "needs a name"),
        ([{"name": "gpu", "vendor_id": "10de"}], "four hexadecimal digits"),
        ([{**GPU, "device_type": "PF"}], "device_type is one of"),
        ([{**GPU, "numa_policy": "near"}], "numa_policy is one of"),
        ([{**GPU, "capability_type": "usb"}], "can only be pci"),
        ([{**GPU, "speed": 1}], "not speed"),
        ([{**GPU, "live_migratable": "perhaps"}], "live_migratable is yes or no"),
        ([GPU, {**GPU, "numa_policy": "required"}], "the same numa_policy"),
    ],
)
def test_wrong_aliases(given: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse_aliases(given)


@pytest.mark.parametrize(
    ("spec", "matches"),
    [
        ({}, True),
        ({"vendor_id": "10de"}, True),
        ({"vendor_id": "10DE", "product_id": "1EB8"}, True),
        ({"vendor_id": "8086"}, False),
        ({"address": "0000:0a:00.1"}, True),
        ({"address": "0a:00.1"}, True),
        ({"address": "*:0a:*.*"}, True),
        ({"address": "*:0b:*.*"}, False),
        ({"address": {"bus": "0[a-c]", "function": "[0-3]"}}, True),
        ({"address": {"bus": "0[b-c]"}}, False),
    ],
)
def test_device_specs(spec: dict[str, Any], matches: bool) -> None:
    device = PciDevice(address="0000:0a:00.1", vendor_id="10de", product_id="1eb8")
    [parsed] = parse_device_specs([spec])
    assert parsed.matches(device) is matches


@pytest.mark.parametrize(
    "spec",
    [
        {"devname": "eth0"},
        {"vendor_id": "x"},
        {"address": "1:2:3:4.5"},
        {"address": {"bus": "("}},
        {"address": {"x": "1"}},
        {"live_migratable": ""},
    ],
)
def test_wrong_device_specs(spec: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"pci\.device_spec"):
        parse_device_specs([spec])

"""Mediated devices: what the settings of a host say, what its devices offer, and what an instance gets."""

from typing import Any

import pytest

from micronova.objects.errors import Invalid
from micronova.objects.fitting import given_back, lacking, taken
from micronova.objects.mediated_devices import (
    CapableDevice,
    assigned,
    offered,
    parse_mdev_types,
    provider_uuid,
    trait_of,
)
from micronova.objects.topology import (
    NOTHING_USED,
    AssignedMdev,
    Assignment,
    MdevParent,
    NodeTopology,
    decode_use,
    encode,
)

FIRST, SECOND, THIRD = "pci_0000_84_00_0", "pci_0000_85_00_0", "pci_0000_86_00_0"
GPUS = [CapableDevice(name=name, available={"nvidia-35": 4, "nvidia-36": 2}) for name in (THIRD, SECOND, FIRST)]


def _totals(enabled: list[str], sections: dict[str, Any], existing: dict[tuple[str, str], int]) -> dict[str, Any]:
    found = offered(GPUS, existing, parse_mdev_types(enabled, sections))
    return {each.name: (each.mdev_type, each.resource_class, each.total) for each in found}


def test_a_type_without_addresses_is_that_of_all_other_devices() -> None:
    sections = {"nvidia-36": {"device_addresses": ["0000:85:00.0"], "mdev_class": "CUSTOM_SMALL"}}
    assert _totals(["nvidia-35", "nvidia-36"], sections, {(FIRST, "nvidia-35"): 1, (SECOND, "nvidia-35"): 3}) == {
        FIRST: ("nvidia-35", "VGPU", 5),
        SECOND: ("nvidia-36", "CUSTOM_SMALL", 2),  # what exists of another type is not offered
        THIRD: ("nvidia-35", "VGPU", 4),
    }
    only = {"nvidia-36": {"device_addresses": ["0000:85:00.0", "0000:86:00.0"]}}
    assert list(_totals(["nvidia-36"], only, {})) == [SECOND, THIRD]
    assert _totals(["nvidia-99"], {}, {}) == {}
    assert not parse_mdev_types([], {})


def test_a_limit_counts_what_exists_first() -> None:
    limited = {"nvidia-35": {"max_instances": 6}}
    assert [total for _, _, total in _totals(["nvidia-35"], limited, {}).values()] == [4, 2, 0]
    existing = {(THIRD, "nvidia-35"): 3}
    assert [total for _, _, total in _totals(["nvidia-35"], limited, existing).values()] == [3, 0, 3]


@pytest.mark.parametrize(
    ("enabled", "sections", "message"),
    [
        (["nvidia-35", "nvidia-35"], {}, "twice"),
        (["a b"], {}, "no type"),
        (["nvidia-35"], {"nvidia-36": {}}, "not in devices.enabled_mdev_types, which has nvidia-35"),
        (["nvidia-35", "nvidia-36"], {}, "mdev_nvidia-36.*needs device_addresses, because nvidia-35 has none"),
        (["nvidia-35"], {"nvidia-35": {"mdev_class": "GPU"}}, "begins with CUSTOM_"),
        (["nvidia-35"], {"nvidia-35": {"device_addresses": ["84:00.0"]}}, "should be like 0000:84:00.0"),
        (
            ["nvidia-35", "nvidia-36"],
            {name: {"device_addresses": ["0000:84:00.0"]} for name in ("nvidia-35", "nvidia-36")},
            "has the type nvidia-35 already",
        ),
        ([f"t{number}" for number in range(17)], {}, "has 17 types: 16 are allowed"),
    ],
)
def test_what_the_settings_cannot_mean(enabled: list[str], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse_mdev_types(enabled, sections)


def test_an_instance_gets_devices_by_its_amounts() -> None:
    topology = NodeTopology(
        mdevs=(
            MdevParent(name=FIRST, mdev_type="nvidia-35", total=2),
            MdevParent(name=SECOND, mdev_type="i915-GVTg_V5_4", total=1, resource_class="CUSTOM_ENCODER"),
        )
    )
    amounts = {
        provider_uuid("node", FIRST): {"VGPU": 2},
        provider_uuid("node", SECOND): {"CUSTOM_ENCODER": 1, "VGPU": 5},
        "another": {"VGPU": 7},
    }
    devices = assigned("node", topology, amounts)
    assert [(each.parent, each.mdev_type) for each in devices] == [
        (FIRST, "nvidia-35"), (FIRST, "nvidia-35"), (SECOND, "i915-GVTg_V5_4"),
    ]  # fmt: skip
    use = taken(NOTHING_USED, Assignment(mdevs=devices), topology)
    assert decode_use(encode(use)) == use and lacking(topology, use) == []
    assert given_back(use, Assignment(mdevs=devices[:1]), topology).mdevs[FIRST] == {"nvidia-35": 1}
    assert given_back(use, Assignment(mdevs=devices), topology) == NOTHING_USED
    more = taken(use, Assignment(mdevs=(AssignedMdev(parent=FIRST, mdev_type="nvidia-35"),)), topology)
    assert lacking(topology, more) == [
        f"The device {FIRST} has 2 mediated devices of the type nvidia-35; instances hold 3."
    ]
    assert provider_uuid("other", FIRST) not in amounts


def test_traits_of_types() -> None:
    assert [trait_of(name) for name in ("nvidia-35", "i915-GVTg_V5_4")] == ["CUSTOM_NVIDIA_35", "CUSTOM_I915_GVTG_V5_4"]

"""Synthetic fleets: kinds of hosts, their shares and their capacity."""

from collections import Counter
from pathlib import Path

import pytest

from micronova.conf.default import DefaultSettings
from micronova.fleetsim.fleet import DEFAULT_FLEET, make_hosts, read_fleet
from micronova.objects.errors import Invalid
from micronova.objects.topology import decode_topology

FLEET = """
zones = ["east", "west"]

[[kinds]]
name = "general"
share = 3
vcpus = 32
memory_mb = 131072
local_gb = 1000

[[kinds]]
name = "pinned"
vcpus = 64
memory_mb = 262144
local_gb = 2000
numa_nodes = 2
cpu_dedicated_set = "8-63"
traits = ["CUSTOM_FAST"]
aggregates = { fast = { ssd = "true" } }
"""


def test_the_kinds_have_their_shares_and_are_in_all_zones(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    states = make_hosts(read_fleet(file), 80, DefaultSettings())
    assert len({state.host for state in states}) == len({state.node_uuid for state in states}) == 80
    assert Counter(state.total["MEMORY_MB"] for state in states) == {131072: 60, 262144: 20}
    kinds = Counter((state.zone, state.total["MEMORY_MB"]) for state in states)
    assert kinds == {("east", 131072): 30, ("west", 131072): 30, ("east", 262144): 10, ("west", 262144): 10}
    pinned = next(state for state in states if state.traits)
    assert (pinned.total["VCPU"], pinned.total["PCPU"], pinned.traits) == (8, 56, ("CUSTOM_FAST",))
    assert pinned.aggregates == (("fast", {"ssd": "true"}),)
    assert [len(cell.dedicated) for cell in decode_topology(pinned.topology).cells] == [24, 32]


def test_capacity_follows_from_ratios_and_reserves() -> None:
    settings = DefaultSettings(
        cpu_allocation_ratio=2.5, ram_allocation_ratio=1.5, reserved_host_cpus=2, reserved_host_memory_mb=1024
    )
    [state] = make_hosts(DEFAULT_FLEET, 1, settings)
    assert state.capacity == {"VCPU": int(14 * 2.5), "MEMORY_MB": int((65536 - 1024) * 1.5), "DISK_GB": 800}
    assert decode_topology(state.topology).cpu_allocation_ratio == 2.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kinds = [", "is not valid TOML"),
        ("", "the file: 'kinds' is a required property"),
        ("kinds = []", "kinds must be a list of at least 1 item"),
        ("[[kinds]]\nvcpus = 1", "a kind: 'name' is a required property"),
        ("[[kinds]]\nname = 'a'\nshare = 0", "share must be a number above 0"),
        ("[[kinds]]\nname = 'a'\ncpus = 1", "The kind a has the unknown option cpus: it may have vcpus"),
        ("[[kinds]]\nname = 'a'\nvcpus = 'many'", "vcpus must be a whole number"),
        ("[[kinds]]\nname = 'a'\nvcpus = 3\nnuma_nodes = 2", "cannot be divided evenly"),
        (
            "[[kinds]]\nname = 'a'\naggregates = { east = { availability_zone = 'east' } }",
            "The aggregate east of the kind a has the metadata availability_zone: name the zones in `zones`",
        ),
        ("size = 1\n[[kinds]]\nname = 'a'", "('size' was unexpected; known are kinds, zones)"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(Invalid) as caught:
        read_fleet(file)
    assert str(file) in caught.value.message
    assert said in caught.value.message

"""The simulation: what it counts is what the scheduler and the claims of a cloud count."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.conf.hosts import FakeSettings
from micronova.fleetsim.claims import Claims, Oversold
from micronova.fleetsim.fleet import DEFAULT_FLEET, FleetModel, HostModel, make_hosts
from micronova.fleetsim.generator import generate
from micronova.fleetsim.policies import parse_policy
from micronova.fleetsim.simulation import Experiment, Outcome, check, simulate
from micronova.fleetsim.trace import Request
from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.scheduling import GroupSpec, RequestSpec
from micronova.scheduler import topologies
from micronova.scheduler.host_table import HostTable


def a_fleet(vcpus: int = 4, memory_mb: int = 4096 + 512, zones: tuple[str, ...] = ("az1",), **more: Any) -> FleetModel:
    """Return hosts with room for four small servers each: 4 GiB besides what is reserved."""
    hardware = FakeSettings(vcpus=vcpus, memory_mb=memory_mb, local_gb=100, **more)
    return FleetModel(kinds=(HostModel(name="host", hardware=hardware),), zones=zones)


def a_spec(ram: int = 1024, **changes: Any) -> RequestSpec:
    extra_specs = changes.pop("extra_specs", {})
    flavor = Flavor(id="f", name=f"f{ram}", vcpus=1, ram=ram, disk=1, extra_specs=extra_specs)
    return RequestSpec(project_id="p", user_id="u", flavor=flavor, **changes)


def a_request(
    at: float, lifetime: float | None = None, count: int = 1, spec: RequestSpec | None = None, **more: Any
) -> Request:
    return Request(at=at, lifetime=lifetime, count=count, spec=spec or a_spec(), **more)


def run(fleet: FleetModel, hosts: int, *requests: Request, policy: str = "spread", **options: Any) -> Outcome:
    """Simulate, with a clock that gives each decision a millisecond."""
    experiment = Experiment(fleet=fleet, hosts=hosts, requests=requests, samples=options.pop("samples", 1), **options)
    return asyncio.run(simulate(experiment, parse_policy(policy), timer=_milliseconds()))


def _milliseconds() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) / 1000


def test_servers_fill_hosts_and_give_back_what_they_held() -> None:
    full = run(a_fleet(), 2, a_request(0, 100, 8), a_request(50), a_request(150, None, 8))
    assert (full.placed_requests, full.placed_servers, full.refused_requests) == (2, 16, 1)
    assert full.refused_servers == {"memory": 1}
    [end] = full.samples
    assert (end.time, end.servers, end.occupied, end.used["MEMORY_MB"], end.largest_fits) == (150, 8, 2, 1.0, 0)


def test_all_servers_of_a_request_get_a_host_or_none() -> None:
    outcome = run(a_fleet(), 2, a_request(0, None, 5), a_request(1, None, 4), a_request(2, None, 3))
    assert (outcome.placed_servers, outcome.refused_servers) == (8, {"memory": 4})


def test_samples_add_up_to_the_whole() -> None:
    requests = generate(DEFAULT_FLEET, 20, 400, load=1.3, seed=5)
    outcome = run(DEFAULT_FLEET, 20, *requests, samples=50)
    assert len(outcome.samples) == 50
    assert sum(each.since.requested for each in outcome.samples) == sum(each.count for each in requests)
    refused: dict[str, int] = {}
    for each in outcome.samples:
        for name, servers in each.since.refused.items():
            refused[name] = refused.get(name, 0) + servers
    assert refused == outcome.refused_servers != {}
    assert sum(each.since.decisions for each in outcome.samples) == len(outcome.decision_seconds) == 400
    assert sum(outcome.decision_seconds) == pytest.approx(0.4)
    assert outcome.samples[-1].time == requests[-1].at


def test_the_same_seed_gives_the_same_result_and_policies_differ() -> None:
    requests = generate(DEFAULT_FLEET, 20, 300, load=1.2, seed=2)
    policy = "random=host_subset_size=5"
    once, again, other, packed = (
        run(DEFAULT_FLEET, 20, *requests, policy=name, seed=seed, samples=20)
        for name, seed in ((policy, 1), (policy, 1), (policy, 2), ("pack", 1))
    )
    assert once.samples == again.samples
    assert once.samples != other.samples
    assert once.samples != packed.samples


def test_packing_leaves_more_room_for_the_largest_flavor() -> None:
    requests = [a_request(at, None, spec=a_spec()) for at in range(8)] + [a_request(60, 1, spec=a_spec(4096))]
    spread, pack = (run(a_fleet(), 4, *requests, policy=name, build_time=0.0) for name in ("spread", "pack"))
    assert (spread.samples[-1].occupied, pack.samples[-1].occupied) == (4, 3)  # with the large server
    assert (spread.refused_servers, pack.refused_servers) == ({"memory": 1}, {})
    assert (spread.samples[-1].largest_fits, pack.samples[-1].largest_fits) == (0, 1)


def test_memory_that_no_flavor_can_use() -> None:
    requests = [a_request(0, None, spec=a_spec(3584)), a_request(1, 1.0, spec=a_spec(1024))]
    [end] = run(a_fleet(), 1, *requests).samples
    assert end.used["MEMORY_MB"] == 3584 / 4096
    assert end.unusable == 512 / 4096
    requests[1] = a_request(1, 1.0, spec=a_spec(512))
    [end] = run(a_fleet(memory_mb=4096 + 512), 1, *requests).samples
    assert end.unusable == 0.0


def test_allocation_ratios_and_filters_of_a_policy() -> None:
    many = a_request(0, None, 8)
    assert run(a_fleet(), 1, many).refused_servers == {"memory": 8}
    assert run(a_fleet(), 1, many, policy="a=ram_allocation_ratio=2").placed_servers == 8
    limited = "a=ram_allocation_ratio=2,enabled_filters=ComputeFilter+NumInstancesFilter,max_instances_per_host=6"
    assert run(a_fleet(), 1, many, policy=limited).refused_servers == {"servers per host": 8}
    few = "a=ram_allocation_ratio=2,cpu_allocation_ratio=1"
    assert run(a_fleet(), 1, many, policy=few).refused_servers == {"vCPUs": 8}


def test_hosts_work_on_new_servers_for_the_build_time() -> None:
    policy = "a=enabled_filters=ComputeFilter+IoOpsFilter,max_io_ops_per_host=1"
    requests = [a_request(0), a_request(20), a_request(31), a_request(40, 5.0), a_request(62), a_request(62.5)]
    outcome = run(a_fleet(), 1, *requests, policy=policy, build_time=30.0)
    # The second and the fourth come while the host builds; the last one, too.
    assert (outcome.placed_servers, outcome.refused_servers) == (3, {"work of hosts": 3})


def test_a_server_that_is_deleted_while_it_is_built() -> None:
    policy = "a=enabled_filters=ComputeFilter+IoOpsFilter,max_io_ops_per_host=1"
    outcome = run(a_fleet(), 1, a_request(0, 10.0), a_request(11), a_request(42), policy=policy, build_time=30.0)
    assert outcome.placed_servers == 3
    assert outcome.samples[-1].servers == 2


def test_zones_and_groups() -> None:
    fleet = a_fleet(zones=("az1", "az2"))
    zoned = run(fleet, 2, a_request(0, None, 5, a_spec(availability_zone="az1")))
    assert zoned.refused_servers == {"memory": 5}  # of the hosts in the zone; the others do not count
    few = run(fleet, 2, a_request(0, None, 5, a_spec(availability_zone="az1")), policy="a=cpu_allocation_ratio=1")
    assert few.refused_servers == {"vCPUs": 5}
    apart = a_spec(server_group=GroupSpec(id="g", policy="anti-affinity"))
    grouped = run(fleet, 2, a_request(0, 10.0, 2, apart), a_request(5, None, 1, apart), a_request(20, None, 1, apart))
    assert (grouped.placed_servers, grouped.refused_servers) == (3, {"anti-affinity": 1})
    together = a_spec(server_group=GroupSpec(id="h", policy="affinity"))
    grouped = run(fleet, 2, a_request(0, None, 3, together), a_request(1, None, 2, together))
    assert (grouped.placed_servers, grouped.refused_servers) == (3, {"affinity": 2})


def test_hints_that_name_servers() -> None:
    first, beside = a_request(0, None, id="a"), a_spec(hints={"same_host": ["a"]})
    assert run(a_fleet(), 2, first, a_request(60)).samples[-1].occupied == 2
    assert run(a_fleet(), 2, first, a_request(60, spec=beside)).samples[-1].occupied == 1
    other = a_spec(hints={"different_host": ["a"]})
    outcome = run(
        a_fleet(), 1, a_request(0, 10.0, 1, id="a"), a_request(5, None, 1, other), a_request(15, None, 1, other)
    )
    assert (outcome.placed_servers, outcome.refused_servers) == (2, {"DifferentHostFilter": 1})


def test_dedicated_cpus_are_taken_and_given_back() -> None:
    fleet = a_fleet(vcpus=8, memory_mb=65536, numa_nodes=2, cpu_dedicated_set="2-3,6-7")
    flavor = Flavor(id="p", name="pinned", vcpus=2, ram=512, disk=1, extra_specs={"hw:cpu_policy": "dedicated"})
    spec = RequestSpec(project_id="p", user_id="u", flavor=flavor)
    outcome = run(fleet, 1, a_request(0, 10.0, 2, spec), a_request(5, None, 1, spec), a_request(15, None, 2, spec))
    assert (outcome.placed_servers, outcome.refused_servers) == (4, {"dedicated CPUs": 1})
    assert outcome.samples[-1].used["PCPU"] == 1.0


def test_hosts_that_take_long_to_compare_are_compared_as_in_a_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such requests counted as refused, because nothing was compared before the decision."""
    monkeypatch.setattr(topologies, "MOST_STEPS_AT_ONCE", 1)
    monkeypatch.setattr(topologies, "MOST_STEPS_OF_A_REQUEST", 2)
    monkeypatch.setattr(topologies, "FREE_STEPS", 0)
    (tmp_path / "policy.toml").write_text(
        '[pci]\nalias = [{name = "gpu", vendor_id = "10de", product_id = "1eb8"}]\n'
        '[filter_scheduler]\nenabled_filters = ["PciPassthroughFilter", "NUMATopologyFilter"]\n'
    )

    def kind(number: int, cells: tuple[int, ...]) -> HostModel:
        """Hosts whose dedicated CPUs are in the first cell, with a device in these cells."""
        devices = [
            {"address": f"0000:0{cell}:00.0", "vendor_id": "10de", "product_id": "1eb8", "numa_node": cell}
            for cell in cells
        ]
        hardware = FakeSettings(
            vcpus=8, memory_mb=8192 + 2 * number, numa_nodes=2, cpu_dedicated_set="0-3", pci_devices=tuple(devices)
        )
        return HostModel(name=f"kind{number}", hardware=hardware)

    fleet = FleetModel(kinds=(*(kind(number, (1,)) for number in range(9)), kind(9, (0, 1))))
    specs = {"hw:cpu_policy": "dedicated", "pci_passthrough:alias": "gpu:1"}
    far = a_request(0, spec=a_spec(ram=512, extra_specs=specs))
    outcome = run(fleet, 10, far, a_request(1, spec=far.spec), policy=f"far={tmp_path / 'policy.toml'}")
    assert (outcome.placed_servers, outcome.refused_requests) == (1, 1)


def test_a_claim_that_does_not_fit_is_an_error() -> None:
    [host] = make_hosts(a_fleet(), 1, parse_policy("spread").settings.default)
    claims, node = Claims([host], HostTable()), host.node_uuid
    claims.claim((node, node), {"MEMORY_MB": 2048}, None, None)
    with pytest.raises(Oversold):
        claims.claim((node,), {"MEMORY_MB": 1}, None, None)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (a_spec(availability_zone="az9"), "The fleet has no zone az9: its hosts are in az1"),
        (a_spec(hints={"colour": ["red"]}), "No enabled filter honours the hint colour"),
        (a_spec(hints={"query": ['["=", 1, 1]']}), "No enabled filter honours the hint query"),
        (a_spec(extra_specs={"trait:CUSTOM_X": "maybe"}), "must be required or forbidden"),
        (a_spec(extra_specs={"resources_A:VGPU": "1"}), "request groups (resources_NAME:CLASS), or for other"),
        (a_spec(extra_specs={"resources:VGPU": "1"}), "other classes than VCPU, MEMORY_MB and DISK_GB, which are not"),
        (a_spec(extra_specs={"aggregate_instance_extra_specs:ssd": "1"}), "aggregates that match extra specs"),
        (a_spec(extra_specs={"pci_passthrough:alias": "gpu:1"}), "gpu"),
        (a_spec(extra_specs={"hw:cpu_policy": "own"}), "own"),
    ],
)
def test_requests_that_the_api_would_refuse_are_refused(spec: RequestSpec, said: str) -> None:
    experiment = Experiment(fleet=a_fleet(), hosts=1, requests=[a_request(0), a_request(1, spec=spec, line=7)])
    with pytest.raises(Invalid) as caught:
        check(experiment, [parse_policy("spread")])
    assert caught.value.message.startswith("Line 7: ")
    assert said in caught.value.message

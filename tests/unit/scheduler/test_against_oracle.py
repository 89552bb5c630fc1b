"""Vectors against plain Python, on arbitrary clouds and requests."""

import inspect
import json
import random
import re
from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import MOST_NAMED
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec
from micronova.objects.topology import (
    NOTHING_USED,
    CellUse,
    HostCell,
    MemoryPages,
    NodeTopology,
    PciDevice,
    TopologyUse,
    encode,
)
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.base import Compared, FilterOptions
from micronova.scheduler.filters.registry import BUILT_IN, load_filters
from micronova.scheduler.prefilters import Prefilters
from micronova.scheduler.ranking import Ranking
from micronova.scheduler.weights.base import WeigherOptions
from micronova.scheduler.weights.registry import BUILT_IN as WEIGHERS
from micronova.scheduler.weights.registry import load_weighers
from tests.unit.scheduler import fitting_oracle, oracle
from tests.unit.scheduler.factory import ALIASES, NOW, OPTIONS, a_flavor, a_host, a_spec, a_table, free_of, held_of

# On a machine that does much else, examples take long to make; that says nothing about the scheduler.
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTS = [f"h{number}" for number in range(8)]
MULTIPLIERS = st.fixed_dictionaries({name: st.sampled_from([1.0, 2.5, -1.0, 0.5, 0.0]) for name in WEIGHERS})
DEFAULT = dict.fromkeys(WEIGHERS, 1.0)
NO_PREFILTERS = Prefilters()
FILTERS = FilterSchedulerSettings().enabled_filters
# The filters of a test: those of the default, and some of the others.
ENABLED = st.lists(st.sampled_from(sorted(BUILT_IN.keys() - set(FILTERS))), max_size=6, unique=True).map(
    lambda others: (*FILTERS, *others)
)
NUMBERS = st.sampled_from(["0.5", "1", "2.5", "3", "-1", "many"])
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "filter_tenant_id": st.sampled_from(["p", "q", "p, q", "q,r"]),
        "filter_tenant_id_2": st.sampled_from(["p", "q"]),
        "trait:CUSTOM_A": st.sampled_from(["required", "required", "wanted"]),
        "trait:CUSTOM_B": st.just("required"),
        "instance_type": st.sampled_from(["m1.small", "m1.large", "m1.large, m1.small"]),
        "ssd": st.sampled_from(["true", "false", "true,false", "3"]),
        "os_distro": st.sampled_from(["debian", "fedora", "debian, fedora"]),
        "hw_vm_mode": st.sampled_from(["hvm", "xen"]),
        "max_instances_per_host": st.sampled_from(["1", "2", "5", "many"]),
        "max_io_ops_per_host": st.sampled_from(["1", "2", "5", "2.5"]),
        **{f"{name}_allocation_ratio": st.sampled_from(["0.5", "1", "2"]) for name in ("cpu", "ram", "disk")},
        **{weigher.setting: NUMBERS for weigher in WEIGHERS.values()},
    },
)
AGGREGATES = st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=2)
EXTRA_SPECS = st.dictionaries(
    st.sampled_from(
        [
            "aggregate_instance_extra_specs:ssd",
            "ssd",
            "hw:boot_menu",
            "capabilities:free_ram_mb",
            "capabilities:cpu_allocation_ratio",
            "capabilities:gpu",
        ]
    ),
    st.sampled_from(
        ["true", "s== true", "s!= true", "<or> true <or> 3", ">= 2", "<= 1024", "<in> ru", "= 512", "!= 3", "s> false"]
    ),
    max_size=2,
)
COMPARISONS = st.one_of(
    st.tuples(
        st.sampled_from(["=", "<", ">", "<=", ">="]),
        st.sampled_from(
            [
                "$free_ram_mb",
                "$free_disk_mb",
                "$vcpus_used",
                "$num_instances",
                "$hypervisor_version",
                "$failed_builds",
                "$ram_allocation_ratio",
            ]
        ),
        st.sampled_from([0, 1, 2, 1024, 2048.0, 7_002_000]),
    ),
    st.tuples(
        st.sampled_from(["=", "in", "<"]),
        st.sampled_from(["$host", "$hypervisor_type", "$stats.gpu", "$host_ip"]),
        st.sampled_from(["h1", "QEMU", "A100"]),
        st.sampled_from(["h2", "10.0.0.1"]),
    ),
).map(list)
QUERIES = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda queries: ["and", *queries]),
        st.lists(inner, min_size=1, max_size=3).map(lambda queries: ["or", *queries]),
        st.lists(inner, min_size=1, max_size=2).map(lambda queries: ["not", *queries]),
    ),
    max_leaves=4,
)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "enabled_filters": ENABLED,
    "max_io_ops_per_host": st.sampled_from([1, 2, 8]),
    "max_instances_per_host": st.sampled_from([1, 2, 50]),
    "image_properties_default_architecture": st.sampled_from(["", "", "x86_64"]),
    "isolated_images": st.sampled_from([(), ("i",), ("other",)]),
    "isolated_hosts": st.sampled_from([(), ("h1", "h2")]),
    "restrict_isolated_hosts_to_isolated_images": st.booleans(),
    "aggregate_image_properties_isolation_namespace": st.sampled_from(["", "", "os"]),
    "aggregate_image_properties_isolation_separator": st.sampled_from([".", "_"]),
}
SETTINGS = st.builds(FilterSchedulerSettings, **DRAWN)
METRICS = st.builds(
    MetricsSettings,
    weight_setting=st.sampled_from([(), (), ("cpu.percent=-1.0",), ("cpu.percent=-1.0", "temperature=2.5")]),
    required=st.booleans(),
)


PREFILTERS = st.builds(
    Prefilters,
    image_types=st.booleans(),
    tenants=st.booleans(),
    tenants_need_aggregates=st.booleans(),
    isolated_aggregates=st.booleans(),
)
TRAITS = st.dictionaries(
    st.sampled_from(["trait:CUSTOM_A", "trait:CUSTOM_B"]), st.sampled_from(["required", "forbidden"]), max_size=2
)
HOST_TRAITS = st.lists(
    st.sampled_from(["CUSTOM_A", "CUSTOM_B", "COMPUTE_IMAGE_TYPE_QCOW2", "COMPUTE_SECURITY_UEFI_SECURE_BOOT"]),
    unique=True,
    max_size=4,
).map(tuple)
SECURE_BOOT = st.sampled_from([None, None, None, "disabled", "required"])
RESOURCES = st.dictionaries(
    st.sampled_from(["resources:VCPU", "resources:MEMORY_MB", "resources:DISK_GB"]),
    st.sampled_from(["0", "1", "3", "40"]),
    max_size=2,
)


def _cells(count: int, dedicated: int, *, huge: int | None = None) -> tuple[HostCell, ...]:
    return tuple(
        HostCell(
            id=number,
            memory_mb=2048,
            shared=tuple(range(number * 4 + dedicated, number * 4 + 4)),
            dedicated=tuple(range(number * 4, number * 4 + dedicated)),
            pages=()
            if huge is None
            else (
                MemoryPages(size_kib=4, total=(2048 - 2 * huge) * 256),
                MemoryPages(size_kib=2048, total=huge, reserved=64 * number),
            ),
        )
        for number in range(count)
    )


DEVICES = tuple(
    PciDevice(address=f"0000:0{slot}:00.0", vendor_id="10de", product_id="1eb8", numa_node=slot) for slot in (0, 1)
)
FUNCTIONS = (
    PciDevice(address="0000:05:00.0", vendor_id="10de", product_id="1eb8", dev_type="type-PF", numa_node=1),
    PciDevice(
        address="0000:05:00.1",
        vendor_id="10de",
        product_id="1eb8",
        dev_type="type-VF",
        numa_node=1,
        parent="0000:05:00.0",
    ),
    PciDevice(address="0000:06:00.0", vendor_id="10de", product_id="1eb8", dev_type="type-VF", parent="0000:09:00.0"),
)
TOPOLOGIES = (
    NodeTopology(),
    NodeTopology(cells=_cells(1, 0)),
    NodeTopology(cells=_cells(2, 2), devices=DEVICES),
    NodeTopology(cells=_cells(2, 4), devices=DEVICES[:1]),
    NodeTopology(cells=_cells(2, 1), devices=FUNCTIONS[:2]),
    NodeTopology(cells=_cells(2, 2, huge=512), devices=FUNCTIONS),
    NodeTopology(cells=_cells(1, 1, huge=256), devices=(*DEVICES, *FUNCTIONS), cpu_allocation_ratio=2.0),
)
USES = (
    NOTHING_USED,
    TopologyUse(cells={0: CellUse(memory_mb=1024, pinned=(0,))}),
    TopologyUse(cells={0: CellUse(cpus=4)}, devices=(DEVICES[0].address,)),
    TopologyUse(cells={0: CellUse(cpus=1, memory_mb=512, pages={4: 131_072, 2048: 256})}, devices=("0000:05:00.1",)),
)
PLACES: tuple[dict[str, str], ...] = (
    {},
    {},
    {"hw:numa_nodes": "1"},
    {"hw:numa_nodes": "2"},
    {"hw:cpu_policy": "dedicated"},
    {"hw:cpu_policy": "dedicated", "hw:emulator_threads_policy": "isolate"},
    {"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0"},
    {"hw:cpu_policy": "dedicated", "hw:numa_nodes": "2", "hw:mem_page_size": "any"},
    {"hw:mem_page_size": "small"},
    {"hw:mem_page_size": "large"},
    {"hw:mem_page_size": "2048"},
    {"pci_passthrough:alias": "gpu:1"},
    {"pci_passthrough:alias": "gpu:2", "hw:numa_nodes": "1"},
    {"pci_passthrough:alias": "pf:1,gpu:1"},
    {"pci_passthrough:alias": "pf:1", "hw:mem_page_size": "any", "hw:pci_numa_affinity_policy": "required"},
    {"pci_passthrough:alias": "gpu:2", "hw:cpu_policy": "dedicated", "hw:pci_numa_affinity_policy": "preferred"},
    {"hw:cpu_policy": "dedicated", "pci_passthrough:alias": "gpu:1", "hw:pci_numa_affinity_policy": "required"},
)


@st.composite
def hosts(draw: st.DrawFn) -> list[HostState]:
    """A handful of hosts, some with two nodes, some down, some full."""
    made = []
    aggregates = {name: draw(METADATA) for name in ("a", "b", "c")}
    for number in range(draw(st.integers(1, 10))):
        topology = draw(st.sampled_from(TOPOLOGIES))
        # Hosts with cells have room more often, so that the cells decide.
        is_empty = bool(topology.cells) and draw(st.booleans())
        capacity = {
            "VCPU": draw(st.integers(3 if is_empty else 0, 8)),
            "PCPU": sum(len(cell.dedicated) for cell in topology.cells),
            "MEMORY_MB": draw(st.integers(3 if is_empty else 0, 8)) * 512,
            "DISK_GB": draw(st.integers(1 if is_empty else 0, 5)) * 10,
        }
        reserved = {name: draw(st.integers(0, 1)) for name in capacity}
        made.append(
            a_host(
                draw(st.sampled_from(HOSTS)),
                node=f"n{number}",
                node_uuid=f"uuid-{number}",
                zone=draw(st.sampled_from(["nova", "az1"])),
                enabled=draw(st.booleans()) or draw(st.booleans()),
                forced_down=draw(st.integers(0, 9)) == 0,
                last_seen=NOW - draw(st.sampled_from([0, 59, 60, 61, 5000])),
                total={name: amount + reserved[name] for name, amount in capacity.items()},
                reserved=reserved,
                capacity=capacity,
                max_unit=draw(st.sampled_from([{}, {}, {"VCPU": 2}, {"MEMORY_MB": 1024, "DISK_GB": 2}, {"PCPU": 1}])),
                traits=draw(HOST_TRAITS),
                used={name: 0 if is_empty else draw(st.integers(0, amount)) for name, amount in capacity.items()},
                allocation_ratio=dict.fromkeys(capacity, draw(st.sampled_from([1.0, 2.0, 4.5]))),
                supported=draw(
                    st.lists(
                        st.tuples(
                            st.sampled_from(["x86_64", "aarch64"]),
                            st.sampled_from(["kvm", "qemu"]),
                            st.sampled_from(["hvm", "xen"]),
                        ),
                        max_size=2,
                    ).map(tuple)
                ),
                failed_builds=draw(st.integers(0, 2)),
                num_instances=draw(st.integers(0, 3)),
                num_io_ops=draw(st.integers(0, 3)),
                hypervisor_version=draw(st.sampled_from([7_002_000, 5_002_000])),
                host_ip=draw(st.sampled_from(["10.0.0.1", "10.0.1.9", "fd00::1", ""])),
                capabilities=draw(st.sampled_from([{}, {"gpu": "A100"}, {"gpu": "true"}])),
                aggregates=tuple((name, aggregates[name]) for name in draw(AGGREGATES)),
                metrics=draw(
                    st.dictionaries(st.sampled_from(["cpu.percent", "temperature"]), st.integers(0, 99), max_size=2)
                ),
                topology=encode(topology) if topology.cells else "",
                held=encode(draw(st.sampled_from(USES))) if topology.cells else "",
            )
        )
    return made


@st.composite
def specs(draw: st.DrawFn) -> RequestSpec:
    """A request that any of the filters may have to say something about."""
    properties = {}
    for key, values in (
        ("hw_architecture", ["x86_64", "aarch64"]),
        ("img_hv_type", ["kvm", "qemu"]),
        ("hw_vm_mode", ["hvm", "xen"]),
        ("os_distro", ["debian", "fedora"]),
    ):
        value = draw(st.sampled_from([None, None, *values]))
        if value is not None:
            properties[key] = value
    group = None
    if draw(st.booleans()):
        group = GroupSpec(
            id="g",
            policy=draw(st.sampled_from(["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"])),
            max_server_per_host=draw(st.integers(1, 2)),
            hosts=draw(st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 2), max_size=4)),
        )
    homes = st.lists(st.sampled_from(HOSTS), max_size=5).map(tuple)
    hinted = draw(st.dictionaries(st.sampled_from(["same_host", "different_host"]), homes, max_size=1))
    hints = {hint: ["a server"] for hint in hinted}
    if draw(st.integers(0, 3)) == 0:
        hints["query"] = [json.dumps(draw(QUERIES))]
    if draw(st.integers(0, 3)) == 0:
        hints["build_near_host_ip"] = [draw(st.sampled_from(["10.0.0.77", "10.0.1.1", "fd00::9"]))]
        if draw(st.booleans()):
            hints["cidr"] = [draw(st.sampled_from(["/8", "/16", "/32", "/0"]))]
    places = draw(st.sampled_from(PLACES))
    properties |= draw(st.one_of(st.just({}), TRAITS))
    secure_boot = draw(SECURE_BOOT)
    in_flavor = draw(st.booleans())
    secure = {} if secure_boot is None else {"os:secure_boot" if in_flavor else "os_secure_boot": secure_boot}
    if not in_flavor:
        properties |= secure
    # The API refuses amounts beside a CPU policy, and guests that cannot be divided.
    amounts = {} if places else draw(RESOURCES)
    even = places.get("hw:numa_nodes") == "2" or places.get("hw:cpu_policy") == "mixed"
    return a_spec(
        flavor=a_flavor(
            vcpus=2 if even else draw(st.integers(1, 3)),
            ram=draw(st.integers(1, 3)) * 512,
            disk=draw(st.integers(0, 2)),
            ephemeral=draw(st.sampled_from([0, 0, 1])),
            swap=draw(st.sampled_from([0, 0, 1, 1025])),
            root_on_volume=draw(st.booleans()),
            extra_specs=draw(EXTRA_SPECS)
            | places
            | amounts
            | draw(st.one_of(st.just({}), TRAITS))
            | (secure if in_flavor else {}),
        ),
        has_aggregates=draw(st.booleans()),
        alike_images=draw(st.dictionaries(st.sampled_from(HOSTS), st.sampled_from([1.0, 2.5]), max_size=2)),
        image=draw(
            st.sampled_from(
                [None, ImageMeta(id="i", properties=properties, disk_format=draw(st.sampled_from(["", "qcow2"])))]
            )
        ),
        availability_zone=draw(st.sampled_from([None, None, "nova", "az1", "nowhere"])),
        ignore_hosts=tuple(draw(st.lists(st.sampled_from(HOSTS), max_size=2))),
        server_group=group,
        hints=hints,
        hinted_hosts={hint: hosts for hint, hosts in hinted.items() if hosts},
    )


STEPS = {
    *(f"{step}({name})" for step in ("Capacity", "MaxUnit") for name in ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")),
    *("ComputeStatus", "ForcedDown", "Traits", "TenantAggregates", "IsolatedAggregates"),
}


def test_the_oracle_knows_each_filter() -> None:
    """A weigher that it does not know shows in its own check."""
    known = set(oracle.passes(a_host("h"), a_spec(), NOW))
    assert known == {*BUILT_IN, *STEPS}


def test_each_setting_that_the_oracle_reads_is_drawn() -> None:
    """Otherwise the comparison has its default only."""
    read = set(re.findall(r"settings\.(\w+)", inspect.getsource(oracle)))
    assert read and read <= DRAWN.keys()


def a_custom_scheduler(
    settings: FilterSchedulerSettings,
    metrics: MetricsSettings,
    multipliers: dict[str, float],
    prefilters: Prefilters = NO_PREFILTERS,
) -> FilterScheduler:
    """Make a scheduler with these settings."""
    return FilterScheduler(
        load_filters(FilterOptions(service_down_time=60.0, settings=settings, metrics=metrics, pci_aliases=ALIASES)),
        load_weighers(multipliers, options=WeigherOptions(settings=settings, metrics=metrics), with_plugins=False),
        random=random.Random(7),
        aliases=ALIASES,
        prefilters=prefilters,
    )


def passing(
    host: HostState,
    spec: RequestSpec,
    settings: FilterSchedulerSettings,
    metrics: MetricsSettings,
    prefilters: Prefilters = NO_PREFILTERS,
) -> bool:
    """Give whether all enabled filters and all steps before them pass a host."""
    needed = {*settings.enabled_filters, *STEPS}
    if metrics.required:
        needed.add("MetricsFilter")
    passed = oracle.passes(host, spec, NOW, settings, metrics, prefilters=prefilters)
    return all(passed[name] for name in needed)


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), SETTINGS, METRICS)
def test_each_filter(
    states: list[HostState], spec: RequestSpec, settings: FilterSchedulerSettings, metrics: MetricsSettings
) -> None:
    """Each one alone: together, one that is too strict hides behind another."""
    table = a_table(*states)
    table.now = NOW
    options = FilterOptions(service_down_time=60.0, settings=settings, metrics=metrics, pci_aliases=ALIASES)
    for each in load_filters(options, BUILT_IN):
        mask = Compared.of(each.mask(table.view(), spec)).mask
        given = [True] * len(states) if mask is None else mask.tolist()
        wanted = [oracle.passes(host, spec, NOW, settings, metrics)[each.name] for host in states]
        assert given == wanted, each.name


def test_each_guest_on_each_kind_of_host() -> None:
    """All of them, because most arbitrary hosts have no room for arbitrary NUMA nodes."""
    held = [
        *USES,
        TopologyUse(cells={0: CellUse(memory_mb=1536, pinned=(0, 1)), 1: CellUse(cpus=1, memory_mb=1024)}),
        TopologyUse(cells={0: CellUse(cpus=3, pages={2048: 256}), 1: CellUse(memory_mb=2048, pinned=(4,))}),
        TopologyUse(devices=("0000:05:00.0", DEVICES[1].address)),
    ]
    amounts = {"VCPU": 99, "PCPU": 99, "MEMORY_MB": 99_999, "DISK_GB": 99}
    states = [
        a_host(
            f"{number}-{of}",
            total=amounts,
            capacity=amounts,
            used=dict.fromkeys(amounts, 0),
            topology=encode(topology),
            held=encode(use),
        )
        for number, topology in enumerate(TOPOLOGIES)
        for of, use in enumerate(held)
    ]
    table, both = a_table(*states), Counter[bool]()
    filters = [each for each in load_filters(OPTIONS) if each.name in ("NUMATopologyFilter", "PciPassthroughFilter")]
    for places, vcpus, ram in product(PLACES, (1, 2, 3, 4), (512, 1024, 1536, 2048, 3072)):
        if places and vcpus % int(places.get("hw:numa_nodes", 2 if "hw:cpu_dedicated_mask" in places else 1)):
            continue
        spec = a_spec(flavor=a_flavor(vcpus=vcpus, ram=ram, extra_specs=places))
        wanted = [oracle.passes(host, spec, NOW) for host in states]
        for each in filters:
            mask = Compared.of(each.mask(table.view(), spec)).mask
            given = [True] * len(states) if mask is None else mask.tolist()
            assert given == [passes[each.name] for passes in wanted], (each.name, places, vcpus, ram)
            both.update(given)
    assert min(both[True], both[False]) > 2000


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), PREFILTERS)
def test_each_prefilter(states: list[HostState], spec: RequestSpec, prefilters: Prefilters) -> None:
    """Each one alone; one that yields no mask lets all hosts pass."""
    given = {each.name: each.mask.tolist() for each in prefilters.masks(a_table(*states).view(), spec)}
    wanted = [oracle.passes(host, spec, NOW, prefilters=prefilters) for host in states]
    for name in {name for name in STEPS if not name.startswith("Capacity")} | given.keys():
        assert given.get(name, [True] * len(states)) == [each[name] for each in wanted], name


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), MULTIPLIERS, METRICS)
def test_the_weights_of_all_hosts(
    states: list[HostState], spec: RequestSpec, multipliers: dict[str, float], metrics: MetricsSettings
) -> None:
    """Without filters, which seldom leave two hosts whose weights differ."""
    table = a_table(*states)
    weighers = load_weighers(multipliers, options=WeigherOptions(metrics=metrics), with_plugins=False)
    given = Ranking(table, table.view(), weighers, spec, lasting=False).totals.tolist()
    assert given == pytest.approx(oracle.weights(states, spec, multipliers, metrics), rel=1e-6, abs=1e-6)


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), MULTIPLIERS, SETTINGS, METRICS, PREFILTERS)
def test_one_decision(
    states: list[HostState],
    spec: RequestSpec,
    multipliers: dict[str, float],
    settings: FilterSchedulerSettings,
    metrics: MetricsSettings,
    prefilters: Prefilters,
) -> None:
    table = a_table(*states)
    before = free_of(table)
    left = [host for host in states if passing(host, spec, settings, metrics, prefilters)]
    scheduler = a_custom_scheduler(settings, metrics, multipliers, prefilters)
    if not left:
        with pytest.raises(NoValidHost) as caught:
            scheduler.select(table, spec, ["i"], now=NOW)
        assert caught.value.details["reasons"][-1]["remaining"] == 0
        assert free_of(table) == before
        return
    decision = scheduler.select(table, spec, ["i"], now=NOW)
    (destination,) = decision.destinations
    by_uuid = {
        host.node_uuid: weight
        for host, weight in zip(left, oracle.weights(left, spec, multipliers, metrics), strict=True)
    }
    assert by_uuid[destination.selected.node_uuid] == pytest.approx(max(by_uuid.values()))
    assert decision.explanation.winners[0].weight == pytest.approx(by_uuid[destination.selected.node_uuid])
    assert sum(decision.explanation.winners[0].weighers.values()) == pytest.approx(
        decision.explanation.winners[0].weight
    )

    alternates = destination.alternates
    names = [destination.selected.host, *(each.host for each in alternates)]
    assert len(set(names)) == len(names)
    assert all(each.node_uuid in by_uuid for each in alternates)
    possible = {h.host for h in left} - {destination.selected.host}
    assert len(alternates) == min(2, len(possible))


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), SETTINGS, PREFILTERS)
def test_explanation_counts_what_each_filter_removed(
    states: list[HostState], spec: RequestSpec, settings: FilterSchedulerSettings, prefilters: Prefilters
) -> None:
    scheduler = a_custom_scheduler(settings, MetricsSettings(), DEFAULT, prefilters)
    try:
        steps = [
            msgspec.structs.asdict(step)
            for step in scheduler.select(a_table(*states), spec, ["i"], now=NOW).explanation.filters
        ]
    except NoValidHost as error:
        steps = error.details["reasons"]
    left = states
    for step in steps:
        kept = [host for host in left if _passes(host, spec, settings, prefilters)[step["name"]]]
        assert (step["removed"], step["remaining"]) == (len(left) - len(kept), len(kept)), step
        removed = [host.host for host in left if host not in kept]
        assert list(step.get("hosts", ())) == removed[:MOST_NAMED], step
        left = kept


def _passes(
    host: HostState, spec: RequestSpec, settings: FilterSchedulerSettings, prefilters: Prefilters
) -> dict[str, bool]:
    return oracle.passes(host, spec, NOW, settings, prefilters=prefilters)


def one_by_one(scheduler: FilterScheduler, states: list[HostState], spec: RequestSpec, count: int) -> list[str] | None:
    """Place instances by separate decisions; None if one finds no host."""
    table, chosen = a_table(*states), []
    for number in range(count):
        try:
            decision = scheduler.select(table, spec, [f"i{number}"], now=NOW)
        except NoValidHost:
            return None
        selected = decision.destinations[0].selected
        chosen.append(selected.node_uuid)
        if spec.server_group is not None:
            members = {**spec.server_group.hosts, selected.host: spec.server_group.hosts.get(selected.host, 0) + 1}
            spec = msgspec.structs.replace(spec, server_group=msgspec.structs.replace(spec.server_group, hosts=members))
    return chosen


@pytest.mark.thorough
@patiently
@given(hosts(), specs(), st.integers(2, 12), MULTIPLIERS, SETTINGS, METRICS)
def test_many_in_one_request_are_placed_as_one_by_one(
    states: list[HostState],
    spec: RequestSpec,
    count: int,
    multipliers: dict[str, float],
    settings: FilterSchedulerSettings,
    metrics: MetricsSettings,
) -> None:
    scheduler = a_custom_scheduler(settings, metrics, multipliers)
    expected = one_by_one(scheduler, states, spec, count)
    table = a_table(*states)
    before, held = free_of(table), held_of(table)
    uuids = [f"i{number}" for number in range(count)]
    try:
        destinations = scheduler.select(table, spec, uuids, now=NOW).destinations
    except NoValidHost:
        assert expected is None
        assert free_of(table) == before and held_of(table) == held
        return
    assert [each.instance_uuid for each in destinations] == uuids
    assert [each.selected.node_uuid for each in destinations] == expected
    for destination in destinations:
        assert destination.selected.host not in {each.host for each in destination.alternates}
        row = table.index(destination.selected.node_uuid)
        assert row is not None
        table.release(row, fitting_oracle.amounts(spec.flavor, spec.image))
    table.undo_topologies()
    assert free_of(table) == before and held_of(table) == held

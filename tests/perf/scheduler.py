"""How long the scheduler takes to decide: `python tests/perf/scheduler.py`.

Prints CPU milliseconds per decision with the default filters and all weighers, for clouds of 100, 1,000 and 10,000
hosts of various sizes and fillings: one instance per request, and 50 instances in one request. A plain request concerns
few filters, a rich one all of the default; the last kind has all filters that there are, with hosts in aggregates.
"""

import random
import statistics
import time
from collections.abc import Iterable

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import BUILT_IN, load_filters
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.weights.registry import load_weighers

NOW = 1_000_000.0
_NEAR = {"build_near_host_ip": ["10.0.0.1"], "cidr": ["/8"]}


def make_table(count: int, seed: int = 1) -> HostTable:
    """Make a cloud: three zones, four kinds of hosts, one in fifty down, from empty to nearly full."""
    chance = random.Random(seed)
    states = []
    for number in range(count):
        cpus = chance.choice([32, 64, 128, 256])
        capacity = {"VCPU": cpus * 4, "MEMORY_MB": cpus * 8192, "DISK_GB": cpus * 40}
        filling = chance.random() * 0.95
        states.append(
            HostState(
                host=f"host-{number}",
                node=f"host-{number}",
                node_uuid=f"{number:032x}",
                zone=f"az{number % 3}",
                last_seen=NOW - (1000 if chance.random() < 0.02 else 3),
                total={name: amount // 4 for name, amount in capacity.items()},
                capacity=capacity,
                used={name: int(amount * filling) for name, amount in capacity.items()},
                hypervisor_type="QEMU",
                hypervisor_version=7_002_000 if cpus > 32 else 5_002_000,
                cpu_info={"arch": "x86_64", "features": ["aes", "avx2"] + ["avx512f"] * (cpus > 64)},
                supported=(("x86_64", "kvm", "hvm"), ("x86_64", "qemu", "hvm")),
                num_instances=int(45 * filling),
                host_ip=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                aggregates=((f"rack-{number % 40}", {"ssd": "true", "filter_tenant_id": "p, q"}),),
            )
        )
    table = HostTable()
    table.update(states)
    return table


def make_spec(kind: str) -> RequestSpec:
    """Make a request: plain, or one that every filter has something to say about."""
    flavor = Flavor(id="1", name="m1.small", ram=2048, vcpus=2, disk=20)
    if kind == "plain":
        return RequestSpec(project_id="p", user_id="u", flavor=flavor, image=ImageMeta(id="i"))
    return RequestSpec(
        project_id="p",
        user_id="u",
        flavor=Flavor(
            id="1",
            name="m1.small",
            ram=2048,
            vcpus=2,
            disk=20,
            extra_specs={
                "capabilities:cpu_info:features": "<all-in> aes avx2",
                "hw:cpu_policy": "shared",
                "aggregate_instance_extra_specs:ssd": "true",
            },
        ),
        hints={"query": ['["and", [">=", "$free_ram_mb", 4096], ["<", "$num_instances", 45]]']} | _NEAR
        if kind == "all"
        else {},
        image=ImageMeta(id="i", properties={"hw_architecture": "x86_64", "img_hv_type": "kvm"}),
        availability_zone="az1",
        ignore_hosts=("host-1", "host-4"),
        group=GroupSpec(id="g", policy="anti-affinity", hosts={f"host-{n}": 1 for n in range(1, 40)}),
    )


def measure(
    table: HostTable, spec: RequestSpec, instances: int, decisions: int, names: Iterable[str] | None = None
) -> float:
    """Give the median CPU milliseconds of a decision; what it counts is taken back outside the clock."""
    scheduler = FilterScheduler(
        load_filters(FilterOptions(service_down_time=60.0), names),
        load_weighers(with_plugins=False),
        random=random.Random(1),
    )
    uuids = [f"instance-{number}" for number in range(instances)]
    resources = spec.flavor.resources()
    times = []
    for _ in range(decisions):
        begin = time.thread_time()
        decision = scheduler.select(table, spec, uuids, now=NOW)
        times.append(time.thread_time() - begin)
        for destination in decision.destinations:
            row = table.index(destination.selected.node_uuid)
            assert row is not None
            table.release(row, resources)
    return statistics.median(times) * 1000


def main() -> None:
    """Print the table of figures."""
    print(f"{'hosts':>7} {'request':>8} {'ms, 1 instance':>15} {'ms, 50 instances':>17} {'ms per instance':>16}")
    for count in (100, 1_000, 10_000):
        table = make_table(count)
        for kind in ("plain", "rich"):
            if kind == "rich" and count == 100:
                continue  # anti-affinity leaves no 50 hosts there
            one = measure(table, make_spec(kind), 1, 500)
            many = measure(table, make_spec(kind), 50, 50)
            print(f"{count:>7} {kind:>8} {one:>15.3f} {many:>17.3f} {many / 50:>16.4f}")
        if count > 100:
            one = measure(table, make_spec("all"), 1, 500, BUILT_IN)
            many = measure(table, make_spec("all"), 50, 50, BUILT_IN)
            print(f"{count:>7} {'all':>8} {one:>15.3f} {many:>17.3f} {many / 50:>16.4f}")


if __name__ == "__main__":
    main()

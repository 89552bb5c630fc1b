"""What runs in an environment with Nova: its own scheduler decides about the same fleet and requests.

    PYTHON -m tests.perf.scheduler.nova_side HOSTS        prints the figures as JSON

Nova is favoured: its hosts are in memory already, and it filters and weighs only those that have the amounts and are in
the zone, which Placement would have found. Neither Placement nor the reading of hosts is counted, although each request
does both. This file imports nothing of ours but the fleet, because Nova needs other versions of what we use.
"""

import datetime
import json
import logging
import statistics
import sys
import time
from typing import Any

import nova.conf  # type: ignore[import-not-found]
from nova import context, objects
from nova.scheduler import host_manager, manager  # type: ignore[import-not-found]
from nova.virt import hardware  # type: ignore[import-not-found]
from oslo_utils import timeutils

from tests.nova_filters import nova_side
from tests.perf.scheduler import fleet

CONF = nova.conf.CONF
ALTERNATES = 2
_SECONDS = 3.0  # for each figure
_LEAST, _MOST = 2, 50  # decisions for each figure


class Hosts(host_manager.HostManager):  # type: ignore[misc]
    """Nova's host manager, with filters and weighers and without a database."""

    def refresh_cells_caches(self) -> None:
        """Do nothing."""

    def _init_aggregates(self) -> None:
        """Do nothing: the hosts have their aggregates."""

    def _init_instance_info(self, computes_by_cell: Any = None) -> None:
        """Do nothing: the hosts have their instances."""


def a_scheduler(kind: str) -> Any:
    """Return Nova's scheduler with the default filters and weighers; with all there are, if requests are such."""
    for name in fleet.SETTINGS:
        CONF.clear_override(name, "filter_scheduler")
    for name in fleet.METRICS:
        CONF.clear_override(name, "metrics")
    CONF.clear_override("enabled_filters", "filter_scheduler")
    if kind == "all":
        known = host_manager.filters.HostFilterHandler().get_all_classes()
        CONF.set_override("enabled_filters", sorted(each.__name__ for each in known), "filter_scheduler")
        for name, value in fleet.SETTINGS.items():
            CONF.set_override(name, value, "filter_scheduler")
        for name, value in fleet.METRICS.items():
            CONF.set_override(name, value, "metrics")
    elif kind == "numa":  # the default is without it, and flavors with NUMA nodes need it
        enabled = [*CONF.filter_scheduler.enabled_filters, "NUMATopologyFilter"]
        CONF.set_override("enabled_filters", enabled, "filter_scheduler")
    scheduler = manager.SchedulerManager.__new__(manager.SchedulerManager)
    scheduler.host_manager = Hosts()
    return scheduler


def a_host(given: dict[str, Any]) -> Any:
    """Return the state of a host with its NUMA cells."""
    host = nova_side.a_host(given)
    host.numa_topology = objects.NUMATopology(
        cells=[
            objects.NUMACell(
                id=cell["id"],
                cpuset=set(cell["shared"]),
                pcpuset=set(cell["dedicated"]),
                memory=cell["memory_mb"],
                cpu_usage=0,
                memory_usage=given["held"][cell["id"]]["memory_mb"],
                pinned_cpus=set(given["held"][cell["id"]]["pinned"]),
                siblings=[set(core) for core in cell["siblings"]],
                socket=cell["socket"],
                mempages=[
                    objects.NUMAPagesTopology(
                        size_kb=size, total=total, used=given["held"][cell["id"]]["pages"].get(size, 0), reserved=kept
                    )
                    for size, total, kept in cell["pages"]
                ],
            )
            for cell in given["cells"]
        ]
    )
    host.pci_stats, host.cell_uuid = None, fleet.server_uuid(0)
    return host


def a_request(given: dict[str, Any]) -> Any:
    """Return a request spec."""
    flavor = {name: given[name] for name in ("extra_specs", "vcpus")}
    group = given["group"] and {**given["group"], "max_server_per_host": 1}
    image = {"id": "00000000-0000-4000-8000-0000000000aa", "properties": given["properties"]}
    spec = nova_side.a_request(
        {
            "project_id": given["project_id"],
            "flavor": {**flavor, "name": "m1.small", "memory_mb": given["ram"], "flavorid": "1"},
            "image": image,
            "hints": given["hints"],
            "group": group,
        }
    )
    spec.flavor.root_gb, spec.flavor.ephemeral_gb, spec.flavor.swap = given["disk"], 0, 0
    spec.ignore_hosts = given["ignore_hosts"] or None
    spec.force_hosts = spec.force_nodes = None
    spec.numa_topology = hardware.numa_get_constraints(spec.flavor, spec.image)
    spec.pci_requests = objects.InstancePCIRequests(requests=[])
    spec.num_instances = 1
    spec.limits = objects.SchedulerLimits()
    return spec


def candidates(states: list[tuple[dict[str, Any], Any]], given: dict[str, Any]) -> list[Any]:
    """Return the hosts that Placement would have found."""
    cpus = "PCPU" if "hw:cpu_policy" in given["extra_specs"] else "VCPU"
    wanted = {cpus: given["vcpus"], "MEMORY_MB": given["ram"], "DISK_GB": given["disk"]}
    return [
        state
        for host, state in states
        if given["zone"] in (None, host["zone"])
        and all(host["capacity"].get(name, 0) - host["used"].get(name, 0) >= n for name, n in wanted.items())
    ]


def decide(states: list[tuple[dict[str, Any], Any]], kind: str) -> list[float]:
    """Return the milliseconds of each decision about one server.

    A request for several takes at least as long for each: Nova filters and weighs all hosts again.
    """
    scheduler, who = a_scheduler(kind), context.get_admin_context()
    times: list[float] = []
    uuid = fleet.server_uuid(0xABCD0000)
    begun = time.monotonic()
    while len(times) < _LEAST or (len(times) < _MOST and time.monotonic() - begun < _SECONDS):
        given = fleet.request(kind, len(times))
        spec, hosts = a_request(given), candidates(states, given)
        for host in hosts:
            host.allocation_candidates = [{"allocations": {host.uuid: {}}, "mappings": {"": [host.uuid]}}]
        start = time.thread_time()
        scheduler._legacy_find_hosts(who, 1, spec, hosts, ALTERNATES, [uuid])
        times.append((time.thread_time() - start) * 1000)
        for host in hosts:
            host.instances.pop(uuid, None)
    return times


def main() -> None:
    """Print the figures of a fleet."""
    count = int(sys.argv[1])
    logging.disable(logging.CRITICAL)  # Nova reports each host that is down, in every decision
    nova_side.prepare()
    now = datetime.datetime.fromtimestamp(fleet.NOW, datetime.UTC)
    timeutils.set_time_override(now.replace(tzinfo=None))
    states = [(host, a_host(host)) for host in fleet.hosts(count)]
    figures: dict[str, Any] = {}
    for kind in fleet.KINDS:
        print(f"{count:,} hosts: {kind} requests to Nova", file=sys.stderr, flush=True)
        times = decide(states, kind)
        figures[kind] = {"p50": statistics.median(times), "decisions": len(times)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

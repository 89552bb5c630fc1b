"""Our scheduler on the synthetic fleet: a process of its own for each fleet, which reads it from a database.

    python -m tests.perf.scheduler.ours URL [KIND…]        prints the figures as JSON

Times are CPU times of this process: others on the machine disturb them less than wall-clock time.
"""

import asyncio
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.db import host_states
from micronova.db.engine import Database, open_database
from micronova.objects.clock import SystemClock, micros
from micronova.objects.errors import NoValidHost
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec, SchedulerDecision
from micronova.placement import extra_specs
from micronova.scheduler.feed import HostFeed
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.base import FilterOptions
from micronova.scheduler.filters.registry import BUILT_IN, load_filters
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.weights.base import WeigherOptions
from micronova.scheduler.weights.registry import load_weighers
from tests.perf.scheduler import fleet
from tests.perf.scheduler.rows import topology_texts

BULK = 1_000
CHANGED = 100
_SECONDS = 1.5  # for each figure
_LEAST, _MOST = 30, 1_000  # decisions for each figure


def make_table(count: int) -> HostTable:
    """Return a table of the fleet without a database."""
    fields = set(HostState.__struct_fields__) - {"held", "supported", "aggregates"}
    table = HostTable()
    for host in fleet.hosts(count):
        topology, held = topology_texts(host)
        given = {name: value for name, value in host.items() if name in fields}
        given |= {name: tuple(host[name]) for name in ("supported", "aggregates")}
        table.update([HostState(**given, topology=topology, held=held)])
    return table


def make_spec(kind: str, number: int = 0, *, bulk: bool = False) -> RequestSpec:
    """Return a request as our scheduler gets it."""
    given = fleet.request(kind, number, bulk=bulk)
    named = given["group"]
    group = GroupSpec(id="g", policy=named["policy"], hosts=dict.fromkeys(named["hosts"], 1)) if named else None
    return RequestSpec(
        project_id=given["project_id"],
        user_id="u",
        flavor=Flavor(
            id=f"{kind}-{number}",
            name="m1.small",
            ram=given["ram"],
            vcpus=given["vcpus"],
            disk=given["disk"],
            extra_specs=given["extra_specs"],
        ),
        image=ImageMeta(id="image", properties=given["properties"]),
        availability_zone=given["zone"],
        hints=given["hints"],
        hinted_hosts={hint: tuple(names) for hint, names in given["hinted_hosts"].items()},
        alike_images=given["alike_images"],
        ignore_hosts=tuple(given["ignore_hosts"]),
        server_group=group,
    )


def make_scheduler(kind: str) -> FilterScheduler:
    """Return a scheduler with the default filters and weighers; for requests of the kind `all`, with all there are."""
    with_all = kind == "all"
    settings = FilterSchedulerSettings(**fleet.SETTINGS) if with_all else FilterSchedulerSettings()
    metrics = MetricsSettings()
    if with_all:
        metrics = MetricsSettings(weight_setting=tuple(fleet.METRICS["weight_setting"]), required=True)
    return FilterScheduler(
        load_filters(
            FilterOptions(service_down_time=60.0, settings=settings, metrics=metrics), BUILT_IN if with_all else None
        ),
        load_weighers(options=WeigherOptions(settings=settings, metrics=metrics), with_plugins=False),
        random=random.Random(1),
    )


def take_back(table: HostTable, spec: RequestSpec, decision: SchedulerDecision) -> None:
    """Undo what a decision has counted in the table."""
    resources = extra_specs.node_resources(spec.flavor, spec.image)
    table.undo_topologies()
    for each in decision.destinations:
        row = table.index(each.selected.node_uuid)
        assert row is not None
        table.release(row, resources)


def decide(table: HostTable, kind: str) -> dict[str, float]:
    """Return the milliseconds of decisions about one server each: the first, the median, and that of one in hundred."""
    scheduler = make_scheduler(kind)
    specs = [make_spec(kind, number) for number in range(fleet.PROJECTS * 3)]
    times: list[float] = []
    begun = time.monotonic()
    while len(times) < _LEAST or (len(times) < _MOST and time.monotonic() - begun < _SECONDS):
        spec = specs[len(times) % len(specs)]
        start = time.thread_time()
        decision = scheduler.select(table, spec, ["server"], now=fleet.NOW)
        times.append((time.thread_time() - start) * 1000)
        take_back(table, spec, decision)
    known = times[len(specs) :] or times  # each request was seen once
    return {
        "first": max(times[: len(specs)]),
        "p50": statistics.median(known),
        "p99": statistics.quantiles(known, n=100)[98],
        "per_s": 1000 / statistics.fmean(known),
    }


def decide_in_bulk(table: HostTable, kind: str) -> float | None:
    """Return how many servers of one request are placed in a second; None if there is no room for all."""
    scheduler, spec = make_scheduler(kind), make_spec(kind, bulk=True)
    uuids = [f"server-{number}" for number in range(BULK)]
    times = []
    for _ in range(3):
        start = time.thread_time()
        try:
            decision = scheduler.select(table, spec, uuids, now=fleet.NOW)
        except NoValidHost:
            return None
        times.append(time.thread_time() - start)
        take_back(table, spec, decision)
    return BULK / statistics.median(times)


async def read_changes(feed: HostFeed, database: Database) -> float:
    """Return the milliseconds (wall clock) that it takes to follow changes of some hosts."""
    names = [f"host-{number}" for number in range(CHANGED)]
    times = []
    for _ in range(5):
        await database.write(host_states.touch_hosts, names, lambda: micros(time.time()))
        start = time.monotonic()
        await feed.refresh(0.0)
        times.append((time.monotonic() - start) * 1000)
    return statistics.median(times)


def _rss() -> float:
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * resource.getpagesize() / (1 << 20)


async def measure(url: str, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Return all figures of one fleet."""
    database = open_database(url)
    feed = HostFeed(database, SystemClock(), default_zone="nova")
    try:
        await database.read(host_states.load_page, "", 1)  # connects
        memory, start, cpu = _rss(), time.monotonic(), time.process_time()
        await feed.reload_all()
        figures: dict[str, Any] = {
            "start_s": time.monotonic() - start,
            "start_cpu_s": time.process_time() - cpu,
            "memory_mib": _rss() - memory,
            "hosts": len(feed.table),
        }
        for kind in kinds:
            print(f"{len(feed.table):,} hosts: {kind} requests", file=sys.stderr, flush=True)
            figures[kind] = decide(feed.table, kind) | {"bulk_per_s": decide_in_bulk(feed.table, kind)}
        figures["changes_ms"] = await read_changes(feed, database)
        return figures
    finally:
        await database.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2:]))))

"""The simulation against the scheduler role with a database: the same trace leads to the same fleet."""

import heapq
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.db import allocations, host_states, tables
from micronova.db.engine import Database, open_database
from micronova.fleetsim.fleet import DEFAULT_FLEET, make_hosts
from micronova.fleetsim.generator import generate
from micronova.fleetsim.measures import Demands
from micronova.fleetsim.policies import Policy, parse_policy
from micronova.fleetsim.simulation import Experiment, simulate
from micronova.fleetsim.trace import Request
from micronova.objects.clock import SystemClock, micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost
from micronova.objects.scheduling import GroupSpec, SelectDestinations
from micronova.rpc.bus import connect
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.manager import SchedulerManager
from tests.unit.scheduler.rows import add_group, add_host, make_tables

HOSTS = 8
CLOCK = SystemClock()
Measured = dict[str, Any]


def _requests() -> list[Request]:
    """Return a trace with zones, of requests with at most six servers, of which some have server groups."""
    found = []
    for number, each in enumerate(generate(DEFAULT_FLEET, HOSTS, 160, load=0.9, seed=4)):
        policy = ("anti-affinity", "soft-anti-affinity", "affinity", "soft-affinity")[number % 4]
        group = GroupSpec(id=f"group-{number % 40}", policy=policy) if number % 40 < 8 else None
        spec = msgspec.structs.replace(each.spec, server_group=group)
        found.append(Request(each.at, each.lifetime, min(each.count, 6), spec))
    return found


async def _simulated(requests: Sequence[Request], policy: Policy) -> Measured:
    outcome = await simulate(Experiment(DEFAULT_FLEET, HOSTS, requests, samples=1), policy, timer=lambda: 0.0)
    [end] = outcome.samples
    return {
        "refused": outcome.refused_requests,
        "used": end.used,
        "servers": end.servers,
        "occupied": end.occupied,
        "largest_fits": end.largest_fits,
        "unusable": end.unusable,
    }


class Role:
    """The scheduler role, its database, and the servers that are to be deleted."""

    def __init__(self, database: Database, manager: SchedulerManager) -> None:
        self._database = database
        self._manager = manager
        self._deletes: list[tuple[float, str, str | None]] = []  # when, which server, its group
        self.refused = 0

    async def take(self, number: int, request: Request) -> None:
        """Delete what has lived long enough, then place the servers of a request."""
        while self._deletes and self._deletes[0][0] <= request.at:
            _, uuid, group = heapq.heappop(self._deletes)
            await self._database.write(allocations.release, uuid, now=micros(CLOCK.now()), group_uuid=group)
        uuids = tuple(f"{number}-{position}" for position in range(request.count))
        try:
            await self._manager.select_destinations(
                Context(request_id="req"), SelectDestinations(spec=request.spec, instance_uuids=uuids)
            )
        except NoValidHost:
            self.refused += 1
            return
        for uuid in uuids:
            group = request.spec.server_group.id if request.spec.server_group is not None else None
            heapq.heappush(self._deletes, (request.at + (request.lifetime or 0.0), uuid, group))

    async def measure(self, requests: Sequence[Request]) -> Measured:
        """Return what the rows of the database say after these requests."""
        demands = Demands(each.spec for each in requests)
        states = await self._database.read(host_states.load_page, "", HOSTS + 1, default_zone="az")
        table = HostTable()
        table.update(states)
        total, used = ({name: sum(getattr(s, field)[name] for s in states) for name in states[0].capacity}
                       for field in ("capacity", "used"))  # fmt: skip
        consumers = sa.select(sa.func.count(tables.allocations.c.consumer_uuid.distinct()))
        return {
            "refused": self.refused,
            "used": {name: used[name] / total[name] for name in total},
            "servers": await self._database.read(lambda conn: conn.execute(consumers).scalar()),
            "occupied": sum(any(state.used.values()) for state in states),
            "largest_fits": demands.largest_fits(table.view()),
            "unusable": demands.unusable_memory(table.view()) / total["MEMORY_MB"],
        }


@pytest.mark.parametrize("name", ["spread", "pack"])
async def test_the_same_trace_leads_to_the_same_fleet(tmp_path: Path, name: str) -> None:
    # How long builds take is not in the database: hosts report it.
    policy = parse_policy(f"{name}=ram_weight_multiplier={'-1' if name == 'pack' else '1'},io_ops_weight_multiplier=0")
    settings = policy.settings
    requests = _requests()
    database = open_database(f"sqlite:///{tmp_path / 'test.sqlite'}")
    bus = connect("local://", clock=CLOCK, random=random.Random(1))
    await bus.start()
    await make_tables(database)
    now = micros(CLOCK.now())
    zones: dict[str, list[str]] = {}

    def fill(conn: sa.Connection) -> None:
        for number, state in enumerate(make_hosts(DEFAULT_FLEET, HOSTS, settings.default)):
            add_host(conn, state.host, number, state.capacity, now=now)
            zones.setdefault(state.zone, []).append(state.host)
        for number, (zone, hosts) in enumerate(zones.items()):
            row = {"id": number, "uuid": zone, "name": zone, "metadata": {"availability_zone": zone}, "created_at": 1}
            conn.execute(tables.aggregates.insert(), row)
            members = [{"aggregate_id": number, "host": host} for host in hosts]
            conn.execute(tables.aggregate_hosts.insert(), members)
        groups = {
            each.spec.server_group.id: each.spec.server_group for each in requests if each.spec.server_group is not None
        }
        for group in groups.values():
            add_group(conn, group.id, group.policy)

    await database.write(fill)
    manager = SchedulerManager(
        settings.filter_scheduler,
        settings.metrics,
        database,
        bus,
        CLOCK,
        random.Random(1),
        host="scheduler",
        report_interval=3600.0,
        service_down_time=3600.0,
        refresh_interval=1e-6,
        max_attempts=3,
        default_zone="az",
    )
    await manager.start()
    try:
        role = Role(database, manager)
        compared = 0
        for number, request in enumerate(requests):
            await role.take(number, request)
            if number % 20 == 19:
                so_far = requests[: number + 1]
                assert await role.measure(so_far) == await _simulated(so_far, policy), number
                compared += 1
        assert compared == 8 and role.refused > 0
    finally:
        await manager.stop()
        await bus.stop()
        await database.close()

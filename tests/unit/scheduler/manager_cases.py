"""What must be true of scheduler roles on every database; run by test_manager here and under tests/integration."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.db import (
    allocation_audit,
    allocations,
    nodes,
    placement_names,
    provider_inventories,
    provider_trees,
    providers,
    tables,
)
from micronova.db.engine import Database
from micronova.objects.clock import SystemClock, micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost, Stale
from micronova.objects.explanation import refusal
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import Destination, RequestSpec, SelectDestinations
from micronova.rpc.bus import Bus, connect
from micronova.scheduler.manager import SchedulerManager
from micronova.scheduler.request_groups import PART
from micronova.scheduler.rpcapi import SchedulerAPI
from tests.unit.scheduler.claim_cases import held_cpus, nothing_wrong, numa_cloud
from tests.unit.scheduler.factory import ALIASES, a_flavor, a_spec
from tests.unit.scheduler.rows import a_claim, a_group, add_group, add_host, add_instances, make_tables, used


class Shifted(SystemClock):
    """The machine's clock, set ahead."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


CLOCK = Shifted()
CONTEXT = Context(request_id="req-1")


class Cloud:
    """Some schedulers on one database, and a bus to ask them."""

    def __init__(self, database: Database, bus: Bus, managers: list[SchedulerManager], events: list[Any]) -> None:
        self.database = database
        self.managers = managers
        self.events = events
        self.api = SchedulerAPI(bus)

    async def select(self, spec: RequestSpec, *uuids: str, **options: Any) -> tuple[Destination, ...]:
        """Ask one of the schedulers, over the bus."""
        return (await self.api.select_destinations(CONTEXT, spec, uuids, **options)).destinations


@asynccontextmanager
async def cloud(
    databases: list[Database],
    hosts: int = 3,
    refresh: float = 0.5,
    down_time: float = 3600.0,
    settings: FilterSchedulerSettings = FilterSchedulerSettings(),  # noqa: B008
    metrics: MetricsSettings = MetricsSettings(),  # noqa: B008
) -> AsyncIterator[Cloud]:
    """A scheduler per database, and hosts with room for four small instances each."""
    now = micros(CLOCK.now())

    def fill(conn: sa.Connection) -> None:
        for number in range(hosts):
            add_host(conn, f"h{number}", number, now=now)

    await make_tables(databases[0])
    await databases[0].write(fill)
    bus = connect("local://", clock=CLOCK, random=random.Random(1))
    await bus.start()
    events: list[Any] = []

    def notify(context: Context, event: str, request: SelectDestinations) -> None:
        events.append((context.request_id, event, request.instance_uuids))

    managers = [
        SchedulerManager(
            settings,
            metrics,
            database,
            bus,
            CLOCK,
            random.Random(seed),
            notify,
            host="scheduler",
            report_interval=5.0,
            service_down_time=down_time,
            refresh_interval=refresh,
            max_attempts=3,
            default_zone="nova",
            pci_aliases=ALIASES,
        )
        for seed, database in enumerate(databases)
    ]
    for manager in managers:
        await manager.start()
    try:
        yield Cloud(databases[0], bus, managers, events)
    finally:
        for manager in managers:
            await manager.stop()
        await bus.stop()


async def no_valid_host(asked: Any) -> NoValidHost | None:
    try:
        await asked
    except NoValidHost as error:
        return error
    return None


async def test_selects_claims_and_tells(databases: list[Database]) -> None:
    async with cloud(databases[:1]) as c:
        await c.database.write(add_instances, "i0", "i1", "i2")
        answer = await c.api.select_destinations(CONTEXT, a_spec(), ["i0", "i1", "i2"], epochs={"i0": 1})
        assert sorted(each.selected.host for each in answer.destinations) == ["h0", "h1", "h2"]
        assert all(len(each.alternates) == 2 for each in answer.destinations)
        assert answer.explanation.hosts == 3
        assert await c.database.read(used) == {"h0": 1, "h1": 1, "h2": 1}
        assert c.events == [
            ("req-1", "scheduler.select_destinations.start", ("i0", "i1", "i2")),
            ("req-1", "scheduler.select_destinations.end", ("i0", "i1", "i2")),
        ]
        assert c.database.statistics.by_function["claim"] == 1


async def test_no_valid_host_arrives_as_itself_and_claims_nothing(databases: list[Database]) -> None:
    async with cloud(databases[:1]) as c:
        error = await no_valid_host(c.select(a_spec(), *(f"i{number}" for number in range(13))))
        assert error is not None
        assert error.message == (
            "No valid host was found. There are not enough hosts available: no host has 1 free vCPU. "
            "There is room for 12 of 13 servers."
        )
        assert error.details["reasons"][-1]["remaining"] == 0
        assert set((await c.database.read(used)).values()) == {0}
        assert len(await c.select(a_spec(), *(f"i{number}" for number in range(12)))) == 12


async def test_a_dry_run_says_what_a_request_would_get_and_changes_nothing(databases: list[Database]) -> None:
    """Neither claims nor what the scheduler counts in its own table."""
    async with cloud(databases[:1], refresh=3600.0) as c:
        await c.database.write(add_instances, "i0", "i1")
        await c.select(a_spec(), "i0")
        await c.api.dry_run(CONTEXT, a_spec(), 12)  # a refusal reads all hosts, with the servers that they report
        before = await c.database.read(used), await c.api.list_hosts(CONTEXT)
        told = await c.api.dry_run(CONTEXT, a_spec(), 11, with_hosts=True)
        assert Counter(each.host for each in told.selections).total() == told.fit == 11
        assert told.fleet is not None and sum(each.chosen for each in told.fleet.hosts) == 11
        assert {each.refused_by for each in told.fleet.hosts} == {-1}
        assert told.explanation.took > 0 and len(told.explanation.winners) == 11
        refused = await c.api.dry_run(CONTEXT, a_spec(), 12, with_hosts=True)
        assert (refused.selections, refused.fit) == ((), 11)
        assert "no host has 1 free vCPU. There is room for 11 of 12 servers." in refused.message
        [step] = [step for step in refused.explanation.filters if step.removed]
        assert (step.name, step.entered, step.remaining, step.hosts) == ("Capacity(VCPU)", 3, 0, ("h0", "h1", "h2"))
        assert refused.fleet is not None and refused.fleet.filters[refused.fleet.hosts[0].refused_by] == step.name
        assert (await c.database.read(used), await c.api.list_hosts(CONTEXT)) == before
        assert c.events[2:] == [], "nobody is told of a dry run"
        (placement,) = await c.select(a_spec(), "i1")
        assert placement.selected.host == told.selections[0].host


async def test_a_dry_run_says_that_a_silent_host_may_return(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=1, down_time=60.0) as c:
        CLOCK.ahead = 70.0
        try:
            told = await c.api.dry_run(CONTEXT, a_spec())
            [host] = (await c.api.list_hosts(CONTEXT)).hosts
        finally:
            CLOCK.ahead = 0.0
        assert told.selections == () and told.explanation.waits
        assert told.explanation.filters[-1].name == "ComputeFilter"
        assert host.state == "down"


async def test_what_was_given_back_elsewhere_is_seen_before_refusing(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=1, refresh=3600.0) as c:
        await c.select(a_spec(), "i0", "i1", "i2", "i3")
        assert await no_valid_host(c.select(a_spec(), "i4")) is not None
        await c.database.write(allocations.release, "i2", now=micros(CLOCK.now()))
        (destination,) = await c.select(a_spec(), "i4")
        assert destination.selected.host == "h0"


async def test_what_another_scheduler_took_is_found_out(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=2, refresh=3600.0) as c:
        await c.select(a_spec(), "first")
        taken = [a_claim(f"i{number}", "h1") for number in range(4)]
        assert (await c.database.write(allocations.claim, taken, now=micros(CLOCK.now()))).claimed
        # It believes h1 to be the emptier one, loses there, and takes the other.
        (destination,) = await c.select(a_spec(), "second")
        assert destination.selected.host == "h0"
        assert await c.database.read(used) == {"h0": 2, "h1": 4}


async def test_a_host_that_came_or_was_disabled_is_noticed(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=1, refresh=0.0) as c:
        await c.database.write(_add_large_host, "h9")
        (destination,) = await c.select(a_spec(), "i0")
        assert destination.selected.host == "h9"
        await c.database.write(_disable, "h9")
        (destination,) = await c.select(a_spec(), "i1")
        assert destination.selected.host == "h0"


async def test_a_host_that_was_disabled_just_now_gets_nothing(databases: list[Database]) -> None:
    """Also if the scheduler has not read that yet: the claim finds it."""
    async with cloud(databases[:1], hosts=1, refresh=3600.0) as c:
        await c.database.write(_add_large_host, "h9")
        assert (await c.select(a_spec(requested_host="h9"), "i0"))[0].selected.host == "h9"
        await c.database.write(_disable, "h9")
        (destination,) = await c.select(a_spec(), "i1")
        assert destination.selected.host == "h0"
        assert await no_valid_host(c.select(a_spec(requested_host="h9"), "i2")) is not None
        (destination,) = await c.select(a_spec(force_host="h9"), "i3")  # as an admin may
        assert destination.selected.host == "h9"
        (destination,) = await c.select(
            a_spec(requested_host="h9"), "i0"
        )  # asked again: it holds its resources already
        assert destination.selected.host == "h9"


async def test_hints_name_servers_of_the_same_project(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=3, refresh=0.0) as c:
        await c.database.write(add_instances, "on-h0", "on-h1", "nowhere")
        await c.database.write(_at, {"on-h0": "h0", "on-h1": "h1"})
        project = a_spec().project_id
        await c.database.write(_owned, project)

        async def selected(uuid: str, **hints: list[str]) -> str | None:
            try:
                (destination,) = await c.select(a_spec(hints=hints), uuid)
            except NoValidHost:
                return None
            return destination.selected.host

        assert await selected("i0", same_host=["on-h1"]) == "h1"
        assert await selected("i1", same_host=["gone", "on-h0"]) == "h0"
        assert await selected("i2", different_host=["on-h0", "on-h1"]) == "h2"
        assert await selected("i3", different_host=["on-h0"], same_host=["on-h0", "on-h1"]) == "h1"
        assert await selected("i4", same_host=["gone"]) is None
        assert await selected("i5", same_host=["nowhere"]) is None
        await c.database.write(_owned, "another project")
        assert await selected("i6", same_host=["on-h0"]) is None


def _at(conn: sa.Connection, hosts: dict[str, str]) -> None:
    for uuid, host in hosts.items():
        conn.execute(tables.instances.update().where(tables.instances.c.uuid == uuid).values(host=host))


def _owned(conn: sa.Connection, project_id: str) -> None:
    conn.execute(tables.instances.update().values(project_id=project_id))


def _add_large_host(conn: sa.Connection, name: str) -> None:
    add_host(conn, name, 9, {"VCPU": 90, "MEMORY_MB": 90000, "DISK_GB": 900}, micros(CLOCK.now()))


def _disable(conn: sa.Connection, host: str) -> None:
    s = tables.services.c
    conn.execute(tables.services.update().where(s.host == host).values(disabled=True, updated_at=micros(CLOCK.now())))


async def test_a_silent_host_is_down_and_up_when_heard_of(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cloud(databases[:1], hosts=1, down_time=600.0) as c:
        monkeypatch.setattr(CLOCK, "ahead", 1300.0)
        error = await no_valid_host(c.select(a_spec(), "i0"))
        assert error is not None and "hosts_may_return" not in error.details
        assert error.details["reasons"][-1]["name"] == "ComputeFilter"
        monkeypatch.setattr(CLOCK, "ahead", 1500.0)
        await c.database.write(_heard, "h0", CLOCK.now())
        assert len(await c.select(a_spec(), "i0")) == 1


async def test_a_host_that_has_just_gone_may_come_back(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long again as a host may be silent, it is not valid, but the answer says that it may return."""
    async with cloud(databases[:1], hosts=1, down_time=600.0) as c:
        monkeypatch.setattr(CLOCK, "ahead", 1000.0)
        error = await no_valid_host(c.select(a_spec(), "i0", "i1"))
        assert error is not None and error.details["hosts_may_return"]
        assert set((await c.database.read(used)).values()) == {0}
        for spec in (a_spec(flavor=a_flavor(ram=8192)), a_spec(ignore_hosts=("h0",))):
            error = await no_valid_host(c.select(spec, "i0"))
            assert error is not None and "hosts_may_return" not in error.details
        await c.database.write(_heard, "h0", CLOCK.now())
        monkeypatch.setattr(CLOCK, "ahead", 1010.0)
        assert len(await c.select(a_spec(), "i0", "i1", "i2", "i3")) == 4


def _heard(conn: sa.Connection, host: str, at: float) -> None:
    conn.execute(tables.services.update().where(tables.services.c.host == host).values(last_seen_at=micros(at)))


async def test_zones_come_from_aggregates(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=3, refresh=0.0) as c:
        await c.database.write(_zone, "az1", "h2")
        (destination,) = await c.select(a_spec(availability_zone="az1"), "i0")
        assert (destination.selected.host, destination.selected.zone) == ("h2", "az1")
        assert await no_valid_host(c.select(a_spec(availability_zone="az2"), "i1")) is not None


def _zone(conn: sa.Connection, zone: str, host: str) -> None:
    from micronova.db.host_states import touch_hosts

    row = {"id": 1, "uuid": zone, "name": zone, "metadata": {"availability_zone": zone}, "created_at": 1}
    conn.execute(tables.aggregates.insert(), row)
    conn.execute(tables.aggregate_hosts.insert(), {"aggregate_id": 1, "host": host})
    touch_hosts(conn, [host], micros(CLOCK.now()))


async def test_asking_again_for_the_last_resources(databases: list[Database]) -> None:
    """A conductor that died after the claim leaves instances that hold all that there is."""
    async with cloud(databases[:1], hosts=1) as c:
        uuids = [f"i{number}" for number in range(4)]
        await c.database.write(add_instances, *uuids)
        for spec in (a_spec(), a_spec(), a_spec(requested_host="h0")):
            destinations = await c.select(spec, *uuids)
            assert [each.selected.host for each in destinations] == ["h0"] * 4
        assert await c.database.read(used) == {"h0": 4}
        assert await no_valid_host(c.select(a_spec(ignore_hosts=("h0",)), *uuids)) is not None
        assert await no_valid_host(c.select(a_spec(flavor=a_flavor(ram=2048)), *uuids)) is not None
        assert await no_valid_host(c.select(a_spec(), *uuids, "i4")) is not None


async def test_asking_again_gives_the_same_answer(databases: list[Database]) -> None:
    async with cloud(databases[:2]) as c:
        await c.database.write(add_instances, "i0", "i1")
        answers = [await c.select(a_spec(), "i0", "i1", epochs={"i0": 1, "i1": 1}) for _ in range(4)]
        assert all([each.selected for each in answer] == [each.selected for each in answers[0]] for answer in answers)
        at_once = await asyncio.gather(*(c.select(a_spec(), "i0", "i1", "i2") for _ in range(8)))
        assert len({tuple(each.selected.node_uuid for each in answer) for answer in at_once}) == 1
        assert sum((await c.database.read(used)).values()) == 3
        # A reschedule leaves the host that was tried.
        spec = a_spec(ignore_hosts=(answers[0][0].selected.host,))
        (destination,) = await c.select(spec, "i0")
        assert destination.selected.host != answers[0][0].selected.host
        assert sum((await c.database.read(used)).values()) == 3


async def test_who_is_gone_or_changed_hands_is_refused(databases: list[Database]) -> None:
    async with cloud(databases[:1]) as c:
        await c.database.write(add_instances, "i0")
        for epochs in ({"i0": 2}, {"gone": 1}):
            try:
                await c.select(a_spec(), *epochs, epochs=epochs)
            except Stale as error:
                assert error.details["instances"] == list(epochs)
            else:
                raise AssertionError("claimed for the dead")
        assert set((await c.database.read(used)).values()) == {0}
        assert set(c.managers[0]._feed.table.view().free("VCPU")) == {4.0}  # counted in memory neither


def _with_cards(conn: sa.Connection, hosts: int) -> None:
    """Give each host a network card with traffic for five servers."""
    stock = {"total": 10, "reserved": 0, "min_unit": 1, "max_unit": 10, "step_size": 1, "allocation_ratio": 1.0}
    providers.ensure_nodes(conn, {f"node-h{number}": (f"h{number}", f"h{number}") for number in range(hosts)}, 1)
    placement_names.create_class(conn, "CUSTOM_TRAFFIC", 1)
    for number in range(hosts):
        providers.create(conn, f"card-h{number}", f"card-h{number}", f"node-h{number}", 1)
        provider_inventories.add(conn, f"card-h{number}", "CUSTOM_TRAFFIC", stock, None, 1)


async def test_only_providers_of_hosts_that_pass_are_read_and_once(databases: list[Database]) -> None:
    """The trees of all hosts were read before the filters were asked, for each attempt."""
    hosts = 2 * PART + 10
    async with cloud(databases[:1], hosts=hosts) as c:
        await c.database.write(_with_cards, hosts)
        await c.database.write(add_instances, *(f"i{number}" for number in range(9)))
        read, roots = c.database.read, list[str]()

        async def noting(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is provider_trees.load_trees:
                roots.extend(args[0])
            return await read(fn, *args, **kwargs)

        c.database.read = noting  # type: ignore[method-assign]
        lists = c.database.statistics.by_function
        flavor = a_flavor(extra_specs={"resources_NET:CUSTOM_TRAFFIC": "2"})
        [chosen] = await c.select(a_spec(flavor=flavor, force_host="h7"), "i0")
        assert (chosen.selected.host, roots) == ("h7", ["node-h7"])
        await c.select(a_spec(flavor=flavor, requested_host="h8"), "i1")
        assert roots == ["node-h7", "node-h8"]
        assert "roots_of" not in lists, "its rows grow with all trees"

        roots.clear()
        await c.select(a_spec(flavor=flavor, ignore_hosts=("h3",)), "i2", "i3")
        assert len(roots) == len(set(roots)) == hosts - 1
        taken: dict[str, int] = await read(used, "CUSTOM_TRAFFIC")
        assert sum(taken.values()) == 4 * 2

        # A request that is refused reads nothing twice either.
        roots.clear()
        too_much = a_flavor(extra_specs={"resources_NET:CUSTOM_TRAFFIC": "9"})
        with pytest.raises(NoValidHost) as refused:
            await c.select(a_spec(flavor=too_much, requested_host="h7"), "i4")
        assert roots == ["node-h7"]
        reasons = refusal(refused.value)
        assert reasons is not None and reasons.filters[-1].name == "RequestGroups"


async def test_a_silent_host_with_request_groups_may_come_back(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=1, down_time=60.0, refresh=0.0) as c:
        await c.database.write(_with_cards, 1)
        await c.database.write(add_instances, "i0")
        flavor = a_flavor(extra_specs={"resources_NET:CUSTOM_TRAFFIC": "2"})
        CLOCK.ahead = 90.0
        try:
            with pytest.raises(NoValidHost) as refused:
                await c.select(a_spec(flavor=flavor), "i0")
        finally:
            CLOCK.ahead = 0.0
        assert refused.value.details["hosts_may_return"]


async def test_group_members_are_where_the_database_says(databases: list[Database]) -> None:
    async with cloud(databases[:2], hosts=4) as c:
        await c.database.write(add_instances, *(f"i{number}" for number in range(5)), group="g")
        await c.database.write(add_group, "g", "anti-affinity")
        spec = a_spec(server_group=a_group("g", "anti-affinity"))
        answers = await asyncio.gather(*(c.select(spec, f"i{number}") for number in range(4)))
        assert {answer[0].selected.host for answer in answers} == {"h0", "h1", "h2", "h3"}
        error = await no_valid_host(c.select(spec, "i4"))
        assert error is not None
        assert error.details["reasons"][-1]["name"] == "ServerGroupAntiAffinityFilter"
        assert await c.database.read(allocation_audit.audit) == []


async def crowd(databases: list[Database], hosts: int, requests: int) -> None:
    """Many ask several schedulers for more than there is: exactly what there is is given."""
    async with cloud(databases, hosts=hosts) as c:
        await c.database.write(add_instances, *(f"i{number}" for number in range(requests)))
        errors = await asyncio.gather(
            *(no_valid_host(c.select(a_spec(), f"i{number}", epochs={f"i{number}": 1})) for number in range(requests))
        )
        assert sum(error is None for error in errors) == 4 * hosts
        assert set((await c.database.read(used)).values()) == {4}
        assert await c.database.read(allocation_audit.audit) == []
        assert await c.database.read(allocation_audit.oversold) == []


async def crowd_for_topologies(databases: list[Database]) -> None:
    """Many ask several schedulers for dedicated CPUs and devices: exactly what there is is given."""
    async with cloud(databases, hosts=0) as c:
        await c.database.write(numa_cloud, "abcdef", 60, micros(CLOCK.now()))
        specs = {"hw:cpu_policy": "dedicated", "pci_passthrough:alias": "gpu:1"}
        spec = a_spec(flavor=a_flavor(vcpus=2, ram=512, disk=0, extra_specs=specs))
        errors = await asyncio.gather(*(no_valid_host(c.select(spec, f"i{number}")) for number in range(60)))
        # Each of six hosts has eight CPUs and four devices.
        assert sum(error is None for error in errors) == 24
        assert {len(cpus) for cpus in (await c.database.read(held_cpus)).values()} == {8}
        assert await c.database.read(nothing_wrong)
        refused = next(error for error in errors if error is not None)
        assert refused.details["reasons"][-1]["remaining"] == 0


async def crowd_of_batches(databases: list[Database]) -> None:
    """Requests for several instances of different sizes race; each gets all it asked for or nothing."""
    async with cloud(databases, hosts=10) as c:
        chance = random.Random(5)

        async def one(number: int) -> int:
            uuids = [f"i{number}-{each}" for each in range(chance.randint(1, 5))]
            flavor = a_flavor(vcpus=chance.randint(1, 2), disk=1)
            error = await no_valid_host(c.select(a_spec(flavor=flavor), *uuids))
            held = await c.database.read(allocations.get_many, uuids)
            assert len(held) == (0 if error else len(uuids))
            return 0 if error else len(uuids) * flavor.vcpus

        taken = sum(await asyncio.gather(*(one(number) for number in range(40))))
        assert taken == sum((await c.database.read(used)).values())
        assert taken > 30
        drift = await c.database.read(allocation_audit.audit)
        assert [each for each in drift if each.kind != "orphan"] == []
        assert await c.database.read(allocation_audit.oversold) == []


def test_messages_of_a_newer_version_are_understood() -> None:
    request = msgspec.to_builtins(SelectDestinations(spec=a_spec(), instance_uuids=("i",)))
    message = msgspec.msgpack.encode(request | {"something_new": 1})
    assert msgspec.msgpack.decode(message, type=SelectDestinations).instance_uuids == ("i",)


async def test_metrics_of_monitors_decide(databases: list[Database]) -> None:
    """Hosts that have not measured get no servers while metrics are required."""
    by_load = MetricsSettings(weight_setting=("cpu.percent=-1.0",), weight_multiplier=1000.0)
    async with cloud(databases[:1], refresh=0.0, metrics=by_load) as c:
        assert await no_valid_host(c.select(a_spec(), "i0")) is not None
        measured = {("h0", "h0"): {"cpu.percent": 70}, ("h2", "h2"): {"cpu.percent": 20}}
        await c.database.write(nodes.note_metrics, measured, micros(CLOCK.now()))
        destinations = await c.select(a_spec(), "i0", "i1")
        assert [each.selected.host for each in destinations] == ["h2", "h2"]
        await c.database.write(nodes.note_metrics, {("h2", "h2"): {"cpu.percent": 90}}, micros(CLOCK.now()))
        (destination,) = await c.select(a_spec(), "i2")
        assert destination.selected.host == "h0"


@pytest.mark.parametrize(
    ("multiplier", "ratios", "expected"),
    [(1000.0, (), "h1"), (-1000.0, (), "h2"), (1000.0, ("os_version=1", "os_distro=0.1"), "h0")],
)
async def test_images_alike_decide(
    databases: list[Database], multiplier: float, ratios: tuple[str, ...], expected: str
) -> None:
    """Of the servers on h1, two have the distribution of the request; that on h0 has its version, too."""
    settings = FilterSchedulerSettings(image_props_weight_multiplier=multiplier, image_props_weight_setting=ratios)
    images = {
        "i0": ("h0", ImageMeta(id="a", properties={"os_version": 13})),
        "i1": ("h1", ImageMeta(id="b", properties={"os_distro": "debian"})),
        "i2": ("h1", ImageMeta(id="b", properties={"os_distro": "debian"})),
        "i3": ("h2", ImageMeta(id="c", properties={"os_distro": "fedora"})),
    }
    async with cloud(databases[:1], settings=settings) as c:
        await c.database.write(add_instances, *images)
        await c.database.write(_with_images, images)
        wanted = ImageMeta(id="d", properties={"os_distro": "debian", "os_version": "13"})
        (destination,) = await c.select(a_spec(image=wanted), "i4")
        assert destination.selected.host == expected


def _with_images(conn: sa.Connection, images: dict[str, tuple[str, ImageMeta]]) -> None:
    for uuid, (host, image) in images.items():
        values = {"host": host, "image_ref": image.id, "image": msgspec.to_builtins(image)}
        conn.execute(tables.instances.update().where(tables.instances.c.uuid == uuid).values(values))

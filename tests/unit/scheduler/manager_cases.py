"""What must be true of scheduler roles on every database; run by test_manager here and under tests/integration."""

import asyncio
import itertools
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
    aggregates,
    allocation_audit,
    allocations,
    group_members,
    host_states,
    nodes,
    placement_names,
    provider_inventories,
    provider_trees,
    providers,
    server_groups,
    tables,
    topologies,
    used_amounts,
)
from micronova.db import claims as claim_rows
from micronova.db.engine import Database
from micronova.db.provider_inventories import InventoryFields
from micronova.objects.clock import SystemClock, micros
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost, Stale, Unavailable
from micronova.objects.explanation import explanation_of
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import Destination, RequestSpec, SelectDestinations
from micronova.objects.topology import HostCell, NodeTopology, PciDevice
from micronova.placement import candidates, extra_specs
from micronova.placement.standard import SHARES_VIA_AGGREGATE
from micronova.rpc.bus import Bus, connect
from micronova.scheduler import topologies as scheduler_topologies
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
            "No valid host was found. There are not enough hosts available: no host has 1 free vCPU; "
            "3 hosts have too little room. There is room for 12 of 13 servers."
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
        assert (
            "no host has 1 free vCPU; 3 hosts have too little room. There is room for 11 of 12 servers."
            in refused.message
        )
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
        assert (await c.database.write(claim_rows.claim, taken, now=micros(CLOCK.now()))).claimed
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
        assert await no_valid_host(c.select(a_spec(force_host="h9"), "i3")) is not None
        by_force = a_spec(force_host="h9", ignore_status=True)  # a move, as an admin may
        assert (await c.select(by_force, "i3"))[0].selected.host == "h9"
        (destination,) = await c.select(
            a_spec(requested_host="h9"), "i0"
        )  # asked again: it holds its resources already
        assert destination.selected.host == "h9"


NO_FILTERS = FilterSchedulerSettings(enabled_filters=("AllHostsFilter",))


async def _refused_as_foretold(c: Cloud, spec: RequestSpec, uuid: str) -> str:
    """Ask for a host, which there is not; return why. A dry run says the same before."""
    foretold = await c.api.dry_run(CONTEXT, spec, 1)
    error = await no_valid_host(c.select(spec, uuid))
    assert error is not None and not foretold.selections
    assert error.message == foretold.message
    return error.message


@pytest.mark.parametrize("settings", [FilterSchedulerSettings(), NO_FILTERS], ids=["default", "no filters"])
@pytest.mark.parametrize("policy", ["anti-affinity", "affinity"])
async def test_a_host_that_the_server_group_forbids_is_refused_at_once(
    databases: list[Database], settings: FilterSchedulerSettings, policy: str
) -> None:
    """Also a forced one, and if the filter of the policy is not enabled: the claim would be refused."""
    async with cloud(databases[:1], hosts=2, settings=settings) as c:
        await c.database.write(add_group, "g", policy)
        await c.database.write(add_instances, "i0", "i1", group="g")
        group = a_group("g", policy)
        await c.select(a_spec(force_host="h0", server_group=group), "i0")
        forbidden = "h0" if policy == "anti-affinity" else "h1"
        claims = c.database.statistics.by_function["claim"]
        for named in ("force_host", "requested_host"):
            why = await _refused_as_foretold(c, a_spec(server_group=group, **{named: forbidden}), "i1")
            assert f"{policy} group" in why
        if policy == "anti-affinity":
            why = await _refused_as_foretold(c, a_spec(server_group=group, ignore_hosts=("h1",)), "i1")
            assert "no other host is without a member of the anti-affinity group; 1 host has members" in why
        assert c.database.statistics.by_function["claim"] == claims, "nothing was tried"
        (destination,) = await c.select(a_spec(server_group=group), "i1")
        assert destination.selected.host == ("h1" if policy == "anti-affinity" else "h0")


@pytest.mark.parametrize("settings", [FilterSchedulerSettings(), NO_FILTERS], ids=["default", "no filters"])
async def test_a_disabled_host_is_refused_at_once(databases: list[Database], settings: FilterSchedulerSettings) -> None:
    asked: list[dict[str, Any]] = [{"force_host": "h0"}, {"requested_host": "h0"}, {"ignore_hosts": ("h1",)}]
    async with cloud(databases[:1], hosts=2, refresh=0.0, settings=settings) as c:
        await c.database.write(_disable, "h0")
        for each in asked:
            assert "disabled" in await _refused_as_foretold(c, a_spec(**each), "i0")
        assert (await c.select(a_spec(), "i0"))[0].selected.host == "h1"


async def test_the_zone_of_a_forced_host_counts_if_an_aggregate_has_it(databases: list[Database]) -> None:
    async with cloud(databases[:1], hosts=2, refresh=0.0) as c:
        await c.database.write(_add_zone, "west", "h1")
        await c.database.write(_add_zone, "empty")
        assert (await c.select(a_spec(force_host="h1", availability_zone="west"), "i0"))[0].selected.host == "h1"
        for zone in ("west", "empty"):
            why = await _refused_as_foretold(c, a_spec(force_host="h0", availability_zone=zone), "i1")
            assert f"the server needs one that is in the availability zone {zone}." in why
        for number, zone in enumerate(("nova", "no-such")):
            spec = a_spec(force_host="h1", availability_zone=zone)
            assert (await c.select(spec, f"i{2 + number}"))[0].selected.host == "h1"


def _add_zone(conn: sa.Connection, name: str, *hosts: str) -> None:
    now = micros(CLOCK.now())
    made = aggregates.insert(conn, f"aggregate-{name}", name, name, now)
    for host in hosts:
        aggregates.add_host(conn, made.id, host, lambda: now)


@pytest.mark.parametrize("reason", ["disabled", "down", "group", "capacity"])
async def test_claims_that_are_refused_again_and_again_end_the_request(
    databases: list[Database], reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that passes the filters may refuse the claim for a reason that they do not see."""
    sentences = {
        "disabled": "is enabled",
        "down": "is up",
        "group": "is one that the server group allows",
        "capacity": "has room",
    }
    tried = []

    def claim(conn: sa.Connection, claims: list[claim_rows.Claim], *, now: int) -> claim_rows.ClaimResult:
        tried.append(claims)
        failed = [claim_rows.ClaimFailure(node_uuid=each.node_uuid, host=each.host, reason=reason) for each in claims]
        return claim_rows.ClaimResult(failures=tuple(failed))

    async with cloud(databases[:1], hosts=2) as c:
        monkeypatch.setattr(claim_rows, "claim", claim)
        error = await no_valid_host(c.select(a_spec(requested_host="h0"), "i0"))
        why = f"the only possible host refuses the claim: the server needs one that {sentences[reason]}"
        assert error is not None and why in error.message
        assert len(tried) == 2, "nothing had changed when it was refused again"
        error = await no_valid_host(c.select(a_spec(), "i0"))
        assert error is not None and f"no host {sentences[reason]}" in error.message
        assert "; 2 hosts refuse the claim." in error.message
        explained = explanation_of(error)
        assert explained is not None and explained.filters[-1].name == f"Claim({reason})"
        assert len(tried) <= 2 + 2 * 2


async def test_a_request_that_lost_races_is_not_refused_because_one_host_refuses_it(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """h0 refuses the request for good; on h1 others are faster each time, which may end well the next time."""
    taken = itertools.cycle([1, -1])

    def claim(conn: sa.Connection, claims: list[claim_rows.Claim], *, now: int) -> claim_rows.ClaimResult:
        [each] = claims
        if each.host == "h1":
            used_amounts.change_unchecked(conn, {(each.node_uuid, "VCPU"): next(taken)}, now)
        failed = claim_rows.ClaimFailure(node_uuid=each.node_uuid, host=each.host, reason="capacity")
        return claim_rows.ClaimResult(failures=(failed,))

    async with cloud(databases[:1], hosts=2, refresh=0.0) as c:
        monkeypatch.setattr(claim_rows, "claim", claim)
        with pytest.raises(Unavailable, match="lost 64 races"):
            await c.select(a_spec(), "i0")


async def test_a_host_that_refuses_many_servers_gets_fewer(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim accepts one server of a request on h0, for a reason that the filters do not see."""
    claim = claim_rows.claim

    def one_on_h0(conn: sa.Connection, claims: list[claim_rows.Claim], *, now: int) -> claim_rows.ClaimResult:
        if sum(each.host == "h0" for each in claims) > 1:
            failed = claim_rows.ClaimFailure(node_uuid="node-h0", host="h0", reason="capacity")
            return claim_rows.ClaimResult(failures=(failed,))
        return claim(conn, claims, now=now)

    async with cloud(databases[:1], hosts=2) as c:
        monkeypatch.setattr(claim_rows, "claim", one_on_h0)
        await c.database.write(add_instances, *(f"i{number}" for number in range(5)))
        hosts = Counter(each.selected.host for each in await c.select(a_spec(), *(f"i{n}" for n in range(5))))
        assert hosts == {"h0": 1, "h1": 4}


def _with_licences(conn: sa.Connection, own: dict[str, int], shared: int) -> None:
    """Give hosts licences of their own, and all of them some that they share."""
    placement_names.create_class(conn, "CUSTOM_LICENCE", 1)
    providers.ensure_nodes(conn, {f"node-{host}": (host, host) for host in own}, 1)
    providers.create(conn, "shared", "licences", None, 1)
    providers.set_traits(conn, "shared", [SHARES_VIA_AGGREGATE])
    for uuid in ("shared", *(f"node-{host}" for host in own)):
        providers.set_aggregates(conn, uuid, ["rack"])
    for host, total in {"": shared, **own}.items():
        if host and total:
            providers.create(conn, f"own-{host}", f"own-{host}", f"node-{host}", 1)
        stock: InventoryFields = {
            "total": total, "reserved": 0, "min_unit": 1, "max_unit": 9, "step_size": 1, "allocation_ratio": 1.0
        }  # fmt: skip
        if total:
            provider = f"own-{host}" if host else "shared"
            provider_inventories.add(conn, provider, "CUSTOM_LICENCE", stock, None, 1)


LICENSED = a_spec(flavor=a_flavor(extra_specs={"resources:CUSTOM_LICENCE": "1"}))


@pytest.mark.parametrize("own", [(0, 0, 0), (0, 1, 2)])
@pytest.mark.parametrize("suffix", ["", "_L"])
@pytest.mark.parametrize("each", [1, 2])
async def test_what_is_shared_counts_once_for_a_request(
    databases: list[Database], own: tuple[int, ...], suffix: str, each: int
) -> None:
    """Each host seemed to have all of it; the claim refused the request, 64 times, and so for an hour."""
    async with cloud(databases[:1]) as c:
        await c.database.write(_with_licences, {f"h{n}": each * count for n, count in enumerate(own)}, 3 * each)
        uuids = [f"i{number}" for number in range(3 + sum(own))]
        await c.database.write(add_instances, *uuids, "more")
        spec = a_spec(flavor=a_flavor(extra_specs={f"resources{suffix}:CUSTOM_LICENCE": str(each)}))
        error = await no_valid_host(c.select(spec, *uuids, "more"))
        assert error is not None and error.message == (
            "No valid host was found. There are not enough hosts available: no host has the further resources that "
            f"the flavor asks for (CUSTOM_LICENCE={each}); 3 hosts lack further resources. "
            f"There is room for {len(uuids)} of {len(uuids) + 1} servers."
        )
        assert "claim" not in c.database.statistics.by_function, "nothing was tried"
        assert (await c.api.dry_run(CONTEXT, spec, len(uuids) + 1)).fit == len(uuids)
        assert len(await c.select(spec, *uuids)) == len(uuids)
        assert c.database.statistics.by_function["claim"] == 1
        assert await no_valid_host(c.select(spec, "more")) is not None


async def test_a_race_for_what_is_shared_reads_no_trees_of_other_hosts(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trees of all hosts were read again after each refused claim."""
    hosts = 6
    async with cloud(databases[:1], hosts=hosts) as c:
        await c.database.write(_with_licences, {f"h{number}": 0 for number in range(hosts)}, 9)
        await c.database.write(add_instances, *(f"i{number}" for number in range(9)))
        claim, read, roots, stolen = claim_rows.claim, c.database.read, list[str](), list[int]()

        def raced(conn: sa.Connection, claims: Any, *, now: int) -> claim_rows.ClaimResult:
            if not stolen:  # another service takes all but two, through the Placement API
                stolen.append(conn.execute(tables.inventories.update().where(LICENCES).values(used=7)).rowcount)
            return claim(conn, claims, now=now)

        async def noting(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is provider_trees.load_trees:
                roots.extend(args[0])
            return await read(fn, *args, **kwargs)

        monkeypatch.setattr(claim_rows, "claim", raced)
        monkeypatch.setattr(c.database, "read", noting)
        error = await no_valid_host(c.select(LICENSED, "i0", "i1", "i2"))
        assert error is not None and "There is room for 2 of 3 servers." in error.message and stolen == [1]
        assert len(roots) <= hosts + 3, "of all hosts, and again of those that refused the claim"
        assert len(await c.select(LICENSED, "i0", "i1")) == 2


LICENCES = sa.and_(tables.inventories.c.node_uuid == "shared", tables.inventories.c.resource_class == "CUSTOM_LICENCE")


def _with_devices(conn: sa.Connection, hosts: dict[str, int]) -> None:
    """Give each host so many good devices for two groups of two, and a bad one that could serve all.

    With fewer devices than groups a search takes long.
    """
    placement_names.create_class(conn, "CUSTOM_DEVICE", 1)
    placement_names.create_trait(conn, "CUSTOM_GOOD", 1)
    providers.ensure_nodes(conn, {f"node-{host}": (host, host) for host in hosts}, 1)
    for host, count in hosts.items():
        for number in range(count + 1):
            uuid, total = f"device-{host}-{number}", 3 if number else 100
            providers.create(conn, uuid, uuid, f"node-{host}", 1)
            stock: InventoryFields = {
                "total": total, "reserved": 0, "min_unit": 1, "max_unit": total, "step_size": 1, "allocation_ratio": 1.0
            }  # fmt: skip
            provider_inventories.add(conn, uuid, "CUSTOM_DEVICE", stock, None, 1)
            providers.set_traits(conn, uuid, ["CUSTOM_GOOD"] if number else [])


async def test_a_search_that_ends_early_says_so_and_leaves_steps_to_others(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that are asked first used up the steps of all others, which were then said to have nothing."""
    groups = 15
    specs = {f"resources_{n}:CUSTOM_DEVICE": "2" for n in range(groups)}
    specs |= {f"trait_{n}:CUSTOM_GOOD": "required" for n in range(groups)}
    spec = a_spec(flavor=a_flavor(extra_specs=specs))
    monkeypatch.setattr(candidates, "MOST_STEPS_OF_A_REQUEST", 20_000)
    async with cloud(databases[:1]) as c:
        await c.database.write(_with_devices, {"h0": 14, "h1": 14, "h2": 15})
        await c.database.write(add_instances, "i0", "i1")
        assert [each.selected.host for each in await c.select(spec, "i0")] == ["h2"]
        error = await no_valid_host(c.select(spec, "i1"))
        assert error is not None
        assert error.message == (
            "No valid host was found. There are not enough hosts available: no host is known to meet all requirements "
            "of the request; 2 hosts were not searched to the end, 1 lacks further resources."
        )
        explained = explanation_of(error)
        assert explained is not None
        steps = {step.name: step.removed for step in explained.filters if step.removed}
        assert steps == {"RequestGroups": 1, "RequestGroupsSearch": 2}
        claim = a_claim("i1", "h0", resource_request=extra_specs.resource_request(spec.flavor, None))
        result = await c.database.write(claim_rows.claim, [claim], now=micros(CLOCK.now()))
        assert [each.reason for each in result.failures] == ["search"], "a claim does not say that there is too little"


def _with_far_devices(conn: sa.Connection, hosts: int) -> None:
    """Give each host a device that is in no cell with CPUs; the last one has another beside its CPUs."""
    reports = {}
    for number in range(hosts):
        add_host(conn, f"far{number}", 100 + number, {"PCPU": 8, "MEMORY_MB": 4096}, micros(CLOCK.now()))
        cells = HostCell(id=0, memory_mb=2048 + number, dedicated=(0, 1, 2, 3)), HostCell(id=1, memory_mb=2048)
        devices = [
            PciDevice(address=f"0000:0{node}:00.0", vendor_id="10de", product_id="1eb8", numa_node=node)
            for node in ((1,) if number < hosts - 1 else (0, 1))
        ]
        reports[f"node-far{number}"] = NodeTopology(cells=cells, devices=tuple(devices))
    topologies.report(conn, reports, 1)


async def test_hosts_that_were_not_compared_are_compared_later(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such requests failed although hosts had room."""
    monkeypatch.setattr(scheduler_topologies, "LONGEST_AT_ONCE", 1e-9)
    monkeypatch.setattr(scheduler_topologies, "LONGEST_OF_A_REQUEST", 1e-9)
    specs = {"hw:cpu_policy": "dedicated", "pci_passthrough:alias": "gpu:1"}
    spec = a_spec(flavor=a_flavor(vcpus=2, ram=512, disk=0, extra_specs=specs))
    async with cloud(databases[:1], hosts=0) as c:
        await c.database.write(_with_far_devices, 20)
        await c.database.write(add_instances, "i0", "i1")
        later = 0
        while later < 30:
            try:
                chosen = await c.select(spec, "i0")
                break
            except Unavailable as error:
                assert "were not compared yet" in error.message
                later += 1
        assert later and [each.selected.host for each in chosen] == ["far19"]
        while later < 30:
            try:
                refused = await no_valid_host(c.select(spec, "i1"))
                break
            except Unavailable:
                later += 1
        assert refused is not None and "20 hosts have no such NUMA nodes free" in refused.message


async def _lose_a_claim(c: Cloud, uuids: list[str], monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the next claim of these find a host that was disabled a moment ago; return what is set when it was refused.

    It is enabled right afterwards.
    """
    claim, refused, loop = claim_rows.claim, asyncio.Event(), asyncio.get_running_loop()

    def disabled_meanwhile(conn: sa.Connection, claims: Any, *, now: int) -> claim_rows.ClaimResult:
        if refused.is_set() or [each.consumer_uuid for each in claims] != uuids:
            return claim(conn, claims, now=now)
        _disable(conn, "h0")
        result = claim(conn, claims, now=now)
        conn.execute(tables.services.update().values(disabled=False))
        loop.call_soon_threadsafe(refused.set)
        return result

    monkeypatch.setattr(claim_rows, "claim", disabled_meanwhile)
    return refused


@pytest.mark.parametrize("end", ["error", "cancellation"])
async def test_a_lost_claim_that_cannot_be_corrected_leaves_no_use_behind(
    databases: list[Database], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is away, or the request is cancelled, when the nodes of a refused claim are read again."""
    async with cloud(databases[:1], refresh=0.0) as c:
        uuids = [f"i{number}" for number in range(12)]
        refused = await _lose_a_claim(c, uuids, monkeypatch)
        read, away = c.database.read, asyncio.Event()

        async def failing(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is host_states.load_hosts and refused.is_set() and not away.is_set():
                away.set()
                if end == "error":
                    raise Unavailable("The database does not answer.")
                await asyncio.Event().wait()
            return await read(fn, *args, **kwargs)

        monkeypatch.setattr(c.database, "read", failing)
        asked = asyncio.create_task(
            c.managers[0].select_destinations(CONTEXT, SelectDestinations(spec=a_spec(), instance_uuids=tuple(uuids)))
        )
        await away.wait()
        if end == "cancellation":
            asked.cancel()
        with pytest.raises(Unavailable if end == "error" else asyncio.CancelledError):
            await asked
        assert set((await c.database.read(used)).values()) == {0}
        assert len(await c.select(a_spec(), *uuids)) == 12


async def test_what_a_claim_under_way_may_not_get_refuses_nobody(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request finds the hosts full of servers whose claim is refused in the end."""
    async with cloud(databases[:1], refresh=0.0) as c:
        uuids = [f"i{number}" for number in range(12)]
        refused = await _lose_a_claim(c, uuids, monkeypatch)
        write, decided, go_on = c.database.write, asyncio.Event(), asyncio.Event()

        async def held_up(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is claim_rows.claim and not decided.is_set():
                decided.set()
                await go_on.wait()
            return await write(fn, *args, **kwargs)

        monkeypatch.setattr(c.database, "write", held_up)
        first = asyncio.create_task(no_valid_host(c.select(a_spec(), *uuids)))
        await decided.wait()
        assert len(await c.select(a_spec(), "other")) == 1
        go_on.set()
        assert await first is not None and refused.is_set(), "there is room for 11"
        assert sum((await c.database.read(used)).values()) == 1


async def test_who_cannot_read_hosts_refuses_nothing(
    databases: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the table says may be over since."""
    async with cloud(databases[:1], hosts=1, refresh=3600.0) as c:
        await c.select(a_spec(), "i0", "i1", "i2", "i3")
        read = c.database.read

        async def away(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is host_states.load_changes:
                raise Unavailable("The database does not answer.")
            return await read(fn, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(c.database, "read", away)
            for asked in (c.select(a_spec(), "i4"), c.api.dry_run(CONTEXT, a_spec())):
                with pytest.raises(Unavailable):
                    await asked
        assert await no_valid_host(c.select(a_spec(), "i4")) is not None


async def test_a_server_group_that_was_deleted_rules_nobody(databases: list[Database]) -> None:
    """Although the requests that were made before name it."""
    async with cloud(databases[:1], hosts=2) as c:
        await c.database.write(add_group, "g", "anti-affinity")
        await c.database.write(add_instances, "i0", "i1", "i2", "i3", group="g")
        spec = a_spec(server_group=a_group("g", "anti-affinity"))
        await c.select(spec, "i0", "i1")
        assert await no_valid_host(c.select(spec, "i2")) is not None
        await c.database.write(_delete_group, "g")
        await c.select(spec, "i2", "i3")
        assert sorted((await c.database.read(used)).values()) == [2, 2]
        assert await c.database.read(group_members.by_host, "g") is None
        assert await c.database.read(nothing_wrong)


def _delete_group(conn: sa.Connection, uuid: str) -> None:
    server_groups.delete(conn, server_groups.get(conn, uuid))


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
    touch_hosts(conn, [host], lambda: micros(CLOCK.now()))


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


@pytest.mark.parametrize("close", ["disabled", "down", "isolated"])
async def test_asking_again_after_the_host_was_closed(databases: list[Database], close: str) -> None:
    """A conductor died after the claim. What closes the host meanwhile closes it to what is claimed there, too."""
    settings = FilterSchedulerSettings(enabled_filters=("ComputeFilter", "AggregateMultiTenancyIsolation"))
    async with cloud(databases[:1], hosts=2, settings=settings, refresh=0.0, down_time=60.0) as c:
        await c.database.write(add_instances, "i0")
        before = await c.select(a_spec(), "i0", epochs={"i0": 1})
        held = before[0].selected.host
        other = {"h0": "h1", "h1": "h0"}[held]
        now = micros(CLOCK.now())

        def change(conn: sa.Connection) -> None:
            if close == "isolated":
                made = aggregates.insert(conn, "aggregate", "reserved", None, now)
                aggregates.add_host(conn, made.id, held, lambda: now)
                reserved: dict[str, str | None] = {"filter_tenant_id": "another-project"}
                aggregates.update(conn, made.id, None, reserved, lambda: now)
                return
            values: dict[str, Any] = {"disabled": True} if close == "disabled" else {"last_seen_at": now - 600_000_000}
            service = tables.services.update().where(tables.services.c.host == held)
            conn.execute(service.values(updated_at=now, **values))

        await c.database.write(change)
        for _ in range(2):
            [again] = await c.select(a_spec(), "i0", epochs={"i0": 1})
            assert again.selected.host == other
        assert await c.database.read(used) == {held: 0, other: 1}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("policy", ["affinity", "anti-affinity"])
async def test_asking_again_for_members_whose_host_was_closed(
    databases: list[Database], policy: str, number: int
) -> None:
    """What they hold on the closed host does not bind them to it: they are the first members of their group."""
    names = ("ComputeFilter", "ServerGroupAffinityFilter", "ServerGroupAntiAffinityFilter")
    settings = FilterSchedulerSettings(enabled_filters=names)
    async with cloud(databases[:1], hosts=4, settings=settings, refresh=0.0) as c:
        uuids = [f"i{each}" for each in range(number)]
        await c.database.write(add_group, "g", policy)
        await c.database.write(add_instances, *uuids, group="g")
        spec, epochs = a_spec(server_group=a_group("g", policy)), dict.fromkeys(uuids, 1)
        before = await c.select(spec, *uuids, epochs=epochs)
        closed = before[0].selected.host

        def disable(conn: sa.Connection) -> None:
            service = tables.services.update().where(tables.services.c.host == closed)
            conn.execute(service.values(updated_at=micros(CLOCK.now()), disabled=True))

        await c.database.write(disable)
        hosts = {each.selected.host for each in await c.select(spec, *uuids, epochs=epochs)}
        assert closed not in hosts and len(hosts) == (1 if policy == "affinity" else number)
        found = await c.database.read(used)
        assert found[closed] == 0 and sum(found.values()) == number


@pytest.mark.parametrize("closed", [True, False])
async def test_asking_again_beside_a_member_that_stays(databases: list[Database], closed: bool) -> None:
    """What another member of an affinity group holds binds the group to its host, also if that is closed."""
    settings = FilterSchedulerSettings(enabled_filters=("ComputeFilter", "ServerGroupAffinityFilter"))
    async with cloud(databases[:1], hosts=3, settings=settings, refresh=0.0) as c:
        await c.database.write(add_group, "g", "affinity")
        await c.database.write(add_instances, "i0", "i1", group="g")
        spec = a_spec(server_group=a_group("g", "affinity"))
        [first] = await c.select(spec, "i0", epochs={"i0": 1})
        await c.select(spec, "i1", epochs={"i1": 1})
        host = first.selected.host

        def disable(conn: sa.Connection) -> None:
            service = tables.services.update().where(tables.services.c.host == host)
            conn.execute(service.values(updated_at=micros(CLOCK.now()), disabled=closed))

        await c.database.write(disable)
        if closed:
            assert await no_valid_host(c.select(spec, "i1", epochs={"i1": 1})) is not None
        else:
            [again] = await c.select(spec, "i1", epochs={"i1": 1})
            assert again.selected.host == host
        assert (await c.database.read(used))[host] == 2


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
    stock: InventoryFields = {
        "total": 10, "reserved": 0, "min_unit": 1, "max_unit": 10, "step_size": 1, "allocation_ratio": 1.0
    }  # fmt: skip
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
        reasons = explanation_of(refused.value)
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

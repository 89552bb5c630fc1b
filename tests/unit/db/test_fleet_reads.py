"""Reads that concern a few hosts of many: zones, services by host, and the set of host users."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import sqlalchemy as sa

from micronova.conductor.host_guests import HOSTS_PER_STEP, hosts_down, hosts_up
from micronova.conductor.host_users import HostUsers
from micronova.db import aggregates, node_reports, nodes, services, tables, usages
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden, NotFound, StaleHeartbeat
from micronova.objects.orders import NodeResources
from micronova.objects.service_names import COMPUTE
from tests.clocks import SetClock
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

DOWN = 20.0
NOW = micros(1_000.0)
LONG_AGO = micros(900.0)


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _zones(conn: sa.Connection) -> None:
    services.heartbeat(conn, COMPUTE, ["a1", "a2", "plain"], NOW)
    services.heartbeat(conn, COMPUTE, ["b1"], LONG_AGO)
    for name, hosts in (("a", ["a1", "a2"]), ("b", ["b1"]), ("empty", [])):
        made = aggregates.insert(conn, f"uuid-{name}", name, name, NOW)
        for host in hosts:
            aggregates.add_host(conn, made.id, host, lambda: NOW)


async def _in_service(database: Database, zone: str, default: str = "nova") -> bool:
    return await database.read(aggregates.zone_is_in_service, zone, default)


async def test_a_zone_is_in_service_if_one_of_its_hosts_is(database: Database) -> None:
    await database.write(_zones)
    found = {zone: await _in_service(database, zone) for zone in ("a", "b", "empty", "nova", "none")}
    assert found == {"a": True, "b": True, "empty": False, "nova": True, "none": False}


@pytest.mark.parametrize("change", [{"disabled": True}, {"forced_down": True}], ids=str)
async def test_a_zone_whose_hosts_an_operator_has_taken_out_is_not_in_service(
    database: Database, change: services.ServiceChanges
) -> None:
    await database.write(_zones)
    for host in ("a1", "a2"):
        assert await _in_service(database, "a")
        found = await database.read(services.find, host, COMPUTE)
        await database.write(services.update, found.uuid, change, NOW)
    assert not await _in_service(database, "a")


async def test_heartbeats_of_hosts_are_recorded_in_order(database: Database) -> None:
    alive = {"h1": NOW - 7, "h2": NOW - 8, "new": 0, "newer": 0}
    await database.write(services.compute_heartbeats, {"h1": 5, "h2": 1 << 60}, alive, NOW)
    await database.write(services.compute_heartbeats, {"h1": 6, "h2": 1 << 60, "new": 0}, alive, NOW + 1)
    with pytest.raises(StaleHeartbeat, match="host h1") as stale:
        numbers = {"h1": 5, "h2": (1 << 60) + 1, "newer": 1}
        await database.write(services.compute_heartbeats, numbers, dict.fromkeys(numbers, NOW), NOW + 2)
    assert stale.value.details["newest"] == 6
    found = await database.read(services.on_hosts, COMPUTE, ["h1", "h2", "new", "newer"])
    told = {host: (row.heartbeat_number, row.last_seen_at - NOW, row.alive_at) for host, row in found.items()}
    assert told == {"h1": (6, 1, NOW - 7), "h2": (1 << 60, 1, NOW - 8), "new": (0, 1, 0)}


async def test_the_default_zone_may_be_an_aggregate_too(database: Database) -> None:
    await database.write(_zones)
    gone = await database.read(services.find, "b1", COMPUTE)
    await database.write(services.update, gone.uuid, {"disabled": True}, NOW)
    assert await _in_service(database, "b", default="b")  # by the host that is in no zone
    plain = await database.read(services.find, "plain", COMPUTE)
    await database.write(services.update, plain.uuid, {"disabled": True}, NOW)
    assert not await _in_service(database, "b", default="b")
    assert not await _in_service(database, "nova")
    assert await _in_service(database, "a", default="a")


async def test_the_largest_ratio_of_the_hosts_of_an_aggregate(database: Database) -> None:
    def report(conn: sa.Connection) -> None:
        _zones(conn)
        for number, (host, ratio) in enumerate((("a1", 2.0), ("a2", 8.0), ("b1", 3.0), ("plain", 16.0))):
            node = NodeResources(
                node=host,
                node_uuid=f"node-{number}",
                hypervisor_type="fake",
                hypervisor_version=1,
                vcpus=8,
                memory_mb=4096,
                local_gb=100,
            )
            ratios = {**node_reports.RATIOS, "VCPU": ratio}
            node_reports.record(conn, {host: [node]}, NOW, ratios=ratios)

    await database.write(report)
    found = await database.read(aggregates.largest_ratios)
    names = {each.id: each.name for each in await database.read(aggregates.list_)}
    vcpu = {names[number]: ratios["VCPU"] for number, ratios in found.items()}
    assert vcpu == {"a": 8.0, "b": 3.0}
    [b] = (number for number, name in names.items() if name == "b")
    assert (await database.read(aggregates.largest_ratios, [b]))[b] == {"VCPU": 3.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0}


async def test_an_aggregate_may_have_more_hosts_than_a_statement_has_parameters(database: Database) -> None:
    names = [f"host-{number}" for number in range(33_000)]

    def add(conn: sa.Connection) -> int:
        services.heartbeat(conn, COMPUTE, [names[-1]], NOW)
        made = aggregates.insert(conn, "uuid-all", "all", None, NOW)
        conn.execute(tables.aggregate_hosts.insert(), [{"aggregate_id": made.id, "host": name} for name in names])
        return made.id

    number = await database.write(add)
    changed = await database.write(aggregates.update, number, "each", {"availability_zone": "red"}, lambda: NOW + 1)
    assert (changed.name, changed.metadata) == ("each", {"availability_zone": "red"})


async def test_hosts_that_a_build_avoids_may_be_more_than_a_statement_has_parameters(database: Database) -> None:
    others = [f"host-{number}" for number in range(33_000)]
    await database.write(services.heartbeat, COMPUTE, [others[0], "one"], NOW)
    assert await database.read(services.any_up, COMPUTE, NOW, DOWN, besides=others)
    assert not await database.read(services.any_up, COMPUTE, NOW, DOWN, besides=[*others, "one"])


async def test_zones_are_available_while_a_service_is_enabled(database: Database) -> None:
    await database.write(_zones)
    assert await database.read(aggregates.zones_available, "nova") == {"a": True, "b": True, "nova": True}
    for host in ("b1", "plain", "a1"):
        found = await database.read(services.find, host, COMPUTE)
        await database.write(services.update, found.uuid, {"disabled": True}, NOW)
    assert await database.read(aggregates.zones_available, "nova") == {"a": True, "b": False, "nova": False}
    assert await database.read(aggregates.zones_available, "a") == {"a": True, "b": False}


async def test_the_database_adds_up_what_projects_used(database: Database) -> None:
    hour = 3600 * 1_000_000
    flavor = {"name": "f", "ram": 512, "vcpus": 2, "disk": 10, "ephemeral": 5}

    def add(conn: sa.Connection) -> None:
        add_instances(conn, "living", "not-launched", "later")
        set_ = tables.instances.update().values(flavor=flavor)
        conn.execute(set_.where(tables.instances.c.uuid == "living").values(launched_at=0))
        conn.execute(set_.where(tables.instances.c.uuid == "later").values(launched_at=9 * hour))
        columns = [column for column in tables.instances.c if column.name in tables.deleted_instances.c]
        row = conn.execute(sa.select(*columns).where(tables.instances.c.uuid == "living")).mappings().one()
        for name, ended in (("gone", 3 * hour), ("gone-before", hour)):
            conn.execute(tables.deleted_instances.insert(), {**row, "uuid": name, "deleted_at": ended})

    await database.write(add)
    [sums] = await database.read(usages.totals, hour, 5 * hour, 4 * hour)
    assert tuple(sums) == ("p", 3 + 2, 5 * 512, 5 * 2, 5 * 15)
    rows = await database.read(usages.used, hour, 5 * hour, limit=10)
    assert [row.uuid for row in rows] == ["gone", "living"]
    rows = await database.read(usages.used, hour, 5 * hour, project_id="p", after=(1, "gone"), limit=10)
    assert [row.uuid for row in rows] == ["living"]


async def test_the_database_adds_up_what_nodes_have(database: Database) -> None:
    assert (await database.read(nodes.statistics))["vcpus"] == 0
    await database.write(_zones)
    resources = NodeResources(
        node="",
        node_uuid="",
        hypervisor_type="fake",
        hypervisor_version=1,
        vcpus=8,
        memory_mb=4096,
        local_gb=100,
        disk_available_gb=None,
        reserved={"MEMORY_MB": 96},
    )
    hosts = ("a1", "a2", "b1", "without-service")
    told = {host: [msgspec.structs.replace(resources, node=host, node_uuid=f"node-{host}")] for host in hosts}
    await database.write(node_reports.record, told, NOW)
    disabled = await database.read(services.find, "b1", COMPUTE)
    await database.write(services.update, disabled.uuid, {"disabled": True}, NOW)
    assert await database.read(nodes.statistics) == {
        "count": 2,
        "current_workload": 0,
        "disk_available_least": 0,
        "running_vms": 0,
        "vcpus": 16,
        "vcpus_used": 0,
        "memory_mb": 8192,
        "memory_mb_used": 192,
        "local_gb": 200,
        "local_gb_used": 0,
    }


async def test_hosts_that_are_up_are_read_in_parts(database: Database) -> None:
    """By conductors, which answer heartbeats in between."""
    names = [f"host-{number}" for number in range(2 * HOSTS_PER_STEP + 1)]
    await database.write(services.heartbeat, COMPUTE, names, NOW)
    await database.write(services.heartbeat, COMPUTE, names[:3], LONG_AGO)
    await database.write(services.heartbeat, "nova-conductor", ["control"], NOW)
    clock = SetClock(NOW / 1e6)
    assert sorted(await hosts_up(database, clock, DOWN)) == sorted(names[3:])
    assert database.statistics.by_function["list_"] == 3
    assert await hosts_down(database, clock, DOWN) == names[:3]


async def test_services_are_read_by_host(database: Database) -> None:
    await database.write(_zones)
    found = await database.read(services.on_hosts, COMPUTE, ["a1", "b1", "none"])
    assert {host: row.last_seen_at for host, row in found.items()} == {"a1": NOW, "b1": LONG_AGO}
    assert await database.read(services.count_up, COMPUTE, NOW, DOWN) == 3


async def test_host_users_are_read_again_only_if_they_changed(database: Database) -> None:
    users = HostUsers(database, required=True)
    await database.write(services.register_host_user, "one", 10)
    await users.refresh()
    mark, names = await database.read(services.host_users_unless, users._mark)
    assert (mark, names) == (users._mark, None)

    # As many as before, and the newest as old as before.
    await database.write(services.forget_host_user, "one", 11)
    await database.write(services.register_host_user, "two", 9)
    await users.refresh()
    users.check(Context(sender="two"), "two")
    with pytest.raises(Forbidden):
        users.check(Context(sender="one"), "one")


async def test_a_removed_host_may_say_nothing_until_it_is_added_again(database: Database) -> None:
    """The broker knows its user until an administrator deletes it there."""
    users = HostUsers(database, required=False)
    await database.write(services.register_host_user, "stolen", 10, "192.0.2.1:6080")
    await database.write(services.forget_host_user, "stolen", 11)
    await users.refresh()
    for sender, host in (("stolen", "stolen"), ("stolen", "unregistered"), ("control", "stolen")):
        with pytest.raises(Forbidden):
            users.check(Context(sender=sender), host)
    users.check(Context(sender="control"), "unregistered")
    assert await users.console_address("stolen") == "", "proxies believed what the host says of its address"
    assert await users.console_address("unregistered") is None
    with pytest.raises(NotFound):
        await database.write(services.forget_host_user, "stolen", 12)

    await database.write(services.register_host_user, "stolen", 13)
    await users.refresh()
    users.check(Context(sender="stolen"), "stolen")
    assert await users.console_address("stolen") == "", "it has the address of its former life"
    await database.write(services.register_host_user, "stolen", 14, "192.0.2.2:6080")
    assert await users.console_address("stolen") == "192.0.2.2:6080"
    await database.write(services.forget_host_user, "stolen", 15)
    await users.refresh()
    with pytest.raises(Forbidden):
        users.check(Context(sender="stolen"), "stolen")

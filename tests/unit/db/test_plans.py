"""PostgreSQL's plans of the hot paths: no statement reads a whole table of those that grow with the cloud."""

import hashlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.conductor.findings import images
from micronova.db import (
    allocation_audit,
    allocations,
    departures,
    host_states,
    instance_actions,
    instances,
    node_reports,
    nodes,
    operations,
    port_claims,
    provider_allocations,
    provider_trees,
    providers,
    quotas,
    reseal,
    retention,
    server_lists,
    server_migrations,
    services,
    topologies,
    usages,
    volume_usages,
)
from micronova.db import claims as claim_rows
from micronova.db.claims import Claim
from micronova.db.engine import Database
from micronova.db.provider_allocations import AllocationRequest
from micronova.db.secrets import SecretBox
from micronova.db.server_lists import Filters
from micronova.db.tables import instances as table_of_instances
from micronova.db.tables import metadata
from micronova.objects.block_device import BlockDevice
from micronova.objects.orders import NodeResources
from micronova.objects.service_names import COMPUTE
from micronova.objects.volume import VolumeStatistics
from micronova.placement.model import RequestGroup, ResourceRequest
from tests.plans import Rows, fill, recorded, rolled_back, rows_read, sequential_scans, too_many
from tests.unit.db.databases import compute_database

pytestmark = [pytest.mark.postgresql, pytest.mark.asyncio(loop_scope="module")]

SERVERS = 20_000
HOSTS = 10_000
MOVED = 2_000
"""Moves that ended long ago, of a project of its own."""
SMALL = {"aggregates", "aggregate_hosts", "flavors", "periodic_jobs"}
"""Tables that grow with the number of hosts at most."""
MOST_READ = 1_100
"""Rows of a table that a hot path may read: the largest page, or two for each of 500 hosts."""
MORE_READ = {
    "heartbeat: numbers": 1_600,
    "purge: volume usage": 2_100,
    "usage, first page": 2_100,
    "usage, a page": 2_100,
}
"""Hot paths that read more: three rows for each of 500 hosts; 1,000 rows and their deletion; twice what was deleted in
the span."""
NOW = SERVERS * 1_000
KNOWN = (("build", 9), ("delete", 9))


def _id(kind: str, number: int | str = "n") -> str:
    text = number if isinstance(number, str) else str(number)
    return f"md5('{kind}' || {text})::uuid::text"


def _uuid(kind: str, number: int) -> str:
    return str(uuid.UUID(hashlib.md5(f"{kind}{number}".encode(), usedforsecurity=False).hexdigest()))


# What differs between the rows; n counts them.
INSTANCE = {
    "project_id": "'p' || n % 100",
    "display_name": "'server-' || n",
    "created_at": "n * 1000",
    "updated_at": "n * 1000",
    "launched_at": "n * 1000",
    "reservation_id": "'r-' || n",
    "vm_state": "'active'",
}
PLACE = {"host": f"'host' || n % {HOSTS}", "node_uuid": _id("node", f"(n % {HOSTS})")}
FILL: Rows = (
    (
        "instances",
        SERVERS,
        {
            **INSTANCE,
            **PLACE,
            "uuid": _id("living"),
            "server_group_id": "CASE WHEN n % 10 = 1 THEN 'group' || n % 100 END",
        },
    ),
    ("deleted_instances", SERVERS, {**INSTANCE, "uuid": _id("deleted"), "deleted_at": "n * 1000"}),
    ("request_specs", SERVERS, {"instance_uuid": _id("living")}),
    (
        "block_devices",
        SERVERS,
        {
            "uuid": _id("device"),
            "instance_uuid": _id("living"),
            "device": f"json_build_object('uuid', {_id('device')})",
        },
    ),
    (
        "operations",
        SERVERS,
        {
            "id": _id("operation"),
            "instance_uuid": _id("living"),
            "kind": "'build'",
            "owner": f"'host:host' || n % {HOSTS}",
            "lease_until": "n * 1000",
            "deadline": str(2 * NOW),
            "finished_at": "CASE WHEN n % 100 > 0 THEN n * 1000 END",
        },
    ),
    ("instance_actions", SERVERS, {"request_id": "'req-' || n", "instance_uuid": _id("living"), "start_time": "n"}),
    ("instance_action_events", SERVERS, {"request_id": "'req-' || n", "instance_uuid": _id("living")}),
    (
        "allocations",
        SERVERS,
        {"consumer_uuid": _id("living"), "node_uuid": PLACE["node_uuid"], "resource_class": "'VCPU'", "used": "1"},
    ),
    (
        "topology_claims",
        SERVERS,
        {"consumer_uuid": _id("living"), "node_uuid": PLACE["node_uuid"], "assignment": "'{}'"},
    ),
    (
        "node_topologies",
        HOSTS,
        {"node_uuid": _id("node", "n"), "topology": "'{}'", "held": "'{}'", "changed_at": "n"},
    ),
    (
        "inventories",
        3 * HOSTS,
        {
            "node_uuid": _id("node", f"(n % {HOSTS})"),
            "resource_class": f"(ARRAY['VCPU', 'MEMORY_MB', 'DISK_GB'])[n / {HOSTS} + 1]",
            "capacity": "1000",
            "used": "10",
            "changed_at": "n",
        },
    ),
    (
        "volume_usages",
        SERVERS,
        {"volume_id": "'volume' || n", "instance_uuid": _id("living"), "refreshed_at": "n * 1000"},
    ),
    ("console_tokens", SERVERS, {"token_digest": _id("token"), "instance_uuid": _id("living"), "expires_at": "n"}),
    ("server_passwords", SERVERS, {"instance_uuid": _id("living")}),
    (
        "migrations",
        SERVERS,
        {
            "id": "n",
            "uuid": _id("migration"),
            "instance_uuid": _id("living"),
            "project_id": "'p' || n % 100",
            "user_id": "'u' || n % 400",
            "source_compute": f"'host' || n % {HOSTS}",
            "dest_compute": f"'host' || (n + 1) % {HOSTS}",
            "status": "CASE WHEN n % 1000 > 0 THEN 'confirmed' ELSE 'finished' END",
            "created_at": "n",
            "updated_at": "CASE WHEN n % 10 > 0 THEN n END",
        },
    ),
    (
        "migrations",
        MOVED,
        {
            "id": f"n + {SERVERS}",
            "uuid": _id("old"),
            "instance_uuid": _id("living"),
            "project_id": "'moved'",
            "status": "'confirmed'",
            "updated_at": "0",
        },
    ),
    # Hosts that were lost, whose servers were evacuated or deleted, have many until they are back.
    (
        "departures",
        SERVERS,
        {"host": f"'host' || n % {HOSTS}", "instance_uuid": _id("living"), "epoch": "1", "created_at": "n"},
    ),
    ("consumers", SERVERS, {"uuid": _id("consumer"), "project_id": "'p' || n % 100", "generation": "1"}),
    ("quota_usages", SERVERS, {"project_id": "'p' || n", "resource": "'instances'"}),
    (
        "services",
        HOSTS,
        {"uuid": _id("service"), "id": "n", "host": "'host' || n", "binary": f"'{COMPUTE}'", "last_seen_at": str(NOW)},
    ),
    (
        "compute_nodes",
        HOSTS,
        {
            "uuid": _id("node"),
            "id": "n",
            "host": "'host' || n",
            "hypervisor_hostname": "'host' || n",
            "changed_at": "n",
        },
    ),
    (
        "resource_providers",
        HOSTS,
        {"uuid": _id("node"), "name": "'host' || n", "root_uuid": _id("node"), "created_at": "n", "updated_at": "n"},
    ),
    (
        "resource_providers",
        2 * HOSTS,
        {
            "uuid": _id("device"),
            "name": "'device' || n",
            "parent_uuid": _id("node", f"(n % {HOSTS})"),
            "root_uuid": _id("node", f"(n % {HOSTS})"),
        },
    ),
    (
        "inventories",
        2 * HOSTS,
        {
            "node_uuid": _id("device"),
            "resource_class": "'VGPU'",
            "total": "4",
            "capacity": "4",
            "min_unit": "1",
            "max_unit": "4",
            "step_size": "1",
            "changed_at": "n",
        },
    ),
    ("provider_aggregates", HOSTS, {"provider_uuid": _id("node"), "aggregate_uuid": _id("rack", "(n / 20)")}),
    ("provider_traits", 10 * HOSTS, {"provider_uuid": _id("node", f"(n % {HOSTS})"), "trait": f"'T' || n / {HOSTS}"}),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("postgresql", request) as opened:
        await opened.write(fill, metadata, FILL)
        yield opened


LIVING = [_uuid("living", number) for number in range(20)]
OPERATIONS = [_uuid("operation", number) for number in range(20)]
NAMES = [f"host{number}" for number in range(500)]
MIDDLE = _uuid("living", SERVERS // 2)
NODE = NodeResources(
    node="host7",
    node_uuid=_uuid("node", 7),
    hypervisor_type="fake",
    hypervisor_version=1,
    vcpus=8,
    memory_mb=8192,
    local_gb=100,
)
RECENTLY = NOW - 1_000_000
"""Since then one of 20 servers was deleted."""


def _usage_of_a_long_span(conn: sa.Connection, project: str | None) -> None:
    """Read servers as if so many were deleted in the span that sorting them for each page took too long."""
    with mock.patch.object(usages, "MOST_SORTED", 100):
        usages.used(conn, 0, NOW, project_id=project, after=(1_000_000, MIDDLE), limit=50)


def _claim_with_groups(conn: sa.Connection) -> None:
    """Claim a device each on five nodes."""
    request = ResourceRequest(groups=(RequestGroup(resources={"VGPU": 1}, with_root=True),))
    claims = [
        Claim(
            consumer_uuid=LIVING[number],
            node_uuid=_uuid("node", number),
            host=f"host{number}",
            resources={"VCPU": 1},
            resource_request=request,
            epoch=0,
        )
        for number in range(2, 7)
    ]
    assert claim_rows.claim(conn, claims, now=NOW).claimed


def _measured(conn: sa.Connection, first: int, servers: int) -> dict[str, list[VolumeStatistics]]:
    """Give servers of one host a volume each; return what the host says of these volumes."""
    found = {}
    for number in range(first, first + servers):
        id, volume = _uuid("living", number), f"volume{number}"
        device = BlockDevice(uuid=_uuid("device", number), volume_id=volume)
        instances.change_device(conn, device)
        conn.execute(table_of_instances.update().where(table_of_instances.c.uuid == id).values(host=f"host{first}"))
        found[id] = [VolumeStatistics(volume_id=volume, reads=1, read_bytes=2, writes=3, write_bytes=4)]
    return found


HOT: dict[str, Callable[[sa.Connection], Any]] = {
    "create: charge": lambda conn: quotas.charge(conn, "p5", {"instances": 1}, quotas.Limits({"instances": 10}), "u"),
    "create: claim": lambda conn: claim_rows.claim(
        conn,
        [
            Claim(consumer_uuid=id, node_uuid=_uuid("node", 7), host="host7", resources={"VCPU": 1}, epoch=1)
            for id in LIVING[:10]
        ],
        now=NOW,
    ),
    "create: claim with request groups": _claim_with_groups,
    "create: specs": lambda conn: instances.specs(conn, LIVING[:10]),
    "create: devices": lambda conn: instances.devices(conn, LIVING[:10]),
    "lease": lambda conn: operations.lease(conn, OPERATIONS, "conductor:a", NOW, NOW + 1, KNOWN),
    "renew": lambda conn: operations.renew(conn, OPERATIONS, "conductor:a", NOW),
    "sweep": lambda conn: operations.expired(conn, NOW // 100, 200, KNOWN, with_hosts=True),
    "sweep without hosts": lambda conn: operations.expired(conn, NOW // 100, 200, KNOWN, with_hosts=False),
    "show": lambda conn: instances.get(conn, MIDDLE),
    "show, own project": lambda conn: instances.get(conn, MIDDLE, "p0"),
    "show with the host's state": lambda conn: instances.get_with_service(conn, MIDDLE),
    "show deleted": lambda conn: instances.get_deleted(conn, _uuid("deleted", 7)),
    "list, first page": lambda conn: server_lists.list_(conn, Filters(project_id="p0", limit=50)),
    "list, next page": lambda conn: server_lists.list_(conn, Filters(project_id="p0", limit=50, marker=MIDDLE)),
    "list all, page in the middle": lambda conn: server_lists.list_(conn, Filters(limit=50, marker=MIDDLE)),
    "list by name, next page": lambda conn: server_lists.list_(
        conn, Filters(project_id="p0", limit=50, marker=MIDDLE, sort=[("display_name", False)])
    ),
    "list all with the hosts' states": lambda conn: server_lists.list_(
        conn, Filters(limit=1000, marker=MIDDLE), with_services=True
    ),
    "list deleted, first page": lambda conn: server_lists.list_(conn, Filters(limit=50, deleted=True)),
    "list deleted, next page": lambda conn: server_lists.list_(
        conn, Filters(limit=50, deleted=True, marker=_uuid("deleted", SERVERS // 2))
    ),
    "list changes": lambda conn: server_lists.list_(conn, Filters(limit=50, changes_since=NOW - 10_000)),
    "actions": lambda conn: instance_actions.list_for(conn, MIDDLE, limit=50),
    "events": lambda conn: instance_actions.events(conn, MIDDLE, "req-7"),
    "volumes: open operations of new servers": lambda conn: operations.open_of_many(
        conn, [_uuid("new", number) for number in range(1_000)]
    ),
    "delete: open operations": lambda conn: operations.open_of(conn, MIDDLE),
    "delete: cancel": lambda conn: operations.cancel_open(conn, MIDDLE, NOW),
    "delete: release": lambda conn: allocations.release(conn, MIDDLE, now=NOW),
    "delete: history": lambda conn: instances.move_to_deleted(conn, instances.get_many(conn, [MIDDLE])[MIDDLE], NOW),
    "heartbeat: services": lambda conn: services.heartbeat(conn, COMPUTE, NAMES, NOW),
    "heartbeat: numbers": lambda conn: services.compute_heartbeats(
        conn, dict.fromkeys(NAMES, NOW), dict.fromkeys(NAMES, NOW), NOW
    ),
    "heartbeat: newer": lambda conn: services.newer_heartbeats(conn, dict.fromkeys(NAMES, NOW)),
    "heartbeat: operations": lambda conn: operations.owned(conn, [f"host:{name}" for name in NAMES]),
    "heartbeat: renew": lambda conn: operations.renew_of_hosts(
        conn, OPERATIONS, [f"host:{name}" for name in NAMES], NOW, NOW + 1, undisturbed=0
    ),
    "heartbeat: departures": lambda conn: departures.of_hosts(conn, NAMES),
    "heartbeat: departures that are held back": lambda conn: departures.held_back(conn, NAMES),
    "heartbeat: departures that are done": lambda conn: departures.delete(conn, [(name, MIDDLE, 1) for name in NAMES]),
    "heartbeat: live migrations that were rolled back": lambda conn: departures.rolled_back(
        conn, [(f"host{number}", _uuid("living", number), 1) for number in range(500)]
    ),
    "moves: guests of a server elsewhere": lambda conn: departures.elsewhere(conn, MIDDLE, "host7"),
    "heartbeat: guests": lambda conn: instances.states_of(conn, LIVING),
    "heartbeat: power states": lambda conn: instances.update_many(conn, LIVING, NOW, {"power_state": 4}),
    "heartbeat: actions": lambda conn: instance_actions.record_finished(
        conn, dict.fromkeys(LIVING, "req-stop"), "stop", "compute_stop_instance", NOW, result="Success", details=""
    ),
    "heartbeat: nodes": lambda conn: node_reports.record(conn, {"host7": [NODE]}, NOW),
    "scheduler: changes": lambda conn: host_states.load_changes(conn, NOW, 500),
    "scheduler: changed nodes": lambda conn: host_states.load_changed_nodes(conn, (100, ""), 120, 500),
    "scheduler: changed amounts": lambda conn: host_states.load_changed_amounts(conn, (100, "", ""), 120, 500),
    "scheduler: some nodes": lambda conn: host_states.load_hosts(conn, [_uuid("node", n) for n in range(5)]),
    "hypervisor": lambda conn: nodes.get(conn, _uuid("node", 7)),
    "hypervisors, a page": lambda conn: nodes.list_(conn, limit=20),
    "usage, first page": lambda conn: usages.used(conn, RECENTLY, NOW, limit=50),
    "usage, a page": lambda conn: usages.used(conn, RECENTLY, NOW, after=(NOW - 100_000, MIDDLE), limit=50),
    "usage, a page of a project": lambda conn: usages.used(
        conn, RECENTLY, NOW, project_id="p7", after=(1_000, ""), limit=50
    ),
    "usage, a page of a long span": lambda conn: _usage_of_a_long_span(conn, None),
    "usage, a page of a project and a long span": lambda conn: _usage_of_a_long_span(conn, "p7"),
    "aggregates: hosts are read again": lambda conn: host_states.touch_hosts(conn, NAMES[:100], lambda: NOW),
    "services, a page": lambda conn: services.list_(conn, after=500, limit=100),
    "shelved for too long": lambda conn: instances.shelved_before(conn, NOW, 100, after=""),
    "rescued for too long": lambda conn: instances.rescued_before(conn, NOW, 100),
    "interfaces to read anew": lambda conn: instances.at_rest_after(conn, MIDDLE, 100),
    "guests of deleted servers": lambda conn: instances.deleted_before(
        conn, [_uuid("deleted", number) for number in range(1000)], NOW
    ),
    "reclaim": lambda conn: instances.soft_deleted_before(conn, NOW, 100),
    "moves: of a server": lambda conn: server_migrations.open_of(conn, MIDDLE),
    "moves: not confirmed": lambda conn: server_migrations.unconfirmed(conn, NOW, 1000),
    "moves: all that are open": lambda conn: server_migrations.list_open(conn),
    "moves: on a host": lambda conn: server_migrations.any_on_host(conn, "host7"),
    "moves: evacuations from hosts that are back": lambda conn: server_migrations.complete_evacuations(
        conn, [(name, MIDDLE) for name in NAMES], NOW
    ),
    "moves: a page": lambda conn: server_migrations.list_page(conn, {}, limit=50),
    "scheduler: changed topologies": lambda conn: host_states.load_changed_topologies(conn, (100, ""), 120, 500),
    "scheduler: trees of nodes": lambda conn: provider_trees.load_trees(conn, [_uuid("node", n) for n in range(50)]),
    "scheduler: sharing providers": provider_trees.load_sharing,
    "placement: a provider": lambda conn: providers.get(conn, _uuid("device", 7)),
    "placement: providers by name": lambda conn: provider_trees.search(
        conn, name="device7", uuid=None, group=RequestGroup()
    ),
    "placement: providers of a tree": lambda conn: provider_trees.search(
        conn, name=None, uuid=None, group=RequestGroup(in_tree=_uuid("device", 7))
    ),
    "placement: providers of an aggregate": lambda conn: provider_trees.search(
        conn, name=None, uuid=None, group=RequestGroup(member_of=(frozenset({_uuid("rack", 7)}),))
    ),
    "placement: allocations of a server": lambda conn: provider_allocations.consumers_of(
        conn, provider_allocations.allocations_of_consumers(conn, [MIDDLE])
    ),
    "placement: allocations of a provider": lambda conn: provider_allocations.allocations_of_provider(
        conn, _uuid("node", 7)
    ),
    "placement: write allocations": lambda conn: provider_allocations.replace(
        conn,
        [
            AllocationRequest(
                consumer=_uuid("consumer", number),
                allocations={_uuid("device", 7): {"VGPU": 1}},
                checks_generation=False,
            )
            for number in range(3)
        ],
        NOW,
    ),
    "placement: what a project of many old moves uses": lambda conn: provider_allocations.usages(conn, "moved", None),
    "audit: whether an image may be deleted": lambda conn: (
        images.needless_images(conn, OPERATIONS[7]),
        images.failed_images(conn, OPERATIONS[7]),
    ),
    "key rotation: secrets of operations": lambda conn: reseal.of_operations(conn, SecretBox(bytes(32)), ""),
    "purge: operations": lambda conn: retention.purge_operations(conn, 20_000),
    "purge: volume usage": lambda conn: volume_usages.purge(conn, NOW),
    "volume usage: servers of 100 hosts": lambda conn: volume_usages.servers_with_volumes(
        conn, [f"host{number}" for number in range(100)]
    ),
    "volume usage: a host": lambda conn: volume_usages.record(conn, "host7", _measured(conn, 7, 1), NOW),
    "purge: servers": lambda conn: retention.purge_servers(conn, 20_000),
}


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    assert await rolled_back(database, sequential_scans, HOT[name], SMALL) == []


@pytest.mark.parametrize("name", HOT)
async def test_few_rows_are_read(database: Database, name: str) -> None:
    """A walk through a whole index, whose rows a filter drops, is no sequential scan."""
    read = await rolled_back(database, rows_read, HOT[name])
    assert too_many(read, MORE_READ.get(name, MOST_READ), SMALL) == {}


IN_PARTS: dict[str, Callable[[sa.Connection], Any]] = {
    "claims of cells and devices": lambda conn: list(topologies.all_claims(conn)),
    "ports that servers do not have": lambda conn: list(port_claims.strays(conn)),
}


@pytest.mark.parametrize("name", IN_PARTS)
async def test_what_is_read_in_parts_is_read_once(database: Database, name: str) -> None:
    """And its ids once before: no part looks for its beginning."""
    read = await rolled_back(database, rows_read, IN_PARTS[name])
    assert too_many(read, 2 * SERVERS) == {}


SHORT_LISTS: dict[str, Callable[[sa.Connection], Any]] = {
    "specs": lambda conn: instances.specs(conn, LIVING[:1]),
    "instances": lambda conn: instances.get_many(conn, LIVING[:1]),
    "operations": lambda conn: operations.get_many(conn, OPERATIONS[:1]),
    "owned": lambda conn: operations.owned(conn, ["host:host7"]),
    "departures": lambda conn: departures.of_hosts(conn, ["host7"]),
    "departures that are held back": lambda conn: departures.held_back(conn, ["host7"]),
    "services": lambda conn: services.on_hosts(conn, COMPUTE, ["host7"]),
    "nodes": lambda conn: nodes.hosts_with_nodes(conn, ["host7"]),
}


@pytest.mark.parametrize("name", SHORT_LISTS)
async def test_a_statement_with_a_list_is_planned_once(database: Database, name: str) -> None:
    """PostgreSQL keeps a plan if one for these very values promises nothing better; it tries five times."""
    planned: list[int] = []

    def run(conn: sa.Connection) -> None:
        with recorded(conn) as statements:
            for _ in range(12):
                SHORT_LISTS[name](conn)
        [statement] = {statement for statement, _ in statements}
        counted = "SELECT custom_plans FROM pg_prepared_statements WHERE statement = $1"
        planned.append(conn.exec_driver_sql(counted, (statement,)).scalar_one())

    await database.read(run)
    assert planned[0] <= 5


async def test_a_page_in_the_middle_does_not_walk_the_rows_before_it(database: Database) -> None:
    """PostgreSQL begins at the marker: it reads as many rows as the page has, and the marker."""
    read = await rolled_back(
        database, rows_read, lambda conn: server_lists.list_(conn, Filters(limit=50, marker=MIDDLE))
    )
    assert read["instances"] == 51


PAGES = {
    "all of the project": Filters(project_id="p0", limit=50),
    "by name": Filters(project_id="p0", limit=50, name="^server-"),
    "next page by name": Filters(project_id="p0", limit=50, name="server", marker=MIDDLE),
}


@pytest.mark.parametrize("name", PAGES)
async def test_a_plan_that_is_kept_reads_no_more_than_a_page(database: Database, name: str) -> None:
    """PostgreSQL read and sorted all servers of a project, and the services of all their hosts, for each page."""

    def run(conn: sa.Connection) -> None:
        conn.exec_driver_sql("SET LOCAL plan_cache_mode = force_generic_plan")
        server_lists.list_(conn, PAGES[name], with_services=True)

    read = await rolled_back(database, rows_read, run)
    assert read["instances"] <= 2 * 51
    assert read["services"] <= 60


async def test_a_list_reads_only_the_columns_that_it_is_asked_for(database: Database) -> None:
    """User data may be 64 KiB per server."""
    read: list[str] = []

    def run(conn: sa.Connection) -> None:
        for filters in (Filters(limit=2, marker=MIDDLE), Filters(limit=2, marker=MIDDLE, changes_since=0)):
            with recorded(conn) as statements:
                [row, _] = server_lists.list_(conn, filters, ("uuid", "display_name"))
            assert set(row) >= {"uuid", "display_name"}
            read.extend(statement.partition("FROM")[0] for statement, _ in statements)

    await database.read(run)
    columns = {name.strip() for each in read for name in each.removeprefix("SELECT ").split(",")}
    assert {name.partition(".")[2] for name in columns} == {"uuid", "display_name", "created_at"}


async def test_the_first_page_of_usage_reads_only_what_was_deleted_in_the_span(database: Database) -> None:
    """PostgreSQL walked through all servers that were deleted before, in the order of their creation."""
    read = await rolled_back(database, rows_read, lambda conn: usages.used(conn, RECENTLY, NOW, limit=50))
    # Once to count those of the span, once to sort them, and those of the page.
    assert read["deleted_instances"] <= 2 * 1_000 + 50


async def test_the_use_of_volumes_is_recorded_together(database: Database) -> None:
    """Not with a statement for each: a region has hundreds of thousands of volumes, which are measured regularly."""

    def run(conn: sa.Connection, servers: int) -> int:
        measured = _measured(conn, 7, servers)
        with recorded(conn) as statements:
            assert len(volume_usages.record(conn, "host7", measured, NOW)) == servers
        return len(statements)

    assert await rolled_back(database, run, 50) == await rolled_back(database, run, 2)


MIGRATIONS: dict[str, tuple[Callable[[sa.Connection], Any], int]] = {
    # Those that are open, which are looked at twice.
    "repair_counters": (allocation_audit.audit, 2 * SERVERS // 1000),
    "a page of a project without any": (
        lambda conn: server_migrations.list_page(conn, {"project_id": "none"}, limit=50),
        0,
    ),
    "a page of a project": (lambda conn: server_migrations.list_page(conn, {"project_id": "p7"}, limit=50), 51),
    "a page of a host": (lambda conn: server_migrations.list_page(conn, {}, host="host7", limit=50), 10),
    "a page of a source": (
        lambda conn: server_migrations.list_page(conn, {"source_compute": "host7"}, limit=50),
        10,
    ),
    "a page of a user": (lambda conn: server_migrations.list_page(conn, {"user_id": "u7"}, limit=50), 60),
    "what has changed": (
        lambda conn: server_migrations.list_page(conn, {}, changes_since=SERVERS - 100, limit=50),
        400,
    ),
    "what has changed since long ago": (
        lambda conn: server_migrations.list_page(conn, {}, changes_since=1, limit=50),
        1_000,  # a tenth was never updated
    ),
    "the drift of a project's quotas": (lambda conn: quotas.drift(conn, "p7"), 2 * SERVERS // 100),
}


@pytest.mark.parametrize("name", MIGRATIONS)
async def test_old_migrations_are_not_walked_through(database: Database, name: str) -> None:
    """They are kept for as long as the records of their servers."""
    work, most = MIGRATIONS[name]
    read = await rolled_back(database, rows_read, work)
    assert read.get("migrations", 0) <= most

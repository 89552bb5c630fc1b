"""Requests that concern all hosts or all servers of a span read few rows at a time, or let the database count."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.db.tables import deleted_instances, instances, migrations
from tests.functional.cloud import Caller, Cloud, CloudOptions, one_process

HOSTS = 1_201
SERVERS = 2_400  # of two projects; half of them deleted
MOST = 1_000  # rows of one read
HOUR = 3600 * 1_000_000
SETTINGS = {
    "default": {"report_interval": 300.0, "service_down_time": 3600.0},
    "conductor": {"lease": 600.0, "sweep_interval": 300.0},
}


class Reads:
    """The largest read of a database, in rows."""

    def __init__(self, database: Database) -> None:
        self.largest = 0
        read = database.read

        async def counted(fn: Any, *args: Any, **kwargs: Any) -> Any:
            found = await read(fn, *args, **kwargs)
            self.largest = max(self.largest, _rows(found))
            return found

        database.read = counted  # type: ignore[method-assign]


def _rows(found: Any) -> int:
    if isinstance(found, tuple) and not hasattr(found, "_fields"):
        return sum(_rows(each) for each in found)
    return len(found) if isinstance(found, list | dict) else 0


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    async with one_process(tmp_path, CloudOptions(hosts=HOSTS, settings=SETTINGS)) as made:
        yield made


async def test_zones_hosts_and_services(cloud: Cloud) -> None:
    database, admin = cloud.process.database, cloud.caller().admin.at(42)
    assert database is not None
    names = [row["host_name"] for row in (await admin.get("/os-hosts"))["hosts"] if row["service"] == "compute"]
    assert len(names) == HOSTS
    asked = {"aggregate": {"name": "a", "availability_zone": "red"}}
    made = (await admin.post("/os-aggregates", asked, 200))["aggregate"]
    await admin.post(f"/os-aggregates/{made['id']}/action", {"add_host": {"host": names[0]}}, 200)
    reads = Reads(database)

    async def zones() -> dict[str, bool]:
        shown = (await admin.get("/os-availability-zone"))["availabilityZoneInfo"]
        return {each["zoneName"]: each["zoneState"]["available"] for each in shown}

    assert await zones() == {"nova": True, "red": True}
    await admin.put("/os-services/disable", {"host": names[0], "binary": "nova-compute"})
    assert await zones() == {"nova": True, "red": False}
    assert reads.largest < 20, "the zones are counted by the database"

    shown = {z["zoneName"]: z for z in (await admin.get("/os-availability-zone/detail"))["availabilityZoneInfo"]}
    assert len(shown["nova"]["hosts"]) == HOSTS - 1 and shown["red"]["hosts"] is None
    listed = (await admin.get("/os-hosts"))["hosts"]
    assert len([each for each in listed if each["zone"] == "nova"]) == HOSTS - 1
    assert len((await admin.get("/os-services?binary=nova-compute"))["services"]) == HOSTS
    assert reads.largest <= MOST


async def test_hypervisors(cloud: Cloud) -> None:
    database, user = cloud.process.database, cloud.caller()
    assert database is not None
    server = await user.boot()
    host = await user.host_of(server["id"])
    reads, admin = Reads(database), user.admin.at(32)
    nodes = (await admin.get("/os-hypervisors/detail"))["hypervisors"]
    assert len(nodes) == len({each["id"] for each in nodes}) == HOSTS
    statistics = (await admin.get("/os-hypervisors/statistics"))["hypervisor_statistics"]
    assert statistics == {"count": HOSTS} | {
        name: sum(each[name] or 0 for each in nodes) for name in statistics if name != "count"
    }
    assert statistics["running_vms"] == 1 and len(statistics) == 12
    found = (await admin.get("/os-hypervisors/fake-/search"))["hypervisors"]
    assert [each["id"] for each in found] == [each["id"] for each in nodes]
    with_servers = (await admin.get("/os-hypervisors/fake-/servers"))["hypervisors"]
    assert [each["hypervisor_hostname"] for each in with_servers if "servers" in each] == [host]
    assert len((await admin.at(53).get("/os-hypervisors?hypervisor_hostname_pattern=fake-"))["hypervisors"]) == HOSTS
    assert reads.largest <= MOST

    await admin.put("/os-services/disable", {"host": host, "binary": "nova-compute"})
    fewer = (await admin.get("/os-hypervisors/statistics"))["hypervisor_statistics"]
    assert (fewer["count"], fewer["running_vms"]) == (HOSTS - 1, 0)
    assert fewer["vcpus"] < statistics["vcpus"]


def _add_servers(conn: sa.Connection, server: str) -> None:
    columns = [column for column in instances.c if column.name in deleted_instances.c]
    template = conn.execute(sa.select(*columns).where(instances.c.uuid == server)).mappings().one()
    begin = template["created_at"] - 10 * HOUR
    rows = [
        {
            **template,
            "uuid": f"00000000-0000-0000-0000-{number:012}",
            "project_id": f"usage{number % 2}",
            "created_at": begin + number // 7,
            "launched_at": begin + number * 1000,
        }
        for number in range(SERVERS)
    ]
    conn.execute(instances.insert(), rows[: SERVERS // 2])
    gone = [{**row, "deleted_at": row["launched_at"] + 2 * HOUR} for row in rows[SERVERS // 2 :]]
    conn.execute(deleted_instances.insert(), gone)


async def test_usage(cloud: Cloud) -> None:
    database, user = cloud.process.database, cloud.caller().at(39)
    assert database is not None
    server = await user.boot()
    await database.write(_add_servers, server["id"])
    reads = Reads(database)

    async def usage(caller: Caller, query: str = "") -> dict[str, dict[str, Any]]:
        found = (
            await caller.get(f"/os-simple-tenant-usage?start=2020-01-01T00:00:00&end=2100-01-01T00:00:00&{query}")
        )["tenant_usages"]
        return {each["tenant_id"]: each for each in found}

    counted = await usage(user.admin)
    assert reads.largest < 20, "the database adds up what projects used"
    detailed = await usage(user.admin, "detailed=1")
    assert reads.largest <= MOST
    assert set(counted) == set(detailed) == {user.project, "usage0", "usage1"}
    for project in ("usage0", "usage1"):
        servers = detailed[project].pop("server_usages")
        assert len(servers) == SERVERS / 2
        assert sorted({each["state"] for each in servers}) == ["active", "terminated"]
        for name, amount in (("memory_mb", "memory_mb"), ("vcpus", "vcpus"), ("local_gb", "local_gb")):
            expected = sum(each["hours"] * each[amount] for each in servers)
            assert counted[project][f"total_{name}_usage"] == pytest.approx(expected, rel=1e-3)
        assert counted[project]["total_hours"] == pytest.approx(detailed[project]["total_hours"], rel=1e-3)
        assert counted[project].keys() == detailed[project].keys()
    one = (await user.admin.get("/os-simple-tenant-usage/usage1?start=2020-01-01T00:00:00&end=2100-01-01T00:00:00"))[
        "tenant_usage"
    ]
    assert len(one["server_usages"]) == SERVERS / 2
    assert reads.largest <= MOST


async def test_migrations(cloud: Cloud) -> None:
    database, user = cloud.process.database, cloud.caller()
    assert database is not None
    server = (await user.boot(flavorRef="1"))["id"]
    await user.act(server, "resize", {"flavorRef": "2"})
    await user.wait_for(server, "VERIFY_RESIZE")

    def add(conn: sa.Connection) -> list[int]:
        """Copy the migration; many have the same time of creation."""
        row = conn.execute(sa.select(migrations).where(migrations.c.instance_uuid == server)).mappings().one()
        copies = [
            {
                **row,
                "id": row["id"] + number,
                "uuid": f"00000000-0000-0000-0001-{number:012}",
                "created_at": row["created_at"] + number // 700,
                "status": "confirmed",
                "source_compute": row["source_compute"] if number % 2 else "another",
            }
            for number in range(1, SERVERS + 1)
        ]
        conn.execute(migrations.insert(), copies)
        return [row["id"], *(each["id"] for each in copies)]

    expected = sorted(await database.write(add), reverse=True)
    reads, admin = Reads(database), user.admin.at(58)

    async def listed(query: str) -> list[int]:
        return [each["id"] for each in (await admin.get(f"/os-migrations?{query}"))["migrations"]]

    assert await listed("") == expected
    host = await user.host_of(server)
    assert set(await listed(f"host={host}")) <= set(expected)
    assert await listed("source_compute=another") == [id for id in expected if (id - expected[-1]) % 2 == 0][:-1]
    assert await listed(f"instance_uuid={server}&status=finished") == [expected[-1]]
    assert await listed("status=error") == []
    assert 0 < reads.largest <= MOST + 1

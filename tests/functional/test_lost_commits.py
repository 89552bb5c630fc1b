"""Every request that writes, on PostgreSQL, while the answer to each COMMIT of all services is lost.

The same requests are sent to two clouds. In the second one a proxy passes every COMMIT on, and cuts the connection
instead of passing its answer back. Clients must get the same answers, and the databases must have the same number of
rows: nothing is done twice, and nothing is refused because it has been done already.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.http.service import Route, Service
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud
from tests.functional.good_requests import C, N
from tests.services.lossy_proxy import Loss, LossyProxy
from tests.services.postgres import Postgres

# How many rows these have depends on the time that passes.
TIMED = {
    "operations", "departures", "console_tokens", "instance_action_events", "agents", "alembic_version", "host_changes",
    "periodic_jobs",
}  # fmt: skip


@contextlib.asynccontextmanager
async def _cloud(directory: Path, url: str, loss: Loss) -> AsyncIterator[tuple[FullCloud, LossyProxy]]:
    async with LossyProxy(url) as proxy:
        cloud = FullCloud(directory, database={"connection": proxy.url})
        await cloud.start()
        try:
            proxy.loss = loss
            yield cloud, proxy
            proxy.loss = Loss.NOTHING
            await cloud.assert_clean()
        finally:
            await cloud.stop()


def _writes(cloud: FullCloud) -> list[tuple[Service, Route]]:
    """Return the routes that write, those that delete last."""
    routes = [(service, route) for service, route in cloud.routes() if route.method not in ("GET", "HEAD")]
    return sorted(routes, key=lambda each: each[1].method == "DELETE")


async def _statuses(cloud: FullCloud) -> dict[str, int]:
    """Make one of everything, call every route that writes, and return the statuses."""
    owner = await cloud.person("member")
    things = await good.make_things(cloud, owner)
    await cloud.settled()
    found = {}
    for service, route in _writes(cloud):
        path, headers = good.path(service, route, things), good.headers(route, things)
        answer = await cloud.admin.request(route.method, path, good.body(route, things), headers, good.newest(route))
        found[f"{service.name} {route.label}"] = answer.status
        await cloud.settled(120)  # a volume of 1 GiB is uploaded
    return found


async def _live(cloud: FullCloud) -> None:
    """Create servers, act on one of them and delete it; every request must succeed."""
    owner = await cloud.person("member")
    network = await owner.make(f"{N}/networks", "network", name="lost")
    await owner.make(f"{N}/subnets", "subnet", network_id=network["id"], cidr="10.9.0.0/24", ip_version=4)
    image = await owner.make_image("lost", "raw", b"x" * 512)
    flavor = (await owner.do("GET", f"{C}/flavors"))["flavors"][0]["id"]
    server = {"name": "lost", "imageRef": image, "flavorRef": flavor, "networks": [{"uuid": network["id"]}]}
    made = await owner.do("POST", f"{C}/servers", {"server": {**server, "min_count": 2, "max_count": 2}})
    await cloud.settled()
    path = f"{C}/servers/{made['server']['id']}"
    for action in ("os-stop", "os-start", "pause", "unpause"):
        await owner.do("POST", f"{path}/action", {action: None})
        await cloud.settled()
    await owner.do("POST", f"{path}/action", {"reboot": {"type": "HARD"}})
    await cloud.settled()
    attached = await owner.make(f"{path}/os-interface", "interfaceAttachment", net_id=network["id"])
    await owner.do("DELETE", f"{path}/os-interface/{attached['port_id']}")
    await cloud.settled()
    shown = (await owner.do("GET", path))["server"]
    assert shown["status"] == "ACTIVE"
    listed = (await owner.do("GET", f"{C}/servers"))["servers"]
    assert len(listed) == 2
    limits = (await owner.do("GET", f"{C}/limits"))["limits"]["absolute"]
    assert limits["totalInstancesUsed"] == 2
    ports = (await owner.do("GET", f"{N}/ports?device_owner=compute:nova"))["ports"]
    assert sorted(port["device_id"] for port in ports) == sorted(each["id"] for each in listed)
    await owner.do("DELETE", path)
    await cloud.settled()
    assert [each["id"] for each in (await owner.do("GET", f"{C}/servers"))["servers"]] != [made["server"]["id"]]


def _count(conn: sa.Connection) -> dict[str, int]:
    tables = [name for name in sa.inspect(conn).get_table_names() if name not in TIMED]
    return {name: conn.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar_one() for name in tables}


async def _rows(cloud: FullCloud) -> dict[str, dict[str, int]]:
    databases: dict[str, Database] = cloud.process._databases
    return {name: await database.read(_count) for name, database in databases.items()}


async def _usage(cloud: FullCloud) -> Counter[str]:
    assert cloud.process.database is not None
    query = sa.text("SELECT resource, in_use FROM quota_usages")
    rows = await cloud.process.database.read(lambda conn: conn.execute(query).all())
    return Counter({row.resource: row.in_use for row in rows})


@pytest.mark.timeout(600)  # every route that writes is called twice
async def test_every_write_happens_once_though_each_answer_to_commit_is_lost(
    postgres: Postgres, tmp_path: Path
) -> None:
    outcomes = []
    for loss in (Loss.NOTHING, Loss.ANSWER):
        name = f"lost_{loss.name.lower()}_{tmp_path.parent.name}".replace("-", "_")
        url = postgres.create_database(name)
        try:
            async with _cloud(tmp_path / loss.name, url, loss) as (cloud, proxy):
                await _live(cloud)
                statuses = await _statuses(cloud)
                rows, usage = await _rows(cloud), await _usage(cloud)
                outcomes.append((statuses, rows, usage))
                lost = proxy.lost
        finally:
            postgres.drop_database(name)
    assert lost > 300
    expected, got = outcomes
    assert got[0] == expected[0]
    assert got[1] == expected[1]
    assert got[2] == expected[2]
    done = [label for label, status in expected[0].items() if 200 <= status < 300]
    assert len(done) > 100, "most of the requests are good ones"

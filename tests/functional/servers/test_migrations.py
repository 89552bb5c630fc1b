"""GET /os-migrations and /servers/{id}/migrations at all microversions: fields, filters, paging, who may see what."""

import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from micronova.db.tables import migrations
from tests.functional.cloud import Caller, Cloud, CloudOptions
from tests.schemas.tempest import check, versions_of

CLOUD = CloudOptions(hosts=3, settings={"default": {"allow_resize_to_same_host": False}})
BASE = {
    "created_at", "dest_compute", "dest_host", "dest_node", "id", "instance_uuid", "new_instance_type_id",
    "old_instance_type_id", "source_compute", "source_node", "status", "updated_at",
}  # fmt: skip


async def _moved(user: Caller, flavor: str = "3") -> str:
    id = (await user.boot(flavorRef="2"))["id"]
    await user.act(id, "resize", {"flavorRef": flavor})
    await user.wait_for(id, "VERIFY_RESIZE")
    return str(id)


async def _listed(user: Caller, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await user.admin.get(f"/os-migrations{query}"))["migrations"]
    return found


async def test_the_fields_of_each_version(cloud: Cloud, user: Caller) -> None:
    id = await _moved(user)
    fields = {1: BASE, 22: BASE, 23: BASE | {"migration_type"}, 58: BASE | {"migration_type"}}
    fields |= {minor: BASE | {"migration_type", "uuid"} for minor in (59, 79)}
    fields |= {minor: fields[59] | {"user_id", "project_id"} for minor in (80, 104)}
    for minor, expected in fields.items():
        [shown] = await _listed(user.at(minor), f"?instance_uuid={id}")
        assert set(shown) == expected, minor
    assert shown["dest_host"] == "127.0.0.1"
    assert isinstance(shown["id"], int) and isinstance(shown["old_instance_type_id"], int)
    assert shown["old_instance_type_id"] != shown["new_instance_type_id"]
    assert (shown["user_id"], shown["project_id"]) == (user.user, user.project)
    assert shown["updated_at"] is not None


@pytest.mark.parametrize("minor", versions_of("migrations", 59, 66, 80))
async def test_what_tempest_accepts(cloud: Cloud, user: Caller, minor: int) -> None:
    await _moved(user)
    answer = await user.admin.at(minor).request("GET", "/os-migrations")
    check("migrations", "list_migrations", minor, answer.status, answer.json())


async def test_filters(cloud: Cloud, user: Caller) -> None:
    one, two = await _moved(user), await _moved(user)
    await user.act(two, "confirmResize", status=204)
    await user.wait_for(two, "ACTIVE")
    mine = f"?project_id={user.project}"
    assert {each["instance_uuid"] for each in await _listed(user, mine)} == {one, two}
    assert [each["instance_uuid"] for each in await _listed(user, f"{mine}&status=confirmed")] == [two]
    assert await _listed(user, f"{mine}&migration_type=migration") == []
    [shown] = await _listed(user, f"?instance_uuid={one}")
    for name in ("source_compute", "dest_compute"):
        found = await _listed(user, f"{mine}&host={shown[name]}")
        assert one in {each["instance_uuid"] for each in found}
    found = await _listed(user, f"{mine}&source_compute={shown['source_compute']}")
    assert one in {each["instance_uuid"] for each in found}
    assert await _listed(user, f"{mine}&host=nowhere") == []
    assert await _listed(user, f"{mine}&user_id=nobody") == []
    assert len(await _listed(user, f"{mine}&user_id={user.user}&hidden=0")) == 2
    assert await _listed(user, f"{mine}&hidden=true") == [], "none is hidden"
    assert "hidden" in await user.admin.refused(400, "GET", f"/os-migrations{mine}&hidden=maybe")


async def test_filters_until_2_58(cloud: Cloud, user: Caller) -> None:
    """Nova applies them though the API's reference has them for later versions, or not at all."""
    id = await _moved(user)
    [shown] = await _listed(user, f"?instance_uuid={id}")
    old, mine = user.at(58), f"?project_id={user.project}"
    assert [each["id"] for each in await _listed(old, mine)] == [shown["id"]]
    assert [each["id"] for each in await _listed(old, f"{mine}&limit=0")] == [shown["id"]], "no parameter of them"
    for name, right in (("user_id", user.user), ("node", shown["dest_node"]), ("node", shown["source_node"])):
        assert [each["id"] for each in await _listed(old, f"{mine}&{name}={right}")] == [shown["id"]]
        assert await _listed(old, f"{mine}&{name}=other") == []
    assert [each["id"] for each in await _listed(old, f"?uuid={shown['uuid']}")] == [shown["id"]]
    assert await _listed(old, "?project_id=other") == []
    for name in ("project_id", "user_id", "node", "uuid"):
        await user.admin.at(59).refused(400, "GET", f"/os-migrations?{name}=x")


async def test_pages(cloud: Cloud, user: Caller) -> None:
    ids = [await _moved(user) for _ in range(3)]
    mine = f"?project_id={user.project}"
    first = await user.admin.get(f"/os-migrations{mine}&limit=2")
    assert [each["instance_uuid"] for each in first["migrations"]] == [ids[2], ids[1]], "the newest first"
    [link] = first["migrations_links"]
    assert link["rel"] == "next" and f"marker={first['migrations'][-1]['uuid']}" in link["href"]
    last = await user.admin.get(f"/os-migrations{mine}&limit=2&marker={first['migrations'][-1]['uuid']}")
    assert [each["instance_uuid"] for each in last["migrations"]] == [ids[0]]
    assert "migrations_links" not in last
    await user.admin.refused(400, "GET", f"/os-migrations{mine}&marker={uuid4()}")
    for wrong in ("limit=-1", "limit=x", "nonsense=1", "changes-since=x", "limit=1&limit=2"):
        await user.admin.refused(400, "GET", f"/os-migrations{mine}&{wrong}")
    assert len((await user.admin.at(58).get(f"/os-migrations?limit=1&instance_uuid={ids[0]}&x=y"))["migrations"]) == 1


async def test_changes_since_and_before(cloud: Cloud, user: Caller) -> None:
    id = await _moved(user)
    [row] = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id))
    at = datetime.datetime.fromtimestamp(row.updated_at / 1e6, datetime.UTC)

    def text(seconds: int) -> str:
        return (at + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    mine = f"?instance_uuid={id}"
    assert len(await _listed(user, f"{mine}&changes-since={text(-10)}&changes-before={text(10)}")) == 1
    assert len(await _listed(user, f"{mine}&changes-before={text(0)}")) == 1  # times are shown without fractions
    assert await _listed(user, f"{mine}&changes-since={text(10)}") == []
    assert await _listed(user, f"{mine}&changes-before={text(-10)}") == []
    await user.admin.refused(400, "GET", f"/os-migrations?changes-since={text(10)}&changes-before={text(-10)}")
    await user.admin.at(65).refused(400, "GET", f"/os-migrations?changes-before={text(0)}")
    await user.admin.at(59).refused(400, "GET", "/os-migrations?limit=1&limit=1")
    await user.admin.at(59).get("/os-migrations?host=x&host=y")  # as in Nova, filters may be given twice


async def test_who_may_list(cloud: Cloud, user: Caller) -> None:
    id = await _moved(user)
    await user.refused(403, "GET", "/os-migrations")
    await user.refused(403, "GET", f"/servers/{id}/migrations")


async def test_only_live_migrations_belong_to_a_server(cloud: Cloud, user: Caller) -> None:
    id = await _moved(user)
    [moved] = await _listed(user, f"?instance_uuid={id}")
    path = f"/servers/{id}/migrations"
    assert (await user.admin.get(path))["migrations"] == []
    assert "not live-migration" in await user.admin.refused(404, "GET", f"{path}/{moved['id']}")
    for unknown in ("999999", "x"):
        assert "not found" in await user.admin.refused(404, "GET", f"{path}/{unknown}")
    await user.admin.at(22).refused(404, "GET", path)
    await user.admin.refused(404, "GET", f"/servers/{uuid4()}/migrations")
    await user.admin.refused(400, "GET", f"{path}?x=y")
    assert (await user.admin.at(101).get(f"{path}?x=y"))["migrations"] == []


async def test_deleted_servers_keep_their_migrations(cloud: Cloud, user: Caller) -> None:
    id = await _moved(user)
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    [shown] = await _listed(user, f"?instance_uuid={id}")
    assert shown["status"] == "confirmed"

"""Flavors, their extra specs and access, at every microversion at which they change."""

import urllib.parse
from typing import Any

import pytest

from tests.functional.api.resources import Caller, Cloud, cloud  # noqa: F401
from tests.schemas.tempest import check, versions_of

MINE = (7, 55, 61, 75, 86, 102)


def _flavor(name: str, **more: object) -> dict[str, object]:
    return {"flavor": {"name": name, "ram": 512, "vcpus": 1, "disk": 1, **more}}


async def _made(admin: Caller, name: str, minor: int = 1, **more: Any) -> dict[str, Any]:
    answer = await admin.post("/flavors", _flavor(name, **more), minor)
    assert answer.status == 200, answer.body
    flavor: dict[str, Any] = answer.json()["flavor"]
    return flavor


@pytest.mark.parametrize("minor", versions_of("flavors", *MINE))
async def test_every_answer_is_what_tempest_accepts(cloud: Cloud, minor: int) -> None:
    admin = cloud.admin
    answer = await admin.post("/flavors", _flavor("small", swap=64), minor)
    check("flavors", "create_update_get_flavor_details", minor, answer.status, answer.json())
    flavor = answer.json()["flavor"]
    assert ("description" in flavor) == (minor >= 55)
    assert ("extra_specs" in flavor) == (minor >= 61)
    assert ("rxtx_factor" in flavor) == ("OS-FLV-DISABLED:disabled" in flavor) == (minor < 102)
    path = f"/flavors/{flavor['id']}"
    answer = await admin.get(path, minor)
    check("flavors", "create_update_get_flavor_details", minor, answer.status, answer.json())
    assert answer.json()["flavor"] == flavor
    answer = await admin.get("/flavors", minor)
    check("flavors", "list_flavors", minor, answer.status, answer.json())
    answer = await admin.get("/flavors/detail?limit=1", minor)
    check("flavors", "list_flavors_details", minor, answer.status, answer.json())
    assert answer.json()["flavors_links"][0]["rel"] == "next"
    answer = await admin.put(path, {"flavor": {"description": "tiny"}}, minor)
    if minor >= 55:
        check("flavors", "create_update_get_flavor_details", minor, answer.status, answer.json())
        assert answer.json()["flavor"]["description"] == "tiny"
    else:
        assert answer.status == 404
    answer = await admin.delete(path, minor)
    check("flavors", "delete_flavor", minor, answer.status, answer.json())
    assert (await admin.get(path, minor)).status == 404


async def test_swap_of_nothing_is_empty_text_and_later_zero(cloud: Cloud) -> None:
    flavor = await _made(cloud.admin, "f")
    assert flavor["swap"] == ""
    assert (await cloud.admin.get(f"/flavors/{flavor['id']}", 75)).json()["flavor"]["swap"] == 0


async def test_numbers_and_flags_may_be_written_as_text(cloud: Cloud) -> None:
    flags: dict[str, Any] = {"os-flavor-access:is_public": "no", "OS-FLV-EXT-DATA:ephemeral": "3"}
    flavor = await _made(
        cloud.admin, "f", id=7, ram="64", vcpus="2", disk="0", rxtx_factor="2.5", **flags
    )  # fmt: skip
    assert flavor["id"] == "7" and flavor["ram"] == 64 and flavor["vcpus"] == 2 and flavor["rxtx_factor"] == 2.5
    assert flavor["os-flavor-access:is_public"] is False and flavor["OS-FLV-EXT-DATA:ephemeral"] == 3


async def test_links_name_the_project_when_the_caller_does(cloud: Cloud) -> None:
    flavor = await _made(cloud.admin, "f", id="f1")
    assert [link["href"] for link in flavor["links"]] == [
        "http://cloud:8774/v2.1/flavors/f1",
        "http://cloud:8774/flavors/f1",
    ]
    named = (await cloud.admin("GET", "/flavors/f1", prefix="/v2.1/red")).json()["flavor"]
    assert [link["href"] for link in named["links"]] == [
        "http://cloud:8774/v2.1/red/flavors/f1",
        "http://cloud:8774/red/flavors/f1",
    ]
    old = (await cloud.admin("GET", "/flavors/f1", prefix="/v2/red")).json()["flavor"]
    assert old["links"][0]["href"] == "http://cloud:8774/v2/red/flavors/f1"


async def test_names_and_ids_are_unique(cloud: Cloud) -> None:
    await _made(cloud.admin, "f", id="1")
    assert (await cloud.admin.post("/flavors", _flavor("g", id="1"))).status == 409
    assert (await cloud.admin.post("/flavors", _flavor("f", id="2"))).status == 409


async def test_filters_order_and_pages(cloud: Cloud) -> None:
    admin = cloud.admin
    for number, ram in enumerate((512, 128, 256)):
        await _made(admin, f"n{number}", id=f"f{number}", ram=ram, disk=number)
    await _made(admin, "hidden", id="h", **{"os-flavor-access:is_public": False})

    async def ids(query: str, caller: Caller = admin, minor: int | None = None) -> list[str]:
        answer = await caller.get(f"/flavors?{query}", minor)
        assert answer.status == 200, answer.body
        return [flavor["id"] for flavor in answer.json()["flavors"]]

    assert await ids("") == ["f0", "f1", "f2"]
    assert await ids("is_public=None") == ["f0", "f1", "f2", "h"]
    assert await ids("is_public=false") == ["h"]
    assert await ids("is_public=None", cloud.member) == ["f0", "f1", "f2"]
    assert await ids("minRam=200") == ["f0", "f2"]
    assert await ids("minDisk=1") == ["f1", "f2"]
    assert await ids("sort_key=memory_mb&sort_dir=desc") == ["f0", "f2", "f1"]
    assert await ids("sort_key=memory_mb&marker=f1") == ["f2", "f0"]
    assert await ids("name=n1", minor=102) == ["f1"]
    assert await ids("name=n1", minor=101 - 27) == ["f0", "f1", "f2"]  # not known before, and ignored until 2.74
    assert await ids("limit=0") == []

    seen, path = [], "/flavors?limit=2"
    while path:
        body = (await admin.get(path)).json()
        seen += [flavor["id"] for flavor in body["flavors"]]
        following = body.get("flavors_links")
        url = urllib.parse.urlsplit(following[0]["href"]) if following else None
        path = f"{url.path.removeprefix('/v2.1')}?{url.query}" if url else ""
    assert seen == ["f0", "f1", "f2"]


async def test_a_flavor_that_is_not_public_is_for_those_who_were_given_it(cloud: Cloud) -> None:
    flavor = await _made(cloud.admin, "f", id="f", **{"os-flavor-access:is_public": False})
    path, action = f"/flavors/{flavor['id']}", f"/flavors/{flavor['id']}/action"
    assert (await cloud.member.get(path)).status == 404
    answer = await cloud.admin.post(action, {"addTenantAccess": {"tenant": "red"}})
    check("flavors_access", "add_remove_list_flavor_access", 1, answer.status, answer.json())
    assert (await cloud.member.get(path)).status == 200
    assert [flavor["id"] for flavor in (await cloud.member.get("/flavors")).json()["flavors"]] == ["f"]
    assert (await cloud.stranger.get(path)).status == 404
    assert (await cloud.stranger.get("/flavors")).json()["flavors"] == []
    assert (await cloud.admin.post(action, {"addTenantAccess": {"tenant": "red"}})).status == 409
    assert (await cloud.admin.post(action, {"addTenantAccess": {"tenant": "green"}})).status == 400
    answer = await cloud.admin.get(f"{path}/os-flavor-access")
    check("flavors_access", "add_remove_list_flavor_access", 1, answer.status, answer.json())
    assert answer.json() == {"flavor_access": [{"flavor_id": "f", "tenant_id": "red"}]}
    answer = await cloud.admin.post(action, {"removeTenantAccess": {"tenant": "red"}})
    check("flavors_access", "add_remove_list_flavor_access", 1, answer.status, answer.json())
    assert (await cloud.admin.post(action, {"removeTenantAccess": {"tenant": "red"}})).status == 404
    assert (await cloud.member.get(path)).status == 404


async def test_access_to_a_public_flavor_conflicts_since_2_7(cloud: Cloud) -> None:
    await _made(cloud.admin, "f", id="f")
    body = {"addTenantAccess": {"tenant": "red"}}
    assert (await cloud.admin.post("/flavors/f/action", body, 7)).status == 409
    assert (await cloud.admin.post("/flavors/f/action", body, 6)).status == 200
    assert (await cloud.admin.get("/flavors/f/os-flavor-access")).status == 404


@pytest.mark.parametrize("minor", [1, 85, 86, 102, 104])
async def test_extra_specs(cloud: Cloud, minor: int) -> None:
    await _made(cloud.admin, "f", id="f")
    path = "/flavors/f/os-extra_specs"
    answer = await cloud.admin.post(path, {"extra_specs": {"hw:cpu_policy": "shared", "mine:x": 5}}, minor)
    check("flavors_extra_specs", "set_get_flavor_extra_specs", minor, answer.status, answer.json())
    answer = await cloud.reader.get(path, minor)
    check("flavors_extra_specs", "set_get_flavor_extra_specs", minor, answer.status, answer.json())
    assert answer.json()["extra_specs"] == {"hw:cpu_policy": "shared", "mine:x": "5"}
    answer = await cloud.admin.put(f"{path}/mine:x", {"mine:x": "6"}, minor)
    check("flavors_extra_specs", "set_get_flavor_extra_specs_key", minor, answer.status, answer.json())
    answer = await cloud.reader.get(f"{path}/mine:x", minor)
    check("flavors_extra_specs", "set_get_flavor_extra_specs_key", minor, answer.status, answer.json())
    answer = await cloud.admin.delete(f"{path}/mine:x", minor)
    check("flavors_extra_specs", "unset_flavor_extra_specs", minor, answer.status, answer.json())
    assert (await cloud.admin.delete(f"{path}/mine:x", minor)).status == 404
    assert (await cloud.admin.get(f"{path}/mine:x", minor)).status == 404
    refused = 400 if minor >= 86 else 200
    for spec in ({"hw:cpu_policy": "round"}, {"hw:numa_nodes": "0"}, {"hw:nonsense": "1"}, {"resources:VCPU": "x"}):
        assert (await cloud.admin.post(path, {"extra_specs": spec}, minor)).status == refused


async def test_extra_specs_are_shown_in_flavors_since_2_61(cloud: Cloud) -> None:
    await _made(cloud.admin, "f", id="f")
    await cloud.admin.post("/flavors/f/os-extra_specs", {"extra_specs": {"a": "b"}})
    assert (await cloud.reader.get("/flavors/f", 61)).json()["flavor"]["extra_specs"] == {"a": "b"}
    [flavor] = (await cloud.reader.get("/flavors/detail", 61)).json()["flavors"]
    assert flavor["extra_specs"] == {"a": "b"}

"""Sub-resources of a server (metadata, tags, addresses, console output), and updates of the server."""

import asyncio
from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud

# --- metadata ------------------------------------------------------------------------------------------------------


async def test_metadata(user: Caller) -> None:
    id = (await user.boot(metadata={"a": "1", "b": "2"}))["id"]
    path = f"/servers/{id}/metadata"
    assert await user.get(path) == {"metadata": {"a": "1", "b": "2"}}
    assert await user.get(f"{path}/a") == {"meta": {"a": "1"}}
    added = await user.post(path, {"metadata": {"b": "3", "c": "4"}}, 200)
    assert added == {"metadata": {"a": "1", "b": "3", "c": "4"}}
    assert await user.put(f"{path}/a", {"meta": {"a": "9"}}) == {"meta": {"a": "9"}}
    assert (await user.show(id))["metadata"] == {"a": "9", "b": "3", "c": "4"}
    await user.delete(f"{path}/b")
    assert await user.get(path) == {"metadata": {"a": "9", "c": "4"}}
    assert await user.put(path, {"metadata": {"z": ""}}) == {"metadata": {"z": ""}}
    assert await user.put(path, {"metadata": {}}) == {"metadata": {}}
    await user.refused(404, "GET", f"{path}/z")
    await user.refused(404, "DELETE", f"{path}/z")


async def test_items_of_metadata_have_limits(user: Caller) -> None:
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"metadata_items": 2}})
    id = (await user.boot(metadata={"a": "1"}))["id"]
    path = f"/servers/{id}/metadata"
    await user.post(path, {"metadata": {"b": "1"}}, 200)
    message = await user.refused(403, "POST", path, {"metadata": {"c": "1"}})
    assert "metadata items exceeds 2" in message
    await user.refused(403, "PUT", path, {"metadata": {"a": "1", "b": "1", "c": "1"}})
    await user.put(f"{path}/b", {"meta": {"b": "2"}})  # replaces a key, so the quota still holds


async def test_items_of_metadata_at_the_same_time(user: Caller) -> None:
    """Concurrent changes do not overwrite each other."""
    id = (await user.boot())["id"]
    path = f"/servers/{id}/metadata"
    await asyncio.gather(*(user.put(f"{path}/k{n}", {"meta": {f"k{n}": str(n)}}) for n in range(10)))
    assert (await user.get(path))["metadata"] == {f"k{n}": str(n) for n in range(10)}


async def test_metadata_while_it_is_built(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 0.2, "name": user.project}):
        id = await user.create(name=user.project)
        path, body = f"/servers/{id}/metadata", {"metadata": {"a": "b"}}
        assert "in vm_state building" in await user.refused(409, "POST", path, body)
        await user.wait_for(id, "ACTIVE")
    assert await user.post(path, body, 200) == body


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("POST", "", {"metadata": {"a": 1}}, "metadata"),
        ("POST", "", {"metadata": ["a"]}, "metadata"),
        ("POST", "", {"metadata": {"": "x"}}, "metadata"),
        ("POST", "", {"metadata": {"a" * 256: "x"}}, "metadata"),
        ("POST", "", {"metadata": {"a": "x" * 256}}, "metadata"),
        ("POST", "", {"metadata": {"a/b": "x"}}, "metadata"),
        ("POST", "", {"metadata": {"a": None}}, "metadata"),
        ("POST", "", {"meta": {"a": "b"}}, "meta"),
        ("POST", "", {}, "metadata"),
        ("POST", "", None, "body"),
        ("PUT", "", {"metadata": {"a": "b"}, "more": 1}, "more"),
        ("PUT", "/a", {"meta": {"b": "c"}}, "mismatch"),
        ("PUT", "/a", {"meta": {"a": "b", "c": "d"}}, "meta"),
        ("PUT", "/a", {"meta": {}}, "meta"),
        ("PUT", "/a", {"metadata": {"a": "b"}}, "metadata"),
    ],
)
async def test_bad_metadata(user: Caller, method: str, path: str, body: Any, words: str) -> None:
    id = await user.create()
    assert words in await user.refused(400, method, f"/servers/{id}/metadata{path}", body)


# --- tags ----------------------------------------------------------------------------------------------------------


async def test_tags(user: Caller) -> None:
    id = (await user.boot(tags=["b", "a", "a"]))["id"]
    path = f"/servers/{id}/tags"
    assert sorted((await user.get(path))["tags"]) == ["a", "b"]
    answer = await user.request("PUT", f"{path}/c")
    assert answer.status == 201 and answer.headers["location"].endswith(f"{path}/c")
    assert (await user.request("PUT", f"{path}/c")).status == 204
    assert (await user.request("GET", f"{path}/c")).status == 204
    await user.refused(404, "GET", f"{path}/d")
    await user.delete(f"{path}/c")
    await user.refused(404, "DELETE", f"{path}/c")
    assert await user.put(path, {"tags": ["x", "y"]}) == {"tags": ["x", "y"]}
    assert (await user.show(id))["tags"] == ["x", "y"]
    await user.delete(path)
    assert (await user.get(path)) == {"tags": []}
    await user.at(25).refused(404, "GET", path)


async def test_the_limit_of_tags(user: Caller) -> None:
    id = (await user.boot(tags=[f"t{n}" for n in range(50)]))["id"]
    await user.refused(400, "PUT", f"/servers/{id}/tags/one-more")
    assert (await user.request("PUT", f"/servers/{id}/tags/t1")).status == 204


@pytest.mark.parametrize(
    "body",
    [{"tags": ["a,b"]}, {"tags": ["a/b"]}, {"tags": [""]}, {"tags": ["a" * 61]}, {"tags": [1]}, {"tags": "a"},
     {"tags": [f"t{n}" for n in range(51)]}, {"tag": []}, {}],
)  # fmt: skip
async def test_bad_tags(user: Caller, body: Any) -> None:
    id = await user.create()
    assert "tag" in await user.refused(400, "PUT", f"/servers/{id}/tags", body)


async def test_bad_tags_in_the_url(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.refused(400, "PUT", f"/servers/{id}/tags/a,b")
    await user.refused(400, "PUT", f"/servers/{id}/tags/{'a' * 61}")


# --- addresses and the console -------------------------------------------------------------------------------------


async def test_a_server_without_networks_has_no_addresses(user: Caller) -> None:
    id = (await user.boot())["id"]
    assert await user.get(f"/servers/{id}/ips") == {"addresses": {}}
    await user.refused(404, "GET", f"/servers/{id}/ips/private")


async def test_the_console(user: Caller) -> None:
    id = (await user.boot(name="talks"))["id"]
    whole = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    assert "server talks is ready" in whole
    lines = whole.removesuffix("\n").split("\n")
    for length, count in ((3, 3), ("2", 2), (10_000, len(lines))):
        part = (await user.act(id, "os-getConsoleOutput", {"length": length}, 200))["output"]
        assert part.split("\n") == lines[-count:]  # as clients count lines
    for length, expected in ((0, ""), (-1, whole)):
        assert (await user.act(id, "os-getConsoleOutput", {"length": length}, 200))["output"] == expected
    assert (await user.act(id, "os-getConsoleOutput", {"length": None}, 200))["output"] == whole


@pytest.mark.parametrize("length", ["many", -2, 1.5, [], {}, True, "1e3", 1 << 40])
async def test_a_bad_length(user: Caller, length: Any) -> None:
    id = (await user.boot())["id"]
    body = {"os-getConsoleOutput": {"length": length}}
    assert "length" in await user.refused(400, "POST", f"/servers/{id}/action", body)


async def test_no_console_before_there_is_a_host(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": user.project}):
        id = await user.create(name=user.project)
        await user.wait_for(id, "ERROR")
    await user.refused(409, "POST", f"/servers/{id}/action", {"os-getConsoleOutput": {}})


# --- the server itself ---------------------------------------------------------------------------------------------


async def test_changing_a_server(user: Caller) -> None:
    id = (await user.boot(name="old"))["id"]
    changes = {
        "name": "new", "description": "d", "accessIPv4": "192.0.2.1", "accessIPv6": "2001:DB8::1",
        "OS-DCF:diskConfig": "AUTO", "hostname": "elsewhere",
    }  # fmt: skip
    shown = (await user.put(f"/servers/{id}", {"server": changes}))["server"]
    assert (shown["name"], shown["description"]) == ("new", "d")
    assert (shown["accessIPv4"], shown["accessIPv6"]) == ("192.0.2.1", "2001:db8::1")
    assert shown["OS-DCF:diskConfig"] == "AUTO"
    assert shown["OS-EXT-SRV-ATTR:hostname"] == "elsewhere"
    now = await user.show(id)
    assert now == shown
    cleared = await user.put(f"/servers/{id}", {"server": {"description": None}})
    assert cleared["server"]["description"] is None
    assert (await user.put(f"/servers/{id}", {"server": {}}))["server"] == cleared["server"]


@pytest.mark.parametrize(
    ("minor", "good", "bad"),
    [
        (90, ("ab", "a-1", "x" * 63), ("a", "a_b", "-a", "a-", "a.b", "x" * 64, "", None)),
        (93, ("ab",), ("a.b",)),
        (94, ("a", "a.b", "a_b", "-a", "x" * 255), ("x" * 256, "a b", "a/b", "a\n", "", None)),
    ],
)
async def test_the_host_name_has_rules_of_its_version(
    user: Caller, minor: int, good: tuple[str, ...], bad: tuple[str | None, ...]
) -> None:
    path = f"/servers/{(await user.boot())['id']}"
    for name in good:
        shown = (await user.at(minor).put(path, {"server": {"hostname": name}}))["server"]
        assert shown["OS-EXT-SRV-ATTR:hostname"] == name
    for wrong in bad:
        assert "hostname" in await user.at(minor).refused(400, "PUT", path, {"server": {"hostname": wrong}})
    await user.at(89).refused(400, "PUT", path, {"server": {"hostname": "ab"}})


async def test_the_zone_that_a_server_is_pinned_to(user: Caller) -> None:
    id = (await user.boot())["id"]
    path = f"/servers/{id}"
    pinned = await user.put(path, {"server": {"pinned_availability_zone": "nova"}})
    assert pinned["server"]["pinned_availability_zone"] == "nova"
    freed = await user.put(path, {"server": {"pinned_availability_zone": None}})
    assert freed["server"]["pinned_availability_zone"] is None
    await user.refused(409, "PUT", path, {"server": {"pinned_availability_zone": "other"}})
    await user.at(103).refused(400, "PUT", path, {"server": {"pinned_availability_zone": "nova"}})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "server"),
        ({"server": {"accessIPv4": None}}, "accessIPv4"),
        ({"server": {"accessIPv4": ""}}, "accessIPv4"),
        ({"server": {"accessIPv6": None}}, "accessIPv6"),
        ({"server": {"name": ""}}, "name"),
        ({"server": {"name": " x "}}, "name"),
        ({"server": {"name": "x" * 256}}, "name"),
        ({"server": {"name": None}}, "name"),
        ({"server": {"name": 7}}, "name"),
        ({"server": {"name": "a\u0001b"}}, "name"),
        ({"server": {"accessIPv4": "1.2.3"}}, "accessIPv4"),
        ({"server": {"accessIPv4": "::1"}}, "accessIPv4"),
        ({"server": {"accessIPv6": "1.2.3.4"}}, "accessIPv6"),
        ({"server": {"OS-DCF:diskConfig": "SOMETIMES"}}, "diskConfig"),
        ({"server": {"description": "x" * 256}}, "description"),
        ({"server": {"hostname": "not a host"}}, "hostname"),
        ({"server": {"flavorRef": "2"}}, "flavorRef"),
        ({"server": []}, "server"),
    ],
)
async def test_bad_changes(user: Caller, body: Any, words: str) -> None:
    id = await user.create()
    assert words in await user.refused(400, "PUT", f"/servers/{id}", body)


async def test_an_update_of_another_projects_server(cloud: Cloud, user: Caller) -> None:
    id = await user.create(name="mine")
    await cloud.caller().refused(404, "PUT", f"/servers/{id}", {"server": {"name": "yours"}})
    await user.admin.put(f"/servers/{id}", {"server": {"name": "admins"}})
    assert (await user.show(id))["name"] == "admins"

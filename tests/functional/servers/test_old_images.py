"""Images and their metadata through the compute API, until 2.35 and 2.38."""

from typing import Any

import pytest

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image, ok
from tests.schemas.tempest import check

CLOUD = CloudOptions(roles=("image",))


async def _names(user: Caller, query: str) -> list[str]:
    return [each["name"] for each in (await user.at(35).get(f"/images?{query}"))["images"]]


async def test_the_forms(user: Caller) -> None:
    id = await image(user, name="first", min_ram=64, min_disk=1, os_distro="debian", auto_disk_config="True")
    old = user.at(1)
    for path, schema in (("/images", "list_images"), ("/images/detail", "list_images_details")):
        answer = await old.request("GET", path)
        check("images", schema, 1, answer.status, answer.json())
    answer = await old.request("GET", f"/images/{id}")
    check("images", "get_image", 1, answer.status, answer.json())
    shown = answer.json()["image"]
    assert (shown["name"], shown["minRam"], shown["minDisk"]) == ("first", 64, 1)
    assert shown["metadata"] == {"os_distro": "debian", "auto_disk_config": "True"}
    assert (shown["status"], shown["progress"], shown["OS-EXT-IMG-SIZE:size"]) == ("ACTIVE", 100, 1024)
    assert shown["OS-DCF:diskConfig"] == "AUTO" and "server" not in shown
    links = {link["rel"]: link["href"] for link in shown["links"]}
    assert links["self"].endswith(f"/compute/v2.1/images/{id}") and links["bookmark"].endswith(f"/compute/images/{id}")
    assert links["alternate"].endswith(f"/image/images/{id}")
    listed = [each for each in (await old.get("/images/detail"))["images"] if each["id"] == id]
    assert listed == [shown]


async def test_an_image_of_a_server_that_is_not_there_yet(user: Caller) -> None:
    server = "11111111-2222-3333-4444-555555555555"
    id = await image(user, name="snapshot", upload=False, instance_uuid=server, image_type="snapshot")
    shown = (await user.at(35).get(f"/images/{id}"))["image"]
    assert (shown["status"], shown["progress"], shown["OS-EXT-IMG-SIZE:size"]) == ("SAVING", 25, 0)
    assert shown["server"]["id"] == server and shown["server"]["links"][0]["href"].endswith(f"/servers/{server}")
    for query in (f"server={server}", f"server=http://cloud/v2.1/servers/{server}", "type=snapshot&name=snapshot"):
        assert await _names(user, query) == ["snapshot"]


async def test_filters_and_pages(user: Caller) -> None:
    mark = user.project[:12]
    for number in range(3):
        await image(user, name=f"{mark}-{number}", min_ram=number, mark=mark)
    mine = f"property-mark={mark}"
    assert sorted(await _names(user, mine)) == [f"{mark}-{number}" for number in range(3)]
    assert await _names(user, f"{mine}&minRam=2") == [f"{mark}-2"]
    assert await _names(user, f"name={mark}-1") == [f"{mark}-1"]
    assert len(await _names(user, f"{mine}&status=ACTIVE")) == 3
    assert await _names(user, f"{mine}&changes-since=2099-01-01T00:00:00") == []
    first = await user.at(35).get(f"/images?{mine}&limit=2")
    assert len(first["images"]) == 2
    rest = first["images_links"][0]["href"].partition("?")[2]
    second = await user.at(35).get(f"/images?{rest}")
    assert len(second["images"]) == 1 and "images_links" not in second
    for bad in ("limit=0", "limit=x", "marker=11111111-2222-3333-4444-555555555555", "changes-since=zork"):
        await user.at(35).refused(400, "GET", f"/images?{bad}")


async def test_an_answer_has_a_limited_size(user: Caller) -> None:
    """A project may have 1,000 images with 64 KiB of properties each."""
    large: dict[str, Any] = {f"p{number:03}": "x" * 500 for number in range(120)}
    made = {await image(user, upload=False, **large) for _ in range(80)}
    for first in ("/images/detail", "/images"):
        found: list[str] = []
        path = first
        for _ in range(10):
            answer = await user.at(35).request("GET", path)
            assert len(answer.body) < 5_000_000
            body = answer.json()
            found += [each["id"] for each in body["images"]]
            if "images_links" not in body:
                break
            path = f"{first}?{body['images_links'][0]['href'].partition('?')[2]}"
        assert len(found) == len(set(found)) and made <= set(found)
        assert (path == first) == (first == "/images"), "names and links alone fit into one answer"


@only_in_one_process("a client of a real server resolves dots in paths")
async def test_deleting(cloud: Cloud, user: Caller) -> None:
    id, kept = await image(user), await image(user, protected=True)
    await cloud.caller().at(35).refused(404, "DELETE", f"/images/{id}")
    answer = await user.at(35).request("DELETE", f"/images/{id}")
    check("images", "delete", 35, answer.status, answer.json())
    for method in ("GET", "DELETE"):
        await user.at(35).refused(404, method, f"/images/{id}")
        await user.at(35).refused(404, method, "/images/..")
    await user.at(35).refused(403, "DELETE", f"/images/{kept}")
    await user.at(35).get(f"/images/{kept}")


async def test_metadata(cloud: Cloud, user: Caller) -> None:
    id = await image(user, a="1", b="2")
    old, path = user.at(38), f"/images/{id}/metadata"

    async def asked(method: str, where: str, schema: str, body: Any = None) -> Any:
        answer = await old.request(method, where, body)
        check("images", schema, 38, answer.status, answer.json())
        return answer.json()

    assert await asked("GET", path, "image_metadata") == {"metadata": {"a": "1", "b": "2"}}
    assert await asked("GET", f"{path}/a", "image_meta_item") == {"meta": {"a": "1"}}
    added = await asked("POST", path, "image_metadata", {"metadata": {"b": "3", "c.d": "4"}})
    assert added == {"metadata": {"a": "1", "b": "3", "c.d": "4"}}
    assert await asked("PUT", f"{path}/a", "image_meta_item", {"meta": {"a": "9"}}) == {"meta": {"a": "9"}}
    await asked("DELETE", f"{path}/b", "delete")
    assert (await ok(user, "GET", f"/image/v2/images/{id}"))["c.d"] == "4"
    assert await asked("PUT", path, "image_metadata", {"metadata": {"z": ""}}) == {"metadata": {"z": ""}}
    assert (await old.get(path)) == {"metadata": {"z": ""}}
    for method in ("GET", "DELETE"):
        await old.refused(404, method, f"{path}/a")
    await cloud.caller().at(38).refused(404, "PUT", path, {"metadata": {}})


@pytest.mark.parametrize(
    ("method", "key", "body"),
    [
        ("POST", "", {"metadata": {"a": 1}}),
        ("POST", "", {"metadata": {"a/b": "1"}}),
        ("POST", "", {"metadata": {"": "1"}}),
        ("POST", "", {"metadata": {"a": "x" * 256}}),
        ("POST", "", {"metadata": {"name": "an attribute"}}),
        ("PUT", "", {"metadata": {"owner": "somebody"}}),
        ("PUT", "", {}),
        ("PUT", "/a", {"meta": {"b": "1"}}),
        ("PUT", "/a", {"meta": {"a": "1", "b": "1"}}),
        ("PUT", "/a", {"metadata": {"a": "1"}}),
    ],
)
async def test_bad_metadata(user: Caller, method: str, key: str, body: Any) -> None:
    path = f"/images/{await image(user, a='1')}/metadata"
    await user.at(38).refused(400, method, f"{path}{key}", body)
    assert (await user.at(38).get(path)) == {"metadata": {"a": "1"}}


async def test_metadata_has_the_limit_of_servers_metadata(user: Caller) -> None:
    await user.admin.put(f"/os-quota-sets/{user.project}", {"quota_set": {"metadata_items": 2}})
    path = f"/images/{await image(user, a='1')}/metadata"
    await user.at(38).refused(403, "POST", path, {"metadata": {"b": "1", "c": "1"}})
    await user.at(38).post(path, {"metadata": {"b": "1"}}, 200)


async def test_where_they_end(user: Caller) -> None:
    id = await image(user, a="1")
    for minor, path in ((36, "/images"), (36, "/images/detail"), (36, f"/images/{id}"), (39, f"/images/{id}/metadata")):
        await user.at(minor - 1).get(path)
        answer = await user.at(minor).request("GET", path)
        assert answer.status == 404 and "itemNotFound" in answer.json()
        assert answer.headers["openstack-api-version"] == f"compute 2.{minor}"
    await user.at(36).get(f"/images/{id}/metadata/a")

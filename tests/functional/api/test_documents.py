"""Version documents, extensions and what was removed."""

from micronova.api.compute import removed
from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.schemas.tempest import check


async def test_versions_need_no_token(cloud: Cloud) -> None:
    for prefix in ("/", ""):
        answer = await cloud.nobody("GET", "", prefix=prefix)
        check("versions", "list_versions", 1, answer.status, answer.json())
    old, new = answer.json()["versions"]
    assert (old["id"], old["version"], old["status"]) == ("v2.0", "", "DEPRECATED")
    assert (new["id"], new["version"], new["min_version"], new["status"]) == ("v2.1", "2.104", "2.1", "CURRENT")
    assert new["links"] == [{"rel": "self", "href": "http://cloud:8774/v2.1/"}]


async def test_one_version(cloud: Cloud) -> None:
    for prefix in ("/v2.1", "/v2.1/"):
        answer = await cloud.nobody("GET", "", prefix=prefix)
        check("versions", "get_one_version", 1, answer.status, answer.json())
        assert answer.json()["version"]["version"] == "2.104"
    for prefix in ("/v2", "/v2/"):
        answer = await cloud.nobody("GET", "", prefix=prefix)
        assert answer.status == 200 and answer.json()["version"]["id"] == "v2.0"
    assert (await cloud.reader.get("/versions/v2.1")).json()["version"]["id"] == "v2.1"
    assert (await cloud.reader.get("/versions/v9")).status == 404


async def test_microversions_are_negotiated(cloud: Cloud) -> None:
    answer = await cloud.reader.get("/flavors", 61)
    assert answer.headers["openstack-api-version"] == "compute 2.61"
    assert answer.headers["x-openstack-nova-api-version"] == "2.61"
    assert (await cloud.reader.get("/flavors", 105)).status == 406
    cloud_reader = cloud.reader
    cloud_reader.headers["x-openstack-nova-api-version"] = "latest"
    assert (await cloud_reader.get("/flavors")).headers["openstack-api-version"] == "compute 2.104"
    cloud_reader.headers["x-openstack-nova-api-version"] = "odd"
    assert (await cloud_reader.get("/flavors")).status == 400


async def test_extensions(cloud: Cloud) -> None:
    answer = await cloud.reader.get("/extensions")
    check("extensions", "list_extensions", 1, answer.status, answer.json())
    aliases = {each["alias"] for each in answer.json()["extensions"]}
    assert {"os-keypairs", "os-quota-sets", "OS-EXT-STS", "os-server-groups"} <= aliases and len(aliases) == 99
    answer = await cloud.reader.get("/extensions/os-keypairs")
    assert answer.status == 200 and answer.json()["extension"]["name"] == "Keypairs"
    assert (await cloud.reader.get("/extensions/os-nothing")).status == 404


async def test_what_was_removed_says_so(cloud: Cloud) -> None:
    asked = 0
    for route in removed.routes():
        path = route.path.replace("{id}", "1").replace("{entry}", "2").replace("{console}", "3")
        body = {route.action: None} if route.action else {"x": 1} if route.method in ("POST", "PUT") else None
        for minor in (1, 50, 104):
            answer = await cloud.admin(route.method, path, body, minor)
            assert answer.status == 410, (route.label, answer.status)
            asked += 1
    assert asked >= 3 * 46
    assert (await cloud.nobody.get("/os-fping")).status == 401

"""Version documents, extensions and what was removed."""

import pytest

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


@pytest.mark.parametrize(
    ("modern", "legacy", "version"),
    [
        ("compute 2.61", None, "2.61"),
        ("compute 2.61", "2.3", "2.61"),
        ("COMPUTE  2.61", None, "2.61"),
        ("identity 3.1, compute 2.61, volume 3.2", None, "2.61"),
        ("compute 2.3, compute 2.61", None, "2.61"),
        ("compute latest", None, "2.104"),
        ("compute", None, "2.1"),
        ("compute ", "2.61", "2.61"),
        ("", "2.61", "2.61"),
        ("2.61", None, "2.1"),
        ("volume 3.61", None, "2.1"),
        (None, "2.3, 2.61", "2.61"),
        (None, "", None),
        ("compute LATEST", None, None),
        ("compute 2.61 2.3", None, None),
    ],
)
async def test_the_last_entry_for_compute_counts(
    cloud: Cloud, modern: str | None, legacy: str | None, version: str | None
) -> None:
    caller = cloud.reader
    for name, value in (("openstack-api-version", modern), ("x-openstack-nova-api-version", legacy)):
        if value is not None:
            caller.headers[name] = value
    answer = await caller.get("/flavors")
    assert answer.headers.get("x-openstack-nova-api-version") == version
    assert answer.status == (400 if version is None else 200)


async def test_a_versions_document_has_the_headers_of_microversions(cloud: Cloud) -> None:
    answer = await cloud.nobody("GET", "", minor=61, prefix="/v2.1/")
    assert answer.status == 200
    assert answer.headers["openstack-api-version"] == "compute 2.61"
    assert answer.headers["x-openstack-nova-api-version"] == "2.61"
    assert answer.headers["vary"] == "OpenStack-API-Version, X-OpenStack-Nova-API-Version"
    assert (await cloud.nobody("GET", "", minor=999, prefix="/v2.1")).status == 406
    for prefix in ("/v2/", "/"):
        answer = await cloud.nobody("GET", "", minor=61, prefix=prefix)
        assert answer.status == 200 and "openstack-api-version" not in answer.headers


async def test_a_path_above_the_versions_has_several_choices(cloud: Cloud) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        answer = await cloud.nobody(method, "/v3/servers", prefix="")
        assert answer.status == 300
        old, new = answer.json()["choices"]
        assert (old["id"], new["id"]) == ("v2.0", "v2.1")
        assert new["links"] == [{"rel": "self", "href": "http://cloud:8774/v2.1/v3/servers"}]
        assert new["media-types"][0]["type"] == "application/vnd.openstack.compute+json;version=2.1"


@pytest.mark.parametrize(
    "path", ["/os-nothing", "/os-nothing/detail", "/flavors/1/nothing", "/blue/os-nothing", "/0a/x"]
)
async def test_an_unknown_path_is_a_404_for_who_has_a_token(cloud: Cloud, path: str) -> None:
    answer = await cloud.stranger("GET", path, minor=61)
    code = 400 if path == "/0a/x" else 404  # it looks like a project, which is not the token's
    assert answer.status == code
    assert answer.json()["badRequest" if code == 400 else "itemNotFound"]["code"] == code
    assert answer.headers["openstack-api-version"] == "compute 2.61"
    assert answer.headers["x-openstack-request-id"].startswith("req-")
    assert (await cloud.nobody.get(path)).status == 401


async def test_a_slash_at_the_end_is_another_path(cloud: Cloud) -> None:
    group = {"server_group": {"name": "g", "policies": ["affinity"]}}
    made = (await cloud.member.post("/os-server-groups", group)).json()["server_group"]["id"]
    for path in ("/flavors/", "/flavors/detail/", "/os-server-groups/", f"/os-server-groups/{made}/", "/limits/"):
        assert (await cloud.member.get(path)).status == 404, path
        assert (await cloud.member.get(path.rstrip("/"))).status == 200, path
    assert (await cloud.member.post("/os-server-groups/", group)).status == 404
    assert (await cloud.member.delete("/os-server-groups/")).status == 404
    assert (await cloud.admin.delete("/os-services/")).status == 404  # an id that is no number would be a 400


async def test_an_unknown_method_is_an_unknown_path(cloud: Cloud) -> None:
    answer = await cloud.reader.put("/flavors", {})
    assert answer.status == 404 and "itemNotFound" in answer.json()
    assert (await cloud.nobody.put("/flavors", {})).status == 401


async def test_the_vendors_name_of_json(cloud: Cloud) -> None:
    vendor = "application/vnd.openstack.compute+json"
    caller = cloud.member
    group = {"server_group": {"name": "g", "policies": ["affinity"]}}
    caller.headers |= {"content-type": vendor, "accept": vendor}
    answer = await caller.post("/os-server-groups", group)
    assert answer.status == 200 and answer.headers["content-type"] == vendor
    for accept in ("*/*", "application/json", f"application/json, {vendor};q=0.5", "text/html"):
        caller.headers["accept"] = accept
        assert (await caller.get("/flavors")).headers["content-type"] == "application/json"
    caller.headers["accept"] = vendor
    assert (await caller.get("/os-nothing")).headers["content-type"] == "application/json"
    caller.headers["content-type"] = "application/xml"
    assert (await caller.post("/os-server-groups", group)).status == 415


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

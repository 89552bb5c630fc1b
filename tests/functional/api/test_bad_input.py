"""Bad bodies and query strings: refused with a message that names what is wrong, on both databases; never a 5xx."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.functional.api.resources import cloud_on
from tests.functional.api.seed import add_host, add_server
from tests.unit.db.databases import KINDS

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD x"
LONG = "x" * 256
UUID = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True)
class Bad:
    """A request, the status it deserves and a word that the message must have."""

    method: str
    path: str
    body: Any
    status: int
    says: str = ""
    minor: int | None = None


def flavor(**changes: Any) -> dict[str, Any]:
    return {"flavor": {"name": "f", "ram": 1, "vcpus": 1, "disk": 1, **changes}}


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    [(key, inner)] = body.items()
    return {key: {k: v for k, v in inner.items() if k != name}}


def post(path: str, body: Any, status: int, says: str = "", minor: int | None = None) -> Bad:
    return Bad("POST", path, body, status, says, minor)


def put(path: str, body: Any, status: int, says: str = "", minor: int | None = None) -> Bad:
    return Bad("PUT", path, body, status, says, minor)


def get(path: str, status: int, says: str = "", minor: int | None = None) -> Bad:
    return Bad("GET", path, None, status, says, minor)


def group(**changes: Any) -> dict[str, Any]:
    return {"server_group": {"name": "g", "policies": ["affinity"], **changes}}


TABLE = [
    # not JSON, or not the right JSON
    post("/flavors", b"{", 400, "Malformed"),
    post("/flavors", b"", 400),
    post("/flavors", b"null", 400),
    post("/flavors", b"[]", 400),
    post("/flavors", b'"text"', 400),
    post("/flavors", b'{"flavor": {"name": "\xff\xfe"}}', 400, "Malformed"),
    post("/flavors", b"[" * 50_000, 400),
    post("/flavors", b'{"flavor": ' * 9_000, 400),
    post("/flavors", {}, 400, "flavor"),
    post("/flavors", {"flavor": None}, 400, "flavor"),
    post("/flavors", {"flavor": []}, 400, "flavor"),
    post("/flavors", {**flavor(), "more": 1}, 400, "more"),
    # flavors
    post("/flavors", without(flavor(), "name"), 400, "name"),
    post("/flavors", without(flavor(), "ram"), 400, "ram"),
    post("/flavors", flavor(name=""), 400, "name"),
    post("/flavors", flavor(name=" f"), 400, "name"),
    post("/flavors", flavor(name="f\n"), 400, "name"),
    post("/flavors", flavor(name="a\x00b"), 400),
    post("/flavors", flavor(name=LONG), 400, "name"),
    post("/flavors", flavor(name=5), 400, "name"),
    post("/flavors", flavor(ram=0), 400, "ram"),
    post("/flavors", flavor(ram=-1), 400, "ram"),
    post("/flavors", flavor(ram="much"), 400, "ram"),
    post("/flavors", flavor(ram=1.5), 400, "ram"),
    post("/flavors", flavor(ram=True), 400, "ram"),
    post("/flavors", flavor(ram=2**31), 400, "ram"),
    post("/flavors", flavor(ram=10**30), 400),
    post("/flavors", flavor(ram="9" * 20), 400, "ram"),
    post("/flavors", flavor(vcpus="0"), 400, "vcpus"),
    post("/flavors", flavor(disk=-1), 400, "disk"),
    post("/flavors", flavor(swap="x"), 400, "swap"),
    post("/flavors", flavor(id=" "), 400, "id"),
    post("/flavors", flavor(id="a/b"), 400, "id"),
    post("/flavors", flavor(id=LONG), 400, "id"),
    post("/flavors", flavor(rxtx_factor=0), 400, "rxtx_factor"),
    post("/flavors", flavor(rxtx_factor="fast"), 400, "rxtx_factor"),
    post("/flavors", flavor(rxtx_factor=1), 400, "rxtx_factor", 102),
    post("/flavors", flavor(description="d"), 400, "description", 54),
    post("/flavors", flavor(description="d\x07"), 400, "description", 55),
    post("/flavors", flavor(description="d" * 65536), 400, "description", 55),
    post("/flavors", flavor(**{"os-flavor-access:is_public": "maybe"}), 400, "is_public"),
    post("/flavors", flavor(color="red"), 400, "color"),
    put("/flavors/1", {"flavor": {}}, 400, "description", 55),
    put("/flavors/1", {"flavor": {"name": "x"}}, 400, "", 55),
    put("/flavors/nothing", {"flavor": {"description": "x"}}, 404, "nothing", 55),
    put("/flavors/1", {"flavor": {"description": "x"}}, 404, "", 54),
    get("/flavors?limit=-1", 400, "limit"),
    get("/flavors?limit=many", 400, "limit"),
    get("/flavors?limit=1e400", 400, "limit"),
    get("/flavors?marker=nothing", 400, "marker"),
    get("/flavors?marker=%00", 400),
    get("/flavors?minRam=much", 400, "minRam"),
    get("/flavors?minDisk=1.5", 400, "minDisk"),
    get("/flavors?is_public=maybe", 400, "is_public"),
    get("/flavors?sort_key=color", 400, "sort_key"),
    get("/flavors?sort_key=rxtx_factor", 400, "sort_key", 102),
    get("/flavors?sort_dir=up", 400, "sort_dir"),
    get("/flavors?odd=1", 400, "odd", 75),
    get("/flavors?name=%ff", 400),
    get("/flavors?name=a%00b", 400, "", 102),
    get("/flavors/1?odd=1", 400, "odd", 102),
    get("/flavors/nothing", 404, "nothing"),
    get("/flavors/a%00b", 404),
    Bad("DELETE", "/flavors/nothing", None, 404, "nothing"),
    Bad("PATCH", "/flavors/1", {}, 404),
    # access and extra specs
    post("/flavors/1/action", {}, 400, "action"),
    post("/flavors/1/action", {"odd": {}}, 400, "odd"),
    post("/flavors/1/action", {"addTenantAccess": {}}, 400, "tenant"),
    post("/flavors/1/action", {"addTenantAccess": {"tenant": ""}}, 400, "tenant"),
    post("/flavors/1/action", {"addTenantAccess": {"tenant": "green"}}, 400, "green"),
    post("/flavors/1/action", {"removeTenantAccess": {"tenant": LONG[:255]}}, 404),
    post("/flavors/1/action", {"addTenantAccess": {"tenant": "red"}, "removeTenantAccess": {"tenant": "red"}}, 400),
    post("/flavors/9/action", {"addTenantAccess": {"tenant": "red"}}, 404),
    post("/flavors/1/os-extra_specs", {}, 400, "extra_specs"),
    post("/flavors/1/os-extra_specs", {"extra_specs": {"": "x"}}, 400),
    post("/flavors/1/os-extra_specs", {"extra_specs": {"a/b": "x"}}, 400),
    post("/flavors/1/os-extra_specs", {"extra_specs": {"a": LONG}}, 400, "a"),
    post("/flavors/1/os-extra_specs", {"extra_specs": {"a": None}}, 400),
    post("/flavors/1/os-extra_specs", {"extra_specs": {"a": {"b": "c"}}}, 400),
    post("/flavors/9/os-extra_specs", {"extra_specs": {"a": "b"}}, 404),
    put("/flavors/1/os-extra_specs/a", {"b": "c"}, 400, "a"),
    put("/flavors/1/os-extra_specs/a", {"a": "c", "b": "c"}, 400),
    put("/flavors/1/os-extra_specs/a", {}, 400),
    put("/flavors/1/os-extra_specs/hw:cpu_policy", {"hw:cpu_policy": "odd"}, 400, "hw:cpu_policy", 86),
    get("/flavors/1/os-extra_specs/nothing", 404),
    # key pairs
    post("/os-keypairs", {"keypair": {}}, 400, "name"),
    post("/os-keypairs", {"keypair": {"name": ""}}, 400, "name"),
    post("/os-keypairs", {"keypair": {"name": LONG, "public_key": KEY}}, 400, "name"),
    post("/os-keypairs", {"keypair": {"name": "a/b", "public_key": KEY}}, 400, "name"),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": "no key"}}, 400, "public_key"),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": ""}}, 400, "public_key"),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": 5}}, 400, "public_key"),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": "ssh-rsa AAAA\x00"}}, 400),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "type": "ssh"}}, 400, "type", 1),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "type": "pgp"}}, 400, "type", 2),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "type": "x509"}}, 400, "public_key", 2),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "user_id": "u"}}, 400, "user_id", 9),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "user_id": LONG}}, 400, "user_id", 10),
    get("/os-keypairs?limit=x", 400, "limit", 35),
    get("/os-keypairs?odd=1", 400, "odd", 75),
    get("/os-keypairs/nothing", 404, "nothing"),
    post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "user_id": "a\x00"}}, 400, "U+0000", 10),
    # quotas
    put("/os-quota-sets/red", {}, 400, "quota_set"),
    put("/os-quota-sets/red", {"quota_set": {"odd": 1}}, 400, "odd"),
    put("/os-quota-sets/red", {"quota_set": {"cores": "many"}}, 400, "cores"),
    put("/os-quota-sets/red", {"quota_set": {"cores": None}}, 400, "cores"),
    put("/os-quota-sets/red", {"quota_set": {"fixed_ips": None}}, 400, "fixed_ips"),
    put("/os-quota-class-sets/default", {"quota_class_set": {"ram": None}}, 400, "ram"),
    put("/os-quota-sets/red", {"quota_set": {"cores": -2}}, 400, "cores"),
    put("/os-quota-sets/red", {"quota_set": {"cores": 2**31}}, 400, "cores"),
    put("/os-quota-sets/red", {"quota_set": {"cores": 1.5}}, 400, "cores"),
    put("/os-quota-sets/red", {"quota_set": {"force": "maybe"}}, 400, "force"),
    put("/os-quota-sets/red?user_id=" + LONG, {"quota_set": {"cores": 1}}, 400, "user_id"),
    put("/os-quota-sets/red?odd=1", {"quota_set": {"cores": 1}}, 400, "odd", 75),
    put("/os-quota-sets/green", {"quota_set": {"cores": 1}}, 400, "green"),
    put("/os-quota-class-sets/x", {"quota_class_set": {"odd": 1}}, 400, "odd"),
    put("/os-quota-class-sets/" + LONG, {"quota_class_set": {"cores": 1}}, 400, "quota_class_name"),
    get("/limits?odd=1", 400, "odd", 75),
    # services, hypervisors, hosts
    put("/os-services/disable", {"host": "h1"}, 400, "binary"),
    put("/os-services/disable", {"host": "h 1", "binary": "nova-compute"}, 400, "host"),
    put("/os-services/disable", {"host": "h9", "binary": "nova-compute"}, 404, "h9"),
    put("/os-services/odd", {"host": "h1", "binary": "nova-compute"}, 404),
    put("/os-services/force-down", {"host": "h1", "binary": "nova-compute"}, 400, "forced_down", 11),
    put("/os-services/1", {"status": "disabled"}, 400, "uuid", 53),
    put(f"/os-services/{UUID}", {"status": "disabled"}, 404, UUID, 53),
    put(f"/os-services/{UUID}", {"status": "disabled", "disabled_reason": ""}, 400, "disabled_reason", 53),
    Bad("DELETE", "/os-services/99999999999999999999", None, 400),
    get("/os-hypervisors/99999999999999999999", 404),
    get("/os-hypervisors/odd", 404),
    get("/os-hypervisors/odd", 400, "uuid", 53),
    get(f"/os-hypervisors/{UUID}", 404, UUID, 53),
    get("/os-hypervisors?with_servers=maybe", 400, "with_servers", 53),
    get("/os-hypervisors?with_servers=true&with_servers=true", 400, "only once", 53),
    get("/os-hypervisors/detail?limit=1&limit=2", 400, "only once", 53),
    get(f"/os-hypervisors/{UUID}?with_servers=true&with_servers=true", 400, "only once", 53),
    get("/servers/SERVER/os-instance-actions?limit=1&limit=2", 400, "only once", 58),
    get("/servers/SERVER/os-instance-actions?changes-since=2020-01-01&changes-since=2020-01-02", 400, "only once", 66),
    get("/os-hypervisors?hypervisor_hostname_pattern=%25%00", 400, "", 53),
    get("/os-hypervisors?marker=99999999999999999999", 400, "marker", 33),
    put("/os-hosts/h1", {"status": "odd"}, 400, "status"),
    # aggregates and groups
    post("/os-aggregates", {"aggregate": {}}, 400, "name"),
    post("/os-aggregates", {"aggregate": {"name": " "}}, 400, "name"),
    post("/os-aggregates", {"aggregate": {"name": LONG}}, 400, "name"),
    post("/os-aggregates", {"aggregate": {"name": "a", "availability_zone": ""}}, 400, "availability_zone"),
    post("/os-aggregates", {"aggregate": {"name": "a", "availability_zone": "a:b"}}, 400, "availability_zone"),
    put("/os-aggregates/1", {"aggregate": {}}, 400, "name"),
    put("/os-aggregates/odd", {"aggregate": {"name": "a"}}, 400, "id"),
    get("/os-aggregates/99999999999999999999", 400, "id"),
    get("/os-aggregates/-1", 404, "-1"),
    post("/os-aggregates/1/action", {"add_host": {}}, 400, "host"),
    post("/os-aggregates/1/action", {"add_host": {"host": "a b"}}, 400, "host"),
    post("/os-aggregates/1/action", {"set_metadata": {"metadata": {"a": LONG}}}, 400),
    post("/os-aggregates/1/action", {"set_metadata": {"metadata": {"a": 5}}}, 400),
    post("/os-server-groups", {"server_group": {"name": "g"}}, 400, "policies"),
    post("/os-server-groups", {"server_group": {"name": "g"}}, 400, "policy", 64),
    post("/os-server-groups", group(name=""), 400, "name"),
    post("/os-server-groups", group(policies=[]), 400, "policies"),
    post("/os-server-groups", group(policies=["odd"]), 400, "policies"),
    post("/os-server-groups", group(policies="affinity"), 400, "policies"),
    get("/os-server-groups?limit=-1", 400, "limit"),
    get("/os-server-groups?offset=" + "9" * 15, 400, "offset"),
    get("/os-server-groups/odd", 404, "odd"),
    get("/os-server-groups/a%00b", 404),
    # actions
    get("/servers/odd/os-instance-actions", 404, "odd"),
    get("/servers/SERVER/os-instance-actions/odd", 404, "odd"),
    get("/servers/SERVER/os-instance-actions?changes-since=odd", 400, "changes-since", 58),
    get("/servers/SERVER/os-instance-actions?changes-since=9999999-01-01", 400, "changes-since", 58),
    # the rest
    get("/nothing", 404),
    get("/extensions/nothing", 404, "nothing"),
    Bad("PUT", "/os-availability-zone", {}, 404),
    get("/flavors?" + "&".join(f"a{number}=1" for number in range(1100)), 400),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_bad_input_is_refused_and_says_why(kind: str, request: pytest.FixtureRequest) -> None:
    assert len(TABLE) > 150
    wrong: list[str] = []
    async with cloud_on(kind, request) as cloud:
        await add_host(cloud, "h1")
        server = await add_server(cloud)
        assert (await cloud.admin.post("/flavors", flavor(id="1", name="one"))).status == 200
        assert (await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "one"}})).status == 200
        for bad in TABLE:
            path = bad.path.replace("SERVER", server)
            answer = await cloud.admin(bad.method, path, bad.body, bad.minor)
            if answer.status != bad.status or bad.says not in answer.body.decode():
                asked = f"{bad.method} {path[:80]} {str(bad.body)[:80]} at {bad.minor}"
                wrong.append(f"{asked}: {answer.status}, not {bad.status} with {bad.says!r}: {answer.body[:200]!r}")
            elif not answer.headers["content-type"].startswith("application/json"):
                wrong.append(f"{bad}: {answer.headers['content-type']}")
    assert not wrong, "\n" + "\n".join(wrong)


async def test_a_body_that_is_too_large_or_of_another_kind(request: pytest.FixtureRequest) -> None:
    async with cloud_on("sqlite", request) as cloud:
        assert (await cloud.admin.post("/flavors", b"x" * 200_000)).status == 413
        caller = cloud.admin
        caller.headers["content-type"] = "application/xml"
        assert (await caller.post("/flavors", flavor())).status == 415

"""Who gets what: every declared route, called by a reader, by a stranger from another project, and without a token.

The requests are good ones, so that only policy can refuse them. A route that has no line here fails the test.
"""

from typing import Any

from micronova.api.compute import removed as removed_routes
from micronova.db import instance_actions as actions
from micronova.http.service import Route
from micronova.policies.compute import RULES
from tests.functional.api.resources import Caller, Cloud, cloud  # noqa: F401
from tests.functional.api.seed import add_host, add_server

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD x"
EVERYBODY, READERS, ADMINS, GONE = (200, 200), (200, 403), (403, 403), (410, 410)

# Label -> (what the reader gets, what the stranger gets), and the body to send.
WHO: dict[str, tuple[tuple[int, int], Any]] = {
    "GET /versions/{id}": (EVERYBODY, None),
    "GET /extensions": (EVERYBODY, None),
    "GET /extensions/{id}": (EVERYBODY, None),
    "GET /flavors": (EVERYBODY, None),
    "GET /flavors/detail": (EVERYBODY, None),
    "GET /flavors/{id}": (EVERYBODY, None),
    "POST /flavors": (ADMINS, {"flavor": {"name": "f", "ram": 1, "vcpus": 1, "disk": 1}}),
    "PUT /flavors/{id}": (ADMINS, {"flavor": {"description": "d"}}),
    "DELETE /flavors/{id}": (ADMINS, None),
    "GET /flavors/{id}/os-flavor-access": (ADMINS, None),
    "POST /flavors/{id}/action addTenantAccess": (ADMINS, {"addTenantAccess": {"tenant": "blue"}}),
    "POST /flavors/{id}/action removeTenantAccess": (ADMINS, {"removeTenantAccess": {"tenant": "blue"}}),
    "GET /flavors/{id}/os-extra_specs": (EVERYBODY, None),
    "GET /flavors/{id}/os-extra_specs/{key}": (EVERYBODY, None),
    "POST /flavors/{id}/os-extra_specs": (ADMINS, {"extra_specs": {"a": "c"}}),
    "PUT /flavors/{id}/os-extra_specs/{key}": (ADMINS, {"a": "c"}),
    "DELETE /flavors/{id}/os-extra_specs/{key}": (ADMINS, None),
    "GET /os-keypairs": (EVERYBODY, None),
    "POST /os-keypairs": ((201, 201), {"keypair": {"name": "own", "public_key": KEY}}),
    "GET /os-keypairs/{id}": ((404, 404), None),  # it is another user's
    "DELETE /os-keypairs/{id}": ((404, 404), None),
    "GET /limits": (EVERYBODY, None),
    "GET /os-quota-sets/{id}": (READERS, None),
    "GET /os-quota-sets/{id}/detail": (READERS, None),
    "GET /os-quota-sets/{id}/defaults": (EVERYBODY, None),
    "PUT /os-quota-sets/{id}": (ADMINS, {"quota_set": {"cores": 99}}),
    "DELETE /os-quota-sets/{id}": (ADMINS, None),
    "GET /os-quota-class-sets/{id}": (ADMINS, None),
    "PUT /os-quota-class-sets/{id}": (ADMINS, {"quota_class_set": {"cores": 99}}),
    "GET /os-services": (ADMINS, None),
    "PUT /os-services/{id}": (ADMINS, {"status": "disabled"}),
    "DELETE /os-services/{id}": (ADMINS, None),
    "GET /os-hypervisors": (ADMINS, None),
    "GET /os-hypervisors/detail": (ADMINS, None),
    "GET /os-hypervisors/statistics": (ADMINS, None),
    "GET /os-hypervisors/{id}": (ADMINS, None),
    "GET /os-hypervisors/{id}/uptime": (ADMINS, None),
    "GET /os-hypervisors/{id}/search": (ADMINS, None),
    "GET /os-hypervisors/{id}/servers": (ADMINS, None),
    "GET /os-hosts": (ADMINS, None),
    "GET /os-hosts/{id}": (ADMINS, None),
    "PUT /os-hosts/{id}": (ADMINS, {"status": "disable"}),
    "GET /os-hosts/{id}/startup": (ADMINS, None),
    "GET /os-hosts/{id}/shutdown": (ADMINS, None),
    "GET /os-hosts/{id}/reboot": (ADMINS, None),
    "GET /os-availability-zone": (EVERYBODY, None),
    "GET /os-availability-zone/detail": (ADMINS, None),
    "GET /os-aggregates": (ADMINS, None),
    "GET /os-aggregates/{id}": (ADMINS, None),
    "POST /os-aggregates": (ADMINS, {"aggregate": {"name": "b"}}),
    "PUT /os-aggregates/{id}": (ADMINS, {"aggregate": {"name": "b"}}),
    "DELETE /os-aggregates/{id}": (ADMINS, None),
    "POST /os-aggregates/{id}/action add_host": (ADMINS, {"add_host": {"host": "h1"}}),
    "POST /os-aggregates/{id}/action remove_host": (ADMINS, {"remove_host": {"host": "h1"}}),
    "POST /os-aggregates/{id}/action set_metadata": (ADMINS, {"set_metadata": {"metadata": {}}}),
    "POST /os-aggregates/{id}/images": (ADMINS, {"cache": [{"id": "0b2a6c0e-8f36-4c0f-9d5e-1f2a3b4c5d6e"}]}),
    "GET /os-server-groups": (EVERYBODY, None),
    "POST /os-server-groups": ((403, 200), {"server_group": {"name": "g", "policies": ["affinity"]}}),
    "GET /os-server-groups/{id}": ((200, 404), None),
    "DELETE /os-server-groups/{id}": ((403, 404), None),
    "GET /servers/{id}/os-instance-actions": ((200, 404), None),
    "GET /servers/{id}/os-instance-actions/{request_id}": ((200, 404), None),
}


class Targets:
    """What belongs to project red, for others to try to reach."""

    def __init__(self, ids: dict[str, str]) -> None:
        self._ids = ids

    @classmethod
    async def made(cls, cloud: Cloud) -> "Targets":
        node = await add_host(cloud, "h1")
        server = await add_server(cloud, host="h1", node_uuid=node)
        await cloud.database.write(actions.start, server, "req-1", "create", "ada", "red", 1)
        await cloud.admin.post("/flavors", {"flavor": {"id": "1", "name": "f1", "ram": 1, "vcpus": 1, "disk": 1}})
        await cloud.admin.post("/flavors/1/os-extra_specs", {"extra_specs": {"a": "b"}})
        await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "a"}})
        await cloud.member.post("/os-keypairs", {"keypair": {"name": "mine", "public_key": KEY}})
        body = {"server_group": {"name": "g", "policies": ["affinity"]}}
        group = (await cloud.member.post("/os-server-groups", body)).json()["server_group"]["id"]
        return cls(
            {
                "versions": "v2.1", "extensions": "os-keypairs", "flavors": "1", "os-keypairs": "mine",
                "os-quota-sets": "red", "os-quota-class-sets": "default", "os-hosts": "h1", "os-aggregates": "1",
                "os-server-groups": group, "servers": server, "os-services": "1", "os-hypervisors": "1",
                "os-services since 2.53": "00000000-0000-4000-8000-000000000000",
            }
        )  # fmt: skip

    def path(self, route: Route, minor: int) -> str:
        noun = route.path.split("/")[1]
        name = self._ids.get(f"{noun} since 2.53") if minor >= 53 else None
        filled = route.path.replace("{id}", name or self._ids.get(noun, "1"))
        for field, value in {"key": "a", "request_id": "req-1", "entry": "1", "console": "1"}.items():
            filled = filled.replace(f"{{{field}}}", value)
        return filled


def _request(route: Route) -> tuple[int, Any]:
    """Return a microversion at which the route exists, and a good body for it."""
    minor = max(route.versions.since, 2 if route.versions.until > 1 else 1)
    body = WHO[route.label][1] if route.label in WHO else {"x": 1} if route.method in ("POST", "PUT") else None
    if route.label == "PUT /os-services/{id}" and route.versions.until < 53:
        body = {"host": "h1", "binary": "nova-compute"}
    return minor, {route.action: None} if route.action and route.label not in WHO else body


async def test_every_route_gives_each_caller_what_it_should(cloud: Cloud) -> None:
    targets = await Targets.made(cloud)
    wrong: list[str] = []
    for route in cloud.routes:
        if route.policy is None:
            continue
        removed = route.handler is removed_routes.gone
        assert removed or route.label in WHO, f"{route.label} has no line in the table"
        reader, stranger = GONE if removed else WHO[route.label][0]
        if route.versions.until == 1 and route.method == "POST":
            reader = stranger = 200  # key pairs, before 2.2
            await cloud.reader.delete("/os-keypairs/own")
        minor, body = _request(route)
        callers: list[tuple[str, Caller, int]] = [
            ("nobody", cloud.nobody, 401),
            ("stranger", cloud.stranger, stranger),
            ("reader", cloud.reader, reader),
        ]
        for name, caller, expected in callers:
            answer = await caller(route.method, targets.path(route, minor), body, minor)
            if route.path == "/os-keypairs" and route.method == "POST":
                await caller.delete("/os-keypairs/own", 2)
            if answer.status != expected:
                wrong.append(
                    f"{name}: {route.label} at 2.{minor}: {answer.status}, not {expected}: {answer.body[:120]!r}"
                )
    assert not wrong, "\n" + "\n".join(wrong)
    assert WHO.keys() <= {route.label for route in cloud.routes}


async def test_strangers_see_nothing_of_others_in_lists(cloud: Cloud) -> None:
    await Targets.made(cloud)
    for path, key in (("/os-keypairs", "keypairs"), ("/os-server-groups", "server_groups")):
        assert (await cloud.stranger.get(path)).json()[key] == []


async def test_a_project_in_the_path_must_be_the_tokens(cloud: Cloud) -> None:
    assert (await cloud.stranger("GET", "/flavors", prefix="/v2.1/red")).status == 400
    assert (await cloud.stranger("GET", "/flavors", prefix="/v2.1/blue")).status == 200


async def test_every_policy_is_one_of_ours(cloud: Cloud) -> None:
    names = {rule.name for rule in RULES}
    assert [route.label for route in cloud.routes if route.policy and route.policy not in names] == []
    assert [route.label for route in cloud.routes if route.policy is None] == ["GET "]  # the version's document

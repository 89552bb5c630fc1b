"""Who is an administrator is decided by the policy rule `context_is_admin`, not by the name of a role."""

from pathlib import Path

import pytest

from micronova.objects.context import RequestContext
from micronova.policies.compute import RULES
from micronova.policies.enforcer import Enforcer
from tests.functional.cloud import Caller, CloudOptions

POLICY_FILE = Path(__file__).with_name("context_is_admin.yaml")
CLOUD = CloudOptions(api={"api": {"policy_file": str(POLICY_FILE)}})


async def test_a_lock_is_no_obstacle_to_whom_the_rule_names(user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "lock")
    assert "locked" in await user.admin.refused(409, "POST", f"/servers/{id}/action", {"os-stop": None})
    assert "locked" in await user.admin.refused(409, "DELETE", f"/servers/{id}")
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")


async def test_private_flavors_and_servers_of_others_follow_the_rule(user: Caller) -> None:
    flavor = (
        await user.post(
            "/flavors",
            {"flavor": {"name": f"f-{user.project}", "ram": 64, "vcpus": 1, "disk": 0}
             | {"os-flavor-access:is_public": False}},
            200,
        )
    )["flavor"]["id"]  # fmt: skip
    body = user.body(flavorRef=flavor)
    assert "Flavor" in await user.admin.refused(400, "POST", "/servers", body)
    id = (await user.boot(flavorRef=flavor))["id"]
    other = Caller(user.cloud, "somebody", "0" * 32, user.minor)
    assert (await other.get(f"/servers/{id}"))["server"]["id"] == id
    await other.admin.refused(404, "GET", f"/servers/{id}")


async def test_policy_hides_the_extra_specs_of_a_server(user: Caller) -> None:
    id = (await user.boot())["id"]
    for caller, shown in ((user, False), (user.admin, True)):
        server = (await caller.get(f"/servers/{id}"))["server"]
        [listed] = (await caller.get("/servers/detail"))["servers"]
        assert [("extra_specs" in each["flavor"]) for each in (server, listed)] == [shown, shown]
        assert "vcpus" in server["flavor"]


async def test_policy_keeps_the_trusted_certificates_of_a_server(user: Caller) -> None:
    server = await user.boot()
    for trusted in (["a"], None):
        body = {"rebuild": {"imageRef": server["image"]["id"], "trusted_image_certificates": trusted}}
        await user.at(63).refused(403, "POST", f"/servers/{server['id']}/action", body)


@pytest.mark.parametrize(
    ("roles", "file", "expected"),
    [
        (("admin",), None, True),
        (("member",), None, False),
        (("admin", "member"), POLICY_FILE, False),
        (("member",), POLICY_FILE, True),
    ],
)
async def test_is_admin_in_policy_files_of_old(roles: tuple[str, ...], file: Path | None, expected: bool) -> None:
    context = RequestContext(request_id="", user_id="u", project_id="p", roles=roles)
    assert Enforcer(RULES, file).allows("admin_api", context) is expected

"""Limits, quota sets and quota classes at every microversion at which they change."""

import pytest

from micronova.conf.api import QuotaSettings
from micronova.db import quotas
from tests.functional.api.resources import Cloud, cloud  # noqa: F401
from tests.schemas.tempest import check, versions_of


@pytest.mark.parametrize("minor", versions_of("limits", 75))
async def test_limits(cloud: Cloud, minor: int) -> None:
    limits = QuotaSettings().limits()
    await cloud.database.write(quotas.charge, "red", {"instances": 2, "cores": 4, "ram": 1024}, limits)
    answer = await cloud.reader.get("/limits", minor)
    check("limits", "get_limit", minor, answer.status, answer.json())
    absolute = answer.json()["limits"]["absolute"]
    assert (absolute["maxTotalInstances"], absolute["totalInstancesUsed"]) == (10, 2)
    assert (absolute["maxTotalCores"], absolute["totalCoresUsed"]) == (20, 4)
    assert (absolute["maxTotalRAMSize"], absolute["totalRAMUsed"]) == (51200, 1024)
    other = (await cloud.admin.get("/limits?tenant_id=blue", minor)).json()["limits"]["absolute"]
    assert other["totalInstancesUsed"] == 0
    assert (await cloud.stranger.get("/limits?tenant_id=red", minor)).status == 403


@pytest.mark.parametrize("minor", versions_of("quotas", 75))
async def test_quota_sets(cloud: Cloud, minor: int) -> None:
    admin = cloud.admin
    answer = await admin.get("/os-quota-sets/red", minor)
    check("quotas", "get_quota_set", minor, answer.status, answer.json())
    defaults = answer.json()
    answer = await cloud.reader.get("/os-quota-sets/red/defaults", minor)
    check("quotas", "get_quota_set", minor, answer.status, answer.json())
    assert answer.json() == defaults
    answer = await admin.put("/os-quota-sets/red", {"quota_set": {"cores": 7, "ram": "-1"}}, minor)
    check("quotas", "update_quota_set", minor, answer.status, answer.json())
    assert (answer.json()["quota_set"]["cores"], answer.json()["quota_set"]["ram"]) == (7, -1)
    answer = await cloud.reader.get("/os-quota-sets/red/detail", minor)
    check("quotas", "get_quota_set_details", minor, answer.status, answer.json())
    assert answer.json()["quota_set"]["cores"] == {"limit": 7, "in_use": 0, "reserved": 0}
    answer = await admin.delete("/os-quota-sets/red", minor)
    check("quotas", "delete_quota", minor, answer.status, answer.json())
    assert (await admin.get("/os-quota-sets/red", minor)).json() == defaults


@pytest.mark.parametrize("minor", versions_of("quota_classes"))
async def test_quota_classes(cloud: Cloud, minor: int) -> None:
    admin = cloud.admin
    answer = await admin.put("/os-quota-class-sets/default", {"quota_class_set": {"instances": 3}}, minor)
    check("quota_classes", "update_quota_class_set", minor, answer.status, answer.json())
    answer = await admin.get("/os-quota-class-sets/default", minor)
    check("quota_classes", "get_quota_class_set", minor, answer.status, answer.json())
    shown = answer.json()["quota_class_set"]
    assert shown["instances"] == 3 and ("server_groups" in shown) == (minor >= 50)
    assert (await admin.get("/os-quota-sets/red", minor)).json()["quota_set"]["instances"] == 3
    assert (await admin.get("/os-quota-sets/red/defaults", minor)).json()["quota_set"]["instances"] == 3


@pytest.mark.parametrize(
    ("key", "until_sets", "until_classes"),
    [("fixed_ips", 35, 49), ("security_groups", 35, 49), ("injected_files", 56, 56)],
)
async def test_old_resources_cannot_be_set_any_more(
    cloud: Cloud, key: str, until_sets: int, until_classes: int
) -> None:
    for path, body, last in (
        ("/os-quota-sets/red", "quota_set", until_sets),
        ("/os-quota-class-sets/x", "quota_class_set", until_classes),
    ):
        assert (await cloud.admin.put(path, {body: {key: 5}}, last)).status == 200
        assert (await cloud.admin.put(path, {body: {key: 5}}, last + 1)).status == 400


async def test_a_limit_below_usage_needs_force(cloud: Cloud) -> None:
    await cloud.database.write(quotas.charge, "red", {"cores": 4}, {"cores": 20})
    answer = await cloud.admin.put("/os-quota-sets/red", {"quota_set": {"cores": 3}})
    assert answer.status == 400 and b"already used" in answer.body
    assert (await cloud.admin.put("/os-quota-sets/red", {"quota_set": {"cores": 3, "force": "True"}})).status == 200
    assert (await cloud.admin.put("/os-quota-sets/red", {"quota_set": {"cores": -1}})).status == 200


async def test_projects_must_exist(cloud: Cloud) -> None:
    for method, path, body in (
        ("GET", "/os-quota-sets/green", None),
        ("GET", "/os-quota-sets/green/detail", None),
        ("GET", "/os-quota-sets/green/defaults", None),
        ("PUT", "/os-quota-sets/green", {"quota_set": {}}),
    ):
        assert (await cloud.admin(method, path, body)).status == 400


async def test_who_may_see_and_set(cloud: Cloud) -> None:
    assert (await cloud.reader.get("/os-quota-sets/red")).status == 200
    assert (await cloud.stranger.get("/os-quota-sets/red")).status == 403
    assert (await cloud.stranger.get("/os-quota-sets/red/detail")).status == 403
    assert (await cloud.stranger.get("/os-quota-sets/red/defaults")).status == 200
    assert (await cloud.member.put("/os-quota-sets/red", {"quota_set": {"cores": 99}})).status == 403
    assert (await cloud.member.delete("/os-quota-sets/red")).status == 403
    assert (await cloud.member.get("/os-quota-class-sets/default")).status == 403


async def test_limits_of_one_user_in_a_project(cloud: Cloud) -> None:
    admin = cloud.admin
    path = "/os-quota-sets/red?user_id=ada"
    assert (await admin.put(path, {"quota_set": {"instances": 4}})).json()["quota_set"]["instances"] == 4
    assert (await admin.get(path)).json()["quota_set"]["instances"] == 4
    assert (await admin.get("/os-quota-sets/red")).json()["quota_set"]["instances"] == 10
    answer = await admin.put("/os-quota-sets/red?user_id=bob", {"quota_set": {"instances": 7}})
    assert answer.status == 400 and b"less than or equal to 6" in answer.body
    assert (await admin.delete(path)).status == 202
    assert (await admin.get(path)).json()["quota_set"]["instances"] == 10

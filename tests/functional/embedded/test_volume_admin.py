"""Types, quotas, services, messages and transfers of the volume service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.volume.core import VolumeServiceSettings
from micronova.embedded.volume.store.quotas import QUOTAS
from tests.unit.embedded.volume.world import ADMIN, ALICE, BOB, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def test_types(cloud: World) -> None:
    [first] = (await cloud.do("GET", "/types"))["volume_types"]
    assert (first["name"], first["is_public"]) == ("__DEFAULT__", True)
    body = {"volume_type": {"name": "fast", "extra_specs": {"x:a": "b", "multiattach": "<is> True"}}}
    assert (await cloud.call("POST", "/types", body)).status == 403
    made = (await cloud.do("POST", "/types", body, token=ADMIN))["volume_type"]
    assert (await cloud.call("POST", "/types", body, token=ADMIN)).status == 409
    path = f"/types/{made['id']}"
    assert made["extra_specs"] == {"x:a": "b", "multiattach": "<is> True"} and "qos_specs_id" not in made
    assert (await cloud.do("GET", path, token=ADMIN))["volume_type"]["qos_specs_id"] is None
    seen = (await cloud.do("GET", path))["volume_type"]
    assert seen["extra_specs"] == {"multiattach": "<is> True"} and "qos_specs_id" not in seen
    changed = await cloud.do("PUT", path, {"volume_type": {"name": "slow", "description": "d"}}, token=ADMIN)
    assert (changed["volume_type"]["name"], changed["volume_type"]["description"]) == ("slow", "d")
    taken = {"volume_type": {"name": "__DEFAULT__"}}
    assert (await cloud.call("PUT", path, taken, token=ADMIN)).status == 409
    assert (await cloud.call("PUT", path, {"volume_type": {}}, token=ADMIN)).status == 400
    specs = f"{path}/extra_specs"
    assert (await cloud.do("POST", specs, {"extra_specs": {"c": "d"}}, token=ADMIN)) == {"extra_specs": {"c": "d"}}
    assert (await cloud.do("PUT", f"{specs}/c", {"c": "e"}, token=ADMIN)) == {"c": "e"}
    assert (await cloud.do("GET", f"{specs}/c", token=ADMIN)) == {"c": "e"}
    assert (await cloud.call("GET", f"{specs}/c")).status == 404  # only administrators see it
    assert (await cloud.call("DELETE", f"{specs}/c", token=ADMIN)).status == 202
    assert (await cloud.call("DELETE", f"{specs}/c", token=ADMIN)).status == 404
    volume = await cloud.create(volume_type="slow")
    assert (await cloud.call("DELETE", path, token=ADMIN)).status == 400
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert (await cloud.call("DELETE", path, token=ADMIN)).status == 202
    assert (await cloud.call("DELETE", f"/types/{first['id']}", token=ADMIN)).status == 400
    assert (await cloud.do("GET", "/types/default"))["volume_type"]["id"] == first["id"]


async def test_a_type_asks_for_what_the_back_end_has(cloud: World) -> None:
    for number, (specs, fits) in enumerate([
        ({"volume_backend_name": "files", "capabilities:storage_protocol": "<or> iscsi <or> nbd"}, True),
        ({"thin_provisioning_support": "<is> True", "other:scope": "x"}, True),
        ({"volume_backend_name": "ceph"}, False),
        ({"no_such_capability": "x"}, False),
    ]):  # fmt: skip
        body = {"volume_type": {"name": f"t{number}", "extra_specs": specs}}
        await cloud.do("POST", "/types", body, token=ADMIN)
        volume = await cloud.create(volume_type=f"t{number}", wait=None)
        while (status := (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"]) == "creating":
            await asyncio.sleep(0.005)
        assert status == ("available" if fits else "error"), specs


async def test_types_for_some_projects(cloud: World) -> None:
    body = {"volume_type": {"name": "secret", "os-volume-type-access:is_public": False}}
    path = f"/types/{(await cloud.do('POST', '/types', body, token=ADMIN))['volume_type']['id']}"
    assert (await cloud.call("GET", path)).status == 404
    wanted = {"volume": {"size": 1, "volume_type": "secret"}}
    assert (await cloud.call("POST", "/volumes", wanted)).status == 404
    await cloud.do("POST", f"{path}/action", {"addProjectAccess": {"project": "p1"}}, token=ADMIN)
    again = {"addProjectAccess": {"project": "p1"}}
    assert (await cloud.call("POST", f"{path}/action", again, token=ADMIN)).status == 409
    access = (await cloud.do("GET", f"{path}/os-volume-type-access", token=ADMIN))["volume_type_access"]
    assert [each["project_id"] for each in access] == ["p1"]
    assert len((await cloud.do("GET", "/types"))["volume_types"]) == 2
    assert len((await cloud.do("GET", "/types", token=BOB))["volume_types"]) == 1
    assert len((await cloud.do("GET", "/types?is_public=none", token=ADMIN))["volume_types"]) == 2
    await cloud.create(volume_type="secret")
    body = {"default_type": {"volume_type": "secret"}}
    assert (await cloud.call("PUT", "/default-types/p2", body, token=ADMIN)).status == 404
    await cloud.do("PUT", "/default-types/p1", body, token=ADMIN)
    assert (await cloud.create())["volume_type"] == "secret"
    assert (await cloud.create(token=BOB))["volume_type"] == "__DEFAULT__"
    assert len((await cloud.do("GET", "/default-types", token=ADMIN))["default_types"]) == 1
    assert (await cloud.call("DELETE", "/default-types/p1", token=ADMIN)).status == 204
    assert (await cloud.call("GET", "/default-types/p1", token=ADMIN)).status == 404
    assert (await cloud.call("GET", "/default-types", token=ADMIN, minor=61)).status == 404
    gone = {"removeProjectAccess": {"project": "p1"}}
    assert (await cloud.call("POST", f"{path}/action", gone, token=ADMIN)).status == 202
    assert (await cloud.call("POST", f"{path}/action", gone, token=ADMIN)).status == 404


async def test_an_association_with_qos_specs_that_are_deleted_meanwhile(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await cloud.do("POST", "/qos-specs", {"qos_specs": {"name": "gold"}}, token=ADMIN))["qos_specs"]
    kind = (await cloud.do("POST", "/types", {"volume_type": {"name": "fast"}}, token=ADMIN))["volume_type"]
    path, write = f"/qos-specs/{made['id']}", cloud.database.write

    async def late(fn: Callable[..., Any], *args: Any) -> Any:  # the request has read the QoS specs
        monkeypatch.undo()
        await cloud.do("DELETE", path, token=ADMIN)
        return await write(fn, *args)

    monkeypatch.setattr(cloud.database, "write", late)
    answer = await cloud.call("GET", f"{path}/associate?vol_type_id={kind['id']}", token=ADMIN)
    assert answer.status == 404, answer
    assert (await cloud.do("GET", f"/types/{kind['id']}", token=ADMIN))["volume_type"]["qos_specs_id"] is None


async def test_qos_specs(cloud: World) -> None:
    body = {"qos_specs": {"name": "gold", "consumer": "front-end", "total_iops_sec": "100"}}
    assert (await cloud.call("POST", "/qos-specs", body)).status == 403
    made = (await cloud.do("POST", "/qos-specs", body, token=ADMIN))["qos_specs"]
    assert made == {"id": made["id"], "name": "gold", "consumer": "front-end", "specs": {"total_iops_sec": "100"}}
    assert (await cloud.call("POST", "/qos-specs", body, token=ADMIN)).status == 409
    path = f"/qos-specs/{made['id']}"
    await cloud.do("PUT", path, {"qos_specs": {"read_iops_sec": "5"}}, token=ADMIN)
    assert (await cloud.call("PUT", f"{path}/delete_keys", {"keys": ["total_iops_sec"]}, token=ADMIN)).status == 202
    assert (await cloud.call("PUT", f"{path}/delete_keys", {"keys": ["total_iops_sec"]}, token=ADMIN)).status == 404
    assert (await cloud.do("GET", path, token=ADMIN))["qos_specs"]["specs"] == {"read_iops_sec": "5"}
    [type_] = (await cloud.do("GET", "/types"))["volume_types"]
    assert (await cloud.call("GET", f"{path}/associate?vol_type_id={type_['id']}", token=ADMIN)).status == 202
    found = (await cloud.do("GET", f"{path}/associations", token=ADMIN))["qos_associations"]
    assert [each["id"] for each in found] == [type_["id"]]
    assert (await cloud.call("DELETE", path, token=ADMIN)).status == 400
    assert (await cloud.call("GET", f"{path}/disassociate?vol_type_id={type_['id']}", token=ADMIN)).status == 202
    assert (await cloud.call("GET", f"{path}/disassociate_all", token=ADMIN)).status == 202
    assert (await cloud.call("DELETE", path, token=ADMIN)).status == 202
    assert (await cloud.call("GET", path, token=ADMIN)).status == 404
    wrong = {"qos_specs": {"name": "x", "consumer": "zork"}}
    assert (await cloud.call("POST", "/qos-specs", wrong, token=ADMIN)).status == 400


async def test_quotas_hold_under_races(cloud: World) -> None:
    await cloud.do("PUT", "/os-quota-sets/p1", {"quota_set": {"volumes": 3, "gigabytes": 5}}, token=ADMIN)
    body = {"volume": {"size": 1}}
    answers = await asyncio.gather(*(cloud.call("POST", "/volumes", body) for _ in range(10)))
    assert sorted(answer.status for answer in answers) == [202] * 3 + [413] * 7
    told = next(answer for answer in answers if answer.status == 413).json()["overLimit"]
    assert told["code"] == 413 and "volumes" in told["message"]
    ids = [answer.json()["volume"]["id"] for answer in answers if answer.status == 202]
    for id in ids:
        await cloud.until(f"/volumes/{id}", "available")
    answers = await asyncio.gather(*(cloud.act(id, "os-extend", new_size=2) for id in ids))
    assert sorted(answer.status for answer in answers) == [202, 202, 413]
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=true"))["quota_set"]
    assert usage["volumes"] == {"limit": 3, "in_use": 3, "reserved": 0, "allocated": 0}
    assert usage["gigabytes"]["in_use"] == 5
    for id in ids:
        await cloud.until(f"/volumes/{id}", "available")
        await cloud.do("DELETE", f"/volumes/{id}")
        await cloud.until(f"/volumes/{id}", "")
    usage = (await cloud.do("GET", "/os-quota-sets/p1?usage=true"))["quota_set"]
    assert {name: each["in_use"] for name, each in usage.items() if name != "id"} == dict.fromkeys(
        usage.keys() - {"id"}, 0
    )


async def test_quota_sets_classes_and_limits(cloud: World) -> None:
    shown = (await cloud.do("GET", "/os-quota-sets/p1"))["quota_set"]
    assert {name: shown[name] for name in QUOTAS} == dict(QUOTAS)
    assert shown["volumes___DEFAULT__"] == -1 and shown["id"] == "p1"
    assert (await cloud.call("GET", "/os-quota-sets/p1", token=BOB)).status == 403
    new = {"quota_set": {"volumes": 5}}
    assert (await cloud.call("PUT", "/os-quota-sets/p1", new)).status == 403
    assert (await cloud.do("PUT", "/os-quota-sets/p1", new, token=ADMIN))["quota_set"]["volumes"] == 5
    for wrong in ({}, {"zork": 1}, {"volumes": -2}, {"volumes": "x"}, {"volumes": 2**31}):
        answer = await cloud.call("PUT", "/os-quota-sets/p1", {"quota_set": wrong}, token=ADMIN)
        assert answer.status == 400, wrong
    await cloud.create()
    assert (await cloud.call("PUT", "/os-quota-sets/p1", {"quota_set": {"volumes": 0}}, token=ADMIN)).status == 400
    await cloud.do("PUT", "/os-quota-class-sets/default", {"quota_class_set": {"volumes": 7}}, token=ADMIN)
    assert (await cloud.do("GET", "/os-quota-sets/p2", token=BOB))["quota_set"]["volumes"] == 7
    assert (await cloud.do("GET", "/os-quota-sets/p1/defaults"))["quota_set"]["volumes"] == 7
    limits = (await cloud.do("GET", "/limits"))["limits"]["absolute"]
    assert (limits["maxTotalVolumes"], limits["totalVolumesUsed"], limits["totalGigabytesUsed"]) == (5, 1, 1)
    other = (await cloud.do("GET", "/limits?project_id=p1", token=ADMIN))["limits"]["absolute"]
    assert other["totalVolumesUsed"] == 1
    assert (await cloud.do("GET", "/limits?project_id=p1", token=BOB))["limits"]["absolute"]["totalVolumesUsed"] == 0
    await cloud.do("DELETE", "/os-quota-sets/p1", token=ADMIN)
    assert (await cloud.do("GET", "/os-quota-sets/p1"))["quota_set"]["volumes"] == 7


@pytest.mark.parametrize("resource", ["volumes", "gigabytes"])
async def test_the_quota_of_a_type_is_named(cloud: World, resource: str) -> None:
    await cloud.do("POST", "/types", {"volume_type": {"name": "gold"}}, token=ADMIN)
    await cloud.do("PUT", "/os-quota-sets/p1", {"quota_set": {f"{resource}_gold": 1}}, token=ADMIN)
    await cloud.create(volume_type="gold")
    answer = await cloud.call("POST", "/volumes", {"volume": {"size": 1, "volume_type": "gold"}})
    assert answer.status == 413 and f"'{resource}_gold' allows 1" in answer.body.decode()


async def test_a_volume_may_have_a_largest_size(tmp_path: Path) -> None:
    settings = VolumeServiceSettings(quotas={**QUOTAS, "per_volume_gigabytes": 2})
    async with world(tmp_path, settings=settings) as cloud:
        assert (await cloud.call("POST", "/volumes", {"volume": {"size": 3}})).status == 413
        volume = await cloud.create(size=2)
        assert (await cloud.act(volume["id"], "os-extend", new_size=3)).status == 413
        assert (await cloud.do("GET", "/os-quota-sets/p1?usage=1"))["quota_set"]["gigabytes"]["in_use"] == 2


async def test_pools_for_a_type(cloud: World) -> None:
    path = "/scheduler-stats/get_pools?volume_type="
    for name, backend in (("here", "files"), ("elsewhere", "ceph")):
        fields = {"name": name, "extra_specs": {"volume_backend_name": backend}}
        await cloud.do("POST", "/types", {"volume_type": fields}, token=ADMIN)
    for name, minor, number in (("here", 35, 1), ("elsewhere", 35, 0), ("elsewhere", 34, 1)):
        assert len((await cloud.do("GET", path + name, token=ADMIN, minor=minor))["pools"]) == number, (name, minor)
    assert (await cloud.call("GET", f"{path}nowhere", token=ADMIN)).status == 404


async def test_services_and_what_else_operators_ask(cloud: World) -> None:
    found = (await cloud.do("GET", "/os-services", token=ADMIN))["services"]
    assert [(each["binary"], each["host"], each["state"]) for each in found] == [
        ("cinder-backup", "here", "up"),
        ("cinder-scheduler", "here", "up"),
        ("cinder-volume", "here@files", "up"),
    ]
    assert (await cloud.call("GET", "/os-services")).status == 403
    body = {"binary": "cinder-volume", "host": "here@files", "disabled_reason": "new disks"}
    shown = await cloud.do("PUT", "/os-services/disable-log-reason", body, token=ADMIN)
    assert (shown["status"], shown["disabled_reason"]) == ("disabled", "new disks")
    zones = (await cloud.do("GET", "/os-availability-zone"))["availabilityZoneInfo"]
    assert zones == [{"zoneName": "nova", "zoneState": {"available": False}}]
    volume = await cloud.create(wait=None)
    while (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] != "error":
        await asyncio.sleep(0.005)
    [message] = (await cloud.do("GET", "/messages"))["messages"]
    assert (message["resource_uuid"], message["event_id"]) == (volume["id"], "VOLUME_VOLUME_008_003")
    assert message["user_message"] == "The volume was not created: no storage service takes volumes of this type."
    path = f"/messages/{message['id']}"
    assert (await cloud.do("GET", path))["message"] == message
    assert (await cloud.call("GET", path, token=BOB)).status == 404
    assert (await cloud.do("GET", "/messages", token=BOB))["messages"] == []
    assert (await cloud.call("DELETE", path)).status == 204
    assert (await cloud.call("GET", path)).status == 404
    body = {"binary": "cinder-volume", "host": "here@files"}
    await cloud.do("PUT", "/os-services/enable", body, token=ADMIN)
    assert (await cloud.call("PUT", "/os-services/enable", {**body, "host": "x"}, token=ADMIN)).status == 404
    [pool] = (await cloud.do("GET", "/scheduler-stats/get_pools?detail=true", token=ADMIN))["pools"]
    assert pool["name"] == "here@files#files" and pool["capabilities"]["allocated_capacity_gb"] == 1
    assert (await cloud.do("GET", "/capabilities/here@files", token=ADMIN))["storage_protocol"] == "nbd"
    assert (await cloud.call("GET", "/capabilities/there", token=ADMIN)).status == 404
    filters = (await cloud.do("GET", "/resource_filters?resource=volume"))["resource_filters"]
    assert [each["resource"] for each in filters] == ["volume"]
    assert {each["alias"] for each in (await cloud.do("GET", "/extensions"))["extensions"]} >= {"os-volume-transfer"}


@pytest.mark.parametrize("base", ["os-volume-transfer", "volume-transfers"])
async def test_transfers(cloud: World, base: str) -> None:
    volume = await cloud.create(size=2)
    snapshot = await cloud.snapshot(volume["id"])
    body = {"transfer": {"volume_id": volume["id"], "name": "gift"}}
    assert (await cloud.call("POST", f"/{base}", body, token=BOB)).status == 404
    made = (await cloud.do("POST", f"/{base}", body))["transfer"]
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "awaiting-transfer"
    assert (await cloud.call("POST", f"/{base}", body)).status == 400
    path = f"/{base}/{made['id']}"
    shown = (await cloud.do("GET", path))["transfer"]
    assert shown["name"] == "gift" and shown["accepted"] is False and "auth_key" not in shown
    assert (await cloud.call("GET", path, token=BOB)).status == 404
    assert (await cloud.do("GET", f"/{base}", token=BOB))["transfers"] == []
    assert len((await cloud.do("GET", f"/{base}/detail"))["transfers"]) == 1
    wrong = {"accept": {"auth_key": "wrong"}}
    assert (await cloud.call("POST", f"{path}/accept", wrong, token=BOB)).status == 404
    right = {"accept": {"auth_key": made["auth_key"]}}
    await cloud.do("PUT", "/os-quota-sets/p2", {"quota_set": {"gigabytes": 3}}, token=ADMIN)
    assert (await cloud.call("POST", f"{path}/accept", right, token=BOB)).status == 413
    await cloud.do("PUT", "/os-quota-sets/p2", {"quota_set": {"gigabytes": 4}}, token=ADMIN)
    assert (await cloud.call("POST", f"{path}/accept", right, token=BOB)).status == 202
    assert (await cloud.call("GET", f"/volumes/{volume['id']}", token=ALICE)).status == 404
    assert (await cloud.do("GET", f"/volumes/{volume['id']}", token=BOB))["volume"]["status"] == "available"
    assert (await cloud.call("GET", f"/snapshots/{snapshot['id']}", token=BOB)).status == 200
    for token, project, used in ((ALICE, "p1", 0), (BOB, "p2", 4)):
        usage = (await cloud.do("GET", f"/os-quota-sets/{project}?usage=1", token=token))["quota_set"]
        assert usage["gigabytes"]["in_use"] == used
    assert (await cloud.call("GET", path, token=BOB)).status == 404
    again = (await cloud.do("POST", f"/{base}", body, token=BOB))["transfer"]
    assert (await cloud.call("DELETE", f"/{base}/{again['id']}", token=BOB)).status == 202
    assert (await cloud.do("GET", f"/volumes/{volume['id']}", token=BOB))["volume"]["status"] == "available"

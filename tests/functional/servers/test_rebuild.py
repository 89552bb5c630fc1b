"""Rebuild: a server gets a new disk and keeps its place, its ports and its name in the cloud."""

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.conductor.operations import engine
from micronova.db.tables import instances, operations, request_specs
from micronova.objects.errors import Unavailable
from micronova.objects.scheduling import RequestSpec
from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.good_requests import KEY
from tests.functional.servers.embedded_services import image, network, ok, ports_of

CLOUD = CloudOptions(hosts=2, roles=("image", "network"))
Rebuilt = list[tuple[str, GuestPlan, bool]]


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rebuilt]:
    """The host, the plan and whether to start the guest, of each rebuild on a simulated host."""
    if ON_CLUSTER:
        pytest.skip("reads the plans of guests in the process of their hosts")
    plans: Rebuilt = []
    rebuild = FakeDriver.rebuild

    async def noted(driver: FakeDriver, plan: GuestPlan, *, start: bool, **more: Any) -> None:
        plans.append((driver.host, plan, start))
        await rebuild(driver, plan, start=start, **more)

    monkeypatch.setattr(FakeDriver, "rebuild", noted)
    yield plans


@pytest_asyncio.fixture(loop_scope="module")
async def images(user: Caller) -> AsyncIterator[tuple[str, str]]:
    """Two images of the user."""
    yield await image(user), await image(user, size=2048)


async def _rebuild(user: Caller, id: str, image_id: str, status: str = "ACTIVE", **fields: Any) -> dict[str, Any]:
    """Rebuild a server; return what the request was answered, once the rebuild has ended."""
    answer = await user.act(id, "rebuild", {"imageRef": image_id, **fields})
    await user.wait_for(id, status)
    return dict(answer["server"])


async def test_the_server_gets_the_image_and_keeps_its_place(
    cloud: Cloud, user: Caller, images: tuple[str, str], rebuilt: Rebuilt
) -> None:
    net = await network(user)
    group = (await user.post("/os-server-groups", {"server_group": {"name": "g", "policy": "affinity"}}, 200))[
        "server_group"
    ]
    fields = {"networks": [{"uuid": net["id"]}], "tags": ["t"], "metadata": {"a": "b"}, "config_drive": True}
    before = await user.boot({"group": group["id"]}, imageRef=images[0], **fields)
    id, home = before["id"], await user.host_of(before["id"])
    [port] = await ports_of(user, id)
    answer = await _rebuild(user, id, images[1])
    assert (answer["status"], answer["progress"], answer["image"]["id"]) == ("REBUILD", 0, images[1])
    after = await user.show(id)
    same = ("name", "addresses", "tags", "metadata", "hostId", "flavor", "created", "config_drive", "server_groups")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert after["image"]["id"] == images[1]
    assert after["OS-SRV-USG:launched_at"] > before["OS-SRV-USG:launched_at"]
    assert [each["id"] for each in await ports_of(user, id)] == [port["id"]]
    [(host, plan, start)] = rebuilt
    assert (host, start) == (home, True)
    assert plan.instance.image is not None and plan.instance.image.id == images[1]
    assert [device.image_id for device in plan.block_devices] == [images[1]]
    assert plan.image_url and plan.admin_password == answer["adminPass"]
    assert [vif.port_id for vif in plan.network_info] == [port["id"]]
    [row] = await cloud.read(sa.select(request_specs.c.spec).where(request_specs.c.instance_uuid == id))
    spec = msgspec.msgpack.decode(row.spec, type=RequestSpec)
    assert spec.image is not None and spec.image.id == images[1]
    guest = (await cloud.guests(home))[id]
    assert (guest.power_state, guest.epoch) == (1, plan.epoch)
    [row] = await cloud.read(sa.select(operations.c.secrets).where(operations.c.kind == "rebuild"))
    assert row.secrets is None, "they are erased with the end"
    await cloud.assert_clean()


async def test_a_stopped_server_stays_stopped(
    cloud: Cloud, user: Caller, images: tuple[str, str], rebuilt: Rebuilt
) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    await _rebuild(user, id, images[1], "SHUTOFF")
    assert [start for _, _, start in rebuilt] == [False]
    assert (await user.show(id))["OS-EXT-STS:power_state"] == 4
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_server_in_error_becomes_active(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0], name=user.project))["id"]
    async with cloud.faults({"operation": "rebuild", "kind": "fail", "name": user.project, "message": "no disk"}):
        await _rebuild(user, id, images[1], "ERROR")
    failed = await user.show(id)
    assert (failed["fault"]["message"], failed["fault"]["code"]) == ("no disk", 500)
    assert failed["image"]["id"] == images[1], "the old disk is gone"
    assert failed["hostId"], "it keeps its host"
    await cloud.assert_clean()
    await _rebuild(user, id, images[0])
    assert "fault" not in await user.show(id)
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["rebuild", "capabilities", "info"])
async def test_a_guest_that_was_not_touched_keeps_its_image(
    cloud: OneProcess, user: Caller, images: tuple[str, str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if ON_CLUSTER:
        pytest.skip("changes the hosts' driver")

    def fail(driver: FakeDriver, *args: Any, **more: Any) -> None:
        raise OSError("the image cannot be read")

    id = (await user.boot(imageRef=images[0]))["id"]
    with monkeypatch.context() as broken:
        broken.setattr(FakeDriver, call, fail)
        await _rebuild(user, id, images[1], "ERROR")
    assert (await user.show(id))["image"]["id"] == images[0]
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    await _rebuild(user, id, images[0])
    await cloud.assert_clean()


@pytest.mark.parametrize("call", ["rebuild", "info"])
async def test_a_guest_that_was_not_touched_in_time_keeps_its_image(
    cloud: OneProcess, user: Caller, images: tuple[str, str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The host gets no image, or cannot ask its hypervisor, until the deadline of the rebuild is over."""
    if ON_CLUSTER:
        pytest.skip("changes the hosts' driver")

    async def no_answer(driver: FakeDriver, *args: Any, **more: Any) -> None:
        raise Unavailable("It does not answer.")

    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    id = (await user.boot(imageRef=images[0]))["id"]
    monkeypatch.setattr(FakeDriver, call, no_answer)
    await user.act(id, "rebuild", {"imageRef": images[1]})
    of_server = sa.and_(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))

    async def repeated() -> bool | None:
        [row] = await cloud.read(sa.select(operations).where(of_server))
        return True if row.leases > 1 else None

    await cloud.until(repeated, "the order to be repeated")
    assert cloud.process.database is not None
    late = sa.update(operations).where(of_server).values(deadline=operations.c.created_at + 1)
    await cloud.process.database.write(lambda conn: conn.execute(late))
    shown = await user.wait_for(id, "ERROR")
    assert "does not answer" in shown["fault"]["message"]
    assert shown["image"]["id"] == images[0]
    monkeypatch.undo()
    await cloud.assert_clean()


async def test_an_image_that_the_host_cannot_run(
    cloud: Cloud, user: Caller, images: tuple[str, str], rebuilt: Rebuilt
) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    foreign = await image(user, hw_architecture="aarch64")
    answer = await _rebuild(user, id, foreign, "ERROR")
    assert answer["image"]["id"] == foreign
    shown = await user.show(id)
    assert shown["image"]["id"] == images[0], "the image is put back"
    assert "No valid host" in shown["fault"]["message"]
    assert not rebuilt, "the guest is as it was"
    [action, _] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    details = (await user.admin.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    assert (details["action"], details["message"]) == ("rebuild", "Error")
    [event] = details["events"]
    assert (event["event"], event["result"]) == ("rebuild_server", "Error")
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_full_host_can_rebuild(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    """The server keeps what it holds: the scheduler does not look for room."""
    if ON_CLUSTER:
        pytest.skip("the hosts are shared")
    host = cloud.hosts[0]
    whole = {"name": user.project, "ram": 260_000, "vcpus": 1, "disk": 1}
    flavor = (await user.admin.post("/flavors", {"flavor": whole}, 200))["flavor"]["id"]
    id = await user.admin.create(imageRef=images[0], flavorRef=flavor, host=host)
    await user.admin.wait_for(id, "ACTIVE")
    await _rebuild(user.admin, id, images[1])
    await cloud.assert_clean()


async def test_the_events_and_who_asked(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    for wanted in images:
        await _rebuild(user, id, wanted)
    for action in (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"][:2]:
        assert (action["action"], action["message"], action["user_id"]) == ("rebuild", None, user.user)
        shown = (await user.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
        assert [(event["event"], event["result"]) for event in shown["events"]] == [
            ("compute_rebuild_instance", "Success"),
            ("rebuild_server", "Success"),
        ]


async def test_task_states(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0], name=user.project))["id"]
    async with cloud.faults({"operation": "rebuild", "kind": "delay", "delay": 0.5, "name": user.project}):
        answer = (await user.act(id, "rebuild", {"imageRef": images[1]}))["server"]
        assert answer["OS-EXT-STS:task_state"] == "rebuilding"
        shown = await user.wait_for(id, "REBUILD", task="rebuild_spawning")
        assert (shown["OS-EXT-STS:vm_state"], shown["progress"]) == ("active", 0)
        await user.wait_for(id, "ACTIVE")


async def test_what_the_request_may_change(
    cloud: Cloud, user: Caller, images: tuple[str, str], rebuilt: Rebuilt
) -> None:
    await user.post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "type": "ssh"}}, 201)
    data = base64.b64encode(b"#!/bin/sh").decode()
    id = (await user.boot(imageRef=images[0], name="old", description="d", metadata={"a": "b"}))["id"]
    fields: dict[str, Any] = {
        "name": "new", "adminPass": "secret", "metadata": {"c": "d"}, "OS-DCF:diskConfig": "AUTO",
        "accessIPv4": "192.0.2.7", "accessIPv6": "2001:db8::7", "description": None, "key_name": "k",
        "user_data": data, "hostname": "fresh.example.org", "preserve_ephemeral": True,
    }  # fmt: skip
    answer = await _rebuild(user, id, images[1], **fields)
    shown = await user.admin.show(id)
    for server in (answer, shown):
        assert (server["name"], server["metadata"], server["description"]) == ("new", {"c": "d"}, None)
        assert (server["OS-DCF:diskConfig"], server["accessIPv4"]) == ("AUTO", "192.0.2.7")
        assert (server["accessIPv6"], server["key_name"]) == ("2001:db8::7", "k")
        assert server["OS-EXT-SRV-ATTR:hostname"] == "fresh.example.org"
    assert (answer["adminPass"], answer["user_data"]) == ("secret", data)
    [(_, plan, _)] = rebuilt
    assert (plan.admin_password, plan.instance.user_data, plan.instance.key_data) == ("secret", data, KEY)
    answer = await _rebuild(user, id, images[1])
    assert (answer["key_name"], answer["user_data"], answer["name"]) == ("k", data, "new")
    assert answer["adminPass"] not in ("", "secret")
    answer = await _rebuild(user, id, images[1], key_name=None, user_data=None, trusted_image_certificates=None)
    assert (answer["key_name"], answer["user_data"]) == (None, None)
    assert rebuilt[-1][1].instance.key_data is None
    assert answer["OS-EXT-SRV-ATTR:hostname"] == "fresh.example.org"


async def test_the_keys_are_those_of_who_asks(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    await user.post("/os-keypairs", {"keypair": {"name": user.project, "public_key": KEY, "type": "ssh"}}, 201)
    body = {"rebuild": {"imageRef": images[0], "key_name": user.project}}
    assert "key_name" in await user.admin.refused(400, "POST", f"/servers/{id}/action", body)
    await user.post(f"/servers/{id}/action", body)


async def test_files_are_injected_by_a_config_drive(
    cloud: Cloud, user: Caller, images: tuple[str, str], rebuilt: Rebuilt
) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    contents = base64.b64encode(b"hello").decode()
    old = user.at(56)
    answer = await _rebuild(old, id, images[0], personality=[{"path": "/hello", "contents": contents}])
    assert "adminPass" in answer
    [(_, plan, _)] = rebuilt
    assert [(file.path, file.contents) for file in plan.injected_files] == [("/hello", b"hello")]
    assert plan.instance.config_drive
    assert (await user.show(id))["config_drive"] == "True"


@pytest.mark.parametrize(
    ("field", "value", "first", "last"),
    [
        ("personality", [], 1, 56), ("description", "d", 19, 104), ("key_name", None, 54, 104),
        ("user_data", None, 57, 104), ("trusted_image_certificates", None, 63, 104), ("hostname", "ab", 90, 104),
    ],
)  # fmt: skip
async def test_versions_of_fields(
    cloud: Cloud, user: Caller, images: tuple[str, str], field: str, value: Any, first: int, last: int
) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    body = {"rebuild": {"imageRef": images[0], field: value}}
    for minor in {first - 1, last + 1} & set(range(1, 105)):
        assert field in await user.at(minor).refused(400, "POST", f"/servers/{id}/action", body)
    for minor in (first, last):
        await user.at(minor).post(f"/servers/{id}/action", body)
        await user.wait_for(id, "ACTIVE")


async def test_what_the_answer_shows(user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    shown = {}
    for minor in (1, 9, 19, 26, 47, 53, 54, 56, 57, 63, 71, 73, 74, 75, 90, 96, 98, 100):
        answer = await user.at(minor).request("POST", f"/servers/{id}/action", {"rebuild": {"imageRef": images[0]}})
        assert answer.status == 202
        assert answer.headers["location"].endswith(f"/compute/v2.1/servers/{id}")
        shown[minor] = answer.json()["server"]
        await user.wait_for(id, "ACTIVE")
    since = {
        "locked": 9, "description": 19, "tags": 26, "key_name": 54, "user_data": 57, "trusted_image_certificates": 63,
        "server_groups": 71, "locked_reason": 73, "OS-EXT-STS:task_state": 75, "OS-SRV-USG:launched_at": 75,
        "OS-EXT-SRV-ATTR:hostname": 90, "pinned_availability_zone": 96, "scheduler_hints": 100, "adminPass": 1,
    }  # fmt: skip
    for minor, server in shown.items():
        for field, first in since.items():
            assert (field in server) == (minor >= first), (field, minor)
    assert "original_name" in shown[47]["flavor"] and "id" in shown[26]["flavor"]
    assert "properties" in shown[98]["image"] and "properties" not in shown[96]["image"]


async def test_refused_requests(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    path = f"/servers/{id}/action"

    async def refused(status: int, minor: int = 104, **fields: Any) -> str:
        return await user.at(minor).refused(status, "POST", path, {"rebuild": {"imageRef": images[0], **fields}})

    assert "imageRef" in await refused(400, imageRef="not-an-id")
    assert "imageRef" in await user.refused(400, "POST", path, {"rebuild": {}})
    assert "could not be found" in await refused(400, imageRef="77777777-7777-4777-8777-777777777777")
    assert "not active" in await refused(400, imageRef=await image(user, upload=False))
    assert "memory is too small" in await refused(400, imageRef=await image(user, min_ram=4096))
    assert "disk would be too small" in await refused(400, imageRef=await image(user, min_disk=100))
    stranger = cloud.caller()
    assert "could not be found" in await refused(400, imageRef=await image(stranger, visibility="private"))
    assert "NUMA" in await refused(400, imageRef=await image(user, hw_numa_nodes="1"))
    automatic: dict[str, Any] = {"OS-DCF:diskConfig": "AUTO"}
    assert "disk resize" in await refused(400, imageRef=await image(user, auto_disk_config="disabled"), **automatic)
    assert "key_name" in await refused(400, key_name="missing")
    assert "user_data" in await refused(400, user_data="%%%")
    assert "is not signed" in await refused(400, trusted_image_certificates=["a"])
    assert "hostname" in await refused(400, minor=90, hostname="a.b")
    assert "accessIPv4" in await refused(400, accessIPv4="::1")
    many = {f"k{number}": "v" for number in range(129)}
    assert "metadata items" in await refused(403, metadata=many)
    file = {"path": "/x", "contents": base64.b64encode(b"x" * 20_000).decode()}
    assert "file" in await refused(403, minor=56, personality=[file])
    assert "files" in await refused(403, minor=56, personality=[{"path": "/x", "contents": ""}] * 6)
    assert "base64" in await refused(400, minor=56, personality=[{"path": "/x", "contents": "%"}])
    await stranger.refused(404, "POST", path, {"rebuild": {"imageRef": images[0]}})
    assert (await user.show(id))["status"] == "ACTIVE"
    assert len((await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]) == 1
    # The state is checked before the image.
    await user.act(id, "pause")
    await user.wait_for(id, "PAUSED")
    assert "vm_state paused" in await refused(409, imageRef="77777777-7777-4777-8777-777777777777")


async def test_ephemeral_disks_cannot_be_kept(user: Caller, images: tuple[str, str]) -> None:
    wanted = {"name": user.project, "ram": 64, "vcpus": 1, "disk": 1, "OS-FLV-EXT-DATA:ephemeral": 1}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    id = (await user.boot(imageRef=images[0], flavorRef=flavor))["id"]
    body = {"rebuild": {"imageRef": images[0], "preserve_ephemeral": True}}
    assert "Ephemeral" in await user.refused(400, "POST", f"/servers/{id}/action", body)
    await _rebuild(user, id, images[1], preserve_ephemeral=False)


async def test_a_lock_protects(user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    await user.act(id, "lock")
    await user.refused(409, "POST", f"/servers/{id}/action", {"rebuild": {"imageRef": images[0]}})
    await _rebuild(user.admin, id, images[1])
    await user.act(id, "unlock")


async def test_a_server_that_never_ran(cloud: Cloud, user: Caller, images: tuple[str, str]) -> None:
    id = (await user.boot(imageRef=images[0]))["id"]
    assert cloud.process.database is not None
    for launched in (None, 1):
        await cloud.process.database.write(
            lambda conn, launched=launched: conn.execute(  # type: ignore[misc]
                sa.update(instances).where(instances.c.uuid == id).values(launched_at=launched)
            )
        )
        if launched is None:
            words = await user.refused(409, "POST", f"/servers/{id}/action", {"rebuild": {"imageRef": images[0]}})
            assert "never been active" in words
        else:
            await _rebuild(user, id, images[0])


async def test_an_image_that_is_deleted_while_the_host_needs_it(cloud: Cloud, user: Caller) -> None:
    first, second = await image(user), await image(user)
    id = (await user.boot(imageRef=first))["id"]
    await ok(user, "DELETE", f"/image/v2/images/{first}")
    await user.refused(400, "POST", f"/servers/{id}/action", {"rebuild": {"imageRef": first}})
    await _rebuild(user, id, second)


@only_in_one_process("watches the notifier of the cloud's process")
async def test_notifications(
    cloud: OneProcess, user: Caller, images: tuple[str, str], notifications: list[tuple[str, Any, Any]]
) -> None:
    id = (await user.boot(imageRef=images[0], name=user.project))["id"]
    await cloud.settled()
    notifications.clear()
    await _rebuild(user, id, images[1])
    await cloud.settled()
    assert [(event, row["vm_state"], row["task_state"]) for event, row, _ in notifications] == [
        ("rebuild.scheduled", "active", "rebuilding"),
        ("rebuild.start", "active", "rebuilding"),
        ("rebuild.end", "active", None),
    ]
    assert {row["image_ref"] for _, row, _ in notifications} == {images[1]}
    notifications.clear()
    async with cloud.faults({"operation": "rebuild", "kind": "fail", "name": user.project, "message": "no"}):
        await _rebuild(user, id, images[0], "ERROR")
    assert [event for event, _, _ in notifications][-1] == "rebuild.error"
    assert notifications[-1][2]["message"] == "no"

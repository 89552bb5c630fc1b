"""Evacuating servers from a lost host: they are built again elsewhere, and their old guests go when it is back."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.compute.host import DESTROY_ATTEMPTS
from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations import engine
from micronova.db.tables import departures, migrations
from micronova.imageformat.signatures import DataVerifier
from tests.certificates import Signer
from tests.functional.cloud import IMAGE, Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.embedded_services import image, network, ports_of
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

crashes = Crashes()
pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts")]

CLOUD = CloudOptions(
    hosts=3,
    roles=("network", "image"),
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0, "allow_resize_to_same_host": False},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


REBUILT = ("rebuild.scheduled", "rebuild.start", "rebuild.end")


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def shared_image(cloud: Cloud) -> None:
    """Most servers are made of the image that the tests name by default."""
    await image(cloud.caller().admin, id=IMAGE, visibility="public")


async def _status(cloud: Cloud, id: str) -> str:
    rows = await cloud.read(sa.select(migrations).where(migrations.c.instance_uuid == id).order_by(migrations.c.id))
    return str(rows[-1].status)


@pytest_asyncio.fixture(loop_scope="module")
async def lost(cloud: Cloud, user: Caller, killable_host: KillableHost) -> AsyncIterator[str]:
    """A server whose host is down."""
    await killable_host.start()
    id = (await user.boot(name="lost"))["id"]
    assert await user.host_of(id) == killable_host.name
    await killable_host.kill()
    await killable_host.wait_until_down()
    yield id


async def _back(cloud: Cloud, host: KillableHost, id: str) -> None:
    """Let the lost host return; it removes the guest that left."""
    await host.start()
    await host.guest_removed(id)

    async def forgotten() -> bool | None:
        return None if await cloud.read(sa.select(departures).where(departures.c.host == host.name)) else True

    await cloud.until(forgotten, "the record of the departure to be erased")
    await cloud.assert_clean()


@pytest.mark.parametrize("crash", [None, ("evacuate", "dispatched")])
async def test_a_server_is_built_again_elsewhere(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
    lost: str,
    crash: Any,
    notifications: Any,
) -> None:
    crashes.next = crash
    await user.refused(403, "POST", f"/servers/{lost}/action", {"evacuate": {}})
    await user.act(lost, "lock")
    await user.admin.at(94).act(lost, "evacuate", {}, 200)
    await user.wait_for(lost, "ACTIVE")
    await user.act(lost, "unlock")
    assert crashes.next is None
    assert await user.host_of(lost) in cloud.hosts
    assert await _status(cloud, lost) == "done"
    actions = (await user.get(f"/servers/{lost}/os-instance-actions"))["instanceActions"]
    assert [each["action"] for each in actions] == ["unlock", "evacuate", "lock", "create"]
    names = [event for event, _, _ in notifications if event not in ("lock", "unlock")]
    lost_with_the_conductor = [] if crash is None else ["rebuild.scheduled", "rebuild.start"]
    assert sorted([*names, *lost_with_the_conductor]) == sorted(["evacuate", *REBUILT])
    assert await killable_host.has_guest(lost)
    await cloud.assert_clean()
    await _back(cloud, killable_host, lost)
    assert await _status(cloud, lost) == "completed"
    assert (await user.show(lost))["status"] == "ACTIVE"


async def test_a_server_is_stopped_since_2_95(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
    lost: str,
) -> None:
    await user.admin.act(lost, "evacuate", {"host": cloud.hosts[1]}, 200)
    await user.wait_for(lost, "SHUTOFF")
    assert await user.host_of(lost) == cloud.hosts[1]
    assert (await cloud.guests(cloud.hosts[1]))[lost].power_state == 4
    await _back(cloud, killable_host, lost)
    await user.act(lost, "os-start")
    await user.wait_for(lost, "ACTIVE")


async def test_a_server_that_cannot_be_stopped_says_why(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
    lost: str,
) -> None:
    async with cloud.faults({"operation": "power_off", "message": "no way to stop it"}):
        await user.admin.act(lost, "evacuate", {}, 200)
        await user.wait_for(lost, "ACTIVE")
    assert await user.host_of(lost) in cloud.hosts and await _status(cloud, lost) == "done"
    path = f"/servers/{lost}/os-instance-actions"
    [evacuation] = [each for each in (await user.get(path))["instanceActions"] if each["action"] == "evacuate"]
    assert evacuation["message"] == "Error"
    shown = (await user.admin.get(f"{path}/{evacuation['request_id']}"))["instanceAction"]
    [stop] = [event for event in shown["events"] if event["event"] == "compute_stop_instance"]
    assert stop["result"] == "Error" and "no way to stop it" in stop["details"]
    await _back(cloud, killable_host, lost)


async def test_what_is_refused(cloud: Cloud, user: Caller, killable_host: KillableHost, lost: str) -> None:
    admin, path = user.admin, f"/servers/{lost}/action"
    unknown = await admin.refused(404, "POST", path, {"evacuate": {"host": "nowhere"}})
    assert unknown == "Compute host nowhere not found."
    same = await admin.refused(400, "POST", path, {"evacuate": {"host": killable_host.name}})
    assert same == "The target host can't be the same one."
    await admin.refused(400, "POST", path, {"evacuate": {"force": True, "host": cloud.hosts[0]}})
    await admin.refused(400, "POST", path, {"evacuate": {"onSharedStorage": False}})
    await admin.refused(400, "POST", path, {"evacuate": None})
    await admin.at(67).refused(400, "POST", path, {"evacuate": {"force": True}})
    await admin.at(28).refused(400, "POST", path, {"evacuate": {"force": True, "host": cloud.hosts[0]}})
    await admin.at(13).refused(400, "POST", path, {"evacuate": {}})
    await admin.at(13).refused(400, "POST", path, {"evacuate": {"onSharedStorage": "True"}})
    up = (await user.boot())["id"]
    assert "still in use" in await admin.refused(400, "POST", f"/servers/{up}/action", {"evacuate": {}})
    answer = await admin.at(13).act(lost, "evacuate", {"onSharedStorage": False, "adminPass": "secret"}, 200)
    assert answer == {"adminPass": "secret"}
    await user.wait_for(lost, "ACTIVE")
    await _back(cloud, killable_host, lost)


async def test_a_signed_image_is_verified_on_the_other_host(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer()
    directory = cloud.process.directory.path / "certificates"
    directory.mkdir()
    (directory / "c1.pem").write_bytes(signer.pem)
    picture = await image(user, **signer.properties(bytes(1024), "c1"))
    await killable_host.start()
    id = ""
    while not id or await user.host_of(id) != killable_host.name:  # on a slow machine it may count as down at first
        id = (await user.boot(imageRef=picture, trusted_image_certificates=["c1"]))["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    (directory / "c1.pem").unlink()  # an expired or lost certificate does not keep a server on a lost host
    verified = []
    verify = DataVerifier.verify

    def noted(self: DataVerifier) -> None:
        verify(self)
        verified.append("right")

    monkeypatch.setattr(DataVerifier, "verify", noted)
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    assert (await user.wait_for(id, "ACTIVE"))["trusted_image_certificates"] == ["c1"]
    assert verified
    await _back(cloud, killable_host, id)


async def test_the_next_host_is_tried_and_ports_follow(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
) -> None:
    await killable_host.start()
    net = await network(user)
    id = (await user.boot(name="tries", networks=[{"uuid": net["id"]}]))["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    async with cloud.faults({"operation": "spawn", "kind": "fail", "name": "tries", "count": 2}):
        await user.admin.at(67).act(id, "evacuate", {}, 200)
        await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    assert host in cloud.hosts
    assert {port["binding:host_id"] for port in await ports_of(user, id)} == {host}
    await _back(cloud, killable_host, id)


async def test_a_host_that_lacks_something_does_not_keep_an_evacuation(
    cloud: Cloud, user: Caller, killable_host: KillableHost, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that lack something for the moment use up no attempt, and one that lacks nothing is found."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    lacking = "|".join(cloud.hosts[:2])
    rule = {"operation": "spawn", "kind": "unavailable", "name": "lost", "host": lacking, "message": "No libvirt."}
    async with cloud.faults(rule):
        await user.admin.at(67).act(lost, "evacuate", {}, 200)
        await user.wait_for(lost, "ACTIVE")
    assert await user.host_of(lost) == cloud.hosts[2]
    await _back(cloud, killable_host, lost)


async def test_an_evacuation_that_fails_leaves_the_server_on_its_host(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
) -> None:
    await killable_host.start()
    net = await network(user)
    id = (await user.boot(name="stays", networks=[{"uuid": net["id"]}]))["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    async with cloud.faults({"operation": "spawn", "kind": "fail", "name": "stays", "message": "No way."}):
        await user.admin.act(id, "evacuate", {}, 200)
        shown = await user.wait_for(id, "ERROR")
    assert "No way." in shown["fault"]["message"]
    assert await user.host_of(id) == killable_host.name
    assert {port["binding:host_id"] for port in await ports_of(user, id)} == {killable_host.name}
    assert await _status(cloud, id) == "failed"
    await cloud.assert_clean()
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    await user.wait_for(id, "ACTIVE")
    await _back(cloud, killable_host, id)


async def test_a_host_that_aborts_an_evacuation_removes_its_half_built_guest_later(
    cloud: Cloud, user: Caller, killable_host: KillableHost, lost: str
) -> None:
    async with cloud.faults(
        {"operation": "spawn", "kind": "abort", "name": "lost", "message": "Never."},
        {"operation": "destroy", "kind": "fail", "name": "lost", "count": DESTROY_ATTEMPTS},
    ):
        await user.admin.act(lost, "evacuate", {}, 200)
        await user.wait_for(lost, "ERROR")

        async def removed() -> bool | None:
            return None if any([lost in await cloud.guests(host) for host in cloud.hosts]) else True

        await cloud.until(removed, "the half-built guest to be removed")
    await user.admin.act(lost, "evacuate", {}, 200)
    await user.wait_for(lost, "ACTIVE")
    await _back(cloud, killable_host, lost)


@pytest.mark.parametrize("how", ["delete", "reset"])
async def test_an_evacuation_is_overtaken(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
    lost: str,
    how: str,
) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": "lost", "count": 1}):
        await user.admin.act(lost, "evacuate", {}, 200)
        await cloud.fault_struck()
        if how == "delete":
            await user.delete(f"/servers/{lost}")
            await user.gone(lost)
            await _back(cloud, killable_host, lost)
        else:
            await user.admin.act(lost, "os-resetState", {"state": "active"})
            await cloud.settled()
            assert await user.host_of(lost) == killable_host.name
            await killable_host.start()
            assert await killable_host.has_guest(lost)
    for host in cloud.hosts:

        async def without(host: str = host) -> bool | None:
            return None if lost in await cloud.guests(host) else True

        await cloud.until(without, f"{host} to have no guest")
    await cloud.assert_clean()


async def test_a_server_that_waits_for_its_lost_host_can_be_evacuated(
    cloud: Cloud,
    user: Caller,
    killable_host: KillableHost,
) -> None:
    """A resize whose source dies waits for it; the evacuation ends that."""
    await killable_host.start({"operation": "power_off", "kind": "hang"})
    id = (await user.boot(flavorRef="2"))["id"]
    await user.act(id, "resize", {"flavorRef": "3"})
    await user.wait_for(id, "RESIZE", task="resize_migrating")
    await killable_host.kill()
    await killable_host.wait_until_down()
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == "m1.small"
    assert await user.host_of(id) in cloud.hosts
    await _back(cloud, killable_host, id)


async def test_the_service_of_the_lost_host_is_deleted(
    cloud: Cloud, user: Caller, killable_host: KillableHost, lost: str
) -> None:
    """When the host is repaired and registers again, it removes the guest that left."""
    await user.admin.at(94).act(lost, "evacuate", {}, 200)
    await user.wait_for(lost, "ACTIVE")
    await cloud.settled()
    [service] = (await user.admin.get(f"/os-services?binary=nova-compute&host={killable_host.name}"))["services"]
    await user.admin.delete(f"/os-services/{service['id']}")
    await _back(cloud, killable_host, lost)
    assert (await user.show(lost))["status"] == "ACTIVE"
    assert await user.host_of(lost) in cloud.hosts

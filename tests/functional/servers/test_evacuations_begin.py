"""An evacuation changes nothing of a server before a conductor that can hear hosts knows that the host is lost."""

import asyncio
from typing import Any

import pytest

from micronova.cli import explain
from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations.transitions import Transitions
from micronova.rpc.bus import Bus
from tests.functional.cloud import IMAGE, Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401
from tests.functional.servers.paused_bus import PausedBus

pytestmark = [pytest.mark.thorough, only_in_one_process("stops the bus and kills hosts")]
crashes = Crashes()
buses: list[PausedBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [PausedBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=3,
    wrap_bus=_wrap,
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0, "allow_resize_to_same_host": True},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _ended(cloud: OneProcess, user: Caller, id: str) -> None:
    """Wait until the evacuation of a server has failed."""

    async def probe() -> bool | None:
        actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        return True if ("evacuate", "Error") in [(each["action"], each["message"]) for each in actions] else None

    await cloud.until(probe, "the evacuation to end")


async def _crashed(cloud: OneProcess) -> None:
    async def probe() -> bool | None:
        return True if crashes.next is None else None

    await cloud.until(probe, "the crash")


async def _only_host(user: Caller, host: str, status: str) -> None:
    """Disable all other hosts, or enable them."""
    for service in (await user.admin.get("/os-services?binary=nova-compute"))["services"]:
        if service["host"] != host:
            await user.admin.put(f"/os-services/{service['id']}", {"status": status})


WORK: list[tuple[str, str, Any, str]] = [
    ("migrate", "export_disks", None, "VERIFY_RESIZE"),
    ("os-migrateLive", "live_migrate", {"host": None, "block_migration": "auto"}, "ACTIVE"),
    ("resize", "resize", {"flavorRef": "2"}, "VERIFY_RESIZE"),
    ("rebuild", "rebuild", {"imageRef": IMAGE}, "ACTIVE"),
]


@pytest.mark.parametrize(("action", "operation", "body", "status"), WORK)
async def test_work_goes_on_if_only_the_bus_was_away(
    cloud: OneProcess, user: Caller, action: str, operation: str, body: Any, status: str
) -> None:
    """All hosts look dead while it is half done; a resize and a rebuild are past their point of no return."""
    name = f"busy-{action}"
    id = (await user.boot(flavorRef="1", name=name))["id"]
    home = await user.host_of(id)
    if action == "resize":
        await _only_host(user, home, "disabled")
    async with cloud.faults({"operation": operation, "kind": "delay", "delay": 2.0, "name": name}):
        await user.admin.act(id, action, body)
        await cloud.fault_struck()
        async with buses[0].outage(cloud, user):
            await user.admin.at(94).act(id, "evacuate", {}, 200)
        await _ended(cloud, user, id)
        shown = await user.wait_for(id, status)
    await _only_host(user, home, "enabled")
    host = await user.host_of(id)
    assert (host == home) == (action in ("resize", "rebuild"))
    guest = (await cloud.guests(host))[id]
    assert (guest.power_state, guest.memory_mb) == (1, shown["flavor"]["ram"])
    assert [each["status"] for each in await _evacuations(user, id)] == ["error"]
    await cloud.settled()
    await cloud.assert_clean()
    await cloud.delete_all()


async def _evacuations(user: Caller, id: str) -> list[dict[str, Any]]:
    found = await user.admin.get(f"/os-migrations?instance_uuid={id}&migration_type=evacuation")
    return list(found["migrations"])


async def test_a_server_that_nothing_works_on_is_shown_as_rebuilding(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    async with buses[0].outage(cloud, user):
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        assert (await user.show(id))["status"] == "REBUILD"
        await user.refused(409, "POST", f"/servers/{id}/action", {"os-stop": None})
    await _ended(cloud, user, id)
    assert (await user.show(id))["status"] == "ACTIVE"


@pytest.mark.parametrize("later", ["reset", "delete"])
async def test_a_later_request_ends_an_evacuation_that_has_not_begun(
    cloud: OneProcess, user: Caller, later: str
) -> None:
    id = (await user.boot())["id"]
    home = await user.host_of(id)
    async with buses[0].outage(cloud, user):
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        if later == "reset":
            await user.admin.act(id, "os-resetState", {"state": "active"})
            assert await cloud.open_operations() == []
        else:
            await user.delete(f"/servers/{id}")
            assert [row.kind for row in await cloud.open_operations()] == ["delete"]
    if later == "reset":
        assert (await user.show(id))["status"] == "ACTIVE"
        assert id in await cloud.guests(home)
    else:
        await user.gone(id)
    await cloud.settled()
    await cloud.assert_clean()


async def test_work_that_was_interrupted_for_a_host_that_returns(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The server is in ERROR: nobody knows how far the work came."""
    await killable_host.start({"operation": "power_off", "kind": "hang", "count": 1})
    id = (await user.boot())["id"]
    assert await user.host_of(id) == killable_host.name
    await user.act(id, "os-stop")
    await killable_host.kill()
    await killable_host.wait_until_down()
    crashes.next = ("evacuate", "new")
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    await _crashed(cloud)
    await killable_host.start()
    shown = await user.wait_for(id, "ERROR")
    assert "not lost" in shown["fault"]["message"]
    assert await user.host_of(id) == killable_host.name


async def test_why_it_was_given_up_is_known_at_its_end(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host returns, and is silent again when the ports are bound to it, which is the last step."""
    bound, silent = asyncio.Event(), asyncio.Event()

    async def rebind(*_: Any, **__: Any) -> None:
        bound.set()
        await silent.wait()

    monkeypatch.setattr(Transitions, "rebind", rebind)
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    crashes.next = ("evacuate", "new")
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    await _crashed(cloud)
    await killable_host.start()
    await asyncio.wait_for(bound.wait(), 10)
    await killable_host.kill()
    await killable_host.wait_until_down()
    silent.set()
    await user.wait_for(id, "ACTIVE")
    await _ended(cloud, user, id)


async def test_one_decision_of_the_scheduler_is_one_attempt(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot())["id"]
    await killable_host.kill()
    await killable_host.wait_until_down()
    await _only_host(user, killable_host.name, "disabled")
    await user.admin.at(94).act(id, "evacuate", {}, 200)
    await user.wait_for(id, "ERROR")
    await _only_host(user, killable_host.name, "enabled")
    decided = (await explain.read_decisions(cloud.process, id))["requests"]
    assert [len(each["decisions"]) for each in decided] == [1, 1]  # the build, and the evacuation

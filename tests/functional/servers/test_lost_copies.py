"""Copies of a server's disks that are lost protect nothing; those whose partner has just died are protected at once."""

import asyncio
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.rpcapi import HostConductorAPI
from micronova.db.tables import departures, migrations, services
from micronova.objects.clock import micros
from micronova.objects.orders import Heartbeat, HeartbeatReply
from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.held_orders import HoldingBus
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts")]
buses: list[HoldingBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [HoldingBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=2,
    wrap_bus=_wrap,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 2.0, "allow_resize_to_same_host": False},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


async def _struck(cloud: OneProcess, host: KillableHost) -> None:
    async def probe() -> bool | None:
        return True if any(rule["hits"] for rule in host.driver.fault_rules()) else None

    await cloud.until(probe, "the fault to strike")


async def _destination(cloud: OneProcess, id: str) -> str:
    [found] = await cloud.read(sa.select(migrations.c.dest_compute).where(migrations.c.instance_uuid == id))
    return str(found.dest_compute)


async def _killed(cloud: OneProcess, host: KillableHost) -> None:
    """Kill a host; return when its last heartbeat is recorded, long before it counts as down."""
    await host.kill()

    async def silent() -> bool | None:
        [found] = await cloud.read(sa.select(services.c.last_seen_at).where(services.c.host == host.name))
        return True if micros(cloud.process.clock.now()) - found.last_seen_at > 400_000 else None

    await cloud.until(silent, f"{host.name} to be silent")


async def _back(cloud: OneProcess, user: Caller, id: str, host: KillableHost) -> None:
    """Let a host that is forced down return, without the server."""
    await user.act(id, "forceDelete")
    await user.gone(id)
    await host.start_unheard()


async def _removed(cloud: OneProcess, id: str, host: str) -> None:
    """Wait until a host that a server has left has removed its guest."""

    async def removed() -> bool | None:
        left = await cloud.read(sa.select(departures).where(departures.c.instance_uuid == id))
        return None if list(left) or id in await cloud.guests(host) else True

    await asyncio.wait_for(cloud.until(removed, f"{host} to remove the guest"), 20)


async def test_a_revert_whose_source_is_lost_when_the_destination_has_removed_its_guest(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot(name="returns"))["id"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    killable_host.driver.set_fault_rules([{"operation": "power_on", "kind": "hang", "name": "returns"}])
    await user.act(id, "revertResize")
    await _struck(cloud, killable_host)
    await killable_host.kill()
    await killable_host.wait_until_down()
    async with cloud.forced_down(killable_host.name):
        await user.admin.act(id, "os-resetState", {"state": "error"})
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        await user.wait_for(id, "ACTIVE")
        assert id in await cloud.guests(await user.host_of(id))
        await _back(cloud, user, id, killable_host)


@pytest.mark.parametrize("finishes", [True, False])
async def test_both_hosts_of_a_move_are_lost(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, finishes: bool
) -> None:
    """While only one is forced down, the message says what leads on; then the server can be evacuated."""
    await killable_host.start()
    id = (await user.boot(name="moves"))["id"]
    rules = [] if finishes else [{"operation": "power_on", "kind": "hang", "name": "moves"}]
    async with cloud.faults(*rules):
        await user.admin.act(id, "migrate")
        if finishes:
            await user.wait_for(id, "VERIFY_RESIZE")
        else:
            await cloud.fault_struck()
        destination = await _destination(cloud, id)
        await killable_host.kill()
        await killable_host.wait_until_down()
        own, other = (destination, killable_host.name) if finishes else (killable_host.name, destination)
        reset = {"os-resetState": {"state": "error"}}
        async with cloud.forced_down(own):
            message = await user.admin.refused(409, "POST", f"/servers/{id}/action", reset)
            assert "force down the compute service of that other host" in message
            assert ("that one does not answer either" in message) == finishes
            assert ("the move goes on by itself" in message) != finishes
            async with cloud.forced_down(other):
                await user.admin.act(id, "os-resetState", {"state": "error"})
                await user.admin.at(94).act(id, "evacuate", {}, 200)
                shown = await user.wait_for(id, "ACTIVE")
                assert await user.host_of(id) not in (own, other)
                assert shown["id"] in await cloud.guests(await user.host_of(id))
                await _back(cloud, user, id, killable_host)


async def test_a_confirmation_right_after_the_death_of_the_servers_host(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The host still counts as up; its source asks whether it may remove its copy, and has to wait."""
    id = (await user.boot())["id"]
    source = await user.host_of(id)
    await killable_host.start()
    await user.admin.act(id, "migrate", {"host": killable_host.name})
    await user.wait_for(id, "VERIFY_RESIZE")
    buses[0].hold("nothing")
    await _killed(cloud, killable_host)
    await user.act(id, "confirmResize", status=204)
    await buses[0].refused()  # the host counts as down now
    assert id in await cloud.guests(source)
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    assert id not in await cloud.guests(source)
    await cloud.assert_clean()


async def test_a_guest_that_cannot_be_started_right_after_the_death_of_its_source(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    await killable_host.start()
    id = (await user.boot(name="arrives"))["id"]
    rules: list[dict[str, Any]] = [
        {"operation": "power_on", "kind": "delay", "delay": 1.0, "name": "arrives", "count": 1},
        {"operation": "power_on", "kind": "fail", "name": "arrives"},
    ]
    async with cloud.faults(*rules):
        await user.admin.act(id, "migrate")
        await cloud.fault_struck()
        await _killed(cloud, killable_host)
        destination = await _destination(cloud, id)
        await killable_host.wait_until_down()
        await user.wait_for(id, "RESIZE", task="resize_finish")
        assert id in await cloud.guests(destination)
    await user.wait_for(id, "VERIFY_RESIZE")  # it can be started now
    assert await user.host_of(id) == destination
    await killable_host.start()


async def test_a_reset_right_after_the_death_of_the_servers_host(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """It still counts as up, but does not answer: the reset is refused, and the other copy can be used."""
    id = (await user.boot())["id"]
    source = await user.host_of(id)
    await killable_host.start()
    await user.admin.act(id, "migrate", {"host": killable_host.name})
    await user.wait_for(id, "VERIFY_RESIZE")
    await _killed(cloud, killable_host)
    reset = {"os-resetState": {"state": "active"}}
    message = await user.admin.refused(409, "POST", f"/servers/{id}/action", reset)
    assert "revert the resize" in message
    await killable_host.wait_until_down()
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    assert id in await cloud.guests(source)
    await killable_host.start()
    await _removed(cloud, id, killable_host.name)
    await cloud.assert_clean()


async def test_a_heartbeat_that_a_host_sent_before_its_death_is_no_sign_of_life(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker kept it; it is applied after the other host was told to remove its copy, and must not do that."""
    id = (await user.boot())["id"]
    source = await user.host_of(id)
    await killable_host.start()
    await user.admin.act(id, "migrate", {"host": killable_host.name})
    await user.wait_for(id, "VERIFY_RESIZE")
    kept: asyncio.Queue[Heartbeat] = asyncio.Queue()
    heartbeat = HostConductorAPI.heartbeat

    async def keep(self: HostConductorAPI, beat: Heartbeat, timeout: float = 10.0) -> HeartbeatReply:
        if any(each.host == killable_host.name for each in beat.hosts):
            kept.put_nowait(beat)
            await asyncio.get_running_loop().create_future()
        return await heartbeat(self, beat, timeout)

    monkeypatch.setattr(HostConductorAPI, "heartbeat", keep)
    late = await asyncio.wait_for(kept.get(), 20)
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await killable_host.kill()
    monkeypatch.setattr(HostConductorAPI, "heartbeat", heartbeat)
    process = cloud.process
    assert process.bus is not None
    await HostConductorAPI(process.bus, process.clock, Random(3)).heartbeat(late)
    await killable_host.wait_until_down()  # the source has got replies to many heartbeats since
    assert id in await cloud.guests(source)
    await killable_host.start()
    await _removed(cloud, id, source)
    await cloud.assert_clean()

"""A server in VERIFY_RESIZE has two guests; none is removed while the host of the other one is down."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.clients.network.client import NetworkClient
from micronova.conductor.operations import engine
from micronova.db.tables import departures, operations
from micronova.objects.errors import Conflict
from micronova.rpc.bus import Bus
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network
from tests.functional.servers.held_orders import HoldingBus, no_orders_by_heartbeat
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("kills hosts and holds orders back")]
buses: list[HoldingBus] = []


def _wrap(bus: Bus) -> Bus:
    buses[:] = [HoldingBus(bus)]
    return buses[0]


CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    wrap_bus=_wrap,
    settings={
        "default": {
            "report_interval": 0.1,
            "service_down_time": 1.0,
            "allow_resize_to_same_host": False,
            "resize_confirm_window": 4.0,
        },
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


async def _moved_to(user: Caller, host: KillableHost) -> tuple[str, str]:
    """Return a server that is resized to a host, and its source."""
    id = (await user.boot())["id"]
    source = await user.host_of(id)
    await host.start()
    await user.admin.act(id, "migrate", {"host": host.name})
    await user.wait_for(id, "VERIFY_RESIZE")
    return id, source


async def _moved_from(user: Caller, host: KillableHost) -> tuple[str, str]:
    """Return a server that is resized and was on a host, and its destination."""
    await host.start()
    id = (await user.boot())["id"]
    assert await user.host_of(id) == host.name
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    return id, await user.host_of(id)


async def _down(host: KillableHost) -> None:
    await host.kill()
    await host.wait_until_down()


async def _deadline_is_over(cloud: OneProcess, id: str, kind: str) -> None:
    """Let the time of a server's operation be over."""
    assert cloud.process.database is not None
    its = sa.and_(operations.c.instance_uuid == id, operations.c.kind == kind)

    def change(conn: Any) -> None:
        conn.execute(operations.update().where(its).values(deadline=operations.c.created_at + 1))

    await cloud.process.database.write(change)


async def _last_events(user: Caller, id: str) -> list[tuple[str, str, str | None]]:
    """Return the events of the newest action of a server, with their results and hosts."""
    path = f"/servers/{id}/os-instance-actions"
    [action, *_] = (await user.get(path))["instanceActions"]
    events = (await user.admin.get(f"{path}/{action['request_id']}"))["instanceAction"]["events"]
    return [(event["event"], event["result"], event["host"]) for event in events]


async def _taken_again(cloud: OneProcess, id: str) -> None:
    """Wait until a conductor has leased the operation of a server twice more."""
    query = sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))
    [before] = await cloud.read(query)

    async def probe() -> bool | None:
        [now] = await cloud.read(query)
        return True if now.leases >= before.leases + 2 else None

    await cloud.until(probe, "a conductor to lease the operation")


async def _looked_at(cloud: OneProcess, user: Caller) -> None:
    """Wait until the job that confirms resizes has run: it confirms the one of another server."""
    other = (await user.boot())["id"]
    home = await user.host_of(other)
    await user.admin.act(other, "migrate", {"host": next(host for host in cloud.hosts if host != home)})
    await user.wait_for(other, "VERIFY_RESIZE")
    await user.wait_for(other, "ACTIVE")


async def test_no_confirmation_while_the_servers_host_is_down(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """Neither by the job nor by its owner, who can revert."""
    id, source = await _moved_to(user, killable_host)
    await _down(killable_host)
    await _looked_at(cloud, user)
    assert (await user.show(id))["status"] == "VERIFY_RESIZE"
    assert id in await cloud.guests(source)
    assert "revert" in await user.refused(409, "POST", f"/servers/{id}/action", {"confirmResize": None})
    assert "revert" in await user.admin.refused(
        409, "POST", f"/servers/{id}/action", {"os-resetState": {"state": "active"}}
    )
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source
    assert (await cloud.guests(source))[id].power_state == 1


async def test_it_is_confirmed_by_itself_when_its_host_is_back(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    id, source = await _moved_to(user, killable_host)
    await _down(killable_host)
    await _looked_at(cloud, user)
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name
    assert id not in await cloud.guests(source)
    await cloud.assert_clean()


@pytest.mark.parametrize("late", [False, True])
async def test_a_host_that_dies_before_the_other_guest_is_removed(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    no_orders_by_heartbeat(monkeypatch)
    id, source = await _moved_to(user, killable_host)
    buses[0].hold("confirm_resize")
    await user.act(id, "confirmResize", status=204)
    await buses[0].held()
    await _down(killable_host)
    await buses[0].release()
    if late:
        await _deadline_is_over(cloud, id, "confirm_resize")
        await user.wait_for(id, "VERIFY_RESIZE")
        assert await _last_events(user, id) == [("compute_confirm_resize", "Error", source)]
        assert id in await cloud.guests(source)
        await user.act(id, "revertResize")
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) == source
    else:
        await buses[0].refused()
        assert id in await cloud.guests(source)
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) == killable_host.name
        assert id not in await cloud.guests(source)
        await cloud.assert_clean()


@pytest.mark.parametrize("late", [False, True])
async def test_a_source_that_dies_before_the_revert(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    no_orders_by_heartbeat(monkeypatch)
    id, destination = await _moved_from(user, killable_host)
    buses[0].hold("revert_resize")
    await user.act(id, "revertResize")
    await buses[0].held()
    await _down(killable_host)
    await buses[0].release()
    await buses[0].refused()
    assert (await cloud.guests(destination))[id].power_state == 1
    if late:
        await _deadline_is_over(cloud, id, "revert_resize")
        await user.wait_for(id, "VERIFY_RESIZE")
        assert await user.host_of(id) == destination
        assert await _last_events(user, id) == [("compute_revert_resize", "Error", destination)]
        assert (await cloud.guests(destination))[id].power_state == 1
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")  # by the job
        assert await user.host_of(id) == destination
        await killable_host.guest_removed(id)
    else:
        assert (await user.show(id))["status"] == "REVERT_RESIZE"
        await killable_host.start()
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) == killable_host.name
        assert id not in await cloud.guests(destination)
    await cloud.assert_clean()


async def test_a_move_goes_on_if_nothing_else_is_left(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest has arrived when its source dies: its time is over, and the destination still makes it."""
    no_orders_by_heartbeat(monkeypatch)
    await killable_host.start()
    id = (await user.boot())["id"]
    buses[0].hold("finish_resize")
    await user.admin.act(id, "migrate")
    await buses[0].held()
    await _down(killable_host)
    await _deadline_is_over(cloud, id, "migrate")
    await _taken_again(cloud, id)
    assert list(await cloud.read(sa.select(departures).where(departures.c.instance_uuid == id))) == []
    await buses[0].release()
    await user.wait_for(id, "VERIFY_RESIZE")
    assert (await cloud.guests(await user.host_of(id)))[id].power_state == 1


async def test_a_move_whose_ports_are_refused_waits_if_nothing_else_is_left(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network service was asked again and again without a pause, because the move could not be undone."""
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    bind, asked, down, refuses = NetworkClient.rebind, [0], asyncio.Event(), [True]

    async def refused(*args: Any, **named: Any) -> Any:
        asked[0] += 1
        await down.wait()
        if refuses[0]:
            raise Conflict("No more bindings.")
        return await bind(*args, **named)

    await killable_host.start()
    id = (await user.boot(networks=[{"uuid": (await network(user))["id"]}]))["id"]
    assert await user.host_of(id) == killable_host.name
    monkeypatch.setattr(NetworkClient, "rebind", refused)
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "RESIZE", task="resize_migrated")
    await _down(killable_host)
    down.set()
    await _taken_again(cloud, id)
    query = sa.select(operations.c.leases).where(operations.c.instance_uuid == id, operations.c.finished_at.is_(None))
    [before] = await cloud.read(query)
    assert asked[0] <= before.leases
    refuses[0] = False
    await user.wait_for(id, "VERIFY_RESIZE")
    assert (await cloud.guests(await user.host_of(id)))[id].power_state == 1

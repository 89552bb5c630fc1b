"""Agents of a version that does not ask before it destroys something: nobody knows whether they have begun."""

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.compute import host as compute_host
from micronova.compute.manager import ComputeManager
from micronova.compute.work import Work
from micronova.conductor import heartbeat_transaction
from micronova.db.tables import operations
from micronova.objects.orders import Heartbeat, HostBeat
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost, killable_host  # noqa: F401

pytestmark = [pytest.mark.thorough, only_in_one_process("changes what agents do")]
CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 1.0, "allow_resize_to_same_host": False},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture(scope="module", autouse=True)
def older() -> Any:
    """Let all agents be of the version before."""

    async def never_asks(_: Work) -> None:
        pass

    heartbeat = ComputeManager._heartbeat

    def without_reply(self: ComputeManager, beats: Iterable[HostBeat]) -> Heartbeat:
        """Return a heartbeat that does not tell which reply the agent got last."""
        return msgspec.structs.replace(heartbeat(self, beats), answered_at=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "check_stands", never_asks)
        patch.setattr(ComputeManager, "_heartbeat", without_reply)
        patch.setattr(compute_host, "ASKS_BEFORE_DESTRUCTION", "unknown_to_conductors")
        patch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)
        yield


async def test_a_rebuild_that_fails(cloud: OneProcess, user: Caller) -> None:
    """Its disks may be new: it keeps the image that it was to get."""
    id, image = (await user.boot(name="older"))["id"], str(uuid.uuid4())
    async with cloud.faults({"operation": "rebuild", "kind": "fail", "name": "older"}):
        await user.act(id, "rebuild", {"imageRef": image})
        shown = await user.wait_for(id, "ERROR")
    assert shown["image"]["id"] == image
    await cloud.delete_all()


async def test_a_revert_whose_source_dies(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination may have removed its guest: the server does not return to it."""
    await killable_host.start()
    id = (await user.boot())["id"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    host = manager._agents[await user.host_of(id)].host
    destroyed, reports, original = asyncio.Event(), asyncio.Event(), host.destroy

    async def destroy(*args: Any, **kwargs: Any) -> None:
        await original(*args, **kwargs)
        destroyed.set()
        await reports.wait()

    monkeypatch.setattr(host, "destroy", destroy)
    await user.act(id, "revertResize")
    await asyncio.wait_for(destroyed.wait(), 20)
    await killable_host.kill()
    await killable_host.wait_until_down()
    its = sa.and_(operations.c.instance_uuid == id, operations.c.kind == "revert_resize")
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(operations.update().where(its).values(deadline=operations.c.created_at + 1))
    )
    [before] = await cloud.read(sa.select(operations.c.leases).where(its))

    async def leased() -> bool | None:
        [now] = await cloud.read(sa.select(operations.c.leases).where(its))
        return True if now.leases >= before.leases + 2 else None

    await cloud.until(leased, "a conductor to lease the operation")
    assert (await user.show(id))["status"] == "REVERT_RESIZE"
    reports.set()
    await killable_host.start()
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == killable_host.name


async def test_heartbeats_count_from_their_arrival(
    cloud: OneProcess, user: Caller, killable_host: KillableHost
) -> None:
    """The host that a server has left removes its guest: nobody waits for replies that older agents do not tell of."""
    await killable_host.start()
    id = (await user.boot())["id"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.admin.act(id, "os-resetState", {"state": "active"})
    await killable_host.guest_removed(id)
    await cloud.assert_clean()

"""Jobs that conductors do again and again: interfaces are read anew, guests of deleted servers are removed."""

import shutil
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from micronova.cli.status import collect_status
from micronova.db.tables import deleted_instances, departures, instances
from micronova.objects.context import Context
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import network
from tests.functional.servers.killable_host import KillableHost

pytestmark = only_in_one_process("the conductor has settings of its own")
CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    settings={
        "default": {
            "heal_instance_info_cache_interval": 0.1, "running_deleted_instance_poll_interval": 0.1,
            "instance_delete_interval": 0.1,
        },
        "conductor": {"sweep_interval": 0.1},
    },
)  # fmt: skip


async def _write(cloud: OneProcess, statement: Any) -> None:
    assert cloud.process.database is not None
    await cloud.process.database.write(lambda conn: conn.execute(statement))


async def test_status_shows_them(cloud: OneProcess) -> None:
    async def ended() -> dict[str, Any] | None:
        shown = {job["name"]: job for job in (await collect_status(cloud.process))["periodic_jobs"]}
        own = [shown.get(name) for name in ("heal_network_info", "running_deleted", "incomplete_migrations")]
        return shown if all(job is not None and job["ended_seconds_ago"] is not None for job in own) else None

    shown = await cloud.until(ended, "the jobs to have run")
    assert all(job["error"] == "" and (job["began_seconds_ago"] or 0) >= 0 for job in shown.values())
    # What has not run yet is listed, too: the first run of some is hours away.
    assert shown["repair_counters"]["began_seconds_ago"] is None and shown["cache_images"]["began_seconds_ago"] is None


async def test_interfaces_are_read_anew(cloud: OneProcess, user: Caller) -> None:
    server = await user.boot(networks=[{"uuid": (await network(user))["id"]}])
    id = server["id"]
    await _write(cloud, sa.update(instances).where(instances.c.uuid == id).values(network_info=[], security_groups=[]))

    async def healed() -> bool | None:
        shown = await user.show(id)
        same = all(shown[name] == server[name] for name in ("addresses", "security_groups"))
        return True if same and server["addresses"] else None

    await cloud.until(healed, "the interfaces to be there again")


async def test_a_guest_that_returns_with_a_backup_of_its_host(cloud: OneProcess, user: Caller, tmp_path: Path) -> None:
    host = KillableHost(cloud, "restored", tmp_path / "host")
    await host.start()
    deleted, newer = [(await user.admin.boot(availability_zone="nova:restored"))["id"] for _ in range(2)]
    shutil.copytree(tmp_path / "host", tmp_path / "backup")
    for id in (deleted, newer):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await host.stop()
    shutil.rmtree(tmp_path / "host")
    shutil.copytree(tmp_path / "backup", tmp_path / "host")
    # A guest that is newer than the record of its server's deletion is nobody's to remove.
    await _write(cloud, sa.update(deleted_instances).where(deleted_instances.c.uuid == newer).values(epoch=0))
    await host.start()
    await host.guest_removed(deleted)
    assert await host.has_guest(newer)
    await host.driver.destroy(newer)
    await host.stop()


async def test_a_host_switches_a_guest_off_for_the_action_shutdown(cloud: OneProcess, user: Caller) -> None:
    """Not one that is newer than the record of its server's deletion."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    guest = (await cloud.guests(host))[id]
    for epoch, state in ((guest.epoch - 1, 1), (guest.epoch, 4), (guest.epoch, 4)):
        await cloud.compute.stop_guest(Context(request_id="req-test"), host, id, epoch)
        assert (await cloud.guests(host))[id].power_state == state
    await cloud.compute.stop_guest(Context(request_id="req-test"), host, "no guest", guest.epoch)


async def test_a_guest_that_its_host_does_not_remove(cloud: OneProcess, user: Caller) -> None:
    """`micronova status` names the host, until it has removed the guest."""
    id = (await user.boot(name=user.project))["id"]
    host = await user.host_of(id)

    async def error() -> str:
        jobs = (await collect_status(cloud.process))["periodic_jobs"]
        [found] = [job for job in jobs if job["name"] == "incomplete_migrations"]
        return found["error"] or ""

    async def named() -> bool | None:
        return True if host in await error() else None

    async def nothing() -> bool | None:
        return True if await error() == "" else None

    async with cloud.faults({"operation": "destroy", "kind": "fail", "name": user.project}):
        async with cloud.forced_down(host):
            await user.delete(f"/servers/{id}")
            await user.gone(id)
        # What has just been recorded is no reason to worry.
        old = sa.update(departures).where(departures.c.instance_uuid == id).values(created_at=1)
        await _write(cloud, old)
        await cloud.until(named, "the host to be named")
    await cloud.until(nothing, "the guest to be removed")
    await cloud.assert_clean()

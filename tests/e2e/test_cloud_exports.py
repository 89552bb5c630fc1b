"""Exports of volumes in a whole cloud: who serves them, and what happens when processes are killed or stopped."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from micronova.exporter import daemon
from tests.e2e.cloud import RealCloud, nothing, real_cloud
from tests.e2e.guests import run, until
from tests.e2e.test_cloud_restart import kill
from tests.e2e.test_trust import process_of, status

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

VOLUMES = "/volume/v3/volumes"
ATTACHMENTS = "/volume/v3/attachments"
VERSION = {"OpenStack-API-Version": "volume 3.59"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cloud(can_run_guests: None) -> AsyncIterator[RealCloud]:
    async with real_cloud() as made:
        yield made


async def ask(cloud: RealCloud, method: str, path: str, body: Any = None) -> Any:
    answer = await cloud.admin.request(method, path, body, VERSION)
    assert answer.status < 300, answer.body
    return answer.json() if answer.body else None


async def make_volume(cloud: RealCloud, **more: Any) -> str:
    volume_id: str = (await ask(cloud, "POST", VOLUMES, {"volume": {"size": 1, **more}}))["volume"]["id"]

    async def available() -> bool:
        return bool((await ask(cloud, "GET", f"{VOLUMES}/{volume_id}"))["volume"]["status"] == "available")

    await until(available, "the volume to be available")
    return volume_id


async def attach(cloud: RealCloud, volume_id: str) -> dict[str, Any]:
    body = {"attachment": {"volume_uuid": volume_id, "connector": {"host": os.uname().nodename}}}
    made: dict[str, Any] = (await ask(cloud, "POST", ATTACHMENTS, body))["attachment"]
    await ask(cloud, "POST", f"{ATTACHMENTS}/{made['id']}/action", {"os-complete": {}})
    return made


async def io(cloud: RealCloud, volume_id: str, *commands: str) -> None:
    socket = cloud.libvirt / "volumes" / volume_id / "nbd"
    options = f"driver=nbd,export={volume_id},server.type=unix,server.path={socket},reconnect-delay=60,open-timeout=60"
    done = await run("qemu-io", *(part for each in commands for part in ("-c", each)), "--image-opts", options)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr


def daemon_of(cloud: RealCloud, volume_id: str) -> int | None:
    pid = None
    for found, each in daemon.find(cloud.prefix):
        each.forget()
        if found == volume_id:
            pid = each.pid
    return pid


async def test_a_volume_is_served_whatever_is_killed(cloud: RealCloud) -> None:
    volume_id = await make_volume(cloud)
    assert daemon_of(cloud, volume_id) is None
    attachment = await attach(cloud, volume_id)
    assert attachment["connection_info"]["socket_path"] == f"/var/lib/libvirt/volumes/{volume_id}/nbd"
    await io(cloud, volume_id, "write -P 1 0 1M", "flush")

    first = daemon_of(cloud, volume_id)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await io(cloud, volume_id, "read -P 1 0 1M")
    second = daemon_of(cloud, volume_id)
    assert second not in (None, first)
    assert f"the storage daemon of volume {volume_id} ended (signal 9) and is started again" in cloud.log

    exporter = process_of(cloud, "micronova.cli.exporter")
    os.kill(exporter, signal.SIGKILL)
    await io(cloud, volume_id, "read -P 1 0 1M", "write -P 2 1M 1M")

    async def taken_over() -> bool:
        return f"the storage daemon of volume {volume_id}, process {second}, is taken over" in cloud.log

    await until(taken_over, "the next exporter to take over the daemon")

    await kill(cloud)
    await io(cloud, volume_id, "read -P 2 1M 1M", "write -P 3 2M 1M")
    await cloud.up()
    assert daemon_of(cloud, volume_id) == second
    await io(cloud, volume_id, "read -P 3 2M 1M")

    await cloud.down()
    nothing("of the cloud", cloud.leftovers())
    await cloud.up()

    async def served() -> bool:
        return daemon_of(cloud, volume_id) is not None

    await until(served, "the volume to be served after a restart")
    await io(cloud, volume_id, "read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M")
    await ask(cloud, "DELETE", f"{ATTACHMENTS}/{attachment['id']}")
    assert daemon_of(cloud, volume_id) is None
    assert not (cloud.libvirt / "volumes" / volume_id).exists()
    await ask(cloud, "DELETE", f"{VOLUMES}/{volume_id}")


async def test_who_serves_volumes(cloud: RealCloud) -> None:
    """The exporter and its daemons are neither root, nor the cloud, nor the agents, and have no capability."""
    volume_id = await make_volume(cloud)
    attachment = await attach(cloud, volume_id)
    pid = daemon_of(cloud, volume_id)
    assert pid is not None
    exporter = process_of(cloud, "micronova.cli.exporter")
    users = {int(status(each)["Uid"][0]) for each in (pid, exporter)}
    others = {
        int(status(process_of(cloud, module))["Uid"][0]) for module in ("micronova.cli.main up", "micronova.cli.agent")
    }
    assert len(users) == 1 and not users & {0, *others}
    for each in (pid, exporter):
        assert int(status(each)["CapEff"][0], 16) == 0 and int(status(each)["CapPrm"][0], 16) == 0
    assert status(pid)["NoNewPrivs"] == ["1"] and status(pid)["Seccomp"] == ["2"]
    opened = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    assert [each for each in opened if each.startswith(str(cloud.directory / "volumes" / "volumes"))] == [
        str(cloud.directory / "volumes" / "volumes" / volume_id)
    ]
    # Neither user of another process can connect, nor a guest that the volume is not attached to.
    user = int(status(process_of(cloud, "micronova.cli.main up"))["Uid"][0])
    sockets = Path(f"/proc/{exporter}/root") / str(cloud.libvirt / "volumes" / volume_id).lstrip("/")
    for name in ("nbd", "qmp"):
        assert (sockets / name).stat().st_mode & 0o077 == 0
        assert (sockets / name).stat().st_uid not in (0, user)
    await ask(cloud, "DELETE", f"{ATTACHMENTS}/{attachment['id']}")
    await ask(cloud, "DELETE", f"{VOLUMES}/{volume_id}")


async def test_a_snapshot_of_a_volume_in_use_is_of_one_moment(cloud: RealCloud) -> None:
    volume_id = await make_volume(cloud)
    attachment = await attach(cloud, volume_id)
    await io(cloud, volume_id, *(f"write -P 7 {at}M 1M" for at in range(8)), "flush")
    body = {"snapshot": {"volume_id": volume_id, "force": True}}
    made = (await ask(cloud, "POST", "/volume/v3/snapshots", body))["snapshot"]["id"]

    async def available() -> bool:
        found = (await ask(cloud, "GET", f"/volume/v3/snapshots/{made}"))["snapshot"]["status"]
        assert found != "error"
        return bool(found == "available")

    await until(available, "the snapshot")
    with (cloud.directory / "volumes" / "snapshots" / made).open("rb") as stream:
        assert stream.read(9 << 20) == b"\7" * (8 << 20) + b"\0" * (1 << 20)
    await ask(cloud, "DELETE", f"{ATTACHMENTS}/{attachment['id']}")
    await ask(cloud, "DELETE", f"/volume/v3/snapshots/{made}")

    async def gone() -> bool:
        return (await cloud.admin.request("GET", f"/volume/v3/snapshots/{made}", None, VERSION)).status == 404

    await until(gone, "the snapshot to be gone")
    await ask(cloud, "DELETE", f"{VOLUMES}/{volume_id}")

"""An attach of a volume that does not end in time: the guest does not keep what others may get."""

import pytest

from micronova.cli.audit import run_audit
from micronova.compute.handlers.table import UNDO
from micronova.conductor.rpcapi import HostConductorAPI
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.gates import Gate
from tests.functional.servers.test_volumes import Volumes, attachment

pytestmark = [pytest.mark.thorough, only_in_one_process("actions have one second")]

CLOUD = CloudOptions(
    hosts=2,
    roles=("volume",),
    settings={
        "default": {"instance_build_timeout": 1.0, "report_interval": 0.1},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


async def _has(cloud: OneProcess, server: str, volume: str) -> bool:
    guests = [found[server] for host in cloud.hosts if server in (found := await cloud.guests(host))]
    return any(volume in (guest.volumes or ()) for guest in guests)


async def _attach_too_late(
    cloud: OneProcess, user: Caller, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str, Gate]:
    """Attach a volume; its host reports when the gate is opened, after the volume was given back."""
    server = (await user.boot())["id"]
    volume = await volumes.create()
    gate = Gate()
    monkeypatch.setattr(HostConductorAPI, "report", gate.before(HostConductorAPI.report))
    path = f"/servers/{server}/os-volume_attachments"
    assert "in time" in await user.at(100).refused(500, "POST", path, attachment(volume))
    assert gate.reached.is_set() and await _has(cloud, server, volume)
    await volumes.until(volume, "available")
    return server, volume, gate


async def test_a_report_that_comes_too_late(cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume is free, and may be another server's: the guest must not go on to use it."""
    server, volume, gate = await _attach_too_late(cloud, user, Volumes(user), monkeypatch)
    gate.open.set()

    async def given_back() -> bool | None:
        return not await _has(cloud, server, volume) or None

    await cloud.until(given_back, "the guest to give the volume back")
    await cloud.assert_clean()


async def test_the_audit_names_a_guest_with_a_volume_whose_server_has_none(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose agent died before it reported, and came back after the deadline."""
    monkeypatch.delitem(UNDO, "attach_volume")
    server, volume, gate = await _attach_too_late(cloud, user, Volumes(user), monkeypatch)
    gate.open.set()
    await gate.left.wait()
    [found] = await run_audit(cloud.process)
    assert (found["kind"], found["subject"]) == ("volume", volume)
    assert f"server {server}" in found["message"] and "which the server does not have" in found["message"]
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await cloud.assert_clean()

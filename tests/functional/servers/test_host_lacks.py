"""A host that lacks something for the moment, such as libvirtd while it is restarted, costs users nothing but time."""

import uuid
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations import engine
from tests.functional.cloud import OTHER_IMAGE, Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import network, ports_left

TIMES = 5
"""More often than a build is tried on hosts where it fails."""

pytestmark = only_in_one_process("hosts of its own, which all lack something")
CLOUD = CloudOptions(
    roles=("network",),
    hosts=2,
    settings={
        "default": {"report_interval": 0.1},
        "conductor": {"sweep_interval": 0.1},
        "scheduler": {"max_attempts": 2},
    },
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


def _away(operation: str, name: str, **more: Any) -> dict[str, Any]:
    message = "Libvirt cannot be reached: Connection refused"
    return {"operation": operation, "kind": "unavailable", "name": name, "message": message, **more}


def _name() -> str:
    return f"l{uuid.uuid4().hex[:10]}"


async def test_a_build_waits_for_its_hosts(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults(_away("spawn", name, count=TIMES)):
        server = await user.boot(name=name)
    assert "fault" not in server
    await cloud.assert_clean()


async def test_a_build_goes_to_a_host_that_lacks_nothing(cloud: Cloud, user: Caller) -> None:
    name = _name()
    async with cloud.faults(_away("spawn", name, host=f"^{cloud.hosts[0]}$")):
        ids = await user.boot_many(4, name=name)
    assert {await user.host_of(id) for id in ids} == {cloud.hosts[1]}
    await cloud.assert_clean()


async def test_a_lack_that_is_over_keeps_no_build_away(cloud: Cloud, user: Caller) -> None:
    """It counted as a failed build, so that all builds went elsewhere until one had succeeded there."""
    name, host = _name(), cloud.hosts[0]
    async with cloud.faults(_away("spawn", name, host=f"^{host}$")):
        await user.boot_many(4, name=name)
    assert host in {await user.host_of(id) for id in await user.boot_many(8)}
    await cloud.assert_clean()


async def test_a_build_for_one_host_waits_for_that_host(cloud: Cloud, user: Caller) -> None:
    name, host = _name(), cloud.hosts[0]
    async with cloud.faults(_away("spawn", name, count=TIMES)):
        id = await user.admin.create(name=name, host=host)
        await user.admin.wait_for(id, "ACTIVE")
    assert await user.admin.host_of(id) == host
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("operation", "action", "value", "before", "after"),
    [
        ("power_off", "os-stop", None, None, "SHUTOFF"),
        ("power_on", "os-start", None, "os-stop", "ACTIVE"),
        ("reboot", "reboot", {"type": "SOFT"}, None, "ACTIVE"),
        ("reboot", "reboot", {"type": "HARD"}, None, "ACTIVE"),
        ("pause", "pause", None, None, "PAUSED"),
        ("unpause", "unpause", None, "pause", "ACTIVE"),
        ("suspend", "suspend", None, None, "SUSPENDED"),
        ("resume", "resume", None, "suspend", "ACTIVE"),
        ("rebuild", "rebuild", {"imageRef": OTHER_IMAGE}, None, "ACTIVE"),
        ("rebuild", "rebuild", {"imageRef": OTHER_IMAGE}, "os-stop", "SHUTOFF"),
    ],
)
async def test_an_action_waits_for_its_host(
    cloud: Cloud, user: Caller, operation: str, action: str, value: Any, before: str | None, after: str
) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    if before is not None:
        await user.act(id, before)
        await user.wait_for(id, "SHUTOFF", "PAUSED", "SUSPENDED", task=None)
    async with cloud.faults(_away(operation, name, count=TIMES)):
        await user.act(id, action, value)
        await cloud.fault_struck()
        server = await user.wait_for(id, after, "ERROR", task=None)
    assert server["status"] == after
    assert "fault" not in server
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert actions[0]["message"] is None
    await cloud.assert_clean()


async def test_a_delete_waits_for_its_host(cloud: Cloud, user: Caller) -> None:
    name = _name()
    id = (await user.boot(name=name))["id"]
    async with cloud.faults(_away("destroy", name, count=TIMES)):
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_an_interface_waits_for_its_host(cloud: Cloud, user: Caller) -> None:
    name = _name()
    net = await network(user)
    id = (await user.boot(name=name))["id"]
    async with cloud.faults(_away("attach_interface", name, count=TIMES), _away("detach_interface", name, count=TIMES)):
        made = await user.post(f"/servers/{id}/os-interface", {"interfaceAttachment": {"net_id": net["id"]}}, 200)
        port = made["interfaceAttachment"]["port_id"]
        await user.delete(f"/servers/{id}/os-interface/{port}", 202)

        async def detached() -> bool | None:
            return None if (await user.get(f"/servers/{id}/os-interface"))["interfaceAttachments"] else True

        await cloud.until(detached, "the interface to be detached")
    assert not await ports_left(user)
    await cloud.assert_clean()

"""What a transaction did is counted and logged once, also if the database runs it twice."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.conductor.operations import engine
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.killable_host import KillableHost

LACKS = 3
"""How often a host lacks something."""

pytestmark = only_in_one_process("its database runs every transaction twice")
CLOUD = CloudOptions(
    hosts=2,
    retried=True,
    settings={"default": {"report_interval": 0.1}, "conductor": {"sweep_interval": 0.1}},
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


def _lack(operation: str, name: str) -> dict[str, Any]:
    return {"operation": operation, "kind": "unavailable", "name": name, "message": "not now", "count": LACKS}


async def test_an_order_that_the_host_gets_again(cloud: Cloud, user: Caller) -> None:
    name = f"r{uuid.uuid4().hex[:10]}"
    id = (await user.boot(name=name))["id"]
    retries = cloud.process.telemetry.metrics.retries
    before = retries.get("stop", 0)
    async with cloud.faults(_lack("power_off", name)):
        await user.act(id, "os-stop")
        await user.wait_for(id, "SHUTOFF")
    assert retries["stop"] - before == LACKS


async def test_a_build_that_goes_elsewhere(cloud: Cloud, user: Caller) -> None:
    name = f"r{uuid.uuid4().hex[:10]}"
    retries = cloud.process.telemetry.metrics.retries
    before = retries.get("build", 0)
    async with cloud.faults(_lack("spawn", name)):
        await user.boot(name=name)
    assert retries.get("build", 0) - before == LACKS


async def test_a_guest_that_ends_by_itself(
    cloud: OneProcess, user: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = KillableHost(cloud, "ends", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:ends"))["id"]
    host.driver.guest_becomes(id, "stopped")
    await user.wait_for(id, "SHUTOFF")
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()
    assert caplog.text.count(f"server {id} is stopped on host ends without a request") == 1

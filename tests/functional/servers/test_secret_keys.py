"""A conductor that has another secret key than the API: its operations wait for one that can read their secrets."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.conductor.manager import ConductorManager
from micronova.conductor.operations.health import Health
from micronova.db.secrets import SecretBox
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process

pytestmark = only_in_one_process("changes the secret key of the conductor")

CLOUD = CloudOptions(
    hosts=2,
    settings={
        "default": {"instance_build_timeout": 1.0, "report_interval": 0.1},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)


@pytest.fixture
def conductor(cloud: OneProcess) -> ConductorManager:
    return next(role for role in cloud.process.started if isinstance(role, ConductorManager))


@pytest.fixture
def forget_key(conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forget() -> None:
        monkeypatch.setattr(conductor._dependencies, "secrets", SecretBox(bytes(32)))

    return forget


async def test_a_build_waits_for_a_conductor_that_has_the_key(
    cloud: OneProcess,
    user: Caller,
    conductor: ConductorManager,
    forget_key: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two conductors was started with the key of another region: the other one builds the server."""
    own = conductor._dependencies.secrets
    monkeypatch.setattr(Health, "undisturbed_for", lambda _: 0.0)  # no deadline ends it
    forget_key()
    id = await user.create(networks="none")

    async def tried_again() -> bool | None:
        found = [row for row in await cloud.open_operations() if row.instance_uuid == id]
        return (not found or found[0].leases > 1) or None

    await cloud.until(tried_again, "the second attempt")
    assert (await user.show(id))["status"] == "BUILD"
    assert conductor.engine.health.healthy(), "hosts are heard"
    monkeypatch.setattr(conductor._dependencies, "secrets", own)
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()


async def test_a_build_whose_secret_nobody_can_read_says_so(
    cloud: OneProcess, user: Caller, forget_key: Callable[[], None]
) -> None:
    forget_key()
    id = await user.create(networks="none")
    server = await user.wait_for(id, "ERROR")
    assert "in time" in server["fault"]["message"]
    assert "another secret key" in server["fault"]["message"]
    await cloud.assert_clean()


async def test_an_order_that_is_lost_and_cannot_be_made_again_says_so(
    cloud: OneProcess,
    user: Caller,
    conductor: ConductorManager,
    forget_key: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def lose(*_: Any) -> None:
        forget_key()

    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)
    monkeypatch.setattr(conductor._dependencies.compute, "send_order", lose)
    id = await user.create(networks="none", name=f"h{uuid.uuid4().hex[:10]}")
    server = await user.wait_for(id, "ERROR")
    assert "another secret key" in server["fault"]["message"]
    said = [each for each in caplog.messages if "cannot be made now" in each]
    assert len(said) == 1, "and not at each heartbeat"
    await cloud.assert_clean()

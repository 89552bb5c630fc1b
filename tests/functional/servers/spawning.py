"""What really arrives at a simulated host, for tests in one process."""

from collections.abc import Iterator

import pytest

from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[str, GuestPlan]]]]:
    """By server: the hosts that were asked to make its guest, each with what it was told."""
    plans: dict[str, list[tuple[str, GuestPlan]]] = {}
    spawn = FakeDriver.spawn

    async def noted(driver: FakeDriver, plan: GuestPlan) -> None:
        plans.setdefault(plan.instance.uuid, []).append((driver.host, plan))
        await spawn(driver, plan)

    monkeypatch.setattr(FakeDriver, "spawn", noted)
    yield plans

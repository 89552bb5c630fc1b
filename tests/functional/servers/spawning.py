"""The guest plans that simulated hosts receive, for tests in one process."""

from collections.abc import Iterator

import pytest

from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[str, GuestPlan]]]]:
    """By server: each host that was asked to spawn its guest, with the plan that it received."""
    plans: dict[str, list[tuple[str, GuestPlan]]] = {}
    spawn = FakeDriver.spawn

    async def noted(driver: FakeDriver, plan: GuestPlan) -> None:
        plans.setdefault(plan.instance.uuid, []).append((driver.host, plan))
        await spawn(driver, plan)

    monkeypatch.setattr(FakeDriver, "spawn", noted)
    yield plans

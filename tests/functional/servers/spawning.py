"""The guest plans that simulated hosts receive, for tests in one process."""

from collections.abc import Iterator

import pytest

from micronova.virt.driver import GuestPlan
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import ON_CLUSTER


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[tuple[str, GuestPlan]]]]:
    """By server: each host that was asked to spawn its guest, with the plan that it received."""
    if ON_CLUSTER:
        pytest.skip("reads the plans of guests in the process of their hosts")
    plans: dict[str, list[tuple[str, GuestPlan]]] = {}
    spawn = FakeDriver.spawn

    async def noted(driver: FakeDriver, plan: GuestPlan) -> None:
        plans.setdefault(plan.instance.uuid, []).append((driver.host, plan))
        await spawn(driver, plan)

    monkeypatch.setattr(FakeDriver, "spawn", noted)
    yield plans

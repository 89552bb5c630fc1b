"""Fixtures for tests of the embedded identity service."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import Cloud, cloud_at, sqlite_at


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
async def cloud(tmp_path: Path, clock: HeldClock) -> AsyncIterator[Cloud]:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as running:
        yield running

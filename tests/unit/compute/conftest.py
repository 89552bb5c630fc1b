"""The agent harness of each test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.unit.compute.agent_harness import AgentHarness


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[AgentHarness]:
    """An agent with one simulated host in memory."""
    harness = AgentHarness()
    await harness.start()
    yield harness
    await harness.close()

"""A world for each test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.unit.compute.world import World


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """An agent with one simulated host in memory."""
    world = World()
    await world.start()
    yield world
    await world.close()

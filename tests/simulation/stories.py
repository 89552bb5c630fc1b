"""What users do in a simulation, and how it ends if the cloud keeps its word."""

import asyncio

from tests.simulation.world import World


async def whole_life(world: World, name: str = "whole") -> None:
    """A server is built, stopped, started, restarted and deleted. One thing may go wrong, and nobody notices."""
    [id] = await world.create(name)
    await world.becomes(id, "active")
    await act(world, id, {"os-stop": None}, "stopped")
    await act(world, id, {"os-start": None}, "active")
    await act(world, id, {"reboot": {"type": "HARD"}}, "active")
    await world.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await world.gone(id)


async def act(world: World, id: str, action: dict[str, object], state: str) -> None:
    """Do something to a server; an action whose answer was lost, and that was done, is refused the second time."""
    await world.insist("POST", f"/servers/{id}/action", action, 202, 409)
    await world.becomes(id, state)


async def several(world: World, name: str = "several") -> None:
    """Three servers in one request."""
    ids = await world.create(name, count=3)
    for id in ids:
        await world.becomes(id, "active", "error")
    for id in ids:
        await world.insist("DELETE", f"/servers/{id}", None, 204, 404)
    for id in ids:
        await world.gone(id)


async def kept(world: World, name: str = "kept") -> None:
    """Two servers that stay."""
    for id in await world.create(name, count=2):
        await world.becomes(id, "active", "error")


async def changed_mind(world: World, name: str = "mind", after: float = 0.0) -> None:
    """A server that is deleted while it is built."""
    [id] = await world.create(name)
    await asyncio.sleep(after)
    await world.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await world.gone(id)


async def crowd(world: World, name: str = "crowd") -> None:
    """More large servers than there is room for, one by one: some run, the others are told that there is none."""
    ids = [id for number in range(14) for id in await world.create(f"{name}-{number:02}", flavor="3")]
    states = [await world.becomes(id, "active", "error") for id in ids]
    assert states.count("active") <= 12

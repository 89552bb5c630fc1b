"""What users do in a simulation, and how it ends if the cloud keeps its word."""

import asyncio

import msgspec

from tests.simulation.world import World


async def whole_life(world: World, name: str = "whole") -> None:
    """A server is built, stopped, started, restarted and deleted. One thing may go wrong, and nobody notices."""
    world.fate.armed = True
    [id] = await world.create(name)
    await world.becomes(id, "active")
    await act(world, id, {"os-stop": None}, "stopped")
    await act(world, id, {"os-start": None}, "active")
    await act(world, id, {"reboot": {"type": "HARD"}}, "active")
    await world.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await world.gone(id)


async def rest(world: World, name: str = "rest") -> None:
    """A server, once it runs, is paused and suspended, and goes on."""
    [id] = await world.create(name)
    await world.becomes(id, "active")
    world.fate.armed = True
    await act(world, id, {"pause": None}, "paused")
    await act(world, id, {"unpause": None}, "active")
    await act(world, id, {"suspend": None}, "suspended")
    await act(world, id, {"resume": None}, "active")


async def wired(world: World, name: str = "wired") -> None:
    """A server with an interface gets another one, loses it again, and is deleted."""
    answer = await world.request("GET", "/networks?name=private", service="/network/v2.0")
    assert answer is not None
    network = msgspec.json.decode(answer.body)["networks"][0]["id"]
    world.fate.armed = True
    [id] = await world.create(name, networks=[{"uuid": network}])
    await world.becomes(id, "active")
    [first] = world.ports()
    body = {"interfaceAttachment": {"net_id": network}}
    # A careful user: an answer that did not come is looked for, once nothing is done to the server any more.
    while len(world.ports()) < 2:
        await world.request("POST", f"/servers/{id}/os-interface", body)
        await settled(world, id)
    for second in world.ports().keys() - {first}:
        await world.insist("DELETE", f"/servers/{id}/os-interface/{second}", None, 202, 404)
    await world.until(lambda: list(world.ports()) == [first], "the interface to be gone")
    await settled(world, id)
    await world.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await world.gone(id)


async def settled(world: World, id: str) -> None:
    """Nothing is done to a server any more."""
    await world.until(lambda: not world.open(), "all operations to end")
    await world.becomes(id, "active")


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

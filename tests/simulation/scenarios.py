"""What users do in a simulation, and the states in which their servers must end."""

import asyncio

import msgspec

from tests.simulation.simulated_cloud import SimulatedCloud


async def server_lifecycle(cloud: SimulatedCloud, name: str = "lifecycle") -> None:
    """Build, stop, start, reboot and delete a server. A fault may delay this but not change it."""
    cloud.fault_plan.armed = True
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    await act(cloud, id, {"os-stop": None}, "stopped")
    await act(cloud, id, {"os-start": None}, "active")
    await act(cloud, id, {"reboot": {"type": "HARD"}}, "active")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def pause_and_suspend(cloud: SimulatedCloud, name: str = "pause") -> None:
    """Pause, unpause, suspend and resume a server that is active."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await act(cloud, id, {"pause": None}, "paused")
    await act(cloud, id, {"unpause": None}, "active")
    await act(cloud, id, {"suspend": None}, "suspended")
    await act(cloud, id, {"resume": None}, "active")


async def attach_and_detach(cloud: SimulatedCloud, name: str = "attach") -> None:
    """Attach a second interface to a server, detach it, and delete the server."""
    answer = await cloud.request("GET", "/networks?name=private", service="/network/v2.0")
    assert answer is not None
    network = msgspec.json.decode(answer.body)["networks"][0]["id"]
    cloud.fault_plan.armed = True
    [id] = await cloud.create(name, networks=[{"uuid": network}])
    await cloud.becomes(id, "active")
    [first] = cloud.ports()
    body = {"interfaceAttachment": {"net_id": network}}
    # If the answer is lost, the user checks for the port after the operation has ended before asking again.
    while len(cloud.ports()) < 2:
        await cloud.request("POST", f"/servers/{id}/os-interface", body)
        await settled(cloud, id)
    for second in cloud.ports().keys() - {first}:
        await cloud.insist("DELETE", f"/servers/{id}/os-interface/{second}", None, 202, 404)
    await cloud.until(lambda: list(cloud.ports()) == [first], "the interface to be gone")
    await settled(cloud, id)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def settled(cloud: SimulatedCloud, id: str) -> None:
    """Wait until all operations have ended and the server is active."""
    await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    await cloud.becomes(id, "active")


async def act(cloud: SimulatedCloud, id: str, action: dict[str, object], state: str) -> None:
    """Send an action until it is accepted. A 409 means that it was done and its answer was lost."""
    await cloud.insist("POST", f"/servers/{id}/action", action, 202, 409)
    await cloud.becomes(id, state)


async def several_in_one_request(cloud: SimulatedCloud, name: str = "several") -> None:
    """Create three servers in one request, and delete them."""
    ids = await cloud.create(name, count=3)
    for id in ids:
        await cloud.becomes(id, "active", "error")
    for id in ids:
        await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    for id in ids:
        await cloud.gone(id)


async def keep_servers(cloud: SimulatedCloud, name: str = "kept") -> None:
    """Create two servers and keep them."""
    for id in await cloud.create(name, count=2):
        await cloud.becomes(id, "active", "error")


async def stays_active(cloud: SimulatedCloud, name: str, after: float) -> None:
    """Create a server after some time; it must become active, whatever happens meanwhile."""
    await asyncio.sleep(after)
    for id in await cloud.create(name):
        await cloud.becomes(id, "active")


async def delete_during_build(cloud: SimulatedCloud, name: str = "deleted", after: float = 0.0) -> None:
    """Delete a server while it is being built."""
    [id] = await cloud.create(name)
    await asyncio.sleep(after)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def exceed_capacity(cloud: SimulatedCloud, name: str = "large") -> None:
    """Create more large servers than the hosts can hold: some become active, the others go to ERROR."""
    ids = [id for number in range(14) for id in await cloud.create(f"{name}-{number:02}", flavor="3")]
    states = [await cloud.becomes(id, "active", "error") for id in ids]
    assert states.count("active") <= 12

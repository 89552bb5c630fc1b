"""Which host has the routers: one, also after outages of the network service."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.functional.embedded.test_network_host_changes import guest, report, state
from tests.unit.embedded.network.world import ADMIN, World, world

HOSTS = [f"h{number}" for number in range(1, 7)]


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        await made.role.watch.stop()  # the test looks itself
        yield made


async def router_hosts(cloud: World, hosts: Iterable[str] = HOSTS) -> list[str]:
    """Return the hosts that have routers, after the service has looked at its agents."""
    await cloud.role.watch.look(complete=True)
    return [host for host in hosts if (await state(cloud, host))["state"]["routers"]]


async def routed(cloud: World) -> Any:
    """Create a network with a router; return the network."""
    network, subnet = await cloud.network()
    router = await cloud.make("router", name="r")
    answer = await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    assert answer.status == 200
    return network


async def test_no_host_has_the_routers_before_an_agent_has_reported(cloud: World) -> None:
    await routed(cloud)
    assert await router_hosts(cloud) == []
    await report(cloud, "h2", started=True)
    assert await router_hosts(cloud) == ["h2"]
    await report(cloud, "h1", started=True)
    assert await router_hosts(cloud) == ["h2"], "they do not move to a new host"


async def test_an_outage_does_not_move_the_routers(cloud: World) -> None:
    """For ten minutes nobody could report. Agents ask for their states first, and report in any order."""
    network = await routed(cloud)
    for host in HOSTS:
        await report(cloud, host, started=True)
    assert await router_hosts(cloud) == ["h1"]
    await cloud.clock.jump(600)
    await guest(cloud, network, "h2")
    assert await router_hosts(cloud) == ["h1"]
    for host in ("h5", "h3", "h6", "h2", "h4", "h1"):
        await report(cloud, host)
        assert await router_hosts(cloud) == ["h1"]
        await cloud.clock.jump(5)
    await cloud.clock.jump(40)
    assert await router_hosts(cloud) == ["h1"]


async def test_two_outages_do_not_count_as_one_silence(cloud: World) -> None:
    await routed(cloud)
    for host in ("h1", "h2"):
        await report(cloud, host, started=True)
    for _ in range(2):
        await cloud.clock.jump(600)
        assert await router_hosts(cloud) == ["h1"]
        await report(cloud, "h2")
        assert await router_hosts(cloud) == ["h1"]


async def test_a_silent_host_loses_the_routers_after_the_grace_time(cloud: World) -> None:
    await routed(cloud)
    for host in ("h1", "h2", "h3"):
        await report(cloud, host, started=True)
    found = []
    for _ in range(8):
        await cloud.clock.jump(20)
        for host in ("h2", "h3"):
            await report(cloud, host)
        found += await router_hosts(cloud)
    assert found == [*["h1"] * 5, *["h2"] * 3], "after 75 s it counts as dead, and 37.5 s later as gone"
    await report(cloud, "h1")
    assert await router_hosts(cloud) == ["h2"], "a host that is back does not take them back"


@pytest.mark.parametrize("how", ["disable", "delete"])
async def test_an_admin_moves_the_routers_at_once(cloud: World, how: str) -> None:
    await routed(cloud)
    for host in ("h1", "h2"):
        await report(cloud, host, started=True)
    [agent] = [each for each in await cloud.list("agent", token=ADMIN) if each["host"] == "h1"]
    if how == "disable":
        await cloud.change("agent", agent["id"], ADMIN, admin_state_up=False)
    else:
        await cloud.delete("agent", agent["id"], ADMIN)
    assert await router_hosts(cloud) == ["h2"]

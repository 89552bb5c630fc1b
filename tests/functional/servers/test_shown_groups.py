"""The security groups that a server shows are those of its ports, whether the user or compute created them."""

import asyncio
from typing import Any

from tests.functional.cloud import Caller, CloudOptions
from tests.functional.servers.embedded_services import make, network, ok, ports_of

CLOUD = CloudOptions(roles=("network",))


async def _shown(user: Caller, **wanted: Any) -> tuple[list[str] | None, list[int]]:
    """Boot a server; return the security groups that it shows, and how many each of its ports has."""
    id = (await user.boot(**wanted))["id"]
    groups = (await user.show(id)).get("security_groups")
    ports = [len(port["security_groups"]) for port in await ports_of(user, id)]
    return groups and [group["name"] for group in groups], sorted(ports)


async def test_a_network_without_port_security_has_none(user: Caller) -> None:
    open_network = await network(user, port_security_enabled=False)
    there = {"uuid": open_network["id"]}
    assert await _shown(user, networks=[there]) == (None, [0])
    assert await _shown(user, networks=[there], security_groups=[{"name": "default"}]) == (None, [0])
    assert await _shown(user, networks="none") == (None, [])
    guarded = await network(user, cidr="10.8.0.0/24")
    assert await _shown(user, networks=[there, {"uuid": guarded["id"]}]) == (["default"], [0, 1])


async def test_named_groups_are_refused_where_they_cannot_hold(user: Caller) -> None:
    open_network = await network(user, port_security_enabled=False)
    await make(user, "security_group", name="web")
    body = user.body(networks=[{"uuid": open_network["id"]}], security_groups=[{"name": "web"}])
    said = await user.refused(400, "POST", "/servers", body)
    assert "port security" in said and open_network["id"] in said


async def test_a_port_of_the_user_brings_its_own(user: Caller) -> None:
    place = await network(user)
    web = await make(user, "security_group", name="web")
    db = await make(user, "security_group", name="db")

    async def port(*groups: dict[str, Any]) -> dict[str, str]:
        made = await make(user, "port", network_id=place["id"], security_groups=[group["id"] for group in groups])
        return {"port": made["id"]}

    assert await _shown(user, networks=[await port(db, web)]) == (["db", "web"], [2])
    assert await _shown(user, networks=[await port()]) == (None, [0])
    assert await _shown(user, networks=[await port(web), {"uuid": place["id"]}]) == (["default", "web"], [1, 1])
    asked = [{"name": "db"}]  # for the port that compute creates; the user's own is not changed
    networks = [await port(web), {"uuid": place["id"]}]
    assert await _shown(user, networks=networks, security_groups=asked) == (["db", "web"], [1, 1])
    assert await _shown(user, networks=[await port(web)], security_groups=asked) == (["web"], [1])


async def _becomes(user: Caller, server: str, *expected: str) -> None:
    async with asyncio.timeout(10):
        while [group["name"] for group in (await user.show(server)).get("security_groups", ())] != list(expected):
            await asyncio.sleep(0.02)  # the network service notifies compute, not this test


async def test_what_is_changed_at_a_port_shows(user: Caller) -> None:
    place = await network(user)
    web = await make(user, "security_group", name="web")
    server = (await user.boot(networks=[{"uuid": place["id"]}]))["id"]
    [port] = await ports_of(user, server)

    async def give(*groups: str) -> None:
        await ok(user, "PUT", f"/network/v2.0/ports/{port['id']}", {"port": {"security_groups": groups}})

    await give(web["id"])
    await _becomes(user, server, "web")
    await give(*port["security_groups"], web["id"])
    await _becomes(user, server, "default", "web")
    await give()
    await _becomes(user, server)


async def test_an_interface_brings_its_groups_and_takes_them_away(user: Caller) -> None:
    place = await network(user)
    web = await make(user, "security_group", name="web")
    server = (await user.boot(networks=[{"uuid": place["id"]}]))["id"]
    port = await make(user, "port", network_id=place["id"], security_groups=[web["id"]])
    await user.post(f"/servers/{server}/os-interface", {"interfaceAttachment": {"port_id": port["id"]}}, 200)
    await _becomes(user, server, "default", "web")
    await user.delete(f"/servers/{server}/os-interface/{port['id']}", 202)
    await _becomes(user, server, "default")


async def test_groups_that_are_named_twice_count_once(user: Caller) -> None:
    place = await network(user)
    for name in ("web", "db"):
        await make(user, "security_group", name=name)
    named = [{"name": name} for name in ("web", "db", "web")]
    assert await _shown(user, networks=[{"uuid": place["id"]}], security_groups=named) == (["web", "db"], [2])

"""Compute hosts at the network service: each has its own ticket, which is valid only for itself."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.http.client import Answer
from micronova.http.host_keys import LIFETIME, HostKeyring
from micronova.http.paging import iso
from micronova.objects.clock import micros
from tests.unit.embedded.network.world import ADMIN, ALICE, KEYRING, SERVICE, World, error, world

HOST = "h1"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


def ticket(cloud: World, host: str = HOST, keyring: HostKeyring = KEYRING) -> str:
    return keyring.issue(host, cloud.clock.now()).ticket


async def state(cloud: World, host: str = HOST, token: str | None = None) -> Answer:
    return await cloud.call("GET", f"/agent-states/{host}", token=token or ticket(cloud, host))


async def report(cloud: World, host: str = HOST, token: str | None = None, **fields: Any) -> Answer:
    return await cloud.call("POST", "/agent-reports", {"host": host, **fields}, token=token or ticket(cloud, host))


async def guest(cloud: World, network: Any, host: str = HOST, **fields: Any) -> Any:
    return await cloud.make(
        "port", SERVICE, network_id=network["id"], project_id="p1", device_id="server", device_owner="compute:nova",
        binding__host_id=host, **fields,
    )  # fmt: skip


async def test_a_host_acts_for_itself(cloud: World) -> None:
    assert (await report(cloud, started=True)).status == 200
    network, _ = await cloud.network()
    port = await guest(cloud, network)
    assert [each["id"] for each in (await state(cloud)).json()["state"]["ports"]] == [port["id"]]
    assert (await report(cloud, up=[port["id"]])).status == 200
    assert (await cloud.show("port", port["id"]))["status"] == "ACTIVE"


async def test_a_silent_agent_is_an_agent(cloud: World) -> None:
    """A port that was bound during an outage was ACTIVE although nobody had wired it, and its guest had no network."""
    network, _ = await cloud.network()
    await report(cloud, started=True)
    await cloud.clock.jump(3600)
    assert not (await cloud.call("GET", f"/agents?host={HOST}", token=ADMIN)).json()["agents"][0]["alive"]
    port = await guest(cloud, network)
    other = await guest(cloud, network, "without-an-agent")
    assert (port["status"], other["status"]) == ("DOWN", "ACTIVE")
    moved = await cloud.change("port", other["id"], SERVICE, binding__host_id=HOST)
    assert moved["status"] == "DOWN"
    assert (await report(cloud, up=[port["id"]])).status == 200
    assert (await cloud.show("port", port["id"]))["status"] == "ACTIVE"


async def test_a_host_does_not_act_for_another(cloud: World) -> None:
    network, _ = await cloud.network()
    await report(cloud, "h2", started=True)
    port = await guest(cloud, network, "h2")
    mine = ticket(cloud)
    for answer in (await state(cloud, "h2", mine), await report(cloud, "h2", mine, up=[port["id"]])):
        assert answer.status == 403 and error(answer) == "PolicyNotAuthorized"
        assert "This is the ticket of host h1: it is not valid for host h2." in answer.body.decode()
    assert (await report(cloud, up=[port["id"]])).status == 200  # ignored: the port is not on this host
    assert (await cloud.show("port", port["id"]))["status"] == "DOWN"


async def test_tickets_that_are_not_good(cloud: World) -> None:
    good = ticket(cloud)
    await cloud.clock.jump(LIFETIME)
    forged = ticket(cloud, keyring=HostKeyring(b"another key, of a thief"))
    for bad in (good, forged, "mnh1.", ticket(cloud)[:-1]):
        for answer in (await state(cloud, token=bad), await report(cloud, token=bad)):
            assert answer.status == 401, bad
    assert (await state(cloud)).status == 200


async def test_a_ticket_opens_nothing_else(cloud: World) -> None:
    open_to_all = 0
    for route in cloud.role.service.routes:
        if route.for_hosts:
            continue
        path = route.path
        for name in ("id", "parent_id", "rule_id", "tag", "project_id", "resource", "key"):
            path = path.replace(f"{{{name}}}", HOST)
        answer = await cloud.call(route.method, f"/{path}", {}, token=ticket(cloud))
        if route.policy is None:
            open_to_all += 1  # version documents
        else:
            assert answer.status == 403, (route.label, answer)
            assert "A host's ticket is not valid for this request." in answer.body.decode()
    assert open_to_all <= 3
    assert [route.label for route in cloud.role.service.routes if route.for_hosts] == [
        "GET /v2.0/agent-states/{id}", "POST /v2.0/agent-reports",
    ]  # fmt: skip


async def test_users_ask_policy_as_before(cloud: World) -> None:
    for token, status in ((ALICE, 403), (SERVICE, 200), (ADMIN, 200)):
        assert (await state(cloud, token=token)).status == status
        assert (await report(cloud, token=token)).status == status


async def test_the_members_of_security_groups_are_limited(cloud: World) -> None:
    """A project may give its ports so many address pairs that they would fill the firewall of a host."""
    network, _ = await cloud.network("10.1.0.0/16")
    [default] = await cloud.list("security_group", "name=default")
    groups = sorted([(await cloud.make("security_group", name=f"g{n}"))["id"] for n in range(9)])
    for group in groups:
        rule = {"security_group_id": group, "direction": "ingress", "ethertype": "IPv6", "remote_group_id": group}
        await cloud.make("security_group_rule", **rule)
    port = await guest(cloud, network, security_groups=[default["id"], *groups])

    async def add(count: int, start: int) -> None:
        bodies = [
            {"network_id": network["id"], "security_groups": groups,
             "allowed_address_pairs": [{"ip_address": f"fd00::{number:x}:{pair:x}"} for pair in range(10)]}
            for number in range(start, start + count)
        ]  # fmt: skip
        answer = await cloud.call("POST", "/ports", {"ports": bodies})
        assert answer.status == 201, answer.body

    await add(450, 1)
    shown = (await state(cloud)).json()["state"]
    assert len(shown["oversized"]) == 1, "one group has to be left out for all to fit"
    assert set(shown["oversized"].values()) == {450 * 11 + 1}
    assert sum(len(each) for each in shown["members"].values()) == 8 * (450 * 11 + 1) + 1
    await add(5, 451)
    shown = (await state(cloud)).json()["state"]
    assert shown["oversized"] == dict.fromkeys(groups, 5001), "each is too large by itself, however many follow"
    own = port["fixed_ips"][0]["ip_address"]
    assert shown["members"] == {default["id"]: [own]}, "a small group keeps its members"


# --- ports of DHCP servers ---


async def servers(cloud: World) -> list[Any]:
    found: list[Any] = await cloud.list("port", "device_owner=network:dhcp", SERVICE)
    return found


async def settle(cloud: World) -> None:
    assert (await report(cloud, dhcp=True)).status == 200


async def test_a_dhcp_server_where_a_host_has_guests(cloud: World) -> None:
    network, subnet = await cloud.network()
    await cloud.network("10.2.0.0/24")  # has no guest on the host
    await settle(cloud)
    assert await servers(cloud) == []
    port = await guest(cloud, network)
    for _ in range(2):
        await settle(cloud)
    [server] = await servers(cloud)
    assert (server["network_id"], server["binding:host_id"], server["project_id"]) == (network["id"], HOST, "")
    assert (server["device_id"], server["status"], server["binding:vif_type"]) == (f"dhcp-{HOST}", "DOWN", "bridge")
    assert not server["port_security_enabled"] and server["security_groups"] == []
    assert [each["subnet_id"] for each in server["fixed_ips"]] == [subnet["id"]]
    await report(cloud, up=[server["id"]])
    assert (await servers(cloud))[0]["status"] == "ACTIVE"
    await cloud.delete("port", port["id"], SERVICE)
    await settle(cloud)
    assert await servers(cloud) == []


async def test_a_dhcp_server_follows_the_subnets(cloud: World) -> None:
    network, first = await cloud.network()
    await guest(cloud, network)
    await settle(cloud)
    address = (await servers(cloud))[0]["fixed_ips"]
    second = await cloud.make("subnet", network_id=network["id"], cidr="10.3.0.0/24", ip_version=4)
    await settle(cloud)
    [server] = await servers(cloud)
    assert address[0] in server["fixed_ips"], "it keeps its addresses"
    assert {each["subnet_id"] for each in server["fixed_ips"]} == {first["id"], second["id"]}
    await cloud.change("subnet", first["id"], enable_dhcp=False)
    await settle(cloud)
    [server] = await servers(cloud)
    assert [each["subnet_id"] for each in server["fixed_ips"]] == [second["id"]]
    await cloud.change("subnet", second["id"], enable_dhcp=False)
    await settle(cloud)
    assert await servers(cloud) == []


async def test_a_full_network_does_not_keep_others_from_having_one(
    cloud: World, caplog: pytest.LogCaptureFixture
) -> None:
    full, _ = await cloud.network("10.1.0.0/30")
    await guest(cloud, full)
    network, _ = await cloud.network("10.2.0.0/24")
    await guest(cloud, network)
    await settle(cloud)
    [server] = await servers(cloud)
    assert server["network_id"] == network["id"]
    assert f"cannot update the DHCP port of host {HOST} on network {full['id']}" in caplog.text


async def test_wide_address_pairs_are_not_members_of_a_remote_group(cloud: World) -> None:
    """A pair 0.0.0.0/0 lets its own port send from every address; it must not open the rules of others to everybody."""
    network, _ = await cloud.network("10.1.0.0/24")
    six = await cloud.make("subnet", network_id=network["id"], cidr="fd00::/64", ip_version=6)
    [default] = await cloud.list("security_group", "name=default")
    port = await guest(cloud, network)
    own = {each["ip_address"] for each in port["fixed_ips"]}
    kept = ["10.1.0.200", "192.0.2.1", "10.1.0.128/25", "172.16.5.0/24", "fd00::/64", "2001:db8::1"]
    wide = ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/23", "::/0"]
    pairs = [{"ip_address": each} for each in (*kept, *wide)]
    await cloud.change("port", port["id"], allowed_address_pairs=pairs)
    shown = (await state(cloud)).json()["state"]
    assert set(shown["members"][default["id"]]) == own | set(kept)
    [wired] = shown["ports"]
    assert {each["ip_address"] for each in wired["allowed_address_pairs"]} == {*kept, *wide}, "it may send from all"
    await cloud.change("port", port["id"], fixed_ips=[{"ip_address": "10.1.0.9"}])
    await cloud.delete("subnet", six["id"])
    members = (await state(cloud)).json()["state"]["members"][default["id"]]
    assert "fd00::/64" not in members, "the network has no IPv6 any more"


async def test_agents_that_wait_for_changes_are_answered_when_the_service_stops(cloud: World) -> None:
    known = (await state(cloud)).json()["fingerprint"]
    path = f"/agent-states/{HOST}?wait=60&fingerprint={known}"
    waiting = asyncio.create_task(cloud.call("GET", path, token=ticket(cloud)))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    cloud.role.end_waits()
    assert (await asyncio.wait_for(waiting, 20)).json() == {"fingerprint": known}


async def test_heartbeats_of_many_agents_share_transactions(cloud: World) -> None:
    hosts = [f"h{number}" for number in range(100)]
    await asyncio.gather(*(report(cloud, host, started=True) for host in hosts))
    statistics = cloud.database.statistics
    before, cloud.clock.time = statistics.writes, cloud.clock.time + 60
    answers = await asyncio.gather(*(report(cloud, host) for host in hosts))
    assert [answer.status for answer in answers] == [200] * 100
    assert statistics.writes - before <= 2, "one for the first, and one for those that came meanwhile"
    shown = await cloud.list("agent", token=ADMIN)
    assert sorted(each["host"] for each in shown) == sorted(hosts)
    assert {each["heartbeat_timestamp"] for each in shown} == {iso(micros(cloud.clock.now()))}
    assert [answer.json() for answer in answers] == [{"interval": 25.0}] * 100


async def test_a_report_keeps_the_configurations_of_each_agent(cloud: World) -> None:
    hosts = ["h1", "h2", "h3"]
    for faults in ([], ["broken"], ["broken"], []):
        told = {host: {"faults": [*faults, host]} for host in hosts}
        await asyncio.gather(*(report(cloud, host, configurations=told[host]) for host in hosts))
        shown = {each["host"]: each["configurations"] for each in await cloud.list("agent", token=ADMIN)}
        assert shown == told


async def test_a_larger_fleet_reports_less_often(cloud: World) -> None:
    core = cloud.role.core
    for agents, interval in ((1, 25.0), (10_000, 25.0), (20_000, 50.0)):
        core.set_heartbeat_interval(agents)
        assert core.heartbeat_interval == interval
        times = core.agent_times()
        assert times.now - times.alive_since == 3 * micros(interval), "who is silent for three intervals is dead"

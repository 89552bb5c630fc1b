"""What network agents wait for: a change makes the service compute only the states of hosts that it concerns."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.embedded.network import state_parts, state_watch
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.desired_state import DesiredState, state_of_parts
from micronova.embedded.network.state_parts import read_parts
from micronova.embedded.network.state_watch import StateWatch
from micronova.embedded.network.tables import addresses, host_changes
from micronova.http.client import ASGITransport, ServiceClient
from tests.functional.metadata_proxies import keys_of
from tests.unit.embedded.network.world import ADMIN, KEYRING, SERVICE, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def state(cloud: World, host: str, fingerprint: str = "", wait: float = 0) -> Any:
    ticket = KEYRING.issue(host, cloud.clock.now()).ticket
    answer = await cloud.call("GET", f"/agent-states/{host}?fingerprint={fingerprint}&wait={wait}", token=ticket)
    assert answer.status == 200, answer.body
    return answer.json()


async def report(cloud: World, host: str, **fields: Any) -> None:
    ticket = KEYRING.issue(host, cloud.clock.now()).ticket
    assert (await cloud.call("POST", "/agent-reports", {"host": host, **fields}, token=ticket)).status == 200


async def guest(cloud: World, network: Any, host: str, **fields: Any) -> Any:
    return await cloud.make(
        "port", SERVICE, network_id=network["id"], project_id="p1", device_id="server", device_owner="compute:nova",
        binding__host_id=host, **fields,
    )  # fmt: skip


def client_of(cloud: World, host: str) -> NetworkServiceClient:
    """Return the agent's end of the protocol, which keeps the parts of the state."""
    keys = keys_of(KEYRING, host, cloud.clock.now)
    return NetworkServiceClient(ServiceClient(ASGITransport(cloud.role.service.app), keys.ticket), host)


def computations(cloud: World) -> int:
    return cloud.database.statistics.by_function.get("read_parts", 0)


async def started(cloud: World, hosts: Iterable[str]) -> dict[str, str]:
    """Return the fingerprints of the states of hosts with a live agent."""
    found = {}
    for host in hosts:
        await report(cloud, host, started=True)
        found[host] = (await state(cloud, host))["fingerprint"]
    return found


async def test_a_change_of_one_host_is_not_computed_for_the_others(cloud: World) -> None:
    network, _ = await cloud.network()
    group = await cloud.make("security_group", name="web")
    hosts = [f"h{number}" for number in range(20)]
    await started(cloud, hosts)
    ports = {host: await guest(cloud, network, host, security_groups=[group["id"]]) for host in hosts}
    known = {host: (await state(cloud, host))["fingerprint"] for host in hosts}
    before = computations(cloud)
    waiting = {host: asyncio.create_task(state(cloud, host, known[host], 60)) for host in hosts}
    await report(cloud, "h7", up=[ports["h7"]["id"]])
    found = (await waiting["h7"])["state"]["ports"]
    assert [port["status"] for port in found if port["host"] == "h7"] == ["ACTIVE"]
    assert computations(cloud) - before <= 2, "one for the change, and one if it came before the request waited"
    assert [host for host, task in waiting.items() if task.done()] == ["h7"]
    for task in waiting.values():
        task.cancel()


async def test_looking_for_changes_costs_the_same_for_any_number_of_agents(cloud: World) -> None:
    statistics = cloud.database.statistics

    async def reads_of_a_look() -> int:
        before = statistics.reads
        await cloud.role.watch.look(complete=True)
        return statistics.reads - before

    await cloud.role.watch.stop()  # the test looks itself
    await started(cloud, ["h1"])
    assert await reads_of_a_look() == 1
    await started(cloud, [f"h{number}" for number in range(2, 30)])
    assert await reads_of_a_look() == 1


async def test_an_agent_learns_of_every_change_of_its_state(cloud: World) -> None:
    """After each kind of write, agents that ask with the old fingerprint get the state that is true by then."""
    await cloud.role.watch.stop()  # the test looks itself
    hosts = ["h1", "h2", "h3"]
    known: dict[str, str] = {}
    agents = {host: client_of(cloud, host) for host in hosts}
    held: dict[str, tuple[str, DesiredState | None]] = dict.fromkeys(hosts, ("", None))
    changed_at: dict[str, list[str]] = {}

    async def check(step: str) -> None:
        await cloud.role.watch.look(complete=True)
        for host in hosts:
            found = await state(cloud, host, known.get(host, ""))
            fresh = StateWatch(cloud.database, cloud.clock, cloud.role.core.agent_times)
            whole = await fresh.state(host, "", 0)
            true = state_of_parts({name: msgspec.json.decode(raw) for name, raw in whole.parts.items()})
            if "state" in found:
                assert found["state"] == true, (step, host)
                changed_at.setdefault(step, []).append(host)
            assert found["fingerprint"] == whole.fingerprint, f"{step}: host {host} is not told"
            known[host] = found["fingerprint"]
            fingerprint, changed = await agents[host].state(held[host][0], 0)
            held[host] = fingerprint, held[host][1] if changed is None else changed
            assert held[host] == (whole.fingerprint, msgspec.convert(true, DesiredState)), (step, host)

    for host in hosts:
        await report(cloud, host, started=True)
    await check("start")
    public = await cloud.make("network", ADMIN, name="public", router__external=True)
    await cloud.make("subnet", ADMIN, network_id=public["id"], cidr="203.0.113.0/24", ip_version=4, enable_dhcp=False)
    network, subnet = await cloud.network()
    other, other_subnet = await cloud.network("10.2.0.0/24")
    await check("networks")
    web, db, plain = [(await cloud.make("security_group", name=name))["id"] for name in ("web", "db", "plain")]
    rule = {"security_group_id": db, "direction": "ingress", "ethertype": "IPv4", "remote_group_id": web}
    from_web = await cloud.make("security_group_rule", **rule)
    guest1 = await guest(cloud, network, "h1", security_groups=[web])
    await check("create port")
    guest2 = await guest(cloud, network, "h2", security_groups=[db])
    await check("create port of a group with a remote group")
    await guest(cloud, other, "h3", security_groups=[plain])
    await check("create port elsewhere")
    member = await cloud.make("port", network_id=network["id"], security_groups=[web])
    await check("create member")
    assert changed_at["create member"] == ["h2"], "only h2 has a rule that names the group"
    await cloud.change("port", member["id"], allowed_address_pairs=[{"ip_address": "10.1.0.200"}])
    await check("address pair of a member")
    await cloud.change("port", member["id"], fixed_ips=[{"ip_address": "10.1.0.77"}])
    await check("address of a member")
    await cloud.change("port", member["id"], name="renamed")
    await check("name of a member")
    assert "name of a member" not in changed_at
    await cloud.change("port", member["id"], security_groups=[plain])
    await check("group of a member")
    await cloud.change("port", member["id"], security_groups=[web])
    await check("back to the group")
    await cloud.delete("port", member["id"])
    await check("delete member")
    assert changed_at["delete member"] == ["h2"]
    await report(cloud, "h1", up=[guest1["id"]])
    await check("up")
    assert changed_at["up"] == ["h1"]
    await report(cloud, "h1", dhcp=True)
    await check("create DHCP port")
    await cloud.change("subnet", subnet["id"], dns_nameservers=["10.1.0.53"])
    await check("change subnet")
    slaac: dict[str, Any] = {"ip_version": 6, "ipv6_address_mode": "slaac", "ipv6_ra_mode": "slaac"}
    six = await cloud.make("subnet", network_id=network["id"], cidr="fd00:1::/64", **slaac)
    await check("create SLAAC subnet")
    await cloud.delete("subnet", six["id"])
    await check("delete SLAAC subnet")
    lonely, _ = await cloud.network("10.3.0.0/24")
    away = await cloud.make("port", network_id=lonely["id"], security_groups=[web])
    await check("create member on another network")
    await cloud.make("subnet", network_id=lonely["id"], cidr="fd00:3::/64", **slaac)
    await check("SLAAC address of a member")
    assert changed_at["SLAAC address of a member"] == ["h2"]
    await cloud.delete("port", away["id"])
    await check("delete member on another network")
    await cloud.change("network", network["id"], mtu=1400)
    await check("change network")
    assert changed_at["change network"] == ["h1", "h2"]
    await cloud.make("security_group_rule", **{**rule, "security_group_id": plain})
    await check("create rule")
    assert changed_at["create rule"] == ["h3"]
    await cloud.delete("security_group_rule", from_web["id"])
    await check("delete rule")
    spare = (await cloud.make("security_group", name="spare"))["id"]
    await cloud.make("security_group_rule", **{**rule, "security_group_id": plain, "remote_group_id": spare})
    await check("create rule about a spare group")
    await cloud.delete("security_group", spare)
    await check("delete group that a rule names")
    assert changed_at["delete group that a rule names"] == ["h3"]
    policy = await cloud.make("policy", ADMIN, name="slow", shared=True)
    await cloud.change("network", other["id"], qos_policy_id=policy["id"])
    await check("policy of a network")
    limits = f"/qos/policies/{policy['id']}/bandwidth_limit_rules"
    body = {"bandwidth_limit_rule": {"max_kbps": 1000, "direction": "egress"}}
    made = await cloud.call("POST", limits, body, token=ADMIN)
    await check("create bandwidth limit")
    limit = f"{limits}/{made.json()['bandwidth_limit_rule']['id']}"
    await cloud.call("PUT", limit, {"bandwidth_limit_rule": {"max_kbps": 2000}}, token=ADMIN)
    await check("change bandwidth limit")
    await cloud.call("DELETE", limit, token=ADMIN)
    await check("delete bandwidth limit")
    for step in ("create", "change", "delete"):
        assert changed_at[f"{step} bandwidth limit"] == ["h3"]
    router = await cloud.make("router", name="r")
    await check("create router")
    path = f"/routers/{router['id']}"
    await cloud.call("PUT", f"{path}/add_router_interface", {"subnet_id": other_subnet["id"]})
    await check("add interface")
    own = await cloud.make("port", network_id=network["id"])
    await cloud.call("PUT", f"{path}/add_router_interface", {"port_id": own["id"]})
    await check("add port as interface")
    await cloud.change("router", router["id"], external_gateway_info={"network_id": public["id"]})
    await check("set gateway")
    floating = await cloud.make("floatingip", floating_network_id=public["id"])
    await check("create floating IP")
    await cloud.change("floatingip", floating["id"], port_id=guest2["id"])
    await check("associate floating IP")
    assert changed_at["associate floating IP"] == ["h1"], "the first host has the routers"
    await cloud.change("router", router["id"], routes=[{"destination": "10.9.0.0/24", "nexthop": "10.1.0.9"}])
    await check("set routes")
    await cloud.delete("port", guest2["id"], SERVICE)
    await check("delete port with floating IP")
    await cloud.delete("floatingip", floating["id"])
    await check("delete floating IP")
    await cloud.change("router", router["id"], external_gateway_info=None)
    await check("clear gateway")
    await cloud.call("PUT", f"{path}/remove_router_interface", {"subnet_id": other_subnet["id"]})
    await check("remove interface")
    await cloud.call("PUT", f"{path}/remove_router_interface", {"port_id": own["id"]})
    await check("remove port")
    await cloud.change("port", guest1["id"], SERVICE, binding__host_id="h2")
    await check("bind elsewhere")
    assert {"h1", "h2"} <= set(changed_at["bind elsewhere"])
    await cloud.delete("router", router["id"])
    await check("delete router")
    [agent] = [each for each in await cloud.list("agent", token=ADMIN) if each["host"] == "h1"]
    await cloud.change("agent", agent["id"], ADMIN, admin_state_up=False)
    router = await cloud.make("router", name="r2")
    await check("the second host gets the routers")
    assert set(changed_at["the second host gets the routers"]) == {"h2"}
    for host in ("h1", "h3"):
        await report(cloud, host)
    await cloud.clock.jump(60)
    for host in ("h1", "h3"):
        await report(cloud, host)
    await cloud.clock.jump(30)
    await check("the second host is silent")
    assert "the second host is silent" not in changed_at
    await cloud.clock.jump(40)
    await check("the third host gets the routers")
    assert set(changed_at["the third host gets the routers"]) == {"h2", "h3"}
    await cloud.delete("router", router["id"])
    await cloud.delete("port", guest1["id"], SERVICE)
    for port in await cloud.list("port", f"network_id={network['id']}", ADMIN):
        assert port["device_owner"] == "network:dhcp"
    await cloud.delete("network", network["id"])
    await check("delete network")


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service look for changes only after writes that wake it, and once at the start."""
    monkeypatch.setattr(state_watch, "POLL_INTERVAL", 3600.0)


async def test_each_write_that_concerns_an_agent_wakes_it(only_woken: None, cloud: World) -> None:
    """It need not wait until the service looks for changes of other processes."""
    network, subnet = await cloud.network()
    group = (await cloud.make("security_group", name="web"))["id"]
    policy = (await cloud.make("policy", ADMIN, name="slow", shared=True))["id"]
    known = await started(cloud, ["h1"])
    fingerprint = known["h1"]

    async def woken(write: Awaitable[Any]) -> Any:
        nonlocal fingerprint
        made = await write
        found = await asyncio.wait_for(state(cloud, "h1", fingerprint, 60), 30)
        fingerprint = found["fingerprint"]
        assert "state" in found
        return made

    port = await woken(guest(cloud, network, "h1", security_groups=[group]))
    await cloud.change("port", port["id"], SERVICE, qos_policy_id=policy)
    await woken(report(cloud, "h1", up=[port["id"]]))
    await woken(report(cloud, "h1", dhcp=True))
    await woken(cloud.change("network", network["id"], mtu=1400))
    await woken(cloud.change("subnet", subnet["id"], dns_nameservers=["10.1.0.53"]))
    rule = {"security_group_id": group, "direction": "ingress", "ethertype": "IPv4"}
    made = await woken(cloud.make("security_group_rule", **rule))
    await woken(cloud.delete("security_group_rule", made["id"]))
    limits = f"/qos/policies/{policy}/bandwidth_limit_rules"
    limit = {"bandwidth_limit_rule": {"max_kbps": 1000, "direction": "egress"}}
    answer = await woken(cloud.call("POST", limits, limit, token=ADMIN))
    path = f"{limits}/{answer.json()['bandwidth_limit_rule']['id']}"
    await woken(cloud.call("PUT", path, {"bandwidth_limit_rule": {"max_kbps": 2000}}, token=ADMIN))
    await woken(cloud.call("DELETE", path, token=ADMIN))
    router = await woken(cloud.make("router", name="r"))
    interfaces = f"/routers/{router['id']}"
    await woken(cloud.call("PUT", f"{interfaces}/add_router_interface", {"subnet_id": subnet["id"]}))
    routes = [{"destination": "10.9.0.0/24", "nexthop": "10.1.0.9"}]
    await woken(cloud.change("router", router["id"], routes=routes))
    await woken(cloud.change("router", router["id"], routes=[]))
    await woken(cloud.call("PUT", f"{interfaces}/remove_router_interface", {"subnet_id": subnet["id"]}))
    await woken(cloud.delete("router", router["id"]))
    await woken(cloud.delete("port", port["id"], SERVICE))
    await woken(cloud.delete("network", network["id"]))


async def test_an_agent_learns_of_a_change_by_another_process(module_database_url: str, tmp_path: Path) -> None:
    async with world(tmp_path, module_database_url, schema="two_processes") as one:
        async with world(tmp_path, module_database_url, schema="two_processes") as two:
            network, _ = await one.network()
            [fingerprint] = (await started(one, ["h1"])).values()
            waiting = asyncio.create_task(state(one, "h1", fingerprint, 60))
            port = await guest(two, network, "h1")
            found = await waiting
            assert [each["id"] for each in found["state"]["ports"]] == [port["id"]]


async def test_old_changes_are_deleted(cloud: World) -> None:
    network, _ = await cloud.network()
    await guest(cloud, network, "h1")
    assert await cloud.database.read(_count) > 0
    await cloud.clock.jump(3600)
    await cloud.role.watch.purge()
    assert await cloud.database.read(_count) == 0


def _count(conn: sa.Connection) -> int:
    return int(conn.execute(sa.select(sa.func.count()).select_from(host_changes)).scalar_one())


async def test_a_purge_while_the_first_state_is_read_loses_no_change(cloud: World) -> None:
    """The service deletes old changes once a minute, and as the first thing after the start."""
    network, _ = await cloud.network()
    await report(cloud, "h1", started=True)
    watch = cloud.role.watch
    await watch.stop()  # the test looks itself
    read = cloud.database.read

    async def purged(fn: Any, *args: Any, **more: Any) -> Any:
        found = await read(fn, *args, **more)
        if fn.__name__ not in ("any_before", "purge_changes"):
            await watch.purge()
        return found

    cloud.database.read = purged  # type: ignore[method-assign]
    known = (await state(cloud, "h1"))["fingerprint"]
    cloud.database.read = read  # type: ignore[method-assign]
    await guest(cloud, network, "h1")
    await watch.look(complete=True)
    assert (await state(cloud, "h1", known))["fingerprint"] != known


async def test_a_port_of_a_default_group_is_read_once_for_all_hosts_of_its_group(cloud: World) -> None:
    """Its rules name the group itself as remote, so the firewalls of all hosts with such a port change."""
    network, _ = await cloud.network()
    hosts = [f"h{number}" for number in range(20)]
    await started(cloud, hosts)
    for host in hosts:
        await guest(cloud, network, host)
    agents = {host: client_of(cloud, host) for host in hosts}
    known = {host: (await agents[host].state())[0] for host in hosts}
    await cloud.role.watch.look(complete=True)
    await cloud.role.watch.stop()  # the test looks itself
    waiting = {host: asyncio.create_task(agents[host].state(known[host], 60)) for host in hosts}
    await asyncio.gather(*(asyncio.sleep(0) for _ in hosts))
    before = computations(cloud)
    with statements(cloud) as executed:
        new = await cloud.make("port", network_id=network["id"])
        executed.clear()
        await cloud.role.watch.look(complete=True)
        found = {host: (await task)[1] for host, task in waiting.items()}
    [address] = [each["ip_address"] for each in new["fixed_ips"]]
    for host, shown in found.items():
        assert shown is not None
        assert [address in each for each in shown.members.values()] == [True], host
    assert computations(cloud) - before == 1
    assert len(executed) <= 8, "two for each of two looks, and three for the members of the group"


async def test_a_group_is_read_until_it_is_too_large(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its ports were read at each change, although it is left out of the hosts' firewalls."""
    monkeypatch.setattr(state_parts, "MAX_MEMBERS", 150)
    network, _ = await cloud.network("10.1.0.0/16")
    await started(cloud, ["h1"])
    await guest(cloud, network, "h1")
    answer = await cloud.call("POST", "/ports", {"ports": [{"network_id": network["id"]}] * 450})
    assert answer.status == 201, answer.body
    agent = client_of(cloud, "h1")
    known, before = await agent.state()
    assert before is not None and list(before.oversized.values()) == [151] and not before.members
    await cloud.role.watch.stop()  # the test looks itself
    with statements(cloud) as executed:
        await cloud.make("port", network_id=network["id"])
        executed.clear()
        await cloud.role.watch.look(complete=True)
        assert await agent.state(known, 0) == (known, None), "the state of the host is the same"
    reads = [each for each in executed if " FROM addresses" in " ".join(each.split())]
    assert len(reads) == 2, "for the first 200 ports"


async def test_a_floating_ip_is_read_with_its_router_only(cloud: World) -> None:
    public = await cloud.make("network", ADMIN, name="public", router__external=True)
    await cloud.make("subnet", ADMIN, network_id=public["id"], cidr="203.0.113.0/24", ip_version=4, enable_dhcp=False)
    made = []
    for number in range(5):
        network, subnet = await cloud.network(f"10.{number}.0.0/24")
        router = await cloud.make("router", external_gateway_info={"network_id": public["id"]})
        path = f"/routers/{router['id']}/add_router_interface"
        assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]})).status == 200
        made.append(await cloud.make("port", network_id=network["id"]))
    await started(cloud, ["h1"])
    one = client_of(cloud, "h1")
    known, before = await one.state()
    assert before is not None and len(before.routers) == 5
    floating = await cloud.make("floatingip", floating_network_id=public["id"], port_id=made[3]["id"])
    ticket = KEYRING.issue("h1", cloud.clock.now()).ticket
    path = f"/agent-states/h1?fingerprint={known}&wait=60&parts=true"
    answer = (await cloud.call("GET", path, token=ticket)).json()
    assert list(answer["parts"]) == [f"router:{floating['router_id']}"]
    _, after = await one.state(known, 0)
    assert after is not None
    changed = [router for router in after.routers if router not in before.routers]
    assert [[each.floating for each in router.floating] for router in changed] == [[floating["floating_ip_address"]]]
    assert len(after.routers) == 5


async def test_a_floating_ip_does_not_lead_to_an_address_that_its_port_does_not_have(cloud: World) -> None:
    """Such rows are left of a version that took addresses from ports with floating IPs."""
    public, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    network, subnet = await cloud.network("10.1.0.0/24")
    router = await cloud.make("router", external_gateway_info={"network_id": public["id"]})
    await cloud.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    led, kept, other = [await cloud.make("port", network_id=network["id"]) for _ in range(3)]
    for port in (led, kept):
        await cloud.make("floatingip", floating_network_id=public["id"], port_id=port["id"])
    moved = addresses.update().where(addresses.c.port_id == led["id"]).values(port_id=other["id"])
    await cloud.database.write(lambda conn: conn.execute(moved))
    await started(cloud, ["h1"])
    _, shown = await client_of(cloud, "h1").state()
    assert shown is not None
    [fixed] = [each.fixed for router in shown.routers for each in router.floating]
    assert fixed == kept["fixed_ips"][0]["ip_address"]


@contextlib.contextmanager
def statements(cloud: World) -> Iterator[list[str]]:
    """Record the statements of the cloud's database."""
    found: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if not statement.startswith(("BEGIN", "SAVEPOINT", "RELEASE")):
            found.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


async def test_who_asks_while_a_state_is_read_gets_the_new_one(cloud: World) -> None:
    """The agent that waited has begun to read the change; another request for the same host gets it, too."""
    network, _ = await cloud.network()
    await started(cloud, ["h1"])
    port = await guest(cloud, network, "h1")
    known = (await state(cloud, "h1"))["fingerprint"]
    read, reading, go_on = cloud.database.read, asyncio.Event(), asyncio.Event()

    async def slow(fn: Any, *args: Any, **more: Any) -> Any:
        if fn.__name__ == "read_parts":
            reading.set()
            await go_on.wait()
        return await read(fn, *args, **more)

    cloud.database.read = slow  # type: ignore[method-assign]
    waiting = asyncio.create_task(state(cloud, "h1", known, 60))
    await cloud.delete("port", port["id"], SERVICE)
    await asyncio.wait_for(reading.wait(), 30)
    other = asyncio.create_task(state(cloud, "h1"))
    done, _ = await asyncio.wait({other}, timeout=0.2)
    assert not done, "it waits for the same read"
    go_on.set()
    assert [each["fingerprint"] != known for each in (await waiting, await other)] == [True, True]
    assert (await other)["state"]["ports"] == []


async def test_a_read_that_outlasts_the_memory_of_its_host_ends(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host was forgotten while its parts were read, and they were read again for ever."""
    watch, database = cloud.role.watch, cloud.database
    await watch.stop()  # the test purges itself
    network, _ = await cloud.network()
    port = await guest(cloud, network, "h1")
    read, reads, begun, released = database.read, 0, asyncio.Event(), asyncio.Event()

    async def blocked(fn: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal reads
        if fn is read_parts:
            reads += 1
            begun.set()
            await released.wait()
            assert reads < 10
        return await read(fn, *args, **kwargs)

    monkeypatch.setattr(database, "read", blocked)
    asked = asyncio.create_task(state(cloud, "h1"))
    await asyncio.wait_for(begun.wait(), 10)
    await cloud.clock.jump(400)
    await watch.purge()
    released.set()
    found = await asyncio.wait_for(asked, 10)
    assert [each["id"] for each in found["state"]["ports"]] == [port["id"]]
    assert reads <= 3, "the host, what its ports refer to, and what that refers to"
    await cloud.clock.jump(400)
    await watch.purge()
    assert not watch._hosts and not watch._parts, "nobody asks any more"

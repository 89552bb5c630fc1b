"""Servers with ports that ask for a guaranteed bandwidth: it is claimed on their hosts, and given back."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit, run_repair
from micronova.clients.network.client import NetworkClient
from micronova.conductor.findings.counters import repair_counters
from micronova.db.engine import Database
from micronova.db.tables import allocations, instances, migrations, topology_claims
from micronova.objects.errors import Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.bandwidth import (
    EGRESS,
    INGRESS,
    TRAITS,
    asking_port,
    held,
    interfaces,
    move_allocations,
    policy,
    port_of,
    reshape,
    restock,
    used,
)
from tests.functional.servers.embedded_services import call, image, make, network, ok

CLOUD = CloudOptions(
    hosts=2,
    roles=("image", "network"),
    settings={
        "default": {"report_interval": 0.2, "allow_resize_to_same_host": True},
        "conductor": {"lease": 2.0, "sweep_interval": 0.1},
    },
)
pytestmark = only_in_one_process("makes providers below the nodes of all hosts")
FIRST, SECOND = "fake-1", "fake-2"


async def _body(user: Caller, *ports: dict[str, Any]) -> dict[str, Any]:
    named = [{"port": port["id"]} for port in ports]
    return user.body(name=user.project, networks=named, imageRef=await image(user))


async def _boot(user: Caller, *ports: dict[str, Any]) -> str:
    id = (await user.post("/servers", await _body(user, *ports)))["server"]["id"]
    return str((await user.wait_for(id, "ACTIVE"))["id"])


async def _delete(user: Caller, id: str) -> None:
    await user.delete(f"/servers/{id}")
    await user.gone(id)


def _answer(port: dict[str, Any], provider: str) -> dict[str, str]:
    [group] = port["resource_request"]["request_groups"]
    return {group["id"]: provider}


async def test_the_bandwidth_of_a_port_is_claimed_with_its_server(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=600, ingress=100)
        [group] = port["resource_request"]["request_groups"]
        assert (group["required"], group["resources"]) == (TRAITS, {EGRESS: 600, INGRESS: 100})
        assert port["resource_request"]["same_subtree"] == [group["id"]]
        id = await _boot(user, port)
        assert await user.host_of(id) == SECOND
        assert (await held(user, id))[providers[SECOND]] == {EGRESS: 600, INGRESS: 100}
        bound = await port_of(user, port["id"])
        assert bound["binding:profile"]["allocation"] == _answer(port, providers[SECOND])
        await cloud.assert_clean()
        other = await asking_port(user, net, egress=401)
        refused = (await user.post("/servers", await _body(user, other)))["server"]["id"]
        fault = (await user.wait_for(refused, "ERROR"))["fault"]["message"]
        assert "no host has the resources, such as bandwidth, that the port asks for" in fault
        assert "allocation" not in (await port_of(user, other["id"]))["binding:profile"]
        await _delete(user, id)
        bound = await port_of(user, port["id"])
        assert (bound["device_id"], bound["binding:profile"]) == ("", {})
        assert await used(user, providers[SECOND]) == {EGRESS: 0, INGRESS: 0}
        await _delete(user, refused)
    await cloud.assert_clean()


async def test_two_ports_and_one_without_a_request(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 999}) as providers:
        ports = [await asking_port(user, net, egress=500) for _ in range(2)]
        plain = await make(user, "port", network_id=net["id"])
        id = await _boot(user, ports[0], plain, ports[1])
        assert await user.host_of(id) == FIRST
        assert (await held(user, id))[providers[FIRST]] == {EGRESS: 1000}
        for port in ports:
            bound = await port_of(user, port["id"])
            assert bound["binding:profile"]["allocation"] == _answer(port, providers[FIRST])
        assert "allocation" not in (await port_of(user, plain["id"]))["binding:profile"]
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_repeated_attempt_binds_with_what_the_first_has_claimed(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await network(user)
    known, outages = NetworkClient.allocate, iter([True, True])

    async def allocate(self: NetworkClient, **wanted: Any) -> Any:
        if next(outages, False):
            raise Unavailable("The network service does not answer.")
        return await known(self, **wanted)

    monkeypatch.setattr(NetworkClient, "allocate", allocate)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}):
        async with interfaces(user, {FIRST: 1000, SECOND: 1000}):
            port = await asking_port(user, net, egress=600)
            id = await _boot(user, port)
            assert next(outages, None) is None
            [provider] = [provider for provider, own in (await held(user, id)).items() if EGRESS in own]
            assert (await port_of(user, port["id"]))["binding:profile"]["allocation"] == _answer(port, provider)
            await _delete(user, id)
    await cloud.assert_clean()


async def test_what_is_refused(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    port = await asking_port(user, net, egress=1)
    message = await user.at(71).refused(400, "POST", "/servers", await _body(user, port))
    assert "ports having resource requests" in message and "2.72" in message
    guaranteed = await network(user, cidr="10.8.0.0/24", qos_policy_id=await policy(user, egress=1))
    wanted = user.body(networks=[{"uuid": guaranteed["id"]}], imageRef=await image(user))
    message = await user.refused(400, "POST", "/servers", wanted)
    assert "networks with QoS policy is not supported" in message and guaranteed["id"] in message
    # Nobody has such bandwidth.
    id = (await user.post("/servers", await _body(user, port, await asking_port(user, net, egress=1))))["server"]["id"]
    assert "that the ports ask for" in (await user.wait_for(id, "ERROR"))["fault"]["message"]
    await _delete(user, id)
    await cloud.assert_clean()


async def test_races_for_the_last_bandwidth_never_oversell(cloud: Cloud, user: Caller) -> None:
    net = await network(user, cidr="10.9.0.0/16")
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        shared = await policy(user, egress=250)
        ports = [await make(user, "port", network_id=net["id"], qos_policy_id=shared) for _ in range(12)]
        bodies = [await _body(user, port) for port in ports]
        made = await asyncio.gather(*(user.post("/servers", body) for body in bodies))
        ids = [each["server"]["id"] for each in made]
        ended = await asyncio.gather(*(user.wait_for(id, "ACTIVE", "ERROR") for id in ids))
        assert sorted(each["status"] for each in ended) == ["ACTIVE"] * 8 + ["ERROR"] * 4
        for host in (FIRST, SECOND):
            assert (await used(user, providers[host]))[EGRESS] == 1000
        await asyncio.gather(*(_delete(user, id) for id in ids))
    await cloud.assert_clean()


async def _is_served_by(
    user: Caller, server: str, port: dict[str, Any], provider: str, amounts: dict[str, int]
) -> None:
    """Check that a provider, and no other, serves the port of a server, and that the network service knows it."""
    found = await held(user, server)
    assert [each for each, own in found.items() if EGRESS in own] == [provider]
    assert found[provider] == amounts
    bound = await port_of(user, port["id"])
    assert bound["binding:profile"]["allocation"] == _answer(port, provider)
    assert bound["binding:host_id"] == await user.host_of(server)


async def test_an_interface_is_attached_and_detached(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        first, second, third = [await asking_port(user, net, egress=kbps) for kbps in (400, 500, 101)]
        id = await _boot(user, first)
        provider = providers[await user.host_of(id)]
        path = f"/servers/{id}/os-interface"
        await user.post(path, {"interfaceAttachment": {"port_id": second["id"]}}, 200)
        await _is_served_by(user, id, second, provider, {EGRESS: 900})
        await _is_served_by(user, id, first, provider, {EGRESS: 900})
        message = await user.refused(400, "POST", path, {"interfaceAttachment": {"port_id": third["id"]}})
        assert f"Failed to allocate additional resources to {id} during interface attach" in message
        guaranteed = await network(user, cidr="10.8.0.0/24", qos_policy_id=await policy(user, egress=1))
        message = await user.refused(400, "POST", path, {"interfaceAttachment": {"net_id": guaranteed["id"]}})
        assert "networks with QoS policy is not supported" in message
        await cloud.assert_clean()
        await user.delete(f"{path}/{first['id']}", 202)
        await user.wait_for(id, "ACTIVE")
        await _is_served_by(user, id, second, provider, {EGRESS: 500})
        assert (await port_of(user, first["id"]))["binding:profile"] == {}
        rule = {"operation": "attach_interface", "kind": "fail", "name": user.project, "message": "no slot is free"}
        async with cloud.faults(rule):
            await user.refused(500, "POST", path, {"interfaceAttachment": {"port_id": third["id"]}})
        await _is_served_by(user, id, second, provider, {EGRESS: 500})
        # A port that was deleted gives back what it had.
        await ok(user.admin, "DELETE", f"/network/v2.0/ports/{second['id']}")

        async def detached() -> bool | None:
            listed = (await user.get(path))["interfaceAttachments"]
            return True if not listed and provider not in await held(user, id) else None

        await cloud.until(detached, "the port to be detached")
        await cloud.assert_clean()
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_second_interface_is_served_by_another_card(cloud: Cloud, user: Caller) -> None:
    """No server gets more of a provider than its `max_unit`, however much is left."""
    net = await network(user)
    async with interfaces(user, {FIRST: 10}, ratio=2.0) as one, interfaces(user, {FIRST: 10}, ratio=2.0) as two:
        ports = [await asking_port(user, net, egress=6) for _ in range(3)]
        id = await _boot(user, ports[0])
        path = f"/servers/{id}/os-interface"
        await user.post(path, {"interfaceAttachment": {"port_id": ports[1]["id"]}}, 200)
        assert {provider: (await held(user, id))[provider] for provider in (one[FIRST], two[FIRST])} == {
            one[FIRST]: {EGRESS: 6},
            two[FIRST]: {EGRESS: 6},
        }
        message = await user.refused(400, "POST", path, {"interfaceAttachment": {"port_id": ports[2]["id"]}})
        assert "Failed to allocate additional resources" in message
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_port_is_attached_once(cloud: Cloud, user: Caller) -> None:
    """Of two requests that come together one is refused; else its failure would unbind the port of the other one."""
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=400)
        id = str((await user.boot(networks="none", imageRef=await image(user)))["id"])
        path, body = f"/servers/{id}/os-interface", {"interfaceAttachment": {"port_id": port["id"]}}
        answers = await asyncio.gather(*(user.request("POST", path, body) for _ in range(3)))
        assert sorted(answer.status for answer in answers) == [200, 409, 409]
        await _is_served_by(user, id, port, providers[await user.host_of(id)], {EGRESS: 400})
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_detach_gives_back_what_has_moved_to_another_provider(cloud: Cloud, user: Caller) -> None:
    """By the reshaper, or by a change of the server's allocations."""
    net = await network(user)
    async with interfaces(user, {FIRST: 1000}) as one, interfaces(user, {FIRST: 1000}) as two:
        first, second = [await asking_port(user, net, egress=kbps, ingress=100) for kbps in (600, 300)]
        id = await _boot(user, first, second)
        before, after = one[FIRST], two[FIRST]
        if before not in await held(user, id):
            before, after = after, before
        await reshape(user, id, before, after)
        path = f"/servers/{id}/os-interface"
        await user.delete(f"{path}/{first['id']}", 202)
        await user.wait_for(id, "ACTIVE")
        assert await used(user, after) == {EGRESS: 300, INGRESS: 100}
        await restock(user, before, 1000)
        await move_allocations(user, id, after, before)
        await user.delete(f"{path}/{second['id']}", 202)
        await user.wait_for(id, "ACTIVE")
        assert await used(user, before) == {EGRESS: 0, INGRESS: 0}
        await cloud.assert_clean()
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_port_is_bound_with_the_provider_to_which_its_bandwidth_has_moved(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000}) as one, interfaces(user, {FIRST: 1000}) as two:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        before, after = one[FIRST], two[FIRST]
        if before not in await held(user, id):
            before, after = after, before
        async with interfaces(user, {SECOND: 1000}):
            await user.admin.act(id, "migrate", {"host": SECOND})
            await user.wait_for(id, "VERIFY_RESIZE")
            [migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
            await move_allocations(user, migration["uuid"], before, after)
            await user.act(id, "revertResize")
            await user.wait_for(id, "ACTIVE")
            await _is_served_by(user, id, port, after, {EGRESS: 600})
            await _delete(user, id)
    await cloud.assert_clean()


async def test_the_bandwidth_moves_with_the_server(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        others = {FIRST: SECOND, SECOND: FIRST}
        source = await user.host_of(id)

        async def is_on(host: str, elsewhere: int = 0) -> None:
            assert await user.host_of(id) == host
            await _is_served_by(user, id, port, providers[host], {EGRESS: 600})
            assert (await used(user, providers[others[host]]))[EGRESS] == elsewhere

        await user.admin.act(id, "migrate")
        await user.wait_for(id, "VERIFY_RESIZE")
        await is_on(others[source], 600)
        await user.act(id, "revertResize")
        await user.wait_for(id, "ACTIVE")
        await is_on(source)
        await user.admin.act(id, "migrate")
        await user.wait_for(id, "VERIFY_RESIZE")
        await user.act(id, "confirmResize", status=204)
        await user.wait_for(id, "ACTIVE")
        await is_on(others[source])
        await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})
        await user.wait_for(id, "ACTIVE")
        await is_on(source)
        rule = {"operation": "import_guest", "kind": "fail", "name": user.project}
        async with cloud.faults(rule):
            await user.admin.act(id, "migrate")
            await user.wait_for(id, "ACTIVE")
        await is_on(source)
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED_OFFLOADED")
        assert {(await used(user, each))[EGRESS] for each in providers.values()} == {0}
        assert "allocation" not in (await port_of(user, port["id"]))["binding:profile"]
        await user.act(id, "unshelve")
        await user.wait_for(id, "ACTIVE")
        await is_on(await user.host_of(id))
        await cloud.assert_clean()
        # Where there is too little, it does not go.
        other = await _boot(user, await asking_port(user, net, egress=500))
        await user.admin.act(id, "migrate")
        await user.wait_for(id, "ACTIVE")
        await is_on(await user.host_of(id), 500)
        await _delete(user, other)
        await _delete(user, id)
    await cloud.assert_clean()


async def test_an_offloaded_server_comes_back_with_what_its_port_asks_for_then(cloud: Cloud, user: Caller) -> None:
    """While its port is bound to no host, the policy may change."""
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        more = {"port": {"qos_policy_id": await policy(user, egress=900)}}
        path = f"/network/v2.0/ports/{port['id']}"
        assert (await call(user.admin, "PUT", path, more)).status == 409
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED_OFFLOADED")
        await ok(user.admin, "PUT", path, more)
        await user.act(id, "unshelve")
        await user.wait_for(id, "ACTIVE")
        port = await port_of(user, port["id"])
        await _is_served_by(user, id, port, providers[await user.host_of(id)], {EGRESS: 900})
        await _delete(user, id)
    await cloud.assert_clean()


async def test_an_evacuated_server_takes_its_bandwidth_elsewhere(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        source = await user.host_of(id)
        async with cloud.forced_down(source):
            await user.admin.act(id, "evacuate", {}, 200)
            await user.wait_for(id, "SHUTOFF", "ACTIVE")
        moved = await user.host_of(id)
        assert moved != source
        await _is_served_by(user, id, port, providers[moved], {EGRESS: 600})
        assert (await used(user, providers[source]))[EGRESS] == 0
        await _delete(user, id)
        await cloud.settled()
    await cloud.assert_clean()


async def test_a_resize_on_the_same_host_may_change_the_provider(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 700}) as one, interfaces(user, {FIRST: 700}) as two:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        [before] = {one[FIRST], two[FIRST]} & (await held(user, id)).keys()
        [after] = {one[FIRST], two[FIRST]} - {before}
        await user.act(id, "resize", {"flavorRef": "2"})
        await user.wait_for(id, "VERIFY_RESIZE")
        assert await user.host_of(id) == FIRST
        await _is_served_by(user, id, port, after, {EGRESS: 600})
        await user.act(id, "revertResize")
        await user.wait_for(id, "ACTIVE")
        await _is_served_by(user, id, port, before, {EGRESS: 600})
        await _delete(user, id)
    await cloud.assert_clean()


async def test_the_audit_finds_what_is_held_for_a_port_that_is_gone(cloud: OneProcess, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        database = cloud.process.database
        assert database is not None
        lost = instances.update().where(instances.c.uuid == id).values(network_info=[])
        await database.write(lambda conn: conn.execute(lost).rowcount)
        found = [each for each in await run_audit(cloud.process) if each["kind"] == "allocation"]
        assert [(each["subject"], port["id"] in each["message"]) for each in found] == [(id, True)]
        assert any(port["id"] in each for each in await repair_counters(database, 0))
        assert (await used(user, providers[FIRST]))[EGRESS] == 0
        await _delete(user, id)
    await cloud.assert_clean()


_HELD = (allocations, topology_claims)


def _database(cloud: OneProcess) -> Database:
    assert cloud.process.database is not None
    return cloud.process.database


async def _write(cloud: OneProcess, *statements: sa.Executable) -> None:
    await _database(cloud).write(lambda conn: [conn.execute(each).rowcount for each in statements] and None)
    await repair_counters(_database(cloud), 0)


async def _is_bound(cloud: OneProcess, user: Caller, id: str, port: dict[str, Any], provider: str, kbps: int) -> None:
    """Wait until the port is bound to the host of its server, whose provider serves it."""

    async def probe() -> bool | None:
        found = await port_of(user, port["id"])
        there = found["binding:host_id"] == await user.host_of(id)
        return True if there and found["binding:profile"].get("allocation") == _answer(port, provider) else None

    await cloud.until(probe, "the port to be bound")
    assert (await held(user, id))[provider] == {EGRESS: kbps}


async def test_the_audit_finds_a_port_for_which_its_server_holds_too_little(cloud: OneProcess, user: Caller) -> None:
    net = await network(user)
    async with interfaces(user, {FIRST: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        await cloud.settled()
        kept = await cloud.read(topology_claims.select().where(topology_claims.c.consumer_uuid == id))
        await _write(cloud, topology_claims.delete().where(topology_claims.c.consumer_uuid == id))
        found = [each for each in await run_audit(cloud.process) if each["kind"] == "port"]
        assert {each["subject"] for each in found} == {port["id"]}
        assert f"Server {id} holds 0 of the 600 {EGRESS} that its ports ask for." in [each["message"] for each in found]
        assert all(each["advice"] for each in found)
        await _write(cloud, *(topology_claims.insert().values(**row._mapping) for row in kept))
        assert (await held(user, id))[providers[FIRST]] == {EGRESS: 600}
        await _delete(user, id)
    await cloud.assert_clean()


async def test_a_repaired_claim_has_the_ports_of_today(cloud: OneProcess, user: Caller) -> None:
    """Not those of the request by which the server was made."""
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        first, later = await asking_port(user, net, egress=300), await asking_port(user, net, egress=400)
        id = await _boot(user, first)
        path = f"/servers/{id}/os-interface"
        await user.post(path, {"interfaceAttachment": {"port_id": later["id"]}}, 200)
        await user.delete(f"{path}/{first['id']}", 202)
        await cloud.settled()
        await _write(cloud, *(each.delete().where(each.c.consumer_uuid == id) for each in _HELD))
        [finding] = [each for each in await run_audit(cloud.process) if each["kind"] == "allocation"]
        assert await run_repair(cloud.process, finding["repairs"][0])
        await _is_bound(cloud, user, id, later, providers[await user.host_of(id)], 400)
        await _delete(user, id)
    await cloud.assert_clean()


async def test_an_adopted_server_has_its_bandwidth_and_its_ports_where_it_is(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the network service is away when the guest is adopted."""
    net = await network(user)
    async with interfaces(user, {FIRST: 1000, SECOND: 1000}) as providers:
        port = await asking_port(user, net, egress=600)
        id = await _boot(user, port)
        await cloud.settled()
        [before] = await cloud.read(instances.select().where(instances.c.uuid == id))
        bound_before = await port_of(user, port["id"])
        held_before = {each: await cloud.read(each.select().where(each.c.consumer_uuid == id)) for each in _HELD}
        await user.admin.act(id, "migrate")
        await user.wait_for(id, "VERIFY_RESIZE")
        await user.act(id, "confirmResize", status=204)
        await user.wait_for(id, "ACTIVE")
        await cloud.settled()
        there = await user.host_of(id)
        assert there != before.host
        await _write(
            cloud,
            instances.update().where(instances.c.uuid == id).values(**{**before._mapping, "updated_at": 1}),
            *(each.delete().where(each.c.consumer_uuid == id) for each in _HELD),
            *(each.insert().values(**row._mapping) for each, rows in held_before.items() for row in rows),
            migrations.delete().where(migrations.c.instance_uuid == id),
        )
        binding = {name: bound_before[name] for name in ("binding:host_id", "binding:profile")}
        await ok(user.admin, "PUT", f"/network/v2.0/ports/{port['id']}", {"port": binding})
        offered = [repair for each in await run_audit(cloud.process) for repair in each.get("repairs", ())]
        [adopt] = [each for each in offered if each["name"] == "adopt_guest"]
        rebind, refused = NetworkClient.rebind, list[str]()

        async def away(self: NetworkClient, **arguments: Any) -> Any:
            if not refused:
                refused.append(arguments["instance_uuid"])
                raise Unavailable("The network service is away.")
            return await rebind(self, **arguments)

        monkeypatch.setattr(NetworkClient, "rebind", away)
        assert await run_repair(cloud.process, adopt)
        assert await user.host_of(id) == there
        await _is_bound(cloud, user, id, port, providers[there], 600)
        assert refused == [id]
        await _delete(user, id)
    await cloud.assert_clean()

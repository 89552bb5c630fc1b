"""Concurrent requests: no address, MAC address, segment or quota is allocated twice; on both databases."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.network.networks import Networks
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, SERVICE, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


@pytest.fixture(params=["sqlite", "postgresql"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[World, World]]:
    """Two network services on one database, as on two machines."""
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    schema = "pair_" + request.node.name.split("[")[0][:40] if url else None
    async with world(tmp_path, url, schema=schema) as one, world(tmp_path, url, schema=schema) as two:
        two.role.core.random_source.seed(8)  # otherwise both make the same ids
        yield one, two
        assert await one.database.read(quota_drift) == []


def counted(answers: list[Any]) -> Counter[Any]:
    return Counter(answer.status if answer.status < 400 else (answer.status, error(answer)) for answer in answers)


async def test_ports_on_a_small_network_never_share_an_address(pair: tuple[World, World]) -> None:
    """200 concurrent creates by two services get an address each; of 100 more, the 53 that fit succeed."""
    one, two = pair
    network, _ = await one.network("10.1.0.0/24")
    body = {"port": {"network_id": network["id"]}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/ports", body) for n in range(200)))
    assert counted(answers) == {201: 200}
    answers += await asyncio.gather(*((one, two)[n % 2].call("POST", "/ports", body) for n in range(100)))
    assert counted(answers) == {201: 253, (409, "IpAddressGenerationFailure"): 47}
    addresses = [a.json()["port"]["fixed_ips"][0]["ip_address"] for a in answers if a.status == 201]
    assert sorted(addresses, key=lambda a: int(a.split(".")[3])) == [f"10.1.0.{n}" for n in range(2, 255)]
    assert len({a.json()["port"]["mac_address"] for a in answers if a.status == 201}) == 253


async def test_ports_come_and_go_on_a_full_network(cloud: World) -> None:
    """Concurrent deletes and creates: free addresses are found, and none is allocated twice."""
    network, _ = await cloud.network("10.1.0.0/28")
    body = {"port": {"network_id": network["id"]}}
    held: set[str] = set()

    async def churn() -> None:
        for _ in range(8):
            answer = await cloud.call("POST", "/ports", body)
            if answer.status == 409:
                continue
            port = answer.json()["port"]
            address = port["fixed_ips"][0]["ip_address"]
            assert address not in held
            held.add(address)
            await asyncio.sleep(0)
            held.discard(address)
            await cloud.delete("port", port["id"])

    await asyncio.gather(*(churn() for _ in range(20)))
    answers = await asyncio.gather(*(cloud.call("POST", "/ports", body) for _ in range(20)))
    assert counted(answers) == {201: 13, (409, "IpAddressGenerationFailure"): 7}


async def test_a_floating_ip_never_leads_to_an_address_that_its_port_has_lost(pair: tuple[World, World]) -> None:
    """One service associates it while the other takes the address from the port, or deletes the port."""
    one, two = pair
    public, _ = await one.network("203.0.113.0/24", ADMIN, router__external=True)
    network, subnet = await one.network("10.1.0.0/24")
    router = await one.make("router", external_gateway_info={"network_id": public["id"]})
    await one.call("PUT", f"/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    made = [await one.make("floatingip", floating_network_id=public["id"]) for _ in range(10)]
    found: Counter[Any] = Counter()
    for attempt in range(3):
        ports = [await one.make("port", network_id=network["id"]) for _ in made]
        requests = []
        for number, (port, floating) in enumerate(zip(ports, made, strict=True)):
            lead = {"floatingip": {"port_id": port["id"]}}
            requests.append(one.call("PUT", f"/floatingips/{floating['id']}", lead))
            if number % 5 < 4:
                requests.append(two.call("PUT", f"/ports/{port['id']}", {"port": {"fixed_ips": []}}))
            else:
                requests.append(two.call("DELETE", f"/ports/{port['id']}"))
            if (number + attempt) % 2:
                requests[-2:] = reversed(requests[-2:])
        found += counted(await asyncio.gather(*requests))
        held = {port["id"]: [each["ip_address"] for each in port["fixed_ips"]] for port in await one.list("port")}
        for floating in await one.list("floatingip"):
            if floating["port_id"] is not None:
                assert floating["fixed_ip_address"] in held[floating["port_id"]]
            await one.change("floatingip", floating["id"], port_id=None)
    assert set(found) <= {200, 204, (400, "BadRequest"), (404, "PortNotFound")}, found


async def test_one_address_has_one_winner(cloud: World) -> None:
    network, _ = await cloud.network()
    body = {"port": {"network_id": network["id"], "fixed_ips": [{"ip_address": "10.1.0.77"}]}}
    answers = await asyncio.gather(*(cloud.call("POST", "/ports", body) for _ in range(20)))
    assert counted(answers) == {201: 1, (409, "IpAddressInUse"): 19}
    body = {"port": {"network_id": network["id"], "mac_address": "fa:16:3e:00:00:01"}}
    answers = await asyncio.gather(*(cloud.call("POST", "/ports", body) for _ in range(20)))
    assert counted(answers) == {201: 1, (409, "MacAddressInUse"): 19}


async def test_quotas_hold(pair: tuple[World, World]) -> None:
    one, two = pair
    network, _ = await one.network("10.1.0.0/20")
    await one.call("PUT", "/quotas/p1", {"quota": {"port": 10, "network": 5, "security_group": 4}}, token=ADMIN)
    ports = {"port": {"network_id": network["id"]}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/ports", ports) for n in range(50)))
    assert counted(answers) == {201: 10, (409, "OverQuota"): 40}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/networks", {"network": {}}) for n in range(20)))
    assert counted(answers) == {201: 4, (409, "OverQuota"): 16}
    group = {"security_group": {"name": "g"}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/security-groups", group) for n in range(20)))
    assert counted(answers) == {201: 3, (409, "OverQuota"): 17}


async def test_a_project_gets_one_default_group(pair: tuple[World, World]) -> None:
    one, two = pair
    network, _ = await one.network(shared=True, token=ADMIN)
    body = {"port": {"network_id": network["id"]}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/ports", body, token=BOB) for n in range(20)))
    assert counted(answers) == {201: 20}
    assert len({tuple(answer.json()["port"]["security_groups"]) for answer in answers}) == 1
    assert len(await one.list("security_group", token=BOB)) == 1


async def test_segments_and_ranges_are_taken_once(pair: tuple[World, World]) -> None:
    one, two = pair
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/networks", {"network": {}}) for n in range(30)))
    assert counted(answers) == {201: 30}
    listed = await one.list("network", token=ADMIN)
    assert len({each["provider:segmentation_id"] for each in listed}) == 30
    network = answers[0].json()["network"]["id"]
    body = {"subnet": {"network_id": network, "cidr": "10.1.0.0/24", "ip_version": 4}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/subnets", body) for n in range(10)))
    assert counted(answers) == {201: 1, (400, "InvalidInput"): 9}
    pool = await one.make("subnetpool", name="p", prefixes=["10.9.0.0/24"], default_prefixlen=28)
    body = {"subnet": {"network_id": network, "subnetpool_id": pool["id"], "ip_version": 4}}
    answers = await asyncio.gather(*((one, two)[n % 2].call("POST", "/subnets", body) for n in range(20)))
    assert counted(answers) == {201: 16, (400, "SubnetAllocationError"): 4}
    assert len({answer.json()["subnet"]["cidr"] for answer in answers if answer.status == 201}) == 16


async def test_rules_alike_have_one_winner(cloud: World) -> None:
    group = await cloud.make("security_group", name="g")
    body = {"security_group_rule": {"security_group_id": group["id"], "direction": "ingress", "protocol": "tcp"}}
    answers = await asyncio.gather(*(cloud.call("POST", "/security-group-rules", body) for _ in range(20)))
    assert counted(answers) == {201: 1, (409, "SecurityGroupRuleExists"): 19}


async def test_a_network_is_deleted_or_used_never_both(cloud: World) -> None:
    for _ in range(8):
        network, _ = await cloud.network()
        body = {"port": {"network_id": network["id"]}}
        deleted, *created = await asyncio.gather(
            cloud.call("DELETE", f"/networks/{network['id']}"),
            *(cloud.call("POST", "/ports", body) for _ in range(4)),
        )
        if deleted.status == 204:
            assert counted(created) == {(404, "NetworkNotFound"): 4}
        else:
            assert error(deleted) == "NetworkInUse"
            assert counted(created) == {201: 4}


async def test_a_group_is_deleted_or_used_never_both(cloud: World) -> None:
    network, _ = await cloud.network()
    for _ in range(8):
        group = await cloud.make("security_group", name="g")
        body = {"port": {"network_id": network["id"], "security_groups": [group["id"]]}}
        deleted, created = await asyncio.gather(
            cloud.call("DELETE", f"/security-groups/{group['id']}"), cloud.call("POST", "/ports", body)
        )
        assert (deleted.status, created.status) in ((204, 404), (409, 201))


async def test_concurrent_changes_of_a_port_are_all_kept(cloud: World) -> None:
    network, _ = await cloud.network()
    port = await cloud.make("port", network_id=network["id"])
    changes: list[dict[str, Any]] = [
        {"name": "n"}, {"description": "d"}, {"admin_state_up": False}, {"dns_name": "x"}, {"device_id": "s"}
    ]  # fmt: skip
    answers = await asyncio.gather(
        *(cloud.call("PUT", f"/ports/{port['id']}", {"port": each}, token=SERVICE) for each in changes)
    )
    assert counted(answers) == {200: 5}
    shown = await cloud.show("port", port["id"])
    assert all(shown[name] == value for each in changes for name, value in each.items())
    assert shown["revision_number"] == 6


async def test_who_binds_a_port_knows_what_it_asks_for(pair: tuple[World, World]) -> None:
    """If a binding and a change of what the port asks for come together, the one knows it, or the other fails."""
    one, two = pair
    for number, changes in itertools.product(range(12), ("rule", "network")):
        policy = (await one.make("policy", ADMIN, shared=True))["id"]
        rule = {"minimum_bandwidth_rule": {"min_kbps": 600}}
        rules = f"/qos/policies/{policy}/minimum_bandwidth_rules"
        if changes == "network":
            await one.call("POST", rules, rule, token=ADMIN)
        network, _ = await one.network(qos_policy_id=policy if changes == "rule" else None)
        bound = {"binding:host_id": "h1", "device_id": "s1", "device_owner": "compute:nova"}
        if number % 2:
            port = await one.make("port", network_id=network["id"])
            binding = one.call("PUT", f"/ports/{port['id']}", {"port": bound}, token=SERVICE)
        else:
            new = {"network_id": network["id"], "project_id": "p1", **bound}
            binding = one.call("POST", "/ports", {"port": new}, token=SERVICE)
        change = (
            two.call("POST", rules, rule, token=ADMIN)
            if changes == "rule"
            else two.call("PUT", f"/networks/{network['id']}", {"network": {"qos_policy_id": policy}}, token=ADMIN)
        )
        answer, changed = await asyncio.gather(binding, change)
        assert answer.status in (200, 201)
        told = answer.json()["port"]["resource_request"]
        assert changed.status < 300 if told else (changed.status, error(changed)) == (409, "QosRuleNotSupported")


async def test_double_deletes_give_the_quota_back_once(cloud: World) -> None:
    network, subnet = await cloud.network()
    port = await cloud.make("port", network_id=network["id"])
    group = await cloud.make("security_group", name="g")
    router = await cloud.make("router")
    for path in (
        f"/ports/{port['id']}",
        f"/security-groups/{group['id']}",
        f"/routers/{router['id']}",
        f"/subnets/{subnet['id']}",
        f"/networks/{network['id']}",
    ):
        answers = await asyncio.gather(*(cloud.call("DELETE", path) for _ in range(5)))
        assert Counter(answer.status for answer in answers) == {204: 1, 404: 4}


async def test_one_topology_per_project(pair: tuple[World, World]) -> None:
    one, two = pair
    assert sorted(await asyncio.gather(*(w.role.bootstrap() for w in (one, two, one)))) == [False, False, True]
    answers = await asyncio.gather(*((one, two)[n % 2].call("GET", "/auto-allocated-topology/p1") for n in range(10)))
    assert counted(answers) == {200: 10}
    assert len({answer.json()["auto_allocated_topology"]["id"] for answer in answers}) == 1
    assert len(await one.list("network", "name=auto_allocated_network")) == 1


async def test_one_fixed_address_has_one_floating_ip(cloud: World) -> None:
    await cloud.role.bootstrap()
    networks = {each["name"]: each["id"] for each in await cloud.list("network")}
    port = await cloud.make("port", network_id=networks["private"])
    body = {"floatingip": {"floating_network_id": networks["public"], "port_id": port["id"]}}
    answers = await asyncio.gather(*(cloud.call("POST", "/floatingips", body, token=ALICE) for _ in range(10)))
    assert counted(answers) == {201: 1, (409, "FloatingIPPortAlreadyAssociated"): 9}


async def test_a_repeated_transaction_chooses_a_free_segment(cloud: World) -> None:
    """A transaction that the database rolled back runs again, and another network has got its segment meanwhile."""
    kind = Networks(cloud.role.core)
    given: dict[str, Any] = {}
    wanted = [(kind.row("p1", given), given)]

    def rolled_back(conn: sa.Connection) -> None:
        kind.insert(conn, wanted)
        raise RuntimeError("rolled back")

    with pytest.raises(RuntimeError, match="rolled back"):
        await cloud.database.write(rolled_back)
    other = await cloud.make("network", ADMIN, project_id="p2")
    [made] = await cloud.database.write(kind.insert, wanted)
    assert made.values["provider:segmentation_id"] == other["provider:segmentation_id"] + 1

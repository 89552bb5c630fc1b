"""What compute does with networks, through its client, against the embedded service."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.http.client import Answer, ServiceClient, Transport
from micronova.neighbours.network.quotas import drift
from micronova.network.client import NetworkClient
from micronova.objects.errors import Conflict, Forbidden, Invalid, PortLimitExceeded, Unavailable
from micronova.objects.network import NetworkRequest
from tests.unit.network.world import ADMIN, ALICE, BOB, SERVICE, World, world


class Counting:
    """A transport that counts and can be told to fail."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.sent: list[str] = []
        self.fail: str | None = None

    async def request(self, method: str, url: str, headers: Any, body: bytes | None) -> Answer:
        self.sent.append(f"{method} {url.partition('?')[0]}")
        if self.fail is not None and self.sent[-1].startswith(self.fail):
            return Answer(503, {}, b"{}")
        return await self._inner.request(method, url, headers, body)


@dataclass
class Scene:
    cloud: World
    client: NetworkClient
    transport: Counting

    def forget(self) -> None:
        self.client = NetworkClient(ServiceClient(self.transport, service_token))

    async def plan(self, requests: Any, groups: tuple[str, ...] = ("default",), **more: Any) -> Any:
        given = {"token": ALICE, "project_id": "p1", "count": 1, **more}
        return await self.client.validate(requests, list(groups), **given)

    async def boot(self, requests: Any, server: str = "s1", host: str = "h1", **more: Any) -> Any:
        plan = await self.plan(requests, more.pop("groups", ("default",)))
        stored = msgspec.json.decode(msgspec.json.encode(plan.requests))  # as it comes out of the database
        return await self.client.allocate(
            instance_uuid=server, project_id="p1", host=host, zone="nova", requests=stored,
            security_groups=list(plan.security_groups), hostname="vm", **more,
        )  # fmt: skip


async def service_token() -> str:
    return SERVICE


@pytest.fixture(params=["sqlite", "postgresql"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as cloud:
        transport = Counting(cloud.transport)
        yield Scene(cloud, NetworkClient(ServiceClient(transport, service_token)), transport)
        assert await cloud.database.read(drift) == []


def on(network: dict[str, Any], **more: Any) -> list[NetworkRequest]:
    return [NetworkRequest(network_id=network["id"], **more)]


async def test_a_server_gets_a_port_and_lets_it_go(scene: Scene) -> None:
    network, subnet = await scene.cloud.network("10.1.0.0/24", name="blue")
    [vif] = await scene.boot(on(network, tag="nic1"))
    assert (vif.network_id, vif.network_label, vif.vif_type, vif.status) == (network["id"], "blue", "bridge", "ACTIVE")
    assert (vif.fixed_ips[0].address, vif.fixed_ips[0].subnet_id, vif.mtu) == ("10.1.0.2", subnet["id"], 1450)
    assert (vif.tag, vif.preserve_on_delete) == ("nic1", False)
    assert vif.subnets[0]["cidr"] == "10.1.0.0/24"
    port = await scene.cloud.show("port", vif.port_id)
    assert (port["device_id"], port["device_owner"], port["project_id"]) == ("s1", "compute:nova", "p1")
    assert port["dns_name"] == "vm"
    assert await scene.client.network_info("s1") == (vif,)
    assert await scene.client.list_server_ports() == [{"id": vif.port_id, "device_id": "s1"}]
    await scene.client.deallocate("s1")
    await scene.client.deallocate("s1")
    assert await scene.client.network_info("s1") == ()
    assert await scene.cloud.list("port") == []


async def test_a_port_with_a_forged_device_is_not_a_servers(scene: Scene) -> None:
    network, _ = await scene.cloud.network("10.1.0.0/24")
    [vif] = await scene.boot(on(network))
    foreign, _ = await scene.cloud.network("10.66.0.0/24", BOB)
    forged = {"network_id": foreign["id"], "device_id": "s1", "device_owner": "compute:nova"}
    port = await scene.cloud.make("port", BOB, **forged)
    # Nor is the port of another server whose owner has put this one's name on it since.
    usable = await scene.cloud.make("port", BOB, network_id=foreign["id"])
    body = [{"network_id": foreign["id"], "port_id": usable["id"]}]
    [own] = await scene.client.allocate(instance_uuid="s2", project_id="p2", host="h", zone="z", requests=body)
    await scene.cloud.change("port", own.port_id, BOB, device_id="s1")
    assert [each.port_id for each in await scene.client.network_info("s1")] == [vif.port_id]
    assert [each.port_id for each in await scene.client.rebind("s1", "h2")] == [vif.port_id]
    listed = {each["id"]: each["device_id"] for each in await scene.client.list_server_ports()}
    assert listed == {vif.port_id: "s1", own.port_id: "s2"}
    await scene.client.deallocate("s1")
    assert (await scene.cloud.show("port", port["id"], BOB))["device_id"] == "s1"
    refused = {"port": {**forged, "binding:profile": {"micronova": {"created": True}}}}
    assert (await scene.cloud.call("POST", "/ports", refused, token=BOB)).status == 403


async def test_few_calls_per_server(scene: Scene) -> None:
    network, _ = await scene.cloud.network("10.1.0.0/20")
    await scene.boot(on(network), "warm")
    scene.transport.sent.clear()
    await scene.boot(on(network), "s1")
    assert sorted(scene.transport.sent) == ["GET /v2.0/ports", "POST /v2.0/ports"]
    scene.transport.sent.clear()
    await scene.boot(on(network), "s2", fresh=True)
    assert scene.transport.sent == ["POST /v2.0/ports"]
    scene.transport.sent.clear()
    await scene.client.deallocate("s2")
    assert [call.split("/v2.0")[0] for call in scene.transport.sent] == ["GET ", "DELETE "]


async def test_a_repeated_allocation_finds_its_ports(scene: Scene) -> None:
    networks = [(await scene.cloud.network(f"10.{n}.0.0/24"))[0] for n in (1, 2)]
    own = await scene.cloud.make("port", network_id=networks[0]["id"])
    requests = [*on(networks[0]), *on(networks[1]), NetworkRequest(port_id=own["id"], tag="mine"), *on(networks[0])]
    first = await scene.boot(requests)
    assert [vif.network_id for vif in first] == [networks[0]["id"], networks[1]["id"], *[networks[0]["id"]] * 2]
    assert [vif.preserve_on_delete for vif in first] == [False, False, True, False]
    stored = [
        {"network_id": vif.network_id, "port_id": vif.port_id if vif.preserve_on_delete else None} for vif in first
    ]
    again = await scene.client.allocate(
        instance_uuid="s1", project_id="p1", host="h2", zone="nova", requests=stored, security_groups=["default"]
    )
    assert {vif.port_id for vif in again} == {vif.port_id for vif in first}
    shown = [await scene.cloud.show("port", vif.port_id, ADMIN) for vif in again]
    assert {port["binding:host_id"] for port in shown} == {"h2"}
    moved = await scene.client.rebind("s1", "h3")
    assert len(moved) == 4
    await scene.client.deallocate("s1")
    [left] = await scene.cloud.list("port", token=ADMIN)
    assert (left["id"], left["device_id"], left["device_owner"]) == (own["id"], "", "")
    assert (left["binding:host_id"], left["binding:profile"], left["status"]) == ("", {}, "DOWN")


async def test_a_failure_half_way_can_be_cleaned_up_and_repeated(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    own = await scene.cloud.make("port", network_id=network["id"])
    requests = [*on(network), NetworkRequest(port_id=own["id"])]
    scene.transport.fail = "POST"
    with pytest.raises(Unavailable):
        await scene.boot(requests)
    scene.transport.fail = None
    assert (await scene.cloud.show("port", own["id"]))["device_id"] == "s1"
    plan = [{"network_id": network["id"]}, {"network_id": network["id"], "port_id": own["id"]}]
    vifs = await scene.client.allocate(instance_uuid="s1", project_id="p1", host="h", zone=None, requests=plan)
    assert [vif.port_id == own["id"] for vif in vifs] == [False, True]
    await scene.client.deallocate("s1")
    assert [port["device_id"] for port in await scene.cloud.list("port")] == [""]


async def test_a_users_port_has_one_server(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    own = await scene.cloud.make("port", network_id=network["id"])
    plan = [{"network_id": network["id"], "port_id": own["id"]}]
    results = await asyncio.gather(
        *(
            scene.client.allocate(instance_uuid=f"s{n}", project_id="p1", host="h", zone="z", requests=plan)
            for n in range(5)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, Conflict) for result in results) == 4
    winner = next(n for n, result in enumerate(results) if not isinstance(result, BaseException))
    assert (await scene.cloud.show("port", own["id"]))["device_id"] == f"s{winner}"


async def test_security_groups_by_name_or_id(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    web = await scene.cloud.make("security_group", name="web")
    [default] = await scene.cloud.list("security_group", "name=default")
    plan = await scene.plan(on(network), ("web", default["id"]))
    assert plan.security_groups == ("web", "default")
    assert set(plan.requests[0].security_groups) == {web["id"], default["id"]}
    [vif] = await scene.boot(on(network), groups=("web",))
    assert (await scene.cloud.show("port", vif.port_id))["security_groups"] == [web["id"]]
    # A plan that says no groups means the default one: the names are those of all ports, the user's own too.
    [vif] = await scene.client.allocate(
        instance_uuid="s2", project_id="p1", host="h", zone="z", requests=[{"network_id": network["id"]}],
        security_groups=["web"],
    )  # fmt: skip
    assert (await scene.cloud.show("port", vif.port_id))["security_groups"] == [default["id"]]
    await scene.cloud.make("security_group", name="web")
    with pytest.raises(Conflict):
        await scene.plan(on(network), ("web",))
    with pytest.raises(Invalid, match="nothing"):
        await scene.plan(on(network), ("nothing",))


async def test_without_a_word_the_only_network_is_taken(scene: Scene) -> None:
    assert (await scene.plan(None)).requests == "none"
    assert (await scene.plan("none")).requests == "none"
    assert await scene.boot("none") == ()
    with pytest.raises(Invalid, match="automatically"):
        await scene.plan("auto")
    await scene.cloud.role.bootstrap()
    scene.forget()  # what a user may see is remembered for a moment
    private = next(each for each in await scene.cloud.list("network") if each["name"] == "private")
    for nothing in (None, [], "auto"):
        assert [port.network_id for port in (await scene.plan(nothing)).requests] == [private["id"]]
    await scene.cloud.network()
    scene.forget()
    with pytest.raises(Conflict, match="Multiple possible networks"):
        await scene.plan(None)


async def test_an_automatic_network(scene: Scene) -> None:
    await scene.cloud.role.bootstrap()
    private = next(each for each in await scene.cloud.list("network") if each["name"] == "private")
    await scene.cloud.change("network", private["id"], ADMIN, shared=False)
    plan = await scene.plan("auto")
    assert plan.requests == "auto"
    [vif] = await scene.client.allocate(instance_uuid="s1", project_id="p1", host="h", zone="z", requests="auto")
    assert vif.network_label == "auto_allocated_network"
    assert (await scene.cloud.show("network", vif.network_id))["project_id"] == "p1"
    web = await scene.cloud.make("security_group", name="web")
    [vif] = await scene.client.allocate(
        instance_uuid="s2", project_id="p1", host="h", zone="z", requests="auto", security_groups=["web"]
    )
    assert (await scene.cloud.show("port", vif.port_id))["security_groups"] == [web["id"]]


async def test_what_is_not_the_users_to_use(scene: Scene) -> None:
    cloud = scene.cloud
    network, _ = await cloud.network("10.1.0.0/24")
    foreign, _ = await cloud.network(token=BOB)
    shared, _ = await cloud.network("10.3.0.0/24", token=ADMIN, shared=True)
    public, _ = await cloud.network("203.0.113.0/24", ADMIN, router__external=True)
    bare = await cloud.make("network")
    used = await cloud.make("port", network_id=network["id"], device_id="other")
    theirs = await cloud.make("port", BOB, network_id=foreign["id"])
    addressless = await cloud.make("port", network_id=network["id"], fixed_ips=[])
    for requests, kind, words in (
        (on(foreign), Invalid, "could not be found"),
        ([NetworkRequest(network_id="nothing")], Invalid, "could not be found"),
        ([NetworkRequest(port_id=theirs["id"])], Invalid, "could not be found"),
        ([NetworkRequest(port_id=used["id"])], Conflict, "in use"),
        ([NetworkRequest(port_id="nothing")], Invalid, "could not be found"),
        ([NetworkRequest()], Invalid, "must name"),
        (on(bare), Invalid, "requires a subnet"),
        (on(public), Forbidden, "external"),
        (on(network, fixed_ip="10.9.0.1"), Invalid, "not a valid ip"),
        (on(network, fixed_ip="x"), Invalid, "invalid"),
        (on(network, fixed_ip=used["fixed_ips"][0]["ip_address"]), Invalid, "already in use"),
    ):
        with pytest.raises(kind, match=words):
            await scene.plan(requests)
    # On a network of the caller's own, somebody else's port is seen, and still not usable.
    guest = await cloud.make("port", ADMIN, network_id=network["id"], project_id="p2")
    with pytest.raises(Invalid, match="another project"):
        await scene.plan([NetworkRequest(port_id=guest["id"])])
    assert (await scene.plan(on(public), may_attach_external=True)).requests
    assert (await scene.plan(on(shared))).requests
    assert (await scene.plan([NetworkRequest(port_id=addressless["id"])])).requests
    assert (await scene.plan(on(network, fixed_ip="10.1.0.200"))).requests[0].fixed_ip == "10.1.0.200"
    [vif] = await scene.boot(on(network, fixed_ip="10.1.0.200"))
    assert vif.fixed_ips[0].address == "10.1.0.200"


async def test_the_quota_limits_how_many_servers(scene: Scene) -> None:
    network, _ = await scene.cloud.network("10.1.0.0/24")
    await scene.cloud.call("PUT", "/quotas/p1", {"quota": {"port": 5}}, token=ADMIN)
    own = await scene.cloud.make("port", network_id=network["id"])
    assert (await scene.plan(on(network), count=10)).room == 4
    assert (await scene.plan(on(network) * 2, count=10)).room == 2
    assert (await scene.plan([NetworkRequest(port_id=own["id"])])).room is None
    for n in range(4):
        await scene.boot(on(network), f"s{n}")
    with pytest.raises(PortLimitExceeded):
        await scene.boot(on(network), "s9")
    assert (await scene.plan(on(network))).room == 0
    await scene.cloud.call("PUT", "/quotas/p1", {"quota": {"port": -1}}, token=ADMIN)
    assert (await scene.plan(on(network), count=1000)).room is None


async def test_floating_ips_are_shown(scene: Scene) -> None:
    await scene.cloud.role.bootstrap()
    networks = {each["name"]: each for each in await scene.cloud.list("network")}
    [vif] = await scene.boot(on(networks["private"]))
    floating = await scene.cloud.make("floatingip", floating_network_id=networks["public"]["id"], port_id=vif.port_id)
    [vif] = await scene.client.network_info("s1")
    assert vif.fixed_ips[0].floating == (floating["floating_ip_address"],)

"""Compute's network client against the embedded network service."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.clients.network.client import NetworkClient
from micronova.http.client import Answer, ServiceClient, Transport
from micronova.objects.errors import Conflict, Forbidden, Invalid, PortLimitExceeded, Stale, Unavailable
from micronova.objects.network import NetworkRequest, PlannedPort, PlannedPorts
from micronova.objects.port_resources import BoundPort
from micronova.placement import port_groups
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, SERVICE, World, quota_drift, world


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

    async def close(self) -> None:
        await self._inner.close()


class Guaranteeing:
    """A network service with guaranteed bandwidth: one port has a resource request, which only services see."""

    def __init__(self, inner: Transport, port_id: str, resource_request: Any) -> None:
        self._inner = inner
        self._port_id = port_id
        self._resource_request = resource_request

    async def request(self, method: str, url: str, headers: Any, body: bytes | None) -> Answer:
        answer = await self._inner.request(method, url, headers, body)
        path = url.partition("?")[0]
        if method not in ("GET", "PUT") or not path.startswith("/v2.0/ports") or headers["x-auth-token"] != SERVICE:
            return answer
        document = answer.json()
        for port in document["ports"] if "ports" in document else [document["port"]]:
            port["resource_request"] = self._resource_request if port["id"] == self._port_id else None
        return Answer(answer.status, answer.headers, msgspec.json.encode(document))

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Scene:
    cloud: World
    client: NetworkClient
    transport: Counting

    def forget(self) -> None:
        self.client = NetworkClient(ServiceClient(self.transport, service_token))

    async def plan(self, requests: Any, groups: tuple[str, ...] = ("default",), **more: Any) -> Any:
        given = {"token": ALICE, "project_id": "p1", "count": 1, **more}
        return await self.client.planner.plan(requests, list(groups), **given)

    async def boot(self, requests: Any, server: str = "s1", host: str = "h1", **more: Any) -> Any:
        plan = await self.plan(requests, more.pop("groups", ("default",)))
        stored = msgspec.json.decode(msgspec.json.encode(plan.ports), type=PlannedPorts)  # as it is read back
        return await self.client.allocate(
            instance_uuid=server, project_id="p1", host=host, zone="nova", ports=stored,
            security_groups=list(plan.security_groups), hostname="vm", **{"check": current, **more},
        )  # fmt: skip


async def service_token() -> str:
    return SERVICE


async def current() -> None:
    """Say that the attempt is the newest."""


@pytest.fixture(params=["sqlite", "postgresql"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as cloud:
        transport = Counting(cloud.transport)
        yield Scene(cloud, NetworkClient(ServiceClient(transport, service_token)), transport)
        assert await cloud.database.read(quota_drift) == []


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
    assert await scene.client.servers_of_ports() == {vif.port_id: "s1"}
    await scene.client.deallocate("s1", check=current)
    await scene.client.deallocate("s1", check=current)
    assert await scene.client.network_info("s1") == ()
    assert await scene.cloud.list("port") == []


async def test_the_faults_of_network_agents_are_listed(scene: Scene) -> None:
    assert await scene.client.list_network_agents() == []
    for host, faults in (("h1", []), ("h2", ["dnsmasq is missing."]), ("h3", [{"a": 1}, 7]), ("h4", 7)):
        report = {"host": host, "started": True, "configurations": {"faults": faults}}
        assert (await scene.cloud.call("POST", "/agent-reports", report, token=SERVICE)).status == 200
    listed = await scene.client.list_network_agents()
    assert sorted(listed) == [
        ("h1", True, ()),
        ("h2", True, ("dnsmasq is missing.",)),
        ("h3", True, ("{'a': 1}", "7")),  # a host can report anything
        ("h4", True, ()),
    ]


async def test_a_port_with_a_forged_device_is_not_a_servers(scene: Scene) -> None:
    network, _ = await scene.cloud.network("10.1.0.0/24")
    [vif] = await scene.boot(on(network))
    foreign, _ = await scene.cloud.network("10.66.0.0/24", BOB)
    forged = {"network_id": foreign["id"], "device_id": "s1", "device_owner": "compute:nova"}
    port = await scene.cloud.make("port", BOB, **forged)
    # A port of another server stays, even if its owner sets this server's id as device_id.
    usable = await scene.cloud.make("port", BOB, network_id=foreign["id"])
    planned: PlannedPorts = [PlannedPort(network_id=foreign["id"], port_id=usable["id"])]
    [own] = await scene.client.allocate(
        instance_uuid="s2", project_id="p2", host="h", zone="z", ports=planned, check=current
    )
    await scene.cloud.change("port", own.port_id, BOB, device_id="s1")
    assert [each.port_id for each in await scene.client.network_info("s1")] == [vif.port_id]
    assert [each.port_id for each in await scene.boot(on(network), host="h2")] == [vif.port_id]
    assert await scene.client.servers_of_ports() == {vif.port_id: "s1", own.port_id: "s2"}
    await scene.client.deallocate("s1", check=current)
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
    await scene.client.deallocate("s2", check=current)
    assert [call.split("/v2.0")[0] for call in scene.transport.sent] == ["GET ", "DELETE "]


async def test_a_repeated_allocation_finds_its_ports(scene: Scene) -> None:
    networks = [(await scene.cloud.network(f"10.{n}.0.0/24"))[0] for n in (1, 2)]
    own = await scene.cloud.make("port", network_id=networks[0]["id"])
    requests = [*on(networks[0]), *on(networks[1]), NetworkRequest(port_id=own["id"], tag="mine"), *on(networks[0])]
    first = await scene.boot(requests)
    assert [vif.network_id for vif in first] == [networks[0]["id"], networks[1]["id"], *[networks[0]["id"]] * 2]
    assert [vif.preserve_on_delete for vif in first] == [False, False, True, False]
    stored: PlannedPorts = [
        PlannedPort(network_id=vif.network_id, port_id=vif.port_id if vif.preserve_on_delete else None) for vif in first
    ]
    again = await scene.client.allocate(
        instance_uuid="s1",
        project_id="p1",
        host="h2",
        zone="nova",
        ports=stored,
        security_groups=["default"],
        check=current,
    )
    assert {vif.port_id for vif in again} == {vif.port_id for vif in first}
    shown = [await scene.cloud.show("port", vif.port_id, ADMIN) for vif in again]
    assert {port["binding:host_id"] for port in shown} == {"h2"}
    await scene.client.deallocate("s1", check=current)
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
    plan: PlannedPorts = [
        PlannedPort(network_id=network["id"]),
        PlannedPort(network_id=network["id"], port_id=own["id"]),
    ]
    vifs = await scene.client.allocate(
        instance_uuid="s1", project_id="p1", host="h", zone=None, ports=plan, check=current
    )
    assert [vif.port_id == own["id"] for vif in vifs] == [False, True]
    await scene.client.deallocate("s1", check=current)
    assert [port["device_id"] for port in await scene.cloud.list("port")] == [""]


async def test_a_users_port_has_one_server(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    own = await scene.cloud.make("port", network_id=network["id"])
    plan: PlannedPorts = [PlannedPort(network_id=network["id"], port_id=own["id"])]
    results = await asyncio.gather(
        *(
            scene.client.allocate(instance_uuid=f"s{n}", project_id="p1", host="h", zone="z", ports=plan, check=current)
            for n in range(5)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, Conflict) for result in results) == 4
    winner = next(n for n, result in enumerate(results) if not isinstance(result, BaseException))
    assert (await scene.cloud.show("port", own["id"]))["device_id"] == f"s{winner}"


BANDWIDTH = {"resources": {"NET_BW_EGR_KILOBIT_PER_SEC": 1000}, "required": ["CUSTOM_PHYSNET_A"]}


@pytest.mark.parametrize(
    "resource_request",
    [BANDWIDTH, {"request_groups": [{"id": "g", **BANDWIDTH}], "same_subtree": ["g"]}],
    ids=["one", "groups"],
)  # fmt: skip
async def test_a_port_is_bound_with_the_provider_of_its_bandwidth(scene: Scene, resource_request: Any) -> None:
    """Neutron has two forms, and wants the provider in the same form."""
    network, _ = await scene.cloud.network()
    policy = (await scene.cloud.make("policy", ADMIN, shared=True))["id"]
    asking, other = [await scene.cloud.make("port", network_id=network["id"], qos_policy_id=policy) for _ in range(2)]
    scene.client = NetworkClient(
        ServiceClient(Guaranteeing(scene.transport, asking["id"], resource_request), service_token)
    )
    plan = await scene.plan([NetworkRequest(port_id=port["id"]) for port in (other, asking)])
    assert plan.ports[0].resources is None
    wanted = plan.ports[1].resources
    [group] = wanted.groups
    assert (group.resources, group.required) == (BANDWIDTH["resources"], ("CUSTOM_PHYSNET_A",))
    served = port_groups.served([wanted], {f"{asking['id']}:{group.id}": ["provider"]})
    common: dict[str, Any] = {"instance_uuid": "s1", "zone": "nova", "check": current}
    await scene.client.allocate(project_id="p1", host="h1", ports=plan.ports, served=served, **common)

    async def allocation() -> Any:
        return (await scene.cloud.show("port", asking["id"], ADMIN))["binding:profile"].get("allocation")

    told = {"g": "provider"} if "request_groups" in resource_request else "provider"
    assert await allocation() == told
    bound = BoundPort(server="s1", port_id=asking["id"], allocation=told, asks=wanted)
    assert await scene.client.bound_ports() == await scene.client.bound_ports("s1") == [bound]
    assert await scene.client.bound_ports("s2") == []
    assert "allocation" not in (await scene.cloud.show("port", other["id"], ADMIN))["binding:profile"]
    assert await scene.client.resources_of_server("s1") == (wanted,)
    await scene.client.unbind("s1", check=current)
    assert await allocation() is None
    assert await scene.client.bound_ports() == []
    elsewhere = port_groups.served([wanted], {f"{asking['id']}:{group.id}": ["another"]})
    ids = [port.port_id for port in plan.ports]
    await scene.client.rebind(host="h2", port_ids=ids, served=elsewhere, **common)
    assert await allocation() == ({"g": "another"} if "request_groups" in resource_request else "another")
    await scene.client.deallocate("s1", check=current)
    assert (await scene.cloud.show("port", asking["id"], ADMIN))["binding:profile"] == {}


async def test_a_port_is_not_bound_without_what_it_asks_for(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    policy = (await scene.cloud.make("policy", ADMIN, shared=True))["id"]
    port = await scene.cloud.make("port", network_id=network["id"], qos_policy_id=policy)
    plan = await scene.plan([NetworkRequest(port_id=port["id"])])
    rule = {"minimum_bandwidth_rule": {"min_kbps": 1}}
    path = f"/qos/policies/{policy}/minimum_bandwidth_rules"
    assert (await scene.cloud.call("POST", path, rule, token=ADMIN)).status == 201
    with pytest.raises(Conflict, match="asks for other resources"):
        await scene.client.allocate(
            instance_uuid="s1", project_id="p1", host="h1", zone="nova", ports=plan.ports, check=current
        )
    assert (await scene.cloud.show("port", port["id"]))["device_id"] == ""


@pytest.mark.parametrize("call", ["allocate", "attach", "rebind"])
async def test_a_port_does_not_stay_bound_if_it_came_to_ask_for_something_meanwhile(scene: Scene, call: str) -> None:
    """A rule changes no revision of the port: only the answer to the binding tells of it."""
    network, _ = await scene.cloud.network()
    policy = (await scene.cloud.make("policy", ADMIN, shared=True))["id"]
    port = await scene.cloud.make("port", network_id=network["id"], qos_policy_id=policy)
    planned = (await scene.plan([NetworkRequest(port_id=port["id"])])).ports[0]
    common: dict[str, Any] = {"instance_uuid": "s1", "host": "h1", "zone": "nova"}
    if call == "rebind":
        await scene.client.allocate(**common, project_id="p1", ports=[planned], check=current)
        await scene.client.unbind("s1", check=current)

    async def add_rule() -> None:
        path = f"/qos/policies/{policy}/minimum_bandwidth_rules"
        rule = {"minimum_bandwidth_rule": {"min_kbps": 1}}
        assert (await scene.cloud.call("POST", path, rule, token=ADMIN)).status == 201

    with pytest.raises(Conflict, match="asks for other resources"):
        if call == "allocate":
            await scene.client.allocate(**common, project_id="p1", ports=[planned], check=add_rule)
        elif call == "attach":
            await scene.client.attach(**common, project_id="p1", port=planned, operation="o", check=add_rule)
        else:
            await scene.client.rebind(**common, port_ids=[port["id"]], exact=True, check=add_rule)
    if call == "attach":
        await scene.client.detach(instance_uuid="s1", operation="o", check=current)
    else:
        await scene.client.unbind("s1", check=current)
    assert (await scene.cloud.show("port", port["id"], ADMIN))["binding:host_id"] == ""


@pytest.mark.parametrize(
    "resource_request",
    [
        {"resources": {"NET_BW_EGR_KILOBIT_PER_SEC": "much"}},
        {"request_groups": [{"id": "g", **BANDWIDTH}, {"id": "g", **BANDWIDTH}]},
        {"request_groups": [BANDWIDTH]},
    ],
)
async def test_a_resource_request_that_cannot_be_read_is_refused(scene: Scene, resource_request: Any) -> None:
    network, _ = await scene.cloud.network()
    policy = (await scene.cloud.make("policy", ADMIN, shared=True))["id"]
    port = await scene.cloud.make("port", network_id=network["id"], qos_policy_id=policy)
    transport = Guaranteeing(scene.transport, port["id"], resource_request)
    scene.client = NetworkClient(ServiceClient(transport, service_token))
    with pytest.raises(Invalid, match="resource request"):
        await scene.plan([NetworkRequest(port_id=port["id"])])


async def test_a_network_with_a_guarantee_gets_no_new_ports(scene: Scene) -> None:
    policy = (await scene.cloud.make("policy", ADMIN, shared=True))["id"]
    network, _ = await scene.cloud.network(qos_policy_id=policy)
    plan = await scene.plan(on(network))
    rule = {"minimum_bandwidth_rule": {"min_kbps": 1}}
    path = f"/qos/policies/{policy}/minimum_bandwidth_rules"
    assert (await scene.cloud.call("POST", path, rule, token=ADMIN)).status == 201
    for requests in (on(network), None):
        with pytest.raises(Invalid, match=f"networks with QoS policy.*{network['id']}"):
            await scene.plan(requests)
    with pytest.raises(Invalid, match="networks with QoS policy"):  # the rule came after the plan
        await scene.client.allocate(
            instance_uuid="s1", project_id="p1", host="h1", zone="nova", ports=plan.ports, check=current
        )
    await scene.client.deallocate("s1", check=current)
    assert await scene.cloud.list("port") == []


async def test_security_groups_by_name_or_id(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    web = await scene.cloud.make("security_group", name="web")
    [default] = await scene.cloud.list("security_group", "name=default")
    plan = await scene.plan(on(network), ("web", default["id"]))
    assert plan.security_groups == ("web", "default")
    assert set(plan.ports[0].security_groups) == {web["id"], default["id"]}
    [vif] = await scene.boot(on(network), groups=("web",))
    assert (await scene.cloud.show("port", vif.port_id))["security_groups"] == [web["id"]]
    # Without security groups the plan means the default one; the names are those of all ports, also the user's own.
    [vif] = await scene.client.allocate(
        instance_uuid="s2", project_id="p1", host="h", zone="z", ports=[PlannedPort(network_id=network["id"])],
        security_groups=["web"], check=current,
    )  # fmt: skip
    assert (await scene.cloud.show("port", vif.port_id))["security_groups"] == [default["id"]]
    await scene.cloud.make("security_group", name="web")
    with pytest.raises(Conflict):
        await scene.plan(on(network), ("web",))
    with pytest.raises(Invalid, match="nothing"):
        await scene.plan(on(network), ("nothing",))


async def test_without_a_word_the_only_network_is_taken(scene: Scene) -> None:
    assert (await scene.plan(None)).ports == "none"
    assert (await scene.plan("none")).ports == "none"
    assert await scene.boot("none") == ()
    with pytest.raises(Invalid, match="automatically"):
        await scene.plan("auto")
    await scene.cloud.role.bootstrap()
    scene.forget()  # the user's view of networks is cached
    private = next(each for each in await scene.cloud.list("network") if each["name"] == "private")
    nothings: list[Any] = [None, [], "auto"]
    for nothing in nothings:
        assert [port.network_id for port in (await scene.plan(nothing)).ports] == [private["id"]]
    await scene.cloud.network()
    scene.forget()
    with pytest.raises(Conflict, match="Multiple possible networks"):
        await scene.plan(None)


async def test_an_automatic_network(scene: Scene) -> None:
    await scene.cloud.role.bootstrap()
    private = next(each for each in await scene.cloud.list("network") if each["name"] == "private")
    await scene.cloud.change("network", private["id"], ADMIN, shared=False)
    plan = await scene.plan("auto")
    assert plan.ports == "auto"
    [vif] = await scene.client.allocate(
        instance_uuid="s1", project_id="p1", host="h", zone="z", ports="auto", check=current
    )
    assert vif.network_label == "auto_allocated_network"
    assert (await scene.cloud.show("network", vif.network_id))["project_id"] == "p1"
    web = await scene.cloud.make("security_group", name="web")
    [vif] = await scene.client.allocate(
        instance_uuid="s2", project_id="p1", host="h", zone="z", ports="auto", security_groups=["web"], check=current
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
    # The owner of a network sees ports of others on it, but may not use them.
    guest = await cloud.make("port", ADMIN, network_id=network["id"], project_id="p2")
    with pytest.raises(Invalid, match="another project"):
        await scene.plan([NetworkRequest(port_id=guest["id"])])
    assert (await scene.plan(on(public), may_attach_external=True)).ports
    assert (await scene.plan(on(shared))).ports
    assert (await scene.plan([NetworkRequest(port_id=addressless["id"])])).ports
    assert (await scene.plan(on(network, fixed_ip="10.1.0.200"))).ports[0].fixed_ip == "10.1.0.200"
    [vif] = await scene.boot(on(network, fixed_ip="10.1.0.200"))
    assert vif.fixed_ips[0].address == "10.1.0.200"


async def test_the_quota_limits_how_many_servers(scene: Scene) -> None:
    network, _ = await scene.cloud.network("10.1.0.0/24")
    await scene.cloud.call("PUT", "/quotas/p1", {"quota": {"port": 5}}, token=ADMIN)
    own = await scene.cloud.make("port", network_id=network["id"])
    assert (await scene.plan(on(network), count=10)).max_servers == 4
    assert (await scene.plan(on(network) * 2, count=10)).max_servers == 2
    assert (await scene.plan([NetworkRequest(port_id=own["id"])])).max_servers is None
    for n in range(4):
        await scene.boot(on(network), f"s{n}")
    with pytest.raises(PortLimitExceeded):
        await scene.boot(on(network), "s9")
    assert (await scene.plan(on(network))).max_servers == 0
    await scene.cloud.call("PUT", "/quotas/p1", {"quota": {"port": -1}}, token=ADMIN)
    assert (await scene.plan(on(network), count=1000)).max_servers is None


async def test_floating_ips_are_shown(scene: Scene) -> None:
    await scene.cloud.role.bootstrap()
    networks = {each["name"]: each for each in await scene.cloud.list("network")}
    [vif] = await scene.boot(on(networks["private"]))
    floating = await scene.cloud.make("floatingip", floating_network_id=networks["public"]["id"], port_id=vif.port_id)
    [vif] = await scene.client.network_info("s1")
    assert vif.fixed_ips[0].floating == (floating["floating_ip_address"],)


# --- attempts that are overtaken -----------------------------------------------------------------------------------


class Overtaken:
    """The check of an attempt that stands still right after its first check, while another one does its work."""

    def __init__(self, other: Any) -> None:
        self._other = other
        self.checks = 0

    async def __call__(self) -> None:
        self.checks += 1
        if self.checks > 1:
            raise Stale("Another attempt has taken over.")
        await self._other


async def test_an_overtaken_attempt_does_not_bind_a_port_of_the_newer_one(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    [vif] = await scene.boot(on(network), host="h1")
    for host in ("h2", "h1"):  # also if the newer attempt leaves the port on its host
        check = Overtaken(scene.boot(on(network), host=host))
        with pytest.raises(Stale):
            await scene.boot(on(network), host="old", check=check)
        assert check.checks == 2
        port = await scene.cloud.show("port", vif.port_id, ADMIN)
        assert port["binding:host_id"] == host
    assert len(await scene.cloud.list("port")) == 1


async def test_an_overtaken_attempt_does_not_bind_a_users_port(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    own = await scene.cloud.make("port", network_id=network["id"])
    request = [NetworkRequest(port_id=own["id"])]
    check = Overtaken(scene.boot(request, host="new"))
    with pytest.raises(Stale):
        await scene.boot(request, host="old", check=check)
    assert (await scene.cloud.show("port", own["id"], ADMIN))["binding:host_id"] == "new"


async def test_an_overtaken_removal_leaves_the_port_to_its_next_server(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    own = await scene.cloud.make("port", network_id=network["id"])
    request = [NetworkRequest(port_id=own["id"])]
    await scene.boot(request)

    async def move() -> None:
        await scene.client.deallocate("s1", check=current)
        await scene.boot(request, "s2")

    check = Overtaken(move())
    await scene.client.deallocate("s1", check=check)
    port = await scene.cloud.show("port", own["id"], ADMIN)
    assert check.checks == 1
    assert (port["device_id"], port["binding:host_id"]) == ("s2", "h1")


@pytest.mark.parametrize("call", ["deallocate", "detach"])
async def test_a_removal_whose_operation_has_ended_deletes_nothing(scene: Scene, call: str) -> None:
    network, _ = await scene.cloud.network()
    vif = await scene.client.attach(
        instance_uuid="s1", project_id="p1", host="h1", zone="nova", port=PlannedPort(network_id=network["id"]),
        operation="attach-1", check=current,
    )  # fmt: skip

    async def ended() -> None:
        raise Stale("The operation has ended.")

    with pytest.raises(Stale):
        if call == "deallocate":
            await scene.client.deallocate("s1", check=ended)
        else:
            await scene.client.detach(instance_uuid="s1", operation="attach-1", check=ended)
    assert [port["id"] for port in await scene.cloud.list("port")] == [vif.port_id]


async def test_ports_that_an_overtaken_attempt_created_are_withdrawn(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    [kept] = await scene.boot(on(network), host="new", fresh=True)
    [late] = await scene.boot(on(network), host="old", fresh=True)
    await scene.client.withdraw([late.port_id, "gone"], check=current)
    assert [port["id"] for port in await scene.cloud.list("port")] == [kept.port_id]

    async def in_use() -> None:
        raise Stale("The server has it.")

    await scene.client.withdraw([kept.port_id], check=in_use)
    assert [port["id"] for port in await scene.cloud.list("port")] == [kept.port_id]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_port_that_a_newer_attempt_took_over_is_not_withdrawn(scene: Scene, when: str) -> None:
    network, _ = await scene.cloud.network()
    [vif] = await scene.boot(on(network), host="old", fresh=True)
    if when == "before":
        await scene.boot(on(network), host="new")
        await scene.client.withdraw([vif.port_id], check=current)
    else:
        await scene.client.withdraw([vif.port_id], check=Overtaken(scene.boot(on(network), host="new")))
    assert (await scene.cloud.show("port", vif.port_id, ADMIN))["binding:host_id"] == "new"


async def test_a_port_that_is_being_withdrawn_is_not_taken_over(scene: Scene) -> None:
    network, _ = await scene.cloud.network()
    [late] = await scene.boot(on(network), host="old", fresh=True)
    check = Overtaken(scene.client.withdraw([late.port_id], check=current))

    async def first_only() -> None:
        if check.checks == 0:
            await check()

    [vif] = await scene.boot(on(network), host="new", check=first_only)
    assert [port["id"] for port in await scene.cloud.list("port")] == [vif.port_id] != [late.port_id]

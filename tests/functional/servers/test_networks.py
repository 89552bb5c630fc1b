"""Servers with networks: their ports are created, bound, shown, moved and deleted with them."""

import asyncio
from typing import Any

import pytest

from micronova.clients.network.client import NetworkClient
from micronova.clients.network.plan import MOST_INTERFACES, MOST_SECURITY_GROUPS
from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.objects.errors import Unavailable
from micronova.objects.orders import WorkOrder
from micronova.servers.external_events import ExternalEvents
from micronova.virt.driver import GuestPlan
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.embedded_services import call, image, make, network, ok, ports_left, ports_of
from tests.functional.servers.spawning import spawned  # noqa: F401

Plans = dict[str, list[tuple[str, GuestPlan]]]


crashes = Crashes()
crashing = only_in_one_process("crashes the conductor at a chosen step")
CLOUD = CloudOptions(
    roles=("image", "network"),
    after_commit=crashes,
    settings={
        "default": {"report_interval": 0.2, "vif_plugging_timeout": 10.0, "default_access_ip_network_name": "access"},
        "conductor": {"lease": 2.0, "sweep_interval": 0.1},
    },
)


async def _boot(user: Caller, *networks: Any, **fields: Any) -> dict[str, Any]:
    fields.setdefault("imageRef", await image(user))
    return await user.boot(networks=list(networks), **fields)


async def _delete(user: Caller, id: str) -> None:
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_port_is_made_and_goes_with_its_server(cloud: Cloud, user: Caller) -> None:
    net = await network(user, name="private")
    server = await _boot(user, {"uuid": net["id"]})
    [port] = await ports_of(user, server["id"])
    assert port["network_id"] == net["id"]
    assert port["project_id"] == user.project
    assert port["device_owner"] == "compute:nova"
    assert port["binding:host_id"] == await user.host_of(server["id"])
    assert port["status"] == "ACTIVE"
    [fixed] = port["fixed_ips"]
    [address] = server["addresses"]["private"]
    assert (address["addr"], address["version"]) == (fixed["ip_address"], 4)
    assert address["OS-EXT-IPS-MAC:mac_addr"] == port["mac_address"]
    assert address["OS-EXT-IPS:type"] == "fixed"
    assert await user.get(f"/servers/{server['id']}/ips") == {
        "addresses": {"private": [{"addr": fixed["ip_address"], "version": 4}]}
    }
    one = await user.get(f"/servers/{server['id']}/ips/private")
    assert one == {"private": [{"addr": fixed["ip_address"], "version": 4}]}
    await _delete(user, server["id"])
    assert await ports_left(user) == []
    await cloud.assert_clean()


async def test_the_host_learns_the_port(user: Caller, spawned: Plans) -> None:
    server = await _boot(user, {"uuid": (await network(user))["id"]})
    [port] = await ports_of(user, server["id"])
    [(_, plan)] = spawned[server["id"]]
    [vif] = plan.network_info
    assert (vif.port_id, vif.mac_address) == (port["id"], port["mac_address"])


async def test_policy_decides_about_external_networks(user: Caller) -> None:
    given = {"name": "ext", "project_id": user.project, "router:external": True}
    net = (await ok(user.admin, "POST", "/network/v2.0/networks", {"network": given}))["network"]
    await make(user.admin, "subnet", network_id=net["id"], ip_version=4, cidr="10.98.0.0/24", project_id=user.project)
    body = user.body(networks=[{"uuid": net["id"]}], imageRef=await image(user))
    assert "external network" in await user.refused(403, "POST", "/servers", body)
    server = await _boot(user.admin, {"uuid": net["id"]})
    assert [port["network_id"] for port in await ports_of(user.admin, server["id"])] == [net["id"]]


async def test_filters_by_address(user: Caller) -> None:
    net = await network(user)
    wanted = {"imageRef": await image(user)}
    one = await _boot(user, {"uuid": net["id"], "fixed_ip": "10.7.0.50"}, name="one", **wanted)
    await _boot(user, {"uuid": net["id"], "fixed_ip": "10.7.0.51"}, name="two", **wanted)

    async def names(query: str) -> list[str]:
        return sorted(server["name"] for server in (await user.get(f"/servers?{query}"))["servers"])

    assert await names("ip=10.7.0.50") == ["one"]
    assert await names("ip=10.7.0") == ["one", "two"]
    assert await names("ip=^10.7.0.51$") == ["two"]
    assert await names("ip=10.8") == []
    assert await names("ip6=fd") == []
    assert one["addresses"]


async def test_a_fixed_address(user: Caller) -> None:
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"], "fixed_ip": "10.7.0.77"})
    [[address]] = server["addresses"].values()
    assert address["addr"] == "10.7.0.77"
    again = user.body(imageRef=await image(user), networks=[{"uuid": net["id"], "fixed_ip": "10.7.0.77"}])
    assert "10.7.0.77" in await user.refused(400, "POST", "/servers", again)


async def test_a_request_names_a_limited_number_of_interfaces_and_groups(user: Caller) -> None:
    """The network service is asked three times about each address, before the quota of ports counts."""
    net = await network(user)
    wanted = [{"uuid": net["id"], "fixed_ip": f"10.7.0.{number}"} for number in range(80, 81 + MOST_INTERFACES)]
    body = user.body(imageRef=await image(user), networks=wanted)
    message = await user.refused(400, "POST", "/servers", body)
    assert f"with {MOST_INTERFACES} interfaces, not with {MOST_INTERFACES + 1}" in message
    groups = [{"name": "default"}, *({"name": f"other-{number}"} for number in range(MOST_SECURITY_GROUPS))]
    body = user.body(imageRef=await image(user), networks=wanted[:2], security_groups=groups)
    message = await user.refused(400, "POST", "/servers", body)
    assert f"with {MOST_SECURITY_GROUPS} security groups, not with {MOST_SECURITY_GROUPS + 1}" in message
    await _boot(user, *wanted[:2])


async def test_who_may_choose_an_address(cloud: Cloud, user: Caller) -> None:
    """Compute creates ports as a service, and does for users only what they may do at the network service."""
    listed = (await ok(user, "GET", "/network/v2.0/networks?shared=True&router:external=False"))["networks"]
    shared = listed[0]
    subnet = (await ok(user, "GET", f"/network/v2.0/subnets/{shared['subnets'][0]}"))["subnet"]
    wanted: dict[str, Any] = {"imageRef": await image(user)}
    for address in (subnet["gateway_ip"], subnet["allocation_pools"][0]["end"]):
        chosen = {"uuid": shared["id"], "fixed_ip": address}
        own = {"port": {"network_id": shared["id"], "fixed_ips": [{"ip_address": address}]}}
        assert (await call(user, "POST", "/network/v2.0/ports", own)).status == 403
        message = await user.refused(403, "POST", "/servers", user.body(networks=[chosen], **wanted))
        assert f"does not let you choose a fixed IP on network {shared['id']}" in message
    owner = cloud.caller()
    net = await network(owner)
    server = await _boot(user.admin, {"uuid": net["id"], "fixed_ip": "10.7.0.77"}, **wanted)
    [port] = await ports_of(user, server["id"])
    assert (port["project_id"], port["fixed_ips"][0]["ip_address"]) == (user.project, "10.7.0.77")
    mine = user.body(networks=[{"uuid": net["id"], "fixed_ip": "10.7.0.78"}], **wanted)
    assert net["id"] in await user.refused(400, "POST", "/servers", mine)
    left = (await ok(user.admin, "GET", f"/network/v2.0/ports?project_id={user.project}"))["ports"]
    assert [each["id"] for each in left] == [port["id"]], "the question leaves nothing"


async def test_a_port_of_the_users_own_stays(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    port = await make(user, "port", network_id=net["id"], name="mine")
    server = await _boot(user, {"port": port["id"]})
    [[address]] = server["addresses"].values()
    assert address["addr"] == port["fixed_ips"][0]["ip_address"]
    [bound] = await ports_of(user, server["id"])
    assert bound["id"] == port["id"]
    assert bound["binding:host_id"] == await user.host_of(server["id"])
    refused = user.body(imageRef=await image(user), networks=[{"port": port["id"]}])
    assert port["id"] in await user.refused(409, "POST", "/servers", refused)
    await _delete(user, server["id"])
    freed = (await ok(user.admin, "GET", f"/network/v2.0/ports/{port['id']}"))["port"]
    assert (freed["device_id"], freed["device_owner"], freed["binding:host_id"]) == ("", "", "")
    assert freed["fixed_ips"] == port["fixed_ips"]
    again = await _boot(user, {"port": port["id"]})
    assert again["addresses"]


async def test_several_networks_in_their_order(user: Caller, spawned: Plans) -> None:
    first, second = await network(user, name="first"), await network(user, name="second", cidr="10.8.0.0/24")
    port = await make(user, "port", network_id=first["id"])
    server = await _boot(user, {"uuid": second["id"], "tag": "front"}, {"port": port["id"]}, {"uuid": second["id"]})
    [(_, plan)] = spawned[server["id"]]
    assert [vif.network_id for vif in plan.network_info] == [second["id"], first["id"], second["id"]]
    assert len(server["addresses"]["second"]) == 2
    assert len(await ports_of(user, server["id"])) == 3


async def test_the_only_network_is_taken_when_nothing_is_said(cloud: Cloud, user: Caller) -> None:
    """It is the shared network, unless the project has a network of its own."""
    old = user.at(36)
    listed = (await ok(user, "GET", "/network/v2.0/networks"))["networks"]
    [shared] = [each for each in listed if not each["router:external"]]
    server = await user.wait_for(await old.create(imageRef=await image(user)), "ACTIVE")
    assert list(server["addresses"]) == [shared["name"]]
    automatic = await user.boot(imageRef=await image(user), networks="auto")
    assert list(automatic["addresses"]) == [shared["name"]]
    rich = cloud.caller()
    await network(rich, name="another")
    for caller, networks in ((rich.at(36), None), (rich, "auto")):
        asked = caller.body(imageRef=await image(rich), networks=networks)
        assert "Multiple possible networks found" in await caller.refused(409, "POST", "/servers", asked)


async def test_no_network_at_all(user: Caller) -> None:
    server = await user.boot(imageRef=await image(user), networks="none")
    assert server["addresses"] == {}
    assert await ports_of(user, server["id"]) == []


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("unknown network", 400),
        ("unknown port", 400),
        ("network of others", 400),
        ("port of others", 400),
        ("address outside", 400),
        ("unknown group", 400),
        ("network without subnet", 400),
    ],
)
async def test_what_is_not_the_users_to_use(cloud: Cloud, user: Caller, what: str, status: int) -> None:
    other = cloud.caller()
    fields: dict[str, Any] = {"imageRef": await image(user)}
    unknown = "99999999-9999-4999-8999-999999999999"
    named = unknown
    if what == "unknown network":
        fields["networks"] = [{"uuid": unknown}]
    elif what == "unknown port":
        fields["networks"] = [{"port": unknown}]
    elif what == "network of others":
        named = (await network(other))["id"]
        fields["networks"] = [{"uuid": named}]
    elif what == "port of others":
        named = (await make(other, "port", network_id=(await network(other))["id"]))["id"]
        fields["networks"] = [{"port": named}]
    elif what == "address outside":
        named = "192.0.2.1"
        fields["networks"] = [{"uuid": (await network(user))["id"], "fixed_ip": named}]
    elif what == "network without subnet":
        named = "subnet"
        fields["networks"] = [{"uuid": (await make(user, "network", name="bare"))["id"]}]
    else:
        named = "no-such-group"
        fields["networks"] = [{"uuid": (await network(user))["id"]}]
        fields["security_groups"] = [{"name": named}]
    message = await user.refused(status, "POST", "/servers", user.body(**fields))
    assert named in message
    assert (await user.get("/servers"))["servers"] == []
    assert await ports_left(user) == []


async def test_security_groups(user: Caller) -> None:
    net = await network(user)
    web = await make(user, "security_group", name="web")
    server = await _boot(user, {"uuid": net["id"]}, security_groups=[{"name": "web"}, {"name": "default"}])
    [port] = await ports_of(user, server["id"])
    assert web["id"] in port["security_groups"] and len(port["security_groups"]) == 2
    assert sorted(group["name"] for group in server["security_groups"]) == ["default", "web"]
    plain = await _boot(user, {"uuid": net["id"]})
    [port] = await ports_of(user, plain["id"])
    assert len(port["security_groups"]) == 1 and web["id"] not in port["security_groups"]
    by_id = await _boot(user, {"uuid": net["id"]}, security_groups=[{"name": web["id"]}])
    [port] = await ports_of(user, by_id["id"])
    assert port["security_groups"] == [web["id"]]


async def test_several_servers_have_a_port_each(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    picture = await image(user)
    ids = await user.boot_many(5, imageRef=picture, networks=[{"uuid": net["id"]}])
    addresses = {(await ports_of(user, id))[0]["fixed_ips"][0]["ip_address"] for id in ids}
    assert len(addresses) == 5
    port = await make(user, "port", network_id=net["id"])
    for one in ({"port": port["id"]}, {"uuid": net["id"], "fixed_ip": "10.7.0.99"}):
        await user.refused(400, "POST", "/servers", user.body(imageRef=picture, networks=[one], max_count=2))
    await asyncio.gather(*(_delete(user, id) for id in ids))
    assert await ports_left(user) == []


async def test_the_quota_of_ports_reduces_down_to_the_least(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    picture = await image(user)
    used = len((await ok(user.admin, "GET", f"/network/v2.0/ports?project_id={user.project}"))["ports"])
    await ok(user.admin, "PUT", f"/network/v2.0/quotas/{user.project}", {"quota": {"port": used + 3}})
    body = user.body(imageRef=picture, networks=[{"uuid": net["id"]}], min_count=2, max_count=10)
    await user.post("/servers", body)
    await cloud.settled()
    assert len((await user.get("/servers?status=ACTIVE"))["servers"]) == 3
    assert "ports" in await user.refused(403, "POST", "/servers", body)


async def test_a_build_that_is_rescheduled_takes_its_ports_along(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    bad = cloud.hosts[:2]
    rules = [{"operation": "spawn", "kind": "fail", "name": user.project, "host": f"^{host}$"} for host in bad]
    async with cloud.faults(*rules):
        server = await _boot(user, {"uuid": net["id"]}, name=user.project)
    [port] = await ports_of(user, server["id"])
    assert port["binding:host_id"] == await user.host_of(server["id"])
    assert port["binding:host_id"] not in bad
    assert len(await ports_left(user)) == 1


@pytest.mark.parametrize("crash", [None, pytest.param(("build", "cleanup"), marks=crashing)])
async def test_a_build_that_is_lost_leaves_no_ports(cloud: Cloud, user: Caller, crash: tuple[str, str] | None) -> None:
    net = await network(user)
    own = await make(user, "port", network_id=net["id"])
    crashes.next = crash
    fields: dict[str, Any] = {"imageRef": await image(user), "networks": [{"uuid": net["id"]}, {"port": own["id"]}]}
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": user.project}):
        id = await user.create(name=user.project, **fields)
        server = await user.wait_for(id, "ERROR")
    await cloud.settled()
    assert crashes.next is None
    assert server["addresses"] == {}
    assert await ports_left(user) == []
    assert (await ok(user, "GET", f"/network/v2.0/ports/{own['id']}"))["port"]["device_id"] == ""
    await cloud.assert_clean()


@pytest.mark.parametrize(
    "crash", [None, *(pytest.param(("delete", step), marks=crashing) for step in ("cleanup", "dispatched"))]
)
async def test_a_delete_that_is_cut_short_still_removes_ports(
    cloud: Cloud, user: Caller, crash: tuple[str, str] | None
) -> None:
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"]})
    crashes.next = crash
    await _delete(user, server["id"])
    assert crashes.next is None
    assert await ports_left(user) == []
    await cloud.assert_clean()


async def test_deleted_while_it_is_built(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    fields: dict[str, Any] = {"imageRef": await image(user), "networks": [{"uuid": net["id"]}]}
    for turns in range(6):
        id = await user.create(**fields)
        for _ in range(turns * 10):
            await asyncio.sleep(0)
        await _delete(user, id)
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        id = await user.create(name=user.project, **fields)
        await user.wait_for(id, "BUILD", task="spawning")
        await _delete(user, id)
    assert await ports_left(user) == []
    await cloud.assert_clean()


@only_in_one_process("makes the client of the network service fail")
async def test_a_network_service_that_is_away_delays(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await network(user)
    fields: dict[str, Any] = {"imageRef": await image(user), "networks": [{"uuid": net["id"]}]}
    allocate, deallocate = NetworkClient.allocate, NetworkClient.deallocate
    away = 1

    def absent() -> bool:
        nonlocal away
        away -= 1
        return away >= 0

    async def failing_allocate(*args: Any, **kwargs: Any) -> Any:
        if absent():
            raise Unavailable("The network service does not answer.")
        return await allocate(*args, **kwargs)

    async def failing_deallocate(*args: Any, **kwargs: Any) -> Any:
        if absent():
            raise Unavailable("The network service does not answer.")
        return await deallocate(*args, **kwargs)

    monkeypatch.setattr(NetworkClient, "allocate", failing_allocate)
    monkeypatch.setattr(NetworkClient, "deallocate", failing_deallocate)
    server = await user.wait_for(await user.create(**fields), "ACTIVE")
    assert away < 0 and server["addresses"]
    away = 1
    await _delete(user, server["id"])
    assert away < 0
    assert await ports_left(user) == []
    await cloud.assert_clean()


async def _event(user: Caller, name: str, server: str, port: str) -> int:
    event = {"name": name, "server_uuid": server, "tag": port}
    answer = await user.admin.request("POST", "/os-server-external-events", {"events": [event]})
    return int(answer.json()["events"][0]["code"])


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions that run once, with the server and its ports, when a build has its ports and not yet a host."""
    if ON_CLUSTER:
        pytest.skip("stops the conductor between two of its steps")
    waiting: list[Any] = []
    allocate = NetworkClient.allocate

    async def interrupted(self: NetworkClient, **wanted: Any) -> Any:
        vifs = await allocate(self, **wanted)
        if waiting:
            await waiting.pop()(wanted["instance_uuid"], [vif.port_id for vif in vifs])
        return vifs

    monkeypatch.setattr(NetworkClient, "allocate", interrupted)
    return waiting


async def test_an_address_that_changes_before_the_server_has_a_host(
    cloud: Cloud, user: Caller, spawned: Plans, between: list[Any]
) -> None:
    """The network service sends the event once; the guest gets the address that the port has then."""
    net = await network(user, name="moved")
    codes = []

    async def readdress(server: str, ports: list[str]) -> None:
        changes = {"fixed_ips": [{"ip_address": "10.7.0.77"}]}
        await ok(user.admin, "PUT", f"/network/v2.0/ports/{ports[0]}", {"port": changes})
        codes.append(await _event(user, "network-changed", server, ports[0]))

    between.append(readdress)
    server = await _boot(user, {"uuid": net["id"]})
    assert codes == [200]
    [(_, plan)] = spawned[server["id"]]
    assert [fixed.address for vif in plan.network_info for fixed in vif.fixed_ips] == ["10.7.0.77"]
    assert [each["addr"] for each in server["addresses"]["moved"]] == ["10.7.0.77"]
    await cloud.assert_clean()


async def test_a_port_that_is_deleted_before_the_server_has_a_host(
    cloud: Cloud, user: Caller, spawned: Plans, between: list[Any]
) -> None:
    """A port that Micronova created is created again."""
    net = await network(user)
    deleted = []

    async def delete(server: str, ports: list[str]) -> None:
        await ok(user.admin, "DELETE", f"/network/v2.0/ports/{ports[0]}")
        deleted.append((ports[0], await _event(user, "network-vif-deleted", server, ports[0])))

    between.append(delete)
    server = await _boot(user, {"uuid": net["id"]})
    [(gone, code)] = deleted
    [port] = await ports_of(user, server["id"])
    [(_, plan)] = spawned[server["id"]]
    assert code == 200
    assert [vif.port_id for vif in plan.network_info] == [port["id"]] != [gone]
    await cloud.assert_clean()


async def test_a_port_that_is_plugged_before_the_server_has_a_host(
    cloud: Cloud, user: Caller, between: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is DOWN when it is bound, and ACTIVE before the order is made: the host does not wait for the event."""
    net = await network(user)
    waits: list[tuple[str, ...]] = []
    send_order = ComputeAPI.send_order

    async def noted(self: ComputeAPI, context: Any, order: WorkOrder) -> None:
        if order.kind == "build":
            waits.append(order.wait_for_plugs)
        await send_order(self, context, order)

    monkeypatch.setattr(ComputeAPI, "send_order", noted)
    codes = []

    async def plug(server: str, ports: list[str]) -> None:
        await ok(user.admin, "PUT", f"/network/v2.0/ports/{ports[0]}", {"port": {"admin_state_up": True}})
        codes.append(await _event(user, "network-vif-plugged", server, ports[0]))

    between.append(plug)
    port = await make(user, "port", network_id=net["id"], admin_state_up=False)
    server = await _boot(user, {"port": port["id"]})
    assert server["status"] == "ACTIVE"
    assert (codes, waits) == ([200], [()])
    await cloud.assert_clean()


@only_in_one_process("loses a message of the conductor")
async def test_a_port_whose_event_never_reaches_the_host(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host asks for the port's status; only the server's own host is told."""
    net = await network(user)
    port = await make(user, "port", network_id=net["id"], admin_state_up=False)

    async def lost(*args: Any, **kwargs: Any) -> None:
        pass

    monkeypatch.setattr(ComputeAPI, "external_instance_event", lost)
    id = await user.create(imageRef=await image(user), networks=[{"port": port["id"]}])
    await user.wait_for(id, "BUILD", task="spawning")
    await ok(user.admin, "PUT", f"/network/v2.0/ports/{port['id']}", {"port": {"admin_state_up": True}})
    await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    assert cloud.process.bus is not None
    asked = HostConductorAPI(cloud.process.bus, cloud.process.clock, cloud.process.random)
    assert await asked.plugged_ports(host, id, (port["id"], "other")) == {port["id"]}
    assert await asked.plugged_ports("another", id, (port["id"],)) == frozenset()
    await cloud.assert_clean()


async def test_an_event_about_a_server_that_will_not_have_a_host(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "fail"}):
        id = await user.create(imageRef=await image(user))
        await user.wait_for(id, "ERROR")
    assert await _event(user, "network-vif-plugged", id, "port") == 422


async def test_a_port_that_cannot_be_had_ends_the_build(cloud: Cloud, user: Caller) -> None:
    """Servers compete for the last address of a subnet: the others get an error that says so."""
    net = await make(user, "network", name="tiny")
    await make(user, "subnet", network_id=net["id"], ip_version=4, cidr="10.9.0.0/30", gateway_ip=None)
    fields: dict[str, Any] = {"imageRef": await image(user), "networks": [{"uuid": net["id"]}]}
    ids = await asyncio.gather(*(user.create(**fields) for _ in range(4)))
    ends = await asyncio.gather(*(user.wait_for(id, "ACTIVE", "ERROR") for id in ids))
    lost = [server for server in ends if server["status"] == "ERROR"]
    assert lost and len(ends) - len(lost) == len(await ports_left(user))
    for server in lost:
        assert "Failed to allocate the network(s)" in server["fault"]["message"]
    await cloud.assert_clean()


async def test_access_addresses_come_from_the_operators_network(user: Caller) -> None:
    net = await network(user, name="access")
    server = await _boot(user, {"uuid": net["id"]})
    assert server["accessIPv4"] == server["addresses"]["access"][0]["addr"]
    chosen = await _boot(user, {"uuid": net["id"]}, accessIPv4="192.0.2.9")
    assert chosen["accessIPv4"] == "192.0.2.9"


async def test_power_actions_keep_the_ports(user: Caller) -> None:
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"]})
    before = await ports_of(user, server["id"])
    await user.act(server["id"], "os-stop")
    await user.wait_for(server["id"], "SHUTOFF")
    await user.act(server["id"], "reboot", {"type": "HARD"})
    again = await user.wait_for(server["id"], "ACTIVE")
    assert again["addresses"] == server["addresses"]
    assert [port["id"] for port in await ports_of(user, server["id"])] == [port["id"] for port in before]


@only_in_one_process("looks into the handler of events")
async def test_events_of_several_servers_are_passed_on_side_by_side(
    user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one server are passed on one after another, in their order."""
    first, second = [(await user.boot(imageRef=await image(user), networks="none"))["id"] for _ in range(2)]
    both = asyncio.Barrier(2)
    handled: list[tuple[str, str]] = []

    async def meet(self: ExternalEvents, context: Any, row: Any, event: InstanceEvent) -> bool:
        await both.wait()  # for an event of the other server
        handled.append((event.instance_uuid, event.tag or ""))
        return True

    monkeypatch.setattr(ExternalEvents, "handle", meet)
    events = [
        {"name": "network-vif-plugged", "server_uuid": server, "tag": tag}
        for tag in ("one", "two")
        for server in (first, second)
    ]
    async with asyncio.timeout(30):
        answer = await user.admin.request("POST", "/os-server-external-events", {"events": events})
    assert [(each["server_uuid"], each["tag"]) for each in answer.json()["events"]] == [
        (each["server_uuid"], each["tag"]) for each in events
    ]
    for server in (first, second):
        assert [tag for uuid, tag in handled if uuid == server] == ["one", "two"]

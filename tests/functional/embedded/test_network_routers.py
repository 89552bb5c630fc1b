"""Routers, floating IPs and auto-allocated topologies, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, MANAGER, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


async def outside(cloud: World, cidr: str = "203.0.113.0/24") -> tuple[Any, Any]:
    return await cloud.network(cidr, ADMIN, router__external=True)


async def join(cloud: World, router: str, verb: str = "add", token: str = ALICE, **fields: str) -> Any:
    return await cloud.call("PUT", f"/routers/{router}/{verb}_router_interface", fields, token=token)


async def test_a_router_lives(cloud: World) -> None:
    public, _ = await outside(cloud)
    router = await cloud.make("router", name="r", external_gateway_info={"network_id": public["id"]}, tags=["t"])
    gateway = router["external_gateway_info"]
    assert (gateway["network_id"], gateway["enable_snat"]) == (public["id"], True)
    assert gateway["external_fixed_ips"][0]["ip_address"] == "203.0.113.2"
    assert (router["status"], router["admin_state_up"], router["routes"], router["tags"]) == ("ACTIVE", True, [], ["t"])
    changed = await cloud.change("router", router["id"], name="s", admin_state_up=False)
    assert (changed["name"], changed["admin_state_up"]) == ("s", False)
    assert changed["external_gateway_info"] == gateway
    nothings: tuple[dict[str, Any] | None, ...] = ({}, None)
    for nothing in nothings:
        cleared = await cloud.change("router", router["id"], external_gateway_info=nothing)
        assert cleared["external_gateway_info"] is None
    assert await cloud.list("port", token=ADMIN) == []
    snat = {"network_id": public["id"], "enable_snat": False}
    body = {"router": {"external_gateway_info": snat}}
    assert (await cloud.call("PUT", f"/routers/{router['id']}", body)).status == 403
    set_ = await cloud.change("router", router["id"], ADMIN, external_gateway_info=snat)
    assert set_["external_gateway_info"]["enable_snat"] is False
    await cloud.delete("router", router["id"])
    assert await cloud.list("port", token=ADMIN) == []


async def test_gateways_need_an_external_network_with_room(cloud: World) -> None:
    network, _ = await cloud.network()
    body = {"router": {"external_gateway_info": {"network_id": network["id"]}}}
    answer = await cloud.call("POST", "/routers", body)
    assert (answer.status, error(answer)) == (400, "BadRequest")
    body = {"router": {"external_gateway_info": {"network_id": "nothing"}}}
    answer = await cloud.call("POST", "/routers", body)
    assert (answer.status, error(answer)) == (404, "NetworkNotFound")
    tiny, subnet = await outside(cloud, "203.0.113.0/30")
    address = {"subnet_id": subnet["id"], "ip_address": "203.0.113.2"}
    gateway = {"network_id": tiny["id"], "external_fixed_ips": [address]}
    router = await cloud.make("router", ADMIN, external_gateway_info=gateway)
    assert router["external_gateway_info"]["external_fixed_ips"][0]["ip_address"] == "203.0.113.2"
    answer = await cloud.call("POST", "/routers", {"router": {"external_gateway_info": {"network_id": tiny["id"]}}})
    assert (answer.status, error(answer)) == (400, "ExternalIpAddressExhausted")
    assert len(await cloud.list("router", token=ADMIN)) == 1


async def test_interfaces(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.0.0/24")
    router = await cloud.make("router", name="r")
    joined = (await join(cloud, router["id"], subnet_id=subnet["id"])).json()
    assert (joined["id"], joined["subnet_id"], joined["network_id"]) == (router["id"], subnet["id"], network["id"])
    assert joined["subnet_ids"] == [subnet["id"]]
    port = await cloud.show("port", joined["port_id"])
    assert (port["device_id"], port["device_owner"]) == (router["id"], "network:router_interface")
    assert (port["fixed_ips"][0]["ip_address"], port["status"]) == ("10.1.0.1", "ACTIVE")
    for method, path, type_ in (
        ("DELETE", f"/ports/{port['id']}", "ServicePortInUse"),
        ("DELETE", f"/routers/{router['id']}", "RouterInUse"),
        ("DELETE", f"/subnets/{subnet['id']}", "SubnetInUse"),
        ("DELETE", f"/networks/{network['id']}", "NetworkInUse"),
    ):
        answer = await cloud.call(method, path)
        assert (answer.status, error(answer)) == (409, type_)
    stolen = await cloud.call("PUT", f"/ports/{port['id']}", {"port": {"device_owner": "", "device_id": ""}})
    assert (stolen.status, error(stolen)) == (409, "UnsupportedPortDeviceOwner")
    moved = await cloud.call("PUT", f"/subnets/{subnet['id']}", {"subnet": {"gateway_ip": "10.1.0.254"}})
    assert moved.status == 409
    for fields, status, type_ in (
        ({"subnet_id": subnet["id"]}, 400, "BadRequest"),
        ({}, 400, "BadRequest"),
        ({"subnet_id": subnet["id"], "port_id": port["id"]}, 400, "BadRequest"),
        ({"subnet_id": "nothing"}, 404, "SubnetNotFound"),
        ({"port_id": "nothing"}, 404, "PortNotFound"),
    ):
        answer = await join(cloud, router["id"], **fields)
        assert (answer.status, error(answer)) == (status, type_)
    _, overlapping = await cloud.network("10.1.0.0/25")
    assert (await join(cloud, router["id"], subnet_id=overlapping["id"])).status == 400
    other = await cloud.make("port", network_id=network["id"])
    second = await cloud.make("router", name="r2")
    by_port = await join(cloud, second["id"], port_id=other["id"])
    assert by_port.json()["port_id"] == other["id"]
    again = await join(cloud, second["id"], port_id=other["id"])
    assert again.status in (400, 409)
    third = await cloud.make("router", name="r3")
    busy = await join(cloud, third["id"], port_id=other["id"])
    assert (busy.status, error(busy)) == (409, "PortInUse")
    assert (await join(cloud, router["id"], "remove", subnet_id=subnet["id"])).status == 200
    assert (await join(cloud, second["id"], "remove", port_id=other["id"])).status == 200
    gone = await join(cloud, router["id"], "remove", subnet_id=subnet["id"])
    assert (gone.status, error(gone)) == (404, "RouterInterfaceNotFoundForSubnet")
    gone = await join(cloud, router["id"], "remove", port_id=other["id"])
    assert (gone.status, error(gone)) == (404, "RouterInterfaceNotFound")
    assert await cloud.list("port") == []
    for each in (router, second, third):
        await cloud.delete("router", each["id"])


async def test_foreign_subnets_cannot_be_joined(cloud: World) -> None:
    _, subnet = await cloud.network(token=BOB)
    router = await cloud.make("router")
    answer = await join(cloud, router["id"], subnet_id=subnet["id"])
    assert (answer.status, error(answer)) == (404, "SubnetNotFound")
    answer = await join(cloud, router["id"], token=BOB, subnet_id=subnet["id"])
    assert (answer.status, error(answer)) == (404, "RouterNotFound")
    network, _ = await cloud.network()
    guest = await cloud.make("port", ADMIN, network_id=network["id"], project_id="p2")
    answer = await join(cloud, router["id"], port_id=guest["id"])
    assert (answer.status, error(answer)) == (404, "PortNotFound")


async def test_extra_routes(cloud: World) -> None:
    _, subnet = await cloud.network("10.1.0.0/24")
    router = await cloud.make("router")
    await join(cloud, router["id"], subnet_id=subnet["id"])
    routes = [{"destination": "10.9.0.0/16", "nexthop": "10.1.0.9"}]
    assert (await cloud.change("router", router["id"], routes=routes))["routes"] == routes
    body = {"router": {"routes": [{"destination": "10.8.0.0/16", "nexthop": "10.1.0.8"}]}}
    added = await cloud.call("PUT", f"/routers/{router['id']}/add_extraroutes", body)
    assert len(added.json()["router"]["routes"]) == 2
    left = await cloud.call("PUT", f"/routers/{router['id']}/remove_extraroutes", {"router": {"routes": routes}})
    assert left.json()["router"]["routes"] == body["router"]["routes"]
    lost = {"router": {"routes": [{"destination": "10.8.0.0/16", "nexthop": "192.168.0.1"}]}}
    answer = await cloud.call("PUT", f"/routers/{router['id']}", lost)
    assert (answer.status, error(answer)) == (400, "InvalidRoutes")
    await join(cloud, router["id"], "remove", subnet_id=subnet["id"])
    assert (await cloud.show("router", router["id"]))["routes"] == []


async def gateways(cloud: World, router: str, verb: str, *wanted: Any, token: str = ALICE) -> Any:
    body = {"router": {"external_gateways": list(wanted)}}
    return await cloud.call("PUT", f"/routers/{router}/{verb}_external_gateways", body, token=token)


async def test_the_gateway_is_added_and_removed(cloud: World) -> None:
    (public, _), (other, _) = await outside(cloud), await outside(cloud, "198.51.100.0/24")
    router = (await cloud.make("router"))["id"]
    on_public, on_other = {"network_id": public["id"]}, {"network_id": other["id"]}
    nothing = await gateways(cloud, router, "remove", on_public)
    assert (nothing.status, error(nothing)) == (409, "UnableToRemoveGateways")
    added = (await gateways(cloud, router, "add", on_public)).json()["router"]
    assert added["external_gateways"] == [added["external_gateway_info"]]
    address = added["external_gateway_info"]["external_fixed_ips"][0]
    assert added["external_gateway_info"]["network_id"] == public["id"]
    assert (await gateways(cloud, router, "add")).json()["router"]["external_gateways"] == added["external_gateways"]
    # A router has one gateway at most.
    second = await gateways(cloud, router, "add", on_other)
    assert (second.status, error(second)) == (409, "UnableToAddExtraGateways")
    two = await gateways(cloud, router, "update", on_public, on_other)
    assert (two.status, error(two)) == (400, "UnableToAddExtraGateways")
    # The gateway stays as it is if it is set again, and what is removed must be there.
    again = (await gateways(cloud, router, "update", on_public)).json()["router"]
    assert again["external_gateways"] == added["external_gateways"]
    for wrong in (on_other, {**on_public, "external_fixed_ips": [{"ip_address": "192.0.2.99"}]}):
        answer = await gateways(cloud, router, "remove", wrong, token=ALICE)
        assert (answer.status, error(answer)) == (409, "UnableToMatchGateways")
    assert (await gateways(cloud, router, "remove", {**on_public, "external_fixed_ips": [address]})).status == 200
    assert (await cloud.show("router", router))["external_gateways"] == []
    # Users choose neither addresses nor source NAT; admins do.
    chosen = {**on_other, "enable_snat": "false", "external_fixed_ips": [{"ip_address": "198.51.100.77"}]}
    for verb in ("add", "update"):
        assert (await gateways(cloud, router, verb, chosen)).status == 403
    made = (await gateways(cloud, router, "add", chosen, token=ADMIN)).json()["router"]["external_gateway_info"]
    assert (made["enable_snat"], made["external_fixed_ips"][0]["ip_address"]) == (False, "198.51.100.77")
    moved = (await gateways(cloud, router, "update", on_public)).json()["router"]
    assert [each["network_id"] for each in moved["external_gateways"]] == [public["id"]]
    # Clients send an empty object for no gateways; only the update takes it as a removal.
    path = f"/routers/{router}"
    empty: dict[str, Any] = {"router": {"external_gateways": {}}}
    assert (await cloud.call("PUT", f"{path}/remove_external_gateways", empty)).json()["router"]["external_gateways"]
    assert (await cloud.call("PUT", f"{path}/update_external_gateways", {"router": {}})).status == 200
    assert (await cloud.show("router", router))["external_gateway_info"]
    cleared = await cloud.call("PUT", f"{path}/update_external_gateways", empty)
    assert cleared.json()["router"]["external_gateways"] == []


async def test_gateways_that_make_no_sense(cloud: World) -> None:
    private, _ = await cloud.network()
    router = (await cloud.make("router"))["id"]
    for bad in ({}, {"network_id": None}, {"network_id": private["id"]}, {"network_id": "x", "extra": 1}, "x"):
        assert (await gateways(cloud, router, "add", bad)).status == 400, bad
    assert (await gateways(cloud, router, "add", {"network_id": "nothing"})).status == 404
    assert (await gateways(cloud, router, "add", token=BOB)).status == 404
    # A floating IP holds the gateway.
    public, network, _, router = await connected(cloud)
    port = await cloud.make("port", network_id=network["id"])
    await cloud.make("floatingip", floating_network_id=public["id"], port_id=port["id"])
    for verb, wanted in (("remove", [{"network_id": public["id"]}]), ("update", [])):
        answer = await gateways(cloud, router["id"], verb, *wanted)
        assert (answer.status, error(answer)) == (409, "RouterExternalGatewayInUseByFloatingIp")


async def connected(cloud: World) -> tuple[Any, Any, Any, Any]:
    """A network behind a router with a gateway."""
    public, _ = await outside(cloud)
    network, subnet = await cloud.network("10.1.0.0/24")
    router = await cloud.make("router", external_gateway_info={"network_id": public["id"]})
    assert (await join(cloud, router["id"], subnet_id=subnet["id"])).status == 200
    return public, network, subnet, router


async def test_a_floating_ip_lives(cloud: World) -> None:
    public, network, subnet, router = await connected(cloud)
    floating = await cloud.make("floatingip", floating_network_id=public["id"], description="d", tags=["t"])
    assert (floating["status"], floating["port_id"], floating["router_id"]) == ("DOWN", None, None)
    assert (floating["fixed_ip_address"], floating["port_details"], floating["tags"]) == (None, None, ["t"])
    port = await cloud.make("port", network_id=network["id"], name="p", device_id="s", device_owner="compute:nova")
    led = await cloud.change("floatingip", floating["id"], port_id=port["id"])
    assert (led["status"], led["router_id"], led["fixed_ip_address"]) == ("ACTIVE", router["id"], "10.1.0.2")
    assert led["port_details"]["device_id"] == "s"
    [listed] = await cloud.list("floatingip", f"port_id={port['id']}")
    assert listed["id"] == floating["id"]
    second = await cloud.make("floatingip", floating_network_id=public["id"])
    twice = await cloud.call("PUT", f"/floatingips/{second['id']}", {"floatingip": {"port_id": port["id"]}})
    assert (twice.status, error(twice)) == (409, "FloatingIPPortAlreadyAssociated")
    used = await join(cloud, router["id"], "remove", subnet_id=subnet["id"])
    assert (used.status, error(used)) == (409, "RouterInterfaceInUseByFloatingIP")
    used = await cloud.call("PUT", f"/routers/{router['id']}", {"router": {"external_gateway_info": {}}})
    assert (used.status, error(used)) == (409, "RouterExternalGatewayInUseByFloatingIp")
    free = await cloud.change("floatingip", floating["id"], port_id=None)
    assert (free["status"], free["port_id"], free["fixed_ip_address"]) == ("DOWN", None, None)
    await cloud.change("floatingip", second["id"], port_id=port["id"])
    await cloud.delete("port", port["id"], ADMIN)
    assert (await cloud.show("floatingip", second["id"]))["port_id"] is None
    for each in (floating, second):
        await cloud.delete("floatingip", each["id"])
    assert await cloud.list("port", "device_owner=network:floatingip", ADMIN) == []


async def test_what_a_floating_ip_cannot_do(cloud: World) -> None:
    public, network, subnet, _ = await connected(cloud)
    lonely, _ = await cloud.network("10.2.0.0/24")
    there = await cloud.make("port", network_id=lonely["id"])
    foreign = await cloud.make("port", BOB, network_id=(await cloud.network(token=BOB))[0]["id"])
    bare = await cloud.make("port", network_id=network["id"], fixed_ips=[])
    both = await cloud.make("port", network_id=network["id"], fixed_ips=[{"subnet_id": subnet["id"]}] * 2)
    for fields, status, type_ in (
        ({"floating_network_id": network["id"]}, 400, "BadRequest"),
        ({"floating_network_id": "nothing"}, 404, "NetworkNotFound"),
        ({"port_id": there["id"]}, 404, "ExternalGatewayForFloatingIPNotFound"),
        ({"port_id": foreign["id"]}, 404, "PortNotFound"),
        ({"port_id": "nothing"}, 404, "PortNotFound"),
        ({"port_id": bare["id"]}, 400, "BadRequest"),
        ({"port_id": both["id"]}, 400, "BadRequest"),
        ({"port_id": both["id"], "fixed_ip_address": "10.1.0.99"}, 400, "BadRequest"),
        ({"fixed_ip_address": "10.1.0.99"}, 400, "BadRequest"),
        ({"floating_ip_address": "203.0.113.9"}, 403, "PolicyNotAuthorized"),
        ({"subnet_id": subnet["id"]}, 400, "InvalidInput"),
    ):
        answer = await cloud.call(
            "POST", "/floatingips", {"floatingip": {"floating_network_id": public["id"], **fields}}
        )
        assert (answer.status, error(answer)) == (status, type_), fields
    assert await cloud.list("floatingip") == []
    assert await cloud.list("port", "device_owner=network:floatingip", ADMIN) == []
    asked = {"floating_network_id": public["id"], "floating_ip_address": "203.0.113.9"}
    chosen = await cloud.make("floatingip", MANAGER, **asked)
    assert chosen["floating_ip_address"] == "203.0.113.9"
    body = {"floatingip": {"floating_network_id": public["id"], "floating_ip_address": "203.0.113.9"}}
    taken = await cloud.call("POST", "/floatingips", body, token=ADMIN)
    assert (taken.status, error(taken)) == (409, "IpAddressInUse")
    address = [each["ip_address"] for each in both["fixed_ips"]][1]
    led = await cloud.change("floatingip", chosen["id"], port_id=both["id"], fixed_ip_address=address)
    assert led["fixed_ip_address"] == address


async def test_a_port_keeps_the_address_of_a_floating_ip(cloud: World) -> None:
    """Another project's server could get it, and the floating IP would lead there."""
    public, network, subnet, router = await connected(cloud)
    port = await cloud.make("port", network_id=network["id"], fixed_ips=[{"subnet_id": subnet["id"]}] * 2)
    first, second = (each["ip_address"] for each in port["fixed_ips"])
    floating = await cloud.make(
        "floatingip", floating_network_id=public["id"], port_id=port["id"], fixed_ip_address=first
    )
    other = {"subnet_id": subnet["id"], "ip_address": "10.1.0.77"}
    for wanted in ([], None, [{"ip_address": second}], [other], [other, {"ip_address": second}]):
        for token in (ALICE, ADMIN):
            body = {"port": {"fixed_ips": wanted}}
            answer = await cloud.call("PUT", f"/ports/{port['id']}", body, token=token)
            assert (answer.status, error(answer)) == (400, "BadRequest"), wanted
            assert floating["floating_ip_address"] in str(answer.json())
    assert (await cloud.show("port", port["id"]))["fixed_ips"] == port["fixed_ips"]
    # What keeps the address is allowed, named or not.
    for kept in ([{"ip_address": first}], [{"ip_address": first}, other], [{"subnet_id": subnet["id"]}]):
        changed = await cloud.change("port", port["id"], fixed_ips=kept)
        assert first in {each["ip_address"] for each in changed["fixed_ips"]}
    gone = await cloud.call("DELETE", f"/subnets/{subnet['id']}")
    assert (gone.status, error(gone)) == (409, "SubnetInUse")
    own = await cloud.list("port", "device_owner=network:floatingip", ADMIN)
    taken = await cloud.call("PUT", f"/ports/{own[0]['id']}", {"port": {"fixed_ips": []}}, token=ADMIN)
    assert (taken.status, error(taken)) == (400, "BadRequest")
    # A port of the automatic kind is no way around: its subnet stays while the router does, which stays, too.
    await cloud.change("port", port["id"], ADMIN, device_owner="network:dhcp")
    assert (await cloud.call("DELETE", f"/subnets/{subnet['id']}")).status == 409
    assert (await join(cloud, router["id"], "remove", subnet_id=subnet["id"])).status == 409
    await cloud.change("floatingip", floating["id"], port_id=None)
    await cloud.change("port", port["id"], fixed_ips=[])


async def test_floating_ips_that_lead_nowhere_go_with_their_network(cloud: World) -> None:
    public, network, _, _ = await connected(cloud)
    other, _ = await outside(cloud, "198.51.100.0/24")
    idle = await cloud.make("floatingip", floating_network_id=other["id"], tags=["t"])
    port = await cloud.make("port", network_id=network["id"])
    led = await cloud.make("floatingip", floating_network_id=public["id"], port_id=port["id"])
    await cloud.delete("network", other["id"], ADMIN)
    assert [each["id"] for each in await cloud.list("floatingip")] == [led["id"]]
    assert (await cloud.call("GET", f"/floatingips/{idle['id']}")).status == 404
    answer = await cloud.call("DELETE", f"/networks/{public['id']}", token=ADMIN)
    assert (answer.status, error(answer)) == (409, "NetworkInUse")
    assert len(await cloud.list("floatingip")) == 1


async def test_an_automatic_topology(cloud: World) -> None:
    for query in ("", "?fields=dry-run"):
        answer = await cloud.call("GET", f"/auto-allocated-topology/p1{query}")
        assert (answer.status, error(answer)) == (409, "AutoAllocationFailure")
    await cloud.role.bootstrap()
    dry = (await cloud.call("GET", "/auto-allocated-topology/null?fields=dry-run")).json()
    assert dry["auto_allocated_topology"]["id"] == "dry-run=pass"
    assert await cloud.list("network", "name=auto_allocated_network") == []
    made = (await cloud.call("GET", "/auto-allocated-topology/None")).json()["auto_allocated_topology"]
    assert made["project_id"] == "p1"
    again = (await cloud.call("GET", "/auto-allocated-topology/p1")).json()["auto_allocated_topology"]
    assert again["id"] == made["id"]
    [network] = await cloud.list("network", "name=auto_allocated_network")
    assert network["id"] == made["id"]
    port = await cloud.make("port", network_id=network["id"])
    public = next(each for each in await cloud.list("network") if each["router:external"])
    floating = await cloud.make("floatingip", floating_network_id=public["id"], port_id=port["id"])
    busy = await cloud.call("DELETE", "/auto-allocated-topology/p1")
    assert (busy.status, error(busy)) == (409, "NetworkInUse")
    await cloud.delete("floatingip", floating["id"])
    await cloud.delete("port", port["id"])
    assert (await cloud.call("GET", "/auto-allocated-topology/p1", token=BOB)).status == 403
    assert (await cloud.call("DELETE", "/auto-allocated-topology/p1")).status == 204
    assert await cloud.list("network", "name=auto_allocated_network") == []
    assert await cloud.list("router") == []

"""Servers with networks: their ports are made, bound, shown, moved and removed with them."""

import asyncio
from typing import Any

import pytest

from micronova.network.client import NetworkClient
from micronova.objects.errors import Unavailable
from micronova.virt.driver import GuestPlan
from tests.functional.cloud import Caller, Cloud, OneProcess, Wanted
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.neighbours import image, make, network, ok, ports_left, ports_of
from tests.functional.servers.spawning import spawned  # noqa: F401

Plans = dict[str, list[tuple[str, GuestPlan]]]


crashes = Crashes()
CLOUD = Wanted(
    roles=("image", "network"),
    after_step=crashes,
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


async def test_a_port_is_made_and_goes_with_its_server(cloud: Cloud, user: Caller, spawned: Plans):
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
    [(_, plan)] = spawned[server["id"]]
    [vif] = plan.network_info
    assert (vif.port_id, vif.mac_address) == (port["id"], port["mac_address"])
    await _delete(user, server["id"])
    assert await ports_left(user) == []
    await cloud.assert_clean()


async def test_filters_by_address(user: Caller):
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


async def test_a_fixed_address(user: Caller):
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"], "fixed_ip": "10.7.0.77"})
    [[address]] = server["addresses"].values()
    assert address["addr"] == "10.7.0.77"
    again = user.body(imageRef=await image(user), networks=[{"uuid": net["id"], "fixed_ip": "10.7.0.77"}])
    assert "10.7.0.77" in await user.refused(400, "POST", "/servers", again)


async def test_a_port_of_the_users_own_stays(cloud: Cloud, user: Caller):
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


async def test_several_networks_in_their_order(user: Caller, spawned: Plans):
    first, second = await network(user, name="first"), await network(user, name="second", cidr="10.8.0.0/24")
    port = await make(user, "port", network_id=first["id"])
    server = await _boot(user, {"uuid": second["id"], "tag": "front"}, {"port": port["id"]}, {"uuid": second["id"]})
    [(_, plan)] = spawned[server["id"]]
    assert [vif.network_id for vif in plan.network_info] == [second["id"], first["id"], second["id"]]
    assert len(server["addresses"]["second"]) == 2
    assert len(await ports_of(user, server["id"])) == 3


async def test_the_only_network_is_taken_when_nothing_is_said(cloud: Cloud, user: Caller):
    """It is the one that every project may use, until the project has one of its own."""
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


async def test_no_network_at_all(user: Caller):
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
async def test_what_is_not_the_users_to_use(cloud: Cloud, user: Caller, what: str, status: int):
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


async def test_security_groups(user: Caller):
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


async def test_several_servers_have_a_port_each(cloud: Cloud, user: Caller):
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


async def test_the_quota_of_ports_reduces_down_to_the_least(cloud: Cloud, user: Caller):
    net = await network(user)
    picture = await image(user)
    used = len((await ok(user.admin, "GET", f"/network/v2.0/ports?project_id={user.project}"))["ports"])
    await ok(user.admin, "PUT", f"/network/v2.0/quotas/{user.project}", {"quota": {"port": used + 3}})
    body = user.body(imageRef=picture, networks=[{"uuid": net["id"]}], min_count=2, max_count=10)
    await user.post("/servers", body)
    await cloud.settled()
    assert len((await user.get("/servers?status=ACTIVE"))["servers"]) == 3
    assert "ports" in await user.refused(403, "POST", "/servers", body)


async def test_a_build_that_is_rescheduled_takes_its_ports_along(cloud: Cloud, user: Caller):
    net = await network(user)
    bad = cloud.hosts[:2]
    rules = [{"operation": "spawn", "kind": "fail", "name": user.project, "host": f"^{host}$"} for host in bad]
    async with cloud.faults(*rules):
        server = await _boot(user, {"uuid": net["id"]}, name=user.project)
    [port] = await ports_of(user, server["id"])
    assert port["binding:host_id"] == await user.host_of(server["id"])
    assert port["binding:host_id"] not in bad
    assert len(await ports_left(user)) == 1


@pytest.mark.parametrize("crash", [None, ("build", "cleanup")])
async def test_a_build_that_is_lost_leaves_no_ports(cloud: Cloud, user: Caller, crash: tuple[str, str] | None):
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


@pytest.mark.parametrize("crash", [None, ("delete", "cleanup"), ("delete", "dispatched")])
async def test_a_delete_that_is_cut_short_still_removes_ports(
    cloud: Cloud, user: Caller, crash: tuple[str, str] | None
):
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"]})
    crashes.next = crash
    await _delete(user, server["id"])
    assert crashes.next is None
    assert await ports_left(user) == []
    await cloud.assert_clean()


async def test_deleted_while_it_is_built(cloud: Cloud, user: Caller):
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


async def test_a_network_service_that_is_away_delays(cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch):
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


async def test_a_port_that_cannot_be_had_ends_the_build(cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch):
    """The last address of the subnet: who comes too late gets an error that says so."""
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


async def test_access_addresses_come_from_the_operators_network(user: Caller):
    net = await network(user, name="access")
    server = await _boot(user, {"uuid": net["id"]})
    assert server["accessIPv4"] == server["addresses"]["access"][0]["addr"]
    chosen = await _boot(user, {"uuid": net["id"]}, accessIPv4="192.0.2.9")
    assert chosen["accessIPv4"] == "192.0.2.9"


async def test_power_actions_keep_the_ports(user: Caller):
    net = await network(user)
    server = await _boot(user, {"uuid": net["id"]})
    before = await ports_of(user, server["id"])
    await user.act(server["id"], "os-stop")
    await user.wait_for(server["id"], "SHUTOFF")
    await user.act(server["id"], "reboot", {"type": "HARD"})
    again = await user.wait_for(server["id"], "ACTIVE")
    assert again["addresses"] == server["addresses"]
    assert [port["id"] for port in await ports_of(user, server["id"])] == [port["id"] for port in before]

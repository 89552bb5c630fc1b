"""Attaching, showing and detaching interfaces of existing servers, and their ports."""

import asyncio
import uuid
from typing import Any

import pytest

from micronova.clients.network.client import NetworkClient
from micronova.http.client import Answer
from micronova.objects.errors import Unavailable
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import call, make, network, ok, ports_left, ports_of
from tests.functional.servers.killable_host import KillableHost
from tests.schemas.tempest import check

CLOUD = CloudOptions(
    roles=("network",),
    settings={
        "default": {"report_interval": 0.2, "vif_plugging_timeout": 10.0},
        "conductor": {"lease": 2.0, "sweep_interval": 0.1},
    },
)

killable_host = only_in_one_process("kills a host within the process")


async def _attach(user: Caller, id: str, **wanted: Any) -> dict[str, Any]:
    body = {"interfaceAttachment": wanted}
    return dict((await user.post(f"/servers/{id}/os-interface", body, 200))["interfaceAttachment"])


async def _refused(user: Caller, status: int, id: str, **wanted: Any) -> str:
    return await user.refused(status, "POST", f"/servers/{id}/os-interface", {"interfaceAttachment": wanted})


async def _listed(user: Caller, id: str) -> list[dict[str, Any]]:
    return list((await user.get(f"/servers/{id}/os-interface"))["interfaceAttachments"])


async def _detach(user: Caller, id: str, port: str) -> dict[str, Any]:
    """Detach an interface and wait for the end of the action, as Tempest does."""
    answer = await user.request("DELETE", f"/servers/{id}/os-interface/{port}")
    assert answer.status == 202, answer.body
    path = f"/servers/{id}/os-instance-actions/{answer.headers['x-openstack-request-id']}"

    async def ended() -> dict[str, Any] | None:
        events = (await user.admin.get(path))["instanceAction"]["events"]
        return dict(events[0]) if events and events[0]["finish_time"] else None

    event = await user.cloud.until(ended, "the end of the detachment")
    assert event["event"] == "compute_detach_interface"
    return event


async def _plugged(cloud: Cloud, user: Caller, id: str) -> str:
    """Return what the guest prints about its interfaces when it boots."""
    await user.act(id, "reboot", {"type": "HARD"})
    await user.wait_for(id, "ACTIVE")
    log = (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    return str(log.rpartition("Linux version")[2])


async def test_attach_by_network_and_detach(cloud: Cloud, user: Caller) -> None:
    net = await network(user, name="first")
    id = (await user.boot())["id"]
    made = await _attach(user, id, net_id=net["id"])
    [port] = await ports_of(user, id)
    assert made == {
        "net_id": net["id"],
        "port_id": port["id"],
        "mac_addr": port["mac_address"],
        "port_state": "ACTIVE",
        "fixed_ips": [{key: port["fixed_ips"][0][key] for key in ("subnet_id", "ip_address")}],
        "tag": None,
    }
    assert (port["device_owner"], port["project_id"]) == ("compute:nova", user.project)
    assert port["binding:host_id"] == await user.host_of(id)
    assert await _listed(user, id) == [made]
    assert (await user.get(f"/servers/{id}/os-interface/{port['id']}"))["interfaceAttachment"] == made
    address = port["fixed_ips"][0]["ip_address"]
    server = await user.show(id)
    assert [each["addr"] for each in server["addresses"]["first"]] == [address]
    assert (server["status"], server["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
    assert address in await _plugged(cloud, user, id)
    assert (await _detach(user, id, port["id"]))["result"] == "Success"
    assert await _listed(user, id) == []
    assert (await user.show(id))["addresses"] == {}
    assert await ports_left(user) == []
    assert address not in await _plugged(cloud, user, id)
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert [action["action"] for action in actions] == [
        "reboot", "detach_interface", "reboot", "attach_interface", "create",
    ]  # fmt: skip
    await cloud.assert_clean()


async def test_the_users_own_port_is_unbound_and_kept(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    own = await make(user, "port", network_id=net["id"], name="mine")
    one, two = await user.boot_many(2)
    for id in (one, two, one):
        made = await _attach(user, id, port_id=own["id"], tag="nic")
        assert (made["port_id"], made["tag"]) == (own["id"], "nic")
        assert own["id"] in await _refused(user, 409, two, port_id=own["id"])
        await _detach(user, id, own["id"])
        port = (await ok(user, "GET", f"/network/v2.0/ports/{own['id']}"))["port"]
        assert (port["device_id"], port["device_owner"], port["name"]) == ("", "", "mine")
    await _attach(user, one, port_id=own["id"])
    await user.delete(f"/servers/{one}")
    await user.gone(one)
    assert (await ok(user, "GET", f"/network/v2.0/ports/{own['id']}"))["port"]["device_id"] == ""
    await cloud.assert_clean()


async def test_ports_of_a_trunk(cloud: Cloud, user: Caller) -> None:
    """Subports have the host of the server, and a port that a trunk has outlives the server that it was made for."""
    net, other = await network(user), await network(user, cidr="10.9.0.0/24")
    server = await user.boot(networks=[{"uuid": net["id"]}])
    [port] = await ports_of(user, server["id"])
    below = await make(user, "port", network_id=other["id"])
    vlan = {"port_id": below["id"], "segmentation_type": "vlan", "segmentation_id": 7}
    trunk = await make(user, "trunk", port_id=port["id"], sub_ports=[vlan])
    assert trunk["status"] == "ACTIVE"
    shown = (await ok(user.admin, "GET", f"/network/v2.0/ports/{below['id']}"))["port"]
    assert (shown["binding:host_id"], shown["status"]) == (port["binding:host_id"], "ACTIVE")
    await user.delete(f"/servers/{server['id']}")
    await user.gone(server["id"])
    for id in (port["id"], below["id"]):
        shown = (await ok(user.admin, "GET", f"/network/v2.0/ports/{id}"))["port"]
        assert (shown["device_id"], shown["device_owner"], shown["binding:host_id"]) == ("", "", "")
    assert (await ok(user, "GET", f"/network/v2.0/trunks/{trunk['id']}"))["trunk"]["status"] == "DOWN"
    await cloud.assert_clean()


async def test_with_an_address(user: Caller) -> None:
    net = await network(user)
    id = (await user.boot())["id"]
    made = await _attach(user, id, net_id=net["id"], fixed_ips=[{"ip_address": "10.7.0.77"}])
    assert [fixed["ip_address"] for fixed in made["fixed_ips"]] == ["10.7.0.77"]
    assert "10.7.0.77" in await _refused(user, 409, id, net_id=net["id"], fixed_ips=[{"ip_address": "10.7.0.77"}])
    assert "192.0.2.1" in await _refused(user, 400, id, net_id=net["id"], fixed_ips=[{"ip_address": "192.0.2.1"}])
    await _refused(user, 400, id, net_id=net["id"], fixed_ips=[{"ip_address": "nonsense"}])
    assert len(await ports_left(user)) == 1


async def test_not_with_an_address_that_the_user_may_not_choose(user: Caller) -> None:
    [shared] = (await ok(user, "GET", "/network/v2.0/networks?router:external=False"))["networks"]
    subnet = (await ok(user, "GET", f"/network/v2.0/subnets/{shared['subnets'][0]}"))["subnet"]
    id = (await user.boot())["id"]
    for address in (subnet["gateway_ip"], subnet["allocation_pools"][0]["end"]):
        message = await _refused(user, 403, id, net_id=shared["id"], fixed_ips=[{"ip_address": address}])
        assert f"does not let you choose a fixed IP on network {shared['id']}" in message
    assert await _listed(user, id) == []
    made = await _attach(
        user.admin, id, net_id=shared["id"], fixed_ips=[{"ip_address": subnet["allocation_pools"][0]["end"]}]
    )
    assert made["fixed_ips"][0]["ip_address"] == subnet["allocation_pools"][0]["end"]
    await _detach(user, id, made["port_id"])


async def test_a_port_of_others_with_the_servers_id_is_not_an_interface(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    id = (await user.boot(networks=[{"uuid": net["id"]}]))["id"]
    [own] = await _listed(user, id)
    stranger = cloud.caller()
    theirs = await network(stranger)
    forged = {"device_id": id, "device_owner": "compute:nova"}
    port = await make(stranger, "port", network_id=theirs["id"], **forged)
    unused = await make(user, "port", network_id=net["id"], **forged)
    for caller in (user, user.admin):
        assert await _listed(caller, id) == [own]
        for each in (port, unused):
            assert (await caller.request("GET", f"/servers/{id}/os-interface/{each['id']}")).status == 404
    await user.act(id, "reboot", {"type": "SOFT"})
    await user.wait_for(id, "ACTIVE")
    assert len((await user.show(id))["addresses"]) == 1
    await user.request("DELETE", f"/servers/{id}")
    await cloud.settled()
    for caller, each in ((stranger, port), (user, unused)):
        kept = (await ok(caller, "GET", f"/network/v2.0/ports/{each['id']}"))["port"]
        assert kept["device_id"] == id, "it was not the server's, so it does not go with the server"


async def test_nothing_said_means_the_only_network(user: Caller) -> None:
    id = (await user.boot())["id"]
    made = await _attach(user, id)
    [shared] = (await ok(user, "GET", "/network/v2.0/networks?router:external=False"))["networks"]
    assert made["net_id"] == shared["id"]
    await network(user)

    async def ambiguous() -> str | None:  # the list of networks is cached for a moment
        answer = await _post(user, id)
        return answer.body.decode() if answer.status == 400 else None

    assert "Multiple possible networks" in await user.cloud.until(ambiguous, "both networks to be known")


async def _post(user: Caller, id: str, **wanted: Any) -> Answer:
    return await user.request("POST", f"/servers/{id}/os-interface", {"interfaceAttachment": wanted})


async def test_several_and_their_order(cloud: Cloud, user: Caller) -> None:
    """Simultaneous requests for one server are served one after the other."""
    nets = [await network(user, cidr=f"10.7.{number}.0/24") for number in range(3)]
    id = (await user.boot(networks=[{"uuid": nets[0]["id"]}]))["id"]
    made = await asyncio.gather(*(_attach(user, id, net_id=net["id"]) for net in nets))
    ports = [port["port_id"] for port in await _listed(user, id)]
    assert len(ports) == 4 and {port["port_id"] for port in made} == set(ports[1:])
    await asyncio.gather(*(user.delete(f"/servers/{id}/os-interface/{port}", 202) for port in ports[:2]))
    await user.wait_for(id, "ACTIVE")
    await cloud.settled()
    assert [port["port_id"] for port in await _listed(user, id)] == ports[2:]
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("action", "status"), [("os-stop", "SHUTOFF"), ("pause", "PAUSED")]
)  # fmt: skip
async def test_while_it_does_not_run(cloud: Cloud, user: Caller, action: str, status: str) -> None:
    net = await network(user)
    id = (await user.boot())["id"]
    await user.act(id, action)
    await user.wait_for(id, status)
    made = await _attach(user, id, net_id=net["id"])
    assert (await user.show(id))["status"] == status
    await _detach(user, id, made["port_id"])
    assert (await user.show(id))["status"] == status
    await cloud.assert_clean()


async def test_not_while_suspended_or_locked(user: Caller) -> None:
    net = await network(user)
    id = (await user.boot(networks=[{"uuid": net["id"]}]))["id"]
    [port] = await _listed(user, id)
    path = f"/servers/{id}/os-interface"
    await user.act(id, "lock")
    assert "locked" in await _refused(user, 409, id, net_id=net["id"])
    assert "locked" in await user.refused(409, "DELETE", f"{path}/{port['port_id']}")
    await user.act(id, "unlock")
    await user.act(id, "suspend")
    await user.wait_for(id, "SUSPENDED")
    assert "suspended" in await _refused(user, 409, id, net_id=net["id"])
    await user.refused(409, "DELETE", f"{path}/{port['port_id']}")
    assert len(await ports_left(user)) == 1


@pytest.mark.parametrize(
    ("status", "what"),
    [(404, "no network"), (404, "network of others"), (404, "no port"), (404, "port of others"),
     (400, "both"), (400, "address without network"), (400, "unknown field"), (400, "two addresses"),
     (400, "bare network"), (403, "external network"), (400, "no uuid"), (400, "tag with a slash")],
)  # fmt: skip
async def test_refusals(cloud: Cloud, user: Caller, status: int, what: str) -> None:
    id = (await user.boot())["id"]
    net = await network(user)
    other = cloud.caller()
    unknown = str(uuid.uuid4())
    foreign = await network(other, cidr="10.8.0.0/24")
    wanted: dict[str, Any] = {
        "no network": {"net_id": unknown},
        "network of others": {"net_id": foreign["id"]},
        "no port": {"port_id": unknown},
        "port of others": {"port_id": (await make(other, "port", network_id=foreign["id"]))["id"]},
        "both": {"net_id": net["id"], "port_id": unknown},
        "address without network": {"fixed_ips": [{"ip_address": "10.7.0.9"}]},
        "unknown field": {"net_id": net["id"], "color": "red"},
        "two addresses": {"net_id": net["id"], "fixed_ips": [{"ip_address": "10.7.0.8"}, {"ip_address": "10.7.0.9"}]},
        "bare network": {"net_id": (await make(user, "network", name="bare"))["id"]},
        "external network": {"net_id": (await _external(user))["id"]},
        "no uuid": {"net_id": "first"},
        "tag with a slash": {"net_id": net["id"], "tag": "a/b"},
    }[what]
    message = await _refused(user, status, id, **wanted)
    assert message and "Traceback" not in message
    assert await _listed(user, id) == []
    assert await ports_left(user) == []
    await user.refused(404, "DELETE", f"/servers/{id}/os-interface/{unknown}")
    await user.refused(404, "GET", f"/servers/{id}/os-interface/{unknown}")


async def _external(user: Caller) -> dict[str, Any]:
    made = await make(user.admin, "network", name="ext", project_id=user.project, **{"router:external": True})
    await make(user.admin, "subnet", network_id=made["id"], ip_version=4, cidr="10.99.0.0/24", project_id=user.project)
    return made


async def test_the_quota_of_ports(user: Caller) -> None:
    net = await network(user)
    id = (await user.boot())["id"]
    used = len((await ok(user.admin, "GET", f"/network/v2.0/ports?project_id={user.project}"))["ports"])
    await ok(user.admin, "PUT", f"/network/v2.0/quotas/{user.project}", {"quota": {"port": used + 1}})
    await _attach(user, id, net_id=net["id"])
    assert "ports" in await _refused(user, 403, id, net_id=net["id"])
    assert len(await _listed(user, id)) == 1


async def test_the_last_address_of_a_network(user: Caller) -> None:
    net = await make(user, "network", name="tiny")
    await make(user, "subnet", network_id=net["id"], ip_version=4, cidr="10.9.0.0/30", gateway_ip=None)
    id = (await user.boot())["id"]
    answers = [await _post(user, id, net_id=net["id"]) for _ in range(4)]
    statuses = [answer.status for answer in answers]
    assert statuses == sorted(statuses) and 200 in statuses and set(statuses) == {200, 400}
    assert len(await ports_left(user)) == statuses.count(200)


async def test_a_guest_that_cannot_be_plugged(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    own = await make(user, "port", network_id=net["id"])
    id = (await user.boot(name=user.project, networks=[{"uuid": net["id"]}]))["id"]
    before = await _listed(user, id)
    rule = {"operation": "attach_interface", "kind": "fail", "name": user.project, "message": "no slot is free"}
    async with cloud.faults(rule):
        for wanted in ({"net_id": net["id"]}, {"port_id": own["id"]}):
            message = await _refused(user, 500, id, **wanted)
            assert "no slot is free" in message and id in message
    server = await user.show(id)
    assert (server["status"], server["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
    assert await _listed(user, id) == before
    assert len(await ports_left(user)) == 1
    assert (await ok(user, "GET", f"/network/v2.0/ports/{own['id']}"))["port"]["device_id"] == ""
    [last, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["message"]) == ("attach_interface", "Error")
    await cloud.assert_clean()


async def test_a_detach_that_fails(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    id = (await user.boot(name=user.project, networks=[{"uuid": net["id"]}]))["id"]
    [port] = await _listed(user, id)
    rule = {"operation": "detach_interface", "kind": "fail", "name": user.project, "message": "the guest holds on"}
    async with cloud.faults(rule):
        event = await _detach(user, id, port["port_id"])
    assert (event["result"], event["details"]) == ("Error", "the guest holds on")
    assert (await user.show(id))["OS-EXT-STS:task_state"] is None
    assert await _listed(user, id) == [port]
    await _detach(user, id, port["port_id"])
    assert await _listed(user, id) == []
    await cloud.assert_clean()


async def test_a_port_deleted_under_a_server(cloud: Cloud, user: Caller) -> None:
    net = await network(user)
    id = (await user.boot(networks=[{"uuid": net["id"]}, {"uuid": net["id"]}]))["id"]
    first, second = await _listed(user, id)
    await user.act(id, "lock")  # the network service ignores the lock
    assert (await call(user.admin, "DELETE", f"/network/v2.0/ports/{first['port_id']}")).status == 204

    async def noticed() -> bool | None:
        server = await user.show(id)
        shown = [each["addr"] for addresses in server["addresses"].values() for each in addresses]
        return True if shown == [second["fixed_ips"][0]["ip_address"]] else None

    await cloud.until(noticed, "the address to go")
    await cloud.settled()
    await user.act(id, "unlock")
    assert first["fixed_ips"][0]["ip_address"] not in await _plugged(cloud, user, id)
    assert await _listed(user, id) == [second]
    await cloud.assert_clean()


async def test_a_user_detaches_a_port_before_it_is_deleted(user: Caller) -> None:
    """As at Neutron, only services delete a port that a server has."""
    net = await network(user)
    own = await make(user, "port", network_id=net["id"])
    id = (await user.boot(networks=[{"port": own["id"]}, {"uuid": net["id"]}]))["id"]
    for port in await _listed(user, id):
        path = f"/network/v2.0/ports/{port['port_id']}"
        refused = await call(user, "DELETE", path)
        assert refused.status == 403
        error = refused.json()["NeutronError"]
        assert error["type"] == "PolicyNotAuthorized" and "openstack server remove port" in error["message"]
        await _detach(user, id, port["port_id"])
        assert (await call(user, "DELETE", path)).status == (204 if port["port_id"] == own["id"] else 404)
    assert await _listed(user, id) == []


async def test_the_network_changes_what_is_shown(cloud: Cloud, user: Caller) -> None:
    net = await network(user, name="shown")
    id = (await user.boot(networks=[{"uuid": net["id"]}, {"uuid": net["id"]}]))["id"]
    first, second = await _listed(user, id)
    changes = {"port": {"fixed_ips": [{"ip_address": "10.7.0.200"}]}}
    await ok(user, "PUT", f"/network/v2.0/ports/{first['port_id']}", changes)

    async def shown() -> list[str] | None:
        found = [each["addr"] for each in (await user.show(id))["addresses"]["shown"]]
        return found if "10.7.0.200" in found else None

    assert await cloud.until(shown, "the new address") == ["10.7.0.200", second["fixed_ips"][0]["ip_address"]]


@only_in_one_process("makes the conductor's client fail")
async def test_a_network_service_that_is_away_delays(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await network(user)
    id = (await user.boot())["id"]
    away = {"attach": 1, "detach": 1}

    for name in away:
        working = getattr(NetworkClient, name)

        async def failing(*args: Any, name: str = name, working: Any = working, **kwargs: Any) -> Any:
            away[name] -= 1
            if away[name] >= 0:
                raise Unavailable("The network service does not answer.")
            return await working(*args, **kwargs)

        monkeypatch.setattr(NetworkClient, name, failing)
    made = await _attach(user, id, net_id=net["id"])
    await _detach(user, id, made["port_id"])
    assert max(away.values()) < 0
    assert await ports_left(user) == []
    await cloud.assert_clean()


@killable_host
async def test_a_host_that_dies_while_it_plugs(cloud: OneProcess, user: Caller, tmp_path: Any) -> None:
    """After the restart the order is sent again, and the caller, who still waits, gets the answer."""
    net = await network(user)
    host = KillableHost(cloud, "killable_host", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:killable_host"))["id"]
    host.driver.set_fault_rules([{"operation": "attach_interface", "kind": "hang"}])
    attaching = asyncio.ensure_future(_attach(user, id, net_id=net["id"]))
    await user.wait_for(id, "ACTIVE", task="attaching_interface")

    async def struck() -> bool | None:
        return True if host.driver.fault_rules()[0]["hits"] else None

    await cloud.until(struck, "the host to begin")
    await host.kill()
    await host.start()
    made = await attaching
    assert [port["id"] for port in await ports_of(user, id)] == [made["port_id"]]
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()
    await host.stop()


@killable_host
async def test_a_host_that_is_away_is_not_waited_for(cloud: OneProcess, user: Caller, tmp_path: Any) -> None:
    net = await network(user)
    host = KillableHost(cloud, "away", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:away"))["id"]
    await host.stop()
    await host.wait_until_down()
    await _refused(user, 503, id, net_id=net["id"])
    assert (await user.show(id))["OS-EXT-STS:task_state"] is None
    await host.start()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


@pytest.mark.parametrize("minor", [1, 48, 49, 69, 70, 104])
async def test_what_tempest_accepts(user: Caller, minor: int) -> None:
    net = await network(user)
    id = (await user.boot())["id"]
    caller, path = user.at(minor), f"/servers/{id}/os-interface"
    tagged = {"tag": "nic"} if minor >= 49 else {}
    if minor == 48:
        await _refused(caller, 400, id, net_id=net["id"], tag="nic")
    answer = await _post(caller, id, net_id=net["id"], **tagged)
    check("interfaces", "get_create_interfaces", minor, answer.status, answer.json())
    port = answer.json()["interfaceAttachment"]["port_id"]
    answer = await caller.request("GET", path)
    check("interfaces", "list_interfaces", minor, answer.status, answer.json())
    answer = await caller.request("GET", f"{path}/{port}")
    check("interfaces", "get_create_interfaces", minor, answer.status, answer.json())
    assert answer.json()["interfaceAttachment"].get("tag") == ("nic" if minor >= 70 else None)
    answer = await caller.request("DELETE", f"{path}/{port}")
    check("interfaces", "delete_interface", minor, answer.status, None)

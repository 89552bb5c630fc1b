"""Trunks: ports of a guest in VLANs of another port; on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.lock_recorder import LockRecorder
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, SERVICE, World, error, quota_drift, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made
        assert await made.database.read(quota_drift) == []


def vlan(port: Any, number: Any = 101, kind: str = "vlan") -> dict[str, Any]:
    return {"port_id": port["id"], "segmentation_type": kind, "segmentation_id": number}


async def port_on(cloud: World, cidr: str, token: str = ALICE, **fields: Any) -> Any:
    """Create a network with a port."""
    network, _ = await cloud.network(cidr, token)
    return await cloud.make("port", token, network_id=network["id"], **fields)


async def subports(cloud: World, trunk: Any, verb: str, *wanted: Any, token: str = ALICE) -> Any:
    return await cloud.call("PUT", f"/trunks/{trunk['id']}/{verb}_subports", {"sub_ports": wanted}, token=token)


async def test_a_trunk_lives(cloud: World) -> None:
    parent, first, second = [await port_on(cloud, f"10.{n}.0.0/24") for n in (1, 2, 3)]
    trunk = await cloud.make("trunk", name="t", port_id=parent["id"], sub_ports=[vlan(first, "101")], tags=["x"])
    assert trunk["sub_ports"] == [vlan(first, 101)]
    shown = {name: trunk[name] for name in ("name", "port_id", "status", "admin_state_up", "project_id", "tags")}
    assert shown == {
        "name": "t", "port_id": parent["id"], "status": "DOWN", "admin_state_up": True, "project_id": "p1",
        "tags": ["x"],
    }  # fmt: skip
    assert await cloud.show("trunk", trunk["id"]) == trunk
    assert await cloud.list("trunk", f"port_id={parent['id']}&status=DOWN") == [trunk]
    # The parent tells about the trunk, other ports do not.
    details = {"trunk_id": trunk["id"], "sub_ports": [{**vlan(first), "mac_address": first["mac_address"]}]}
    assert (await cloud.show("port", parent["id"]))["trunk_details"] == details
    [listed] = await cloud.list("port", f"id={parent['id']}&fields=trunk_details")
    assert listed == {"trunk_details": details}
    assert "trunk_details" not in await cloud.show("port", first["id"])

    added = await subports(cloud, trunk, "add", vlan(second, 102))
    assert (added.status, added.json()["sub_ports"]) == (200, [vlan(first), vlan(second, 102)])
    assert added.json()["revision_number"] > trunk["revision_number"]
    listing = await cloud.call("GET", f"/trunks/{trunk['id']}/get_subports")
    assert listing.json() == {"sub_ports": [vlan(first), vlan(second, 102)]}
    # What a trunk has cannot be deleted or given to a router.
    for port, type_ in ((parent, "PortInUseAsTrunkParent"), (first, "PortInUseAsSubPort")):
        answer = await cloud.call("DELETE", f"/ports/{port['id']}")
        assert (answer.status, error(answer)) == (409, type_)
        router = await cloud.make("router")
        path = f"/routers/{router['id']}/add_router_interface"
        assert error(await cloud.call("PUT", path, {"port_id": port["id"]})) == type_
    removed = await subports(cloud, trunk, "remove", {"port_id": first["id"]})
    assert removed.json()["sub_ports"] == [vlan(second, 102)]
    await cloud.delete("port", first["id"])

    changed = await cloud.change("trunk", trunk["id"], name="u", admin_state_up=False, description="d")
    assert (changed["name"], changed["admin_state_up"], changed["description"]) == ("u", False, "d")
    for answer in (
        await subports(cloud, trunk, "add"),
        await subports(cloud, trunk, "remove", {"port_id": second["id"]}),
        await cloud.call("DELETE", f"/trunks/{trunk['id']}"),
    ):
        assert (answer.status, error(answer)) == (409, "TrunkDisabled")
    await cloud.change("trunk", trunk["id"], admin_state_up=True)
    await cloud.delete("trunk", trunk["id"])
    gone = await cloud.call("GET", f"/trunks/{trunk['id']}")
    assert (gone.status, error(gone)) == (404, "TrunkNotFound")
    for port in (parent, second):
        await cloud.delete("port", port["id"])


async def bind(cloud: World, port: Any, host: str | None) -> Any:
    fields = {"device_id": "server", "device_owner": "compute:nova"} if host else {"device_id": "", "device_owner": ""}
    return await cloud.change("port", port["id"], SERVICE, binding__host_id=host, **fields)


async def test_subports_follow_their_parent(cloud: World) -> None:
    parent, first, second = [await port_on(cloud, f"10.{n}.0.0/24") for n in (1, 2, 3)]
    trunk = await cloud.make("trunk", port_id=parent["id"], sub_ports=[vlan(first)])
    await bind(cloud, parent, "h1")
    shown = await cloud.show("port", first["id"], ADMIN)
    bound = {"binding:host_id": "h1", "binding:vif_type": "bridge", "device_owner": "trunk:subport", "status": "ACTIVE"}
    assert {name: shown[name] for name in bound} == bound
    assert (await cloud.show("trunk", trunk["id"]))["status"] == "ACTIVE"
    # A subport that is added to a running server is bound at once, and has no other host than its trunk.
    assert (await subports(cloud, trunk, "add", vlan(second, 102))).json()["status"] == "ACTIVE"
    assert (await cloud.show("port", second["id"], ADMIN))["binding:host_id"] == "h1"
    elsewhere = {"port": {"binding:host_id": "h2"}}
    answer = await cloud.call("PUT", f"/ports/{second['id']}", elsewhere, token=SERVICE)
    assert (answer.status, error(answer)) == (409, "PortInUseAsSubPort")
    await bind(cloud, parent, "h2")
    assert (await cloud.show("port", second["id"], ADMIN))["binding:host_id"] == "h2"
    await subports(cloud, trunk, "remove", {"port_id": second["id"]})
    unbound = {"binding:host_id": "", "binding:vif_type": "unbound", "device_owner": "", "status": "DOWN"}
    shown = await cloud.show("port", second["id"], ADMIN)
    assert {name: shown[name] for name in unbound} == unbound
    await bind(cloud, parent, None)
    shown = await cloud.show("port", first["id"], ADMIN)
    assert {name: shown[name] for name in unbound} == unbound
    assert (await cloud.show("trunk", trunk["id"]))["status"] == "DOWN"


async def test_a_host_with_an_agent_reports_the_ports(cloud: World) -> None:
    async def report(**fields: Any) -> None:
        assert (await cloud.call("POST", "/agent-reports", {"host": "h1", **fields}, token=SERVICE)).status == 200

    parent, first = await port_on(cloud, "10.1.0.0/24"), await port_on(cloud, "10.2.0.0/24")
    await report(started=True)
    trunk = await cloud.make("trunk", port_id=parent["id"], sub_ports=[vlan(first)])
    await bind(cloud, parent, "h1")
    for wired, status in (({}, "DOWN"), ({"up": [parent["id"]]}, "DEGRADED"), ({"up": [first["id"]]}, "ACTIVE"),
                          ({"down": [first["id"]]}, "DEGRADED"), ({"down": [parent["id"]]}, "DOWN")):  # fmt: skip
        await report(**wired)
        assert (await cloud.show("trunk", trunk["id"]))["status"] == status
    # The agent learns in which VLAN of which port the guest has the subport.
    state = (await cloud.call("GET", "/agent-states/h1", token=SERVICE)).json()["state"]
    assert {(port["id"], port["parent"], port["vlan"]) for port in state["ports"]} == {
        (parent["id"], None, None), (first["id"], parent["id"], 101),
    }  # fmt: skip
    await cloud.delete("trunk", trunk["id"])
    state = (await cloud.call("GET", "/agent-states/h1", token=SERVICE)).json()["state"]
    assert [port["id"] for port in state["ports"]] == [parent["id"]]


async def test_trunks_that_make_no_sense(cloud: World) -> None:
    parent, first, second = [await port_on(cloud, f"10.{n}.0.0/24") for n in (1, 2, 3)]
    theirs = await port_on(cloud, "10.4.0.0/24", BOB)
    server, bound = await port_on(cloud, "10.5.0.0/24", device_id="something"), await port_on(cloud, "10.6.0.0/24")
    await bind(cloud, bound, "h1")
    await cloud.change("port", bound["id"], device_id="")
    small, large = [
        await cloud.make("port", network_id=(await cloud.make("network", mtu=mtu))["id"]) for mtu in (1200, 1400)
    ]
    trunk = await cloud.make("trunk", port_id=parent["id"], sub_ports=[vlan(first)])
    other = await cloud.make("trunk", port_id=small["id"])
    for sub_ports, status, type_ in (
        ([vlan(second, 101)], 409, "DuplicateSubPort"),
        ([vlan(first, 5)], 409, "TrunkPortInUse"),
        ([vlan(parent, 5)], 409, "ParentPortInUse"),
        ([vlan(small, 5)], 409, "ParentPortInUse"),
        ([vlan(server, 5)], 409, "PortInUse"),
        ([vlan(bound, 5)], 409, "PortInUse"),
        ([vlan(theirs, 5)], 404, "PortNotFound"),
        ([{"port_id": second["id"]}], 400, "InvalidInput"),
        ([{"port_id": second["id"], "segmentation_type": "vlan"}], 400, "InvalidInput"),
        ([{"port_id": second["id"], "segmentation_type": "inherit"}], 400, "InvalidInput"),
        ([vlan(second, 5), vlan(second, 6)], 400, "InvalidInput"),
        ([vlan(second, 5), vlan(large, "5")], 400, "InvalidInput"),
        ([vlan(second, 0)], 400, "InvalidInput"),
        ([vlan(second, 4095)], 400, "InvalidInput"),
        ([vlan(second, 5, "vxlan")], 400, "InvalidInput"),
    ):  # fmt: skip
        answer = await subports(cloud, trunk, "add", *sub_ports)
        assert (answer.status, error(answer)) == (status, type_), sub_ports
    answer = await subports(cloud, other, "add", vlan(large))
    assert (answer.status, error(answer)) == (409, "SubPortMtuGreaterThanTrunkPortMtu")
    answer = await subports(cloud, trunk, "remove", {"port_id": second["id"]})
    assert (answer.status, error(answer)) == (404, "SubPortNotFound")
    for bad, status, type_ in (
        ({"port_id": parent["id"]}, 409, "ParentPortInUse"),
        ({"port_id": first["id"]}, 409, "TrunkPortInUse"),
        ({"port_id": theirs["id"]}, 404, "PortNotFound"),
        ({"port_id": "nothing"}, 404, "PortNotFound"),
        ({"port_id": second["id"], "sub_ports": [vlan(second, 5)]}, 409, "ParentPortInUse"),
        ({"port_id": second["id"], "sub_ports": [{"port_id": large["id"], "segmentation_id": 1}]}, 400,
         "HTTPBadRequest"),
        ({}, 400, "HTTPBadRequest"),
        ({"port_id": second["id"], "status": "ACTIVE"}, 400, "HTTPBadRequest"),
    ):  # fmt: skip
        answer = await cloud.call("POST", "/trunks", {"trunk": bad})
        assert (answer.status, error(answer)) == (status, type_), bad
    bodies: tuple[dict[str, Any], ...] = ({}, {"sub_ports": "x"}, {"sub_ports": [1]}, {"sub_ports": [{}]})
    for body in bodies:
        assert (await cloud.call("PUT", f"/trunks/{trunk['id']}/add_subports", body)).status == 400, body
    assert (await cloud.show("trunk", trunk["id"]))["sub_ports"] == [vlan(first)]
    # Nobody else uses a trunk or its ports, and a quota counts trunks.
    assert (await subports(cloud, trunk, "add", vlan(theirs, 9), token=BOB)).status == 404
    assert (await cloud.call("PUT", "/quotas/p1", {"quota": {"trunk": 2}}, token=ADMIN)).status == 200
    answer = await cloud.call("POST", "/trunks", {"trunk": {"port_id": second["id"]}})
    assert (answer.status, error(answer)) == (409, "OverQuota")


async def test_the_status_of_a_trunk_is_found_under_its_lock(tmp_path: Path) -> None:
    """Of two transactions that each change a port of it, the later one must see both."""
    async with world(tmp_path, None) as cloud:
        parent, first = await port_on(cloud, "10.1.0.0/24"), await port_on(cloud, "10.2.0.0/24")
        trunk = await cloud.make("trunk", port_id=parent["id"], sub_ports=[vlan(first)])
        await cloud.call("POST", "/agent-reports", {"host": "h1", "started": True}, token=SERVICE)
        await bind(cloud, parent, "h1")
        recorder = LockRecorder(cloud.database)
        try:  # the trunk was and stays DOWN
            report = {"host": "h1", "up": [first["id"]]}
            assert (await cloud.call("POST", "/agent-reports", report, token=SERVICE)).status == 200
        finally:
            recorder.close()
        locked = [lock for transaction in recorder.transactions for lock in transaction.locked]
        assert ("trunks", (trunk["id"],)) in [(lock.table, lock.key) for lock in locked]

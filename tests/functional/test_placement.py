"""The Placement API in a whole cloud: it shows and changes what the scheduler claims from."""

import gc
import uuid
from typing import Any

import pytest

from micronova.db import provider_trees
from micronova.placement.model import Provider
from tests.functional.full_cloud import FullCloud, Person, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
C, P = "/compute/v2.1", "/placement"
CONSUMER = "c0ffee00-0000-4000-8000-00000000c0de"


async def _nodes(cloud: FullCloud) -> dict[str, str]:
    found = (await cloud.admin.do("GET", f"{C}/os-hypervisors"))["hypervisors"]
    return {each["hypervisor_hostname"]: each["id"] for each in found}


async def _server(cloud: FullCloud, owner: Person, flavor: str = "1") -> str:
    body = {"name": "s", "flavorRef": flavor, "networks": "none", "imageRef": await _image(owner)}
    id = str((await owner.do("POST", f"{C}/servers", {"server": body}))["server"]["id"])

    async def active() -> bool | None:
        shown = (await owner.do("GET", f"{C}/servers/{id}"))["server"]
        assert shown["status"] != "ERROR", shown
        return True if shown["status"] == "ACTIVE" else None

    await cloud.until(active, "the server to run")
    return id


async def _image(owner: Person) -> str:
    return await owner.make_image("i", "raw", b"x" * 512)


async def _delete(cloud: FullCloud, owner: Person, id: str) -> None:
    await owner.do("DELETE", f"{C}/servers/{id}")

    async def gone() -> bool | None:
        return True if (await owner.request("GET", f"{C}/servers/{id}")).status == 404 else None

    await cloud.until(gone, "the server to be gone")


async def _usages(cloud: FullCloud, provider: str) -> dict[str, int]:
    found: dict[str, int] = (await cloud.admin.do("GET", f"{P}/resource_providers/{provider}/usages"))["usages"]
    return found


async def test_compute_nodes_are_providers_with_what_their_hosts_report(full_cloud: FullCloud) -> None:
    nodes = await _nodes(full_cloud)
    listed = (await full_cloud.admin.do("GET", f"{P}/resource_providers"))["resource_providers"]
    assert {each["name"]: each["uuid"] for each in listed if each["uuid"] in nodes.values()} == nodes
    for uuid_ in nodes.values():
        stock = await full_cloud.admin.do("GET", f"{P}/resource_providers/{uuid_}/inventories")
        assert {"VCPU", "MEMORY_MB", "DISK_GB"} <= stock["inventories"].keys()
    answer = await full_cloud.admin.request("DELETE", f"{P}/resource_providers/{uuid_}")
    assert answer.status == 409 and "compute node" in answer.json()["errors"][0]["detail"]


async def _providers(cloud: FullCloud, query: str) -> set[str]:
    listed = await cloud.admin.do("GET", f"{P}/resource_providers?{query}")
    return {each["name"] for each in listed["resource_providers"]}


async def _candidates(cloud: FullCloud, query: str) -> set[str]:
    found = await cloud.admin.do("GET", f"{P}/allocation_candidates?resources=VCPU:1&{query}")
    return {uuid_ for each in found["allocation_requests"] for uuid_ in each["allocations"]}


async def test_nodes_have_the_traits_of_what_they_are(full_cloud: FullCloud) -> None:
    """Other services tell them from other providers, place nothing on disabled ones, and flavors ask for features."""
    nodes = await _nodes(full_cloud)
    await full_cloud.admin.do("POST", f"{P}/resource_providers", {"name": "no node"})
    assert await _providers(full_cloud, "required=COMPUTE_NODE") == set(nodes)
    assert await _providers(full_cloud, "required=OWNER_NOVA") == set(nodes)
    features = (
        "COMPUTE_TRUSTED_CERTS",
        "COMPUTE_NET_ATTACH_INTERFACE",
        "COMPUTE_DEVICE_TAGGING",
        "COMPUTE_RESCUE_BFV",
    )
    assert await _providers(full_cloud, f"required={','.join(features)}") == set(nodes)
    found = await full_cloud.admin.do("GET", f"{C}/os-services?binary=nova-compute&host=fake-1")
    path = f"{C}/os-services/{found['services'][0]['id']}"
    own = f"{P}/resource_providers/{nodes['fake-1']}/traits"
    traits = set((await full_cloud.admin.do("GET", own))["traits"])
    await full_cloud.admin.do("PUT", path, {"status": "disabled"})
    assert await _candidates(full_cloud, "root_required=!COMPUTE_STATUS_DISABLED") == {nodes["fake-2"]}
    assert await _candidates(full_cloud, "required=COMPUTE_STATUS_DISABLED") == {nodes["fake-1"]}
    # What an operator changes meanwhile stays: one trait more, and the status by hand.
    await full_cloud.admin.do("PUT", f"{P}/traits/CUSTOM_RACK")
    shown = await full_cloud.admin.do("GET", own)
    await full_cloud.admin.do("PUT", own, {**shown, "traits": [*shown["traits"], "CUSTOM_RACK"]})
    await full_cloud.admin.do("PUT", path, {"forced_down": True})
    assert await _providers(full_cloud, "required=COMPUTE_STATUS_DISABLED") == {"fake-1"}
    await full_cloud.admin.do("PUT", path, {"status": "enabled", "forced_down": False})
    assert await _candidates(full_cloud, "root_required=!COMPUTE_STATUS_DISABLED") == set(nodes.values())
    assert set((await full_cloud.admin.do("GET", own))["traits"]) == traits | {"CUSTOM_RACK"}


async def test_a_server_is_a_consumer_of_its_node(full_cloud: FullCloud) -> None:
    owner = await full_cloud.person("member")
    id = await _server(full_cloud, owner)
    shown = await full_cloud.admin.do("GET", f"{P}/allocations/{id}")
    [(node, held)] = shown["allocations"].items()
    assert held["resources"] == {"VCPU": 1, "MEMORY_MB": 512, "DISK_GB": 1}
    assert (shown["project_id"], shown["user_id"]) == (owner.project_id, owner.user_id)
    assert shown["consumer_type"] == "INSTANCE"
    usage = await full_cloud.admin.do("GET", f"{P}/usages?project_id={owner.project_id}")
    assert usage["usages"] == {"INSTANCE": {"consumer_count": 1, **held["resources"]}}
    assert (await owner.do("GET", f"{P}/usages?project_id={owner.project_id}")) == usage
    of_node = await full_cloud.admin.do("GET", f"{P}/resource_providers/{node}/allocations")
    assert of_node["allocations"][id]["consumer_generation"] == shown["consumer_generation"]
    await _delete(full_cloud, owner, id)
    assert (await full_cloud.admin.do("GET", f"{P}/allocations/{id}")) == {"allocations": {}}


async def test_what_a_server_holds_is_changed_only_by_who_has_read_it(full_cloud: FullCloud) -> None:
    owner = await full_cloud.person("member")
    id = await _server(full_cloud, owner)
    shown = await full_cloud.admin.do("GET", f"{P}/allocations/{id}")
    body: dict[str, Any] = {**shown, "consumer_generation": None}
    answer = await full_cloud.admin.request("PUT", f"{P}/allocations/{id}", body)
    assert (answer.status, answer.json()["errors"][0]["code"]) == (409, "placement.concurrent_update")
    answer = await full_cloud.admin.request("PUT", f"{P}/allocations/{id}", {**shown, "project_id": "another"})
    assert answer.status == 400 and "its project is" in answer.json()["errors"][0]["detail"]
    await full_cloud.admin.do("PUT", f"{P}/allocations/{id}", shown)
    assert (await full_cloud.admin.do("GET", f"{P}/allocations/{id}"))["allocations"].keys() == shown[
        "allocations"
    ].keys()
    await _delete(full_cloud, owner, id)


async def test_the_scheduler_leaves_what_others_have_taken(full_cloud: FullCloud) -> None:
    """A consumer of another service holds all memory of one node: servers go to the other one."""
    nodes = await _nodes(full_cloud)
    node, free = nodes["fake-1"], nodes["fake-2"]
    stock = (await full_cloud.admin.do("GET", f"{P}/resource_providers/{node}/inventories"))["inventories"]["MEMORY_MB"]
    amount = int((stock["total"] - stock["reserved"]) * stock["allocation_ratio"])
    amount -= (await _usages(full_cloud, node))["MEMORY_MB"]
    consumer = str(uuid.uuid4())
    body = {
        "allocations": {node: {"resources": {"MEMORY_MB": amount}}}, "consumer_generation": None,
        "project_id": "p", "user_id": "u", "consumer_type": "RESERVATION",
    }  # fmt: skip
    await full_cloud.admin.do("PUT", f"{P}/allocations/{consumer}", body)
    more = {**body, "allocations": {node: {"resources": {"MEMORY_MB": 1}}}}
    answer = await full_cloud.admin.request("PUT", f"{P}/allocations/{uuid.uuid4()}", more)
    assert answer.status == 409 and "would exceed the capacity" in answer.json()["errors"][0]["detail"]
    owner = await full_cloud.person("member")
    servers = [await _server(full_cloud, owner) for _ in range(3)]
    for id in servers:
        assert list((await full_cloud.admin.do("GET", f"{P}/allocations/{id}"))["allocations"]) == [free]
        await _delete(full_cloud, owner, id)
    await full_cloud.admin.do("DELETE", f"{P}/allocations/{consumer}")
    assert (await _usages(full_cloud, node))["MEMORY_MB"] == 0


async def test_host_aggregates_are_aggregates_of_nodes(full_cloud: FullCloud) -> None:
    nodes = await _nodes(full_cloud)
    made = await full_cloud.admin.make(f"{C}/os-aggregates", "aggregate", name="racks")
    action = f"{C}/os-aggregates/{made['id']}/action"
    await full_cloud.admin.do("POST", action, {"add_host": {"host": "fake-1"}})
    path = f"{P}/resource_providers/{nodes['fake-1']}/aggregates"
    assert (await full_cloud.admin.do("GET", path))["aggregates"] == [made["uuid"]]
    listed = await full_cloud.admin.do("GET", f"{P}/resource_providers?member_of={made['uuid']}")
    assert [each["name"] for each in listed["resource_providers"]] == ["fake-1"]
    await full_cloud.admin.do("POST", action, {"remove_host": {"host": "fake-1"}})
    assert (await full_cloud.admin.do("GET", path))["aggregates"] == []
    await full_cloud.admin.do("DELETE", f"{C}/os-aggregates/{made['id']}")


async def test_candidates_are_the_nodes_with_room(full_cloud: FullCloud) -> None:
    nodes = await _nodes(full_cloud)
    found = await full_cloud.admin.do("GET", f"{P}/allocation_candidates?resources=VCPU:1,MEMORY_MB:64")
    assert {uuid_ for each in found["allocation_requests"] for uuid_ in each["allocations"]} == set(nodes.values())
    limited = await full_cloud.admin.do("GET", f"{P}/allocation_candidates?resources=VCPU:1&limit=1")
    assert len(limited["allocation_requests"]) == 1
    none = await full_cloud.admin.do("GET", f"{P}/allocation_candidates?resources=MEMORY_MB:2147483647")
    assert none == {"allocation_requests": [], "provider_summaries": {}}


async def _flavor(cloud: FullCloud, extra_specs: dict[str, str]) -> str:
    body = {"name": uuid.uuid4().hex, "ram": 64, "vcpus": 1, "disk": 1}
    flavor = await cloud.admin.make(f"{C}/flavors", "flavor", **body)
    await cloud.admin.do("POST", f"{C}/flavors/{flavor['id']}/os-extra_specs", {"extra_specs": extra_specs})
    return str(flavor["id"])


async def _refused(cloud: FullCloud, owner: Person, flavor: str) -> str:
    """Ask for a server that no host takes; return its fault."""
    body = {"name": "s", "flavorRef": flavor, "networks": "none", "imageRef": await _image(owner)}
    id = str((await owner.do("POST", f"{C}/servers", {"server": body}))["server"]["id"])

    async def failed() -> str | None:
        shown = (await owner.do("GET", f"{C}/servers/{id}"))["server"]
        assert shown["status"] != "ACTIVE", shown
        return str(shown["fault"]["message"]) if shown["status"] == "ERROR" else None

    fault = await cloud.until(failed, "the server to fail")
    await _delete(cloud, owner, id)
    return fault


async def _set_traits(cloud: FullCloud, provider: str, *traits: str) -> None:
    for name in traits:
        await cloud.admin.do("PUT", f"{P}/traits/{name}")
    path = f"{P}/resource_providers/{provider}/traits"
    generation = (await cloud.admin.do("GET", path))["resource_provider_generation"]
    await cloud.admin.do("PUT", path, {"traits": list(traits), "resource_provider_generation": generation})


async def test_servers_go_where_their_traits_are(full_cloud: FullCloud) -> None:
    nodes = await _nodes(full_cloud)
    owner = await full_cloud.person("member")
    wants = await _flavor(full_cloud, {"trait:CUSTOM_GOLD": "required"})
    avoids = await _flavor(full_cloud, {"trait:CUSTOM_GOLD": "forbidden"})
    assert "No valid host" in await _refused(full_cloud, owner, wants)
    await _set_traits(full_cloud, nodes["fake-2"], "CUSTOM_GOLD")
    for flavor, node in ((wants, "fake-2"), (avoids, "fake-1")):
        for _ in range(2):
            id = await _server(full_cloud, owner, flavor)
            held = (await full_cloud.admin.do("GET", f"{P}/allocations/{id}"))["allocations"]
            assert list(held) == [nodes[node]]
            await _delete(full_cloud, owner, id)
    await _set_traits(full_cloud, nodes["fake-2"])


async def test_a_resource_class_of_the_cloud_is_claimed_with_the_server(full_cloud: FullCloud) -> None:
    node = (await _nodes(full_cloud))["fake-1"]
    await full_cloud.admin.do("PUT", f"{P}/resource_classes/CUSTOM_LICENCE")
    stock = f"{P}/resource_providers/{node}/inventories"
    await full_cloud.admin.do("POST", stock, {"resource_class": "CUSTOM_LICENCE", "total": 1})
    owner = await full_cloud.person("member")
    flavor = await _flavor(full_cloud, {"resources:CUSTOM_LICENCE": "1", "resources:VCPU": "0"})
    id = await _server(full_cloud, owner, flavor)
    held = (await full_cloud.admin.do("GET", f"{P}/allocations/{id}"))["allocations"]
    assert held[node]["resources"] == {"CUSTOM_LICENCE": 1, "MEMORY_MB": 64, "DISK_GB": 1}
    assert "No valid host" in await _refused(full_cloud, owner, flavor)
    assert (await full_cloud.admin.request("DELETE", f"{stock}/CUSTOM_LICENCE")).status == 409
    await _delete(full_cloud, owner, id)
    await full_cloud.admin.do("DELETE", f"{stock}/CUSTOM_LICENCE")


async def test_a_group_of_resources_is_served_by_a_provider_below_the_node(full_cloud: FullCloud) -> None:
    """As a network service keeps bandwidth: an interface below a node, with a trait for its physical network."""
    nodes = await _nodes(full_cloud)
    interfaces = {}
    for host, trait in (("fake-1", "CUSTOM_PHYSNET_A"), ("fake-2", "CUSTOM_PHYSNET_B")):
        body = {"name": f"{host}:eth0", "parent_provider_uuid": nodes[host]}
        interfaces[host] = (await full_cloud.admin.do("POST", f"{P}/resource_providers", body))["uuid"]
        stock = {"resource_class": "NET_BW_EGR_KILOBIT_PER_SEC", "total": 1000}
        await full_cloud.admin.do("POST", f"{P}/resource_providers/{interfaces[host]}/inventories", stock)
        await _set_traits(full_cloud, interfaces[host], trait)
    owner = await full_cloud.person("member")
    flavor = await _flavor(
        full_cloud, {"resources_NET:NET_BW_EGR_KILOBIT_PER_SEC": "600", "trait_NET:CUSTOM_PHYSNET_B": "required"}
    )
    id = await _server(full_cloud, owner, flavor)
    held = (await full_cloud.admin.do("GET", f"{P}/allocations/{id}"))["allocations"]
    assert {provider: each["resources"] for provider, each in held.items()} == {
        nodes["fake-2"]: {"VCPU": 1, "MEMORY_MB": 64, "DISK_GB": 1},
        interfaces["fake-2"]: {"NET_BW_EGR_KILOBIT_PER_SEC": 600},
    }
    assert "No valid host" in await _refused(full_cloud, owner, flavor)
    any_network = await _flavor(full_cloud, {"resources_NET:NET_BW_EGR_KILOBIT_PER_SEC": "400"})
    others = [await _server(full_cloud, owner, any_network) for _ in range(3)]
    assert await _usages(full_cloud, interfaces["fake-2"]) == {"NET_BW_EGR_KILOBIT_PER_SEC": 1000}
    assert await _usages(full_cloud, interfaces["fake-1"]) == {"NET_BW_EGR_KILOBIT_PER_SEC": 800}
    assert "No valid host" in await _refused(full_cloud, owner, any_network)
    await full_cloud.assert_clean()
    for each in (id, *others):
        await _delete(full_cloud, owner, each)
    for provider in interfaces.values():
        assert await _usages(full_cloud, provider) == {"NET_BW_EGR_KILOBIT_PER_SEC": 0}
        await full_cloud.admin.do("DELETE", f"{P}/resource_providers/{provider}")


async def test_several_servers_share_what_the_providers_have(full_cloud: FullCloud) -> None:
    nodes = await _nodes(full_cloud)
    made = []
    for host, total in (("fake-1", 1), ("fake-2", 2)):
        body = {"name": f"{host}:gpu", "parent_provider_uuid": nodes[host]}
        made.append((await full_cloud.admin.do("POST", f"{P}/resource_providers", body))["uuid"])
        stock = {"resource_class": "VGPU", "total": total}
        await full_cloud.admin.do("POST", f"{P}/resource_providers/{made[-1]}/inventories", stock)
    owner = await full_cloud.person("member")
    flavor = await _flavor(full_cloud, {"resources1:VGPU": "1"})
    body = {"name": "s", "flavorRef": flavor, "networks": "none", "imageRef": await _image(owner)}
    await owner.do("POST", f"{C}/servers", {"server": {**body, "min_count": 3}})

    async def active() -> list[str] | None:
        shown = (await owner.do("GET", f"{C}/servers/detail"))["servers"]
        assert all(each["status"] in ("BUILD", "ACTIVE") for each in shown), shown
        return [each["id"] for each in shown] if all(each["status"] == "ACTIVE" for each in shown) else None

    servers = await full_cloud.until(active, "all servers to run")
    assert [await _usages(full_cloud, each) for each in made] == [{"VGPU": 1}, {"VGPU": 2}]
    for id in servers:
        await _delete(full_cloud, owner, id)
    for provider in made:
        await full_cloud.admin.do("DELETE", f"{P}/resource_providers/{provider}")


@pytest.mark.parametrize(
    "extra_specs",
    [
        {"trait:CUSTOM_A": "perhaps"},
        {"resources:VCPU": "many"},
        {"resources1:VGPU": "1", "resources2:VGPU": "1"},
        {"trait1:CUSTOM_A": "required"},
        {"resources1:VGPU": "1", "group_policy": "together"},
    ],
)
async def test_what_cannot_be_meant_is_refused(full_cloud: FullCloud, extra_specs: dict[str, str]) -> None:
    flavor = await full_cloud.admin.make(f"{C}/flavors", "flavor", name=uuid.uuid4().hex, ram=64, vcpus=1, disk=1)
    path = f"{C}/flavors/{flavor['id']}/os-extra_specs"
    old = {"openstack-api-version": "compute 2.85"}  # later versions check values when the flavor gets them
    await full_cloud.admin.do("POST", path, {"extra_specs": extra_specs}, old)
    owner = await full_cloud.person("member")
    body = {"name": "s", "flavorRef": flavor["id"], "networks": "none", "imageRef": await _image(owner)}
    answer = await owner.request("POST", f"{C}/servers", {"server": body})
    assert answer.status == 400, answer


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/resource_classes", {"name": "CUSTOM_X\n"}),
        ("PUT", "/resource_classes/CUSTOM_X%0A", None),
        ("POST", "/resource_providers", {"name": "a\r\nb"}),
        ("POST", "/allocations", {f"{CONSUMER}\n": "body"}),
        ("POST", "/allocations", {"-" * 36: "body"}),
        ("POST", "/allocations", {CONSUMER: "body", CONSUMER.upper(): "body"}),
        ("POST", "/allocations", {f"{number:08x}{CONSUMER[8:]}": "body" for number in range(1001)}),
        ("PUT", f"/allocations/{CONSUMER}", {"allocations": {"-" * 36: {"resources": {"VCPU": 1}}}}),
        ("PUT", f"/allocations/{CONSUMER}", {"allocations": {CONSUMER: {"resources": {"VCPU\n": 1}}}}),
        ("PUT", f"/allocations/{CONSUMER}", {"consumer_type": "X\n"}),
    ],
)
async def test_names_and_uuids_are_checked_whole(full_cloud: FullCloud, method: str, path: str, body: Any) -> None:
    known: dict[str, Any] = {
        "allocations": {},
        "project_id": "p",
        "user_id": "u",
        "consumer_generation": None,
        "consumer_type": "X",
    }
    if path.startswith("/allocations/"):
        body = known | body
    elif path == "/allocations":
        body = dict.fromkeys(body, known)
    answer = await full_cloud.admin.request(method, f"{P}{path}", body)
    assert answer.status == 400, answer.body[:300]


async def test_a_message_does_not_repeat_a_long_value(full_cloud: FullCloud) -> None:
    answer = await full_cloud.admin.request("POST", f"{P}/resource_classes", {"name": "CUSTOM_" + "x" * 100_000})
    assert answer.status == 400 and len(answer.body) < 1000


async def test_a_uuid_in_capitals_is_the_same_consumer(full_cloud: FullCloud) -> None:
    """Another consumer would take what a server holds once more."""
    owner, admin = await full_cloud.person("member"), full_cloud.admin
    id = await _server(full_cloud, owner, "1")
    held = (await admin.do("GET", f"{P}/allocations/{id}"))["allocations"]
    assert held and (await admin.do("GET", f"{P}/allocations/{id.upper()}"))["allocations"] == held
    taken = {provider.upper(): {"resources": each["resources"]} for provider, each in held.items()}
    more = {"project_id": "p", "user_id": "u", "consumer_generation": None, "consumer_type": "X"}
    answer = await admin.request("POST", f"{P}/allocations", {id.upper(): {"allocations": taken, **more}})
    assert answer.status == 409, "its generation is not that of a new consumer"
    await _delete(full_cloud, owner, id)


async def test_trees_without_a_candidate_are_not_kept(full_cloud: FullCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """All trees that had the amounts were kept until the end: hundreds of megabytes in a large cloud."""
    for number in range(20):
        made = {"name": f"kept-{number}", "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, str(number)))}
        await full_cloud.admin.do("POST", f"{P}/resource_providers", made)
        stock = f"{P}/resource_providers/{made['uuid']}/inventories"
        await full_cloud.admin.do("POST", stock, {"resource_class": "IPV4_ADDRESS", "total": 4})
        await _set_traits(full_cloud, made["uuid"], "CUSTOM_GOLD")
    monkeypatch.setattr(provider_trees, "PART", 2)
    load, alive = provider_trees.load_trees, list[int]()

    def counting(conn: Any, roots: Any) -> Any:
        alive.append(sum(type(each) is Provider for each in gc.get_objects()))
        return load(conn, roots)

    monkeypatch.setattr(provider_trees, "load_trees", counting)
    query = "resources=IPV4_ADDRESS:1&required=!CUSTOM_GOLD"
    gc.collect()
    found = await full_cloud.admin.do("GET", f"{P}/allocation_candidates?{query}")
    assert found == {"allocation_requests": [], "provider_summaries": {}}
    assert len(alive) == 10
    assert max(alive) - min(alive) <= 4

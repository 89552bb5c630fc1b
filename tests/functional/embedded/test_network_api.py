"""The network API as clients use it, on both databases: networks, subnets, pools, lists, quotas, tags."""

import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.embedded.network.networks import NetworkCreate, Networks
from micronova.embedded.network.ports import PortCreate, Ports
from micronova.embedded.network.routers import RouterCreate, Routers
from tests.unit.embedded.network.world import ADMIN, ALICE, BOB, MANAGER, READER, World, error, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


# --- documents ---


async def test_versions_need_no_token_and_resources_do(cloud: World) -> None:
    answer = await cloud.call("GET", "//", token=None)
    assert answer.status == 200
    [version] = answer.json()["versions"]
    assert (version["id"], version["status"]) == ("v2.0", "CURRENT")
    assert version["links"] == [{"rel": "self", "href": "http://cloud/network/v2.0/"}]
    assert (await cloud.call("GET", "", token=None)).status == 401
    for path in ("", "/"):
        resources = (await cloud.call("GET", path)).json()["resources"]
        listed = {each["collection"] for each in resources}
        assert {"networks", "ports", "trunks", "address-scopes", "rbac-policies", "qos/policies"} <= listed


async def test_extensions(cloud: World) -> None:
    listed = (await cloud.call("GET", "/extensions")).json()["extensions"]
    aliases = {each["alias"] for each in listed}
    assert {"security-group", "router", "binding", "quotas", "auto-allocated-topology", "port-security"} <= aliases
    assert "address-group" not in aliases
    assert (await cloud.call("GET", "/extensions/router")).json()["extension"]["alias"] == "router"
    missing = await cloud.call("GET", "/extensions/address-group")
    assert (missing.status, error(missing)) == (404, "ExtensionsNotFound")


async def test_zones_agents_providers(cloud: World) -> None:
    zones = (await cloud.call("GET", "/availability_zones")).json()["availability_zones"]
    assert {(zone["name"], zone["resource"]) for zone in zones} == {("nova", "network"), ("nova", "router")}
    assert (await cloud.call("GET", "/service-providers")).json() == {"service_providers": []}
    assert (await cloud.call("GET", "/agents", token=ADMIN)).json() == {"agents": []}
    for path in ("/address-groups",):
        assert (await cloud.call("GET", path)).status == 404


async def test_paths_may_end_in_json(cloud: World) -> None:
    network = await cloud.make("network", name="n")
    for path in ("/networks.json", f"/networks/{network['id']}.json", "/extensions.json", "/quotas/p1.json"):
        assert (await cloud.call("GET", path)).status == 200
    assert (await cloud.call("POST", "/networks.json", {"network": {}})).status == 201


# --- networks ---


async def test_a_network_shows_what_clients_expect(cloud: World) -> None:
    made = await cloud.make("network", name="blue", description="d", tags=["b", "a"])
    assert made == {
        "id": made["id"], "name": "blue", "description": "d", "project_id": "p1", "tenant_id": "p1",
        "admin_state_up": True, "status": "ACTIVE", "subnets": [], "shared": False, "router:external": False,
        "is_default": False, "port_security_enabled": True, "mtu": 1450, "dns_domain": "",
        "qos_policy_id": None, "ipv4_address_scope": None, "ipv6_address_scope": None,
        "availability_zone_hints": [], "availability_zones": [], "tags": ["a", "b"], "revision_number": 1,
        "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert await cloud.show("network", made["id"]) == made
    seen_by_admin = await cloud.show("network", made["id"], ADMIN)
    assert seen_by_admin["provider:network_type"] == "vxlan"
    assert seen_by_admin["provider:segmentation_id"] == 1
    changed = await cloud.change("network", made["id"], name="green", admin_state_up="False", mtu=1400)
    assert (changed["name"], changed["admin_state_up"], changed["mtu"]) == ("green", False, 1400)
    assert changed["revision_number"] == 2
    await cloud.delete("network", made["id"])
    gone = await cloud.call("GET", f"/networks/{made['id']}")
    assert (gone.status, error(gone)) == (404, "NetworkNotFound")


async def test_every_network_has_a_segment_of_its_own(cloud: World) -> None:
    made = [await cloud.make("network") for _ in range(3)]
    shown = [await cloud.show("network", each["id"], ADMIN) for each in made]
    assert [each["provider:segmentation_id"] for each in shown] == [1, 2, 3]
    fields = {"provider__network_type": "vxlan", "provider__segmentation_id": 7}
    await cloud.make("network", ADMIN, **fields)
    body = {"network": {name.replace("__", ":"): value for name, value in fields.items()}}
    twice = await cloud.call("POST", "/networks", body, token=ADMIN)
    assert (twice.status, error(twice)) == (409, "TunnelIdInUse")
    flat = {"provider__network_type": "flat", "provider__physical_network": "public"}
    await cloud.make("network", ADMIN, **flat)
    body = {"network": {name.replace("__", ":"): value for name, value in flat.items()}}
    assert error(await cloud.call("POST", "/networks", body, token=ADMIN)) == "FlatNetworkInUse"
    local = await cloud.make("network", ADMIN, provider__network_type="local")
    await cloud.make("network", ADMIN, provider__network_type="local")
    assert local["provider:segmentation_id"] is None


@pytest.mark.parametrize(
    ("kind", "wire", "message"),
    [
        ("vlan", "eth1", "physical_network 'eth1' unknown for VLAN provider network"),
        ("vlan", "public", "physical_network 'public' unknown for VLAN provider network"),
        ("flat", "eth1", "physical_network 'eth1' unknown for flat provider network"),
        ("gre", None, "network_type value 'gre' not supported"),
        ("geneve", None, "network_type value 'geneve' not supported"),
    ],
)
async def test_segments_that_no_host_carries(cloud: World, kind: str, wire: str | None, message: str) -> None:
    body = {"network": {"provider:network_type": kind, "provider:physical_network": wire}}
    answer = await cloud.call("POST", "/networks", body, token=ADMIN)
    assert answer.status == 400 and message in answer.body.decode(), answer


FLAGS = [
    (kind.singular, name)
    for kind, struct in ((Networks, NetworkCreate), (Ports, PortCreate), (Routers, RouterCreate))
    for attribute, name in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    if bool in typing.get_args(typing.get_type_hints(struct)[attribute])
]


@pytest.mark.parametrize(("kind", "name"), FLAGS)
@pytest.mark.parametrize("value", [True, False])
async def test_each_flag_that_is_accepted_is_kept(cloud: World, kind: str, name: str, value: bool) -> None:
    body = {name: value}
    if kind == "port":
        body["network_id"] = (await cloud.make("network"))["id"]
    answer = await cloud.call("POST", f"/{kind}s", {kind: body}, token=ADMIN)
    if answer.status == 201:
        assert msgspec.json.decode(answer.body)[kind][name] is value
    else:
        assert answer.status in (400, 409), answer


@pytest.mark.parametrize("attribute", ["vlan_transparent", "propagate_uplink_status"])
async def test_attributes_of_extensions_that_are_not_there(cloud: World, attribute: str) -> None:
    network = await cloud.make("network")
    for path, body in (("networks", {"network": {}}), ("ports", {"port": {"network_id": network["id"]}})):
        for given in body.values():
            given[attribute] = "true"
        assert (await cloud.call("POST", f"/{path}", body)).status == 400
    assert attribute not in network


@pytest.mark.parametrize("path", ["network", "router"])
async def test_availability_zones_exist(cloud: World, path: str) -> None:
    answer = await cloud.call("POST", f"/{path}s", {path: {"availability_zone_hints": ["zz"]}})
    assert (answer.status, error(answer)) == (404, "AvailabilityZoneNotFound")
    made = await cloud.make(path, availability_zone_hints=["nova"])
    assert made["availability_zone_hints"] == ["nova"]


@pytest.mark.parametrize(
    ("domain", "status"),
    [("", 201), ("a.b.", 201), ("my-domain.org.", 201), ("a.b", 400), ("-a.b.", 400), ("a..b.", 400), ("a_b.", 400)],
)
async def test_dns_domains_are_whole_names(cloud: World, domain: str, status: int) -> None:
    answer = await cloud.call("POST", "/networks", {"network": {"dns_domain": domain}})
    assert answer.status == status, answer


async def test_only_one_default_external_network(cloud: World) -> None:
    await cloud.make("network", ADMIN, router__external=True, is_default=True)
    body = {"network": {"router:external": True, "is_default": True}}
    answer = await cloud.call("POST", "/networks", body, token=ADMIN)
    assert (answer.status, error(answer)) == (409, "DefaultExternalNetworkExists")


async def test_many_at_once_are_all_or_none(cloud: World) -> None:
    body = {"networks": [{"name": "a"}, {"name": "b"}]}
    answer = await cloud.call("POST", "/networks", body)
    assert answer.status == 201
    assert [each["name"] for each in answer.json()["networks"]] == ["a", "b"]
    bad = {"networks": [{"name": "c"}, {"name": "d", "shared": True}]}
    assert (await cloud.call("POST", "/networks", bad)).status == 403
    assert {each["name"] for each in await cloud.list("network")} == {"a", "b"}


async def test_a_network_in_use_stays(cloud: World) -> None:
    network, subnet = await cloud.network()
    port = await cloud.make("port", network_id=network["id"])
    for kind, id, type_ in (
        ("networks", network["id"], "NetworkInUse"),
        ("subnets", subnet["id"], "SubnetInUse"),
    ):
        answer = await cloud.call("DELETE", f"/{kind}/{id}")
        assert (answer.status, error(answer)) == (409, type_)
    await cloud.delete("port", port["id"])
    await cloud.delete("network", network["id"])
    assert await cloud.list("subnet") == []
    quota = (await cloud.call("GET", "/quotas/p1/details")).json()["quota"]
    assert {name: each["used"] for name, each in quota.items() if name in ("network", "subnet", "port")} == {
        "network": 0, "subnet": 0, "port": 0,
    }  # fmt: skip


async def test_a_shared_network_with_foreign_ports_stays_shared(cloud: World) -> None:
    network, _ = await cloud.network(token=ADMIN, shared=True)
    port = await cloud.make("port", BOB, network_id=network["id"])
    body = {"network": {"shared": False}}
    answer = await cloud.call("PUT", f"/networks/{network['id']}", body, token=ADMIN)
    assert (answer.status, error(answer)) == (409, "InvalidSharedSetting")
    await cloud.delete("port", port["id"], BOB)
    await cloud.change("network", network["id"], ADMIN, shared=False)


async def test_if_match(cloud: World) -> None:
    network = await cloud.make("network")
    path, body = f"/networks/{network['id']}", {"network": {"name": "x"}}
    wrong = await cloud.call("PUT", path, body, headers={"if-match": "revision_number=9"})
    assert (wrong.status, error(wrong)) == (412, "RevisionNumberConstraintFailed")
    assert (await cloud.call("PUT", path, body, headers={"if-match": "revision_number=1"})).status == 200
    assert (await cloud.call("PUT", path, body, headers={"if-match": "nonsense"})).status == 400


# --- subnets ---


async def test_a_subnet_shows_what_clients_expect(cloud: World) -> None:
    network, subnet = await cloud.network("10.1.2.7/24")
    assert subnet == {
        "id": subnet["id"], "name": "", "description": "", "project_id": "p1", "tenant_id": "p1",
        "network_id": network["id"], "ip_version": 4, "cidr": "10.1.2.0/24", "gateway_ip": "10.1.2.1",
        "enable_dhcp": True, "allocation_pools": [{"start": "10.1.2.2", "end": "10.1.2.254"}],
        "dns_nameservers": [], "host_routes": [], "ipv6_ra_mode": None, "ipv6_address_mode": None,
        "subnetpool_id": None, "service_types": [], "dns_publish_fixed_ip": False, "router:external": False,
        "tags": [], "revision_number": 0, "created_at": "2027-01-15T08:00:00Z", "updated_at": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    assert (await cloud.show("network", network["id"]))["subnets"] == [subnet["id"]]


@pytest.mark.parametrize(
    ("given", "gateway", "pools"),
    [
        ({"cidr": "10.0.0.0/24", "gateway_ip": None}, None, [("10.0.0.1", "10.0.0.254")]),
        ({"cidr": "10.0.0.0/24", "gateway_ip": "10.0.0.9"}, "10.0.0.9",
         [("10.0.0.1", "10.0.0.8"), ("10.0.0.10", "10.0.0.254")]),
        ({"cidr": "10.0.0.0/24", "gateway_ip": "10.0.0.254"}, "10.0.0.254", [("10.0.0.1", "10.0.0.253")]),
        ({"cidr": "10.0.0.0/31", "gateway_ip": None}, None, [("10.0.0.0", "10.0.0.1")]),
        ({"cidr": "10.0.0.0/24", "allocation_pools": [{"start": "10.0.0.9", "end": "10.0.0.11"}]}, "10.0.0.1",
         [("10.0.0.9", "10.0.0.11")]),
        ({"cidr": "fd00::/64", "ip_version": 6}, "fd00::1", [("fd00::2", "fd00::ffff:ffff:ffff:ffff")]),
        ({"cidr": "fd00::/64", "ip_version": 6, "gateway_ip": "fe80::1"}, "fe80::1",
         [("fd00::1", "fd00::ffff:ffff:ffff:ffff")]),
    ],
)  # fmt: skip
async def test_gateways_and_pools(
    cloud: World, given: dict[str, Any], gateway: str | None, pools: list[tuple[str, str]]
) -> None:
    network = await cloud.make("network")
    subnet = await cloud.make("subnet", network_id=network["id"], **{"ip_version": 4, **given})
    assert subnet["gateway_ip"] == gateway
    assert [(pool["start"], pool["end"]) for pool in subnet["allocation_pools"]] == pools


async def test_subnets_of_a_network_do_not_overlap(cloud: World) -> None:
    network, _ = await cloud.network("10.0.0.0/24")
    for cidr in ("10.0.0.0/24", "10.0.0.128/25", "10.0.0.0/16"):
        body = {"subnet": {"network_id": network["id"], "cidr": cidr, "ip_version": 4}}
        answer = await cloud.call("POST", "/subnets", body)
        assert answer.status == 400
        assert "overlaps with another subnet" in answer.json()["NeutronError"]["message"]
    await cloud.make("subnet", network_id=network["id"], cidr="10.0.1.0/24", ip_version=4)
    other = await cloud.make("network")
    await cloud.make("subnet", network_id=other["id"], cidr="10.0.0.0/24", ip_version=4)


async def test_subnets_change(cloud: World) -> None:
    network, subnet = await cloud.network("10.0.0.0/24")
    changed = await cloud.change(
        "subnet",
        subnet["id"],
        name="s",
        dns_nameservers=["8.8.8.8", "1.1.1.1"],
        host_routes=[{"destination": "10.9.0.0/16", "nexthop": "10.0.0.5"}],
        enable_dhcp=False,
        allocation_pools=[{"start": "10.0.0.100", "end": "10.0.0.110"}],
    )
    assert changed["dns_nameservers"] == ["8.8.8.8", "1.1.1.1"]
    assert changed["host_routes"] == [{"destination": "10.9.0.0/16", "nexthop": "10.0.0.5"}]
    assert changed["allocation_pools"] == [{"start": "10.0.0.100", "end": "10.0.0.110"}]
    port = await cloud.make("port", network_id=network["id"])
    assert port["fixed_ips"][0]["ip_address"] == "10.0.0.100"
    assert (await cloud.change("subnet", subnet["id"], gateway_ip=None))["gateway_ip"] is None
    clash = await cloud.call("PUT", f"/subnets/{subnet['id']}", {"subnet": {"gateway_ip": "10.0.0.105"}})
    assert (clash.status, error(clash)) == (409, "GatewayConflictWithAllocationPools")


async def test_pools_give_ranges(cloud: World) -> None:
    pool = await cloud.make(
        "subnetpool", name="p", prefixes=["10.10.0.0/16", "10.11.0.0/16"], default_prefixlen=24, min_prefixlen=20
    )
    assert pool["prefixes"] == ["10.10.0.0/15"]
    network = await cloud.make("network")
    one = await cloud.make("subnet", network_id=network["id"], subnetpool_id=pool["id"], ip_version=4)
    two = await cloud.make("subnet", network_id=network["id"], subnetpool_id=pool["id"], prefixlen=22)
    three = await cloud.make("subnet", network_id=network["id"], subnetpool_id=pool["id"], cidr="10.10.1.0/24")
    assert [one["cidr"], two["cidr"], three["cidr"]] == ["10.10.0.0/24", "10.10.4.0/22", "10.10.1.0/24"]
    for wrong in ({"prefixlen": 19}, {"cidr": "10.10.1.0/24"}, {"cidr": "192.168.0.0/24"}):
        body = {"subnet": {"network_id": network["id"], "subnetpool_id": pool["id"], "ip_version": 4, **wrong}}
        assert (await cloud.call("POST", "/subnets", body)).status == 400
    busy = await cloud.call("DELETE", f"/subnetpools/{pool['id']}")
    assert (busy.status, error(busy)) == (400, "SubnetPoolDeleteError")
    shrunk = await cloud.call("PUT", f"/subnetpools/{pool['id']}", {"subnetpool": {"prefixes": ["10.10.0.0/24"]}})
    assert error(shrunk) == "IllegalSubnetPoolPrefixUpdate"
    grown = await cloud.change("subnetpool", pool["id"], prefixes=["10.10.0.0/15", "10.12.0.0/16"])
    assert grown["prefixes"] == ["10.10.0.0/15", "10.12.0.0/16"]
    await cloud.delete("network", network["id"])
    await cloud.delete("subnetpool", pool["id"])


async def test_slaac_addresses_come_from_the_mac_address(cloud: World) -> None:
    network = await cloud.make("network")
    await cloud.make("subnet", network_id=network["id"], cidr="10.0.0.0/24", ip_version=4)
    await cloud.make(
        "subnet", network_id=network["id"], cidr="fd00:1::/64", ip_version=6,
        ipv6_ra_mode="slaac", ipv6_address_mode="slaac",
    )  # fmt: skip
    port = await cloud.make("port", network_id=network["id"], mac_address="FA-16-3E-12-34-56")
    assert port["mac_address"] == "fa:16:3e:12:34:56"
    assert [each["ip_address"] for each in port["fixed_ips"]] == ["10.0.0.2", "fd00:1::f816:3eff:fe12:3456"]


# --- lists ---


async def test_lists_filter_on_any_attribute(cloud: World) -> None:
    made = {name: await cloud.make("network", name=name, description=name * 2) for name in ("a", "b", "c")}
    await cloud.change("network", made["b"]["id"], admin_state_up=False)

    async def names(query: str, token: str = ALICE) -> list[str]:
        return sorted(each["name"] for each in await cloud.list("network", query, token))

    assert await names("name=a") == ["a"]
    assert await names("name=a&name=c") == ["a", "c"]
    assert await names("name=") == []
    assert await names(f"id={made['c']['id']}") == ["c"]
    assert await names("admin_state_up=false") == ["b"]
    assert await names("admin_state_up=True&description=cc") == ["c"]
    assert await names("tenant_id=p1") == ["a", "b", "c"]
    assert await names("project_id=p2") == []
    assert await names("project_id=p1", ADMIN) == ["a", "b", "c"]
    assert await names("mtu=1450") == ["a", "b", "c"]
    assert await names("mtu=99999999999999999999") == []
    assert await names("provider:network_type=vxlan", ADMIN) == ["a", "b", "c"]
    assert await names("provider:network_type=vxlan") == []  # a filter on a hidden attribute matches nothing
    assert await names("router:external=False") == ["a", "b", "c"]
    unknown = await cloud.call("GET", "/networks?colour=blue")
    assert unknown.status == 400
    assert "['colour'] is invalid attribute for filtering" in unknown.json()["NeutronError"]["message"]


async def test_lists_choose_fields_and_sort(cloud: World) -> None:
    for name in ("b", "c", "a"):
        await cloud.make("network", name=name)
    listed = await cloud.list("network", "fields=name&fields=tenant_id&sort_key=name&sort_dir=desc")
    assert listed == [{"name": name, "tenant_id": "p1"} for name in ("c", "b", "a")]
    listed = await cloud.list("network", "fields=name&sort_key=status&sort_dir=asc&sort_key=name&sort_dir=asc")
    assert [each["name"] for each in listed] == ["a", "b", "c"]
    shown = (await cloud.call("GET", f"/networks/{(await cloud.list('network'))[0]['id']}?fields=status")).json()
    assert shown == {"network": {"status": "ACTIVE"}}


async def test_lists_come_in_pages(cloud: World) -> None:
    names = [f"n{number}" for number in range(7)]
    for name in names:
        await cloud.make("network", name=name)
    for sort in ("", "&sort_key=name&sort_dir=asc", "&sort_key=dns_domain&sort_dir=desc&sort_key=name&sort_dir=desc"):
        whole = [each["id"] for each in await cloud.list("network", f"fields=id{sort}")]
        seen: list[str] = []
        url = f"/networks?limit=3{sort}"
        pages = []
        while url:
            page = (await cloud.call("GET", url)).json()
            seen += [each["id"] for each in page["networks"]]
            pages.append([each["id"] for each in page["networks"]])
            links = {link["rel"]: link["href"] for link in page.get("networks_links", ())}
            url = links["next"].removeprefix("http://cloud/network/v2.0") if "next" in links else ""
        assert seen == whole
        assert [len(page) for page in pages] == [3, 3, 1]
        back = links["previous"].removeprefix("http://cloud/network/v2.0")
        assert [each["id"] for each in (await cloud.call("GET", back)).json()["networks"]] == pages[1]
    assert (await cloud.call("GET", "/networks?limit=0")).json().keys() == {"networks"}
    assert (await cloud.call("GET", "/networks?limit=2&marker=nothing")).status == 404
    lists = "subnets subnetpools ports security-groups security-group-rules routers floatingips agents qos/policies"
    for name in [*lists.split(), "network-ip-availabilities"]:
        assert (await cloud.call("GET", f"/{name}?limit=2&marker=nothing", token=ADMIN)).status == 404, name


# --- tags ---


async def test_tags(cloud: World) -> None:
    made = {}
    for name, tags in (("a", ["red", "big"]), ("b", ["red"]), ("c", [])):
        made[name] = await cloud.make("network", name=name, tags=tags)
    path = f"/networks/{made['c']['id']}/tags"
    assert (await cloud.call("PUT", f"{path}/blue")).status == 201
    assert (await cloud.call("PUT", f"{path}/blue")).status == 201
    assert (await cloud.call("GET", f"{path}/blue")).status == 204
    assert (await cloud.call("GET", f"{path}/red")).status == 404
    assert (await cloud.call("PUT", path, {"tags": ["x", "y"]})).json() == {"tags": ["x", "y"]}
    assert (await cloud.call("POST", path, {"tags": ["z"]})).status in (200, 201)
    assert (await cloud.call("DELETE", f"{path}/y")).status == 204
    assert (await cloud.call("DELETE", f"{path}/y")).status == 404
    assert (await cloud.call("GET", path)).json() == {"tags": ["x", "z"]}

    async def names(query: str) -> list[str]:
        return sorted(each["name"] for each in await cloud.list("network", query))

    assert await names("tags=red") == ["a", "b"]
    assert await names("tags=red,big") == ["a"]
    assert await names("tags-any=big,x") == ["a", "c"]
    assert await names("not-tags=red,big") == ["b", "c"]
    assert await names("not-tags-any=red,big") == ["c"]
    assert (await cloud.call("DELETE", path)).status == 204
    assert (await cloud.show("network", made["c"]["id"]))["tags"] == []
    subnet = (await cloud.network())[1]
    assert (await cloud.call("PUT", f"/subnets/{subnet['id']}/tags/t")).status == 201
    assert (await cloud.call("GET", "/subnets?tags=t")).json()["subnets"][0]["id"] == subnet["id"]


# --- quotas ---


async def test_quotas(cloud: World) -> None:
    own = (await cloud.call("GET", "/quotas/p1")).json()["quota"]
    assert (own["port"], own["network"], own["project_id"]) == (500, 100, "p1")
    default = (await cloud.call("GET", "/quotas/p1/default")).json()["quota"]
    assert (default["port"], {type(each) for each in default.values()}) == (500, {int})
    assert (await cloud.call("GET", "/quotas/p2")).status == 403
    assert (await cloud.call("GET", "/quotas/p2", token=MANAGER)).status == 403
    assert (await cloud.call("GET", "/quotas")).status == 403
    assert (await cloud.call("PUT", "/quotas/p1", {"quota": {"port": 1}})).status == 403
    changed = await cloud.call("PUT", "/quotas/p1", {"quota": {"network": 1, "port": "-1"}}, token=ADMIN)
    assert (changed.json()["quota"]["network"], changed.json()["quota"]["port"]) == (1, -1)
    [listed] = (await cloud.call("GET", "/quotas", token=ADMIN)).json()["quotas"]
    assert (listed["project_id"], listed["network"]) == ("p1", 1)
    await cloud.make("network")
    full = await cloud.call("POST", "/networks", {"network": {}})
    assert (full.status, error(full)) == (409, "OverQuota")
    assert "['network']" in full.json()["NeutronError"]["message"]
    low = await cloud.call("PUT", "/quotas/p1", {"quota": {"network": 0}}, token=ADMIN)
    assert low.status == 400
    assert (await cloud.call("PUT", "/quotas/p1", {"quota": {"network": 0, "force": True}}, token=ADMIN)).status == 200
    details = (await cloud.call("GET", "/quotas/p1/details.json")).json()["quota"]["network"]
    assert details == {"limit": 0, "used": 1, "reserved": 0}
    assert (await cloud.call("DELETE", "/quotas/p1", token=ADMIN)).status == 204
    assert (await cloud.call("GET", "/quotas/p1")).json()["quota"]["network"] == 100


async def test_how_full_networks_are(cloud: World) -> None:
    network, subnet = await cloud.network("10.0.0.0/29")
    for _ in range(2):
        await cloud.make("port", network_id=network["id"])
    assert (await cloud.call("GET", "/network-ip-availabilities")).status == 403
    [listed] = await cloud.list("network_ip_availability", f"network_id={network['id']}", ADMIN)
    assert (listed["total_ips"], listed["used_ips"]) == (5, 2)
    assert listed["subnet_ip_availability"] == [
        {"subnet_id": subnet["id"], "subnet_name": "", "cidr": "10.0.0.0/29", "ip_version": 4, "total_ips": 5,
         "used_ips": 2}
    ]  # fmt: skip
    shown = await cloud.call("GET", f"/network-ip-availabilities/{network['id']}", token=ADMIN)
    assert shown.json()["network_ip_availability"]["network_id"] == network["id"]


async def test_a_reader_reads(cloud: World) -> None:
    network, _ = await cloud.network()
    assert (await cloud.call("GET", "/networks", token=READER)).json()["networks"][0]["id"] == network["id"]
    assert (await cloud.call("POST", "/networks", {"network": {}}, token=READER)).status == 403
    assert (await cloud.call("DELETE", f"/networks/{network['id']}", token=READER)).status == 403


async def test_first_networks_are_made_once(cloud: World) -> None:
    assert await cloud.role.bootstrap() is True
    assert await cloud.role.bootstrap() is False
    listed = {each["name"]: each for each in await cloud.list("network")}
    assert listed.keys() == {"private", "public"}
    assert listed["private"]["shared"] and listed["public"]["router:external"]
    port = await cloud.make("port", network_id=listed["private"]["id"])
    assert port["fixed_ips"][0]["ip_address"] == "10.0.0.2"
    floating = await cloud.make("floatingip", floating_network_id=listed["public"]["id"], port_id=port["id"])
    assert floating["floating_ip_address"].startswith("203.0.113.")
    assert floating["status"] == "ACTIVE"
    await cloud.delete("floatingip", floating["id"])
    await cloud.delete("port", port["id"])
    router = (await cloud.list("router", token=ADMIN))[0]
    subnet = (await cloud.list("subnet", "name=private-subnet"))[0]
    path = f"/routers/{router['id']}/remove_router_interface"
    assert (await cloud.call("PUT", path, {"subnet_id": subnet["id"]}, token=ADMIN)).status == 200
    await cloud.delete("network", listed["private"]["id"], ADMIN)
    # A deleted network does not come back at the next start.
    assert await cloud.role.bootstrap() is False


async def test_a_list_has_pages_though_no_limit_is_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path, max_limit=3) as cloud:
        made = [(await cloud.make("network", name=f"n{number}"))["id"] for number in range(7)]
        for query in ("", "?limit=100", "?limit=2"):
            found: list[str] = []
            url: str | None = f"/networks{query}"
            while url is not None:
                body = (await cloud.call("GET", url)).json()
                assert len(body["networks"]) <= 3
                found += [network["id"] for network in body["networks"]]
                following = [link["href"] for link in body.get("networks_links", ()) if link["rel"] == "next"]
                url = following[0].partition("/v2.0")[2] if following and body["networks"] else None
            assert sorted(found) == sorted(made), query
        small = (await cloud.call("GET", "/networks?name=n1")).json()
        assert small.keys() == {"networks"}, "a list that fits has no links"

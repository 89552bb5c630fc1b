"""The tour of networks: subnets, ports, routers, floating IPs, security groups, QoS."""

from typing import Any

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO


def networks(osc: OpenStackClient) -> None:
    """A network with a subnet and a port."""
    assert osc.column("network list", "--internal", cloud=DEMO) == ["private"]
    osc("network create", "tour-net", cloud=DEMO)
    osc("network set", "--description", "scenic", "--tag", "t", "tour-net", cloud=DEMO)
    shown = osc.json("network show", "tour-net", cloud=DEMO)
    assert (shown["description"], shown["tags"], shown["status"]) == ("scenic", ["t"], "ACTIVE")
    osc("network unset", "--tag", "t", "tour-net", cloud=DEMO)
    assert osc.json("network show", "tour-net", cloud=DEMO)["tags"] == []

    osc("subnet create", "--network", "tour-net", "--subnet-range", "10.99.0.0/24", "tour-subnet", cloud=DEMO)
    osc("subnet set", "--dns-nameserver", "10.99.0.2", "tour-subnet", cloud=DEMO)
    shown = osc.json("subnet show", "tour-subnet", cloud=DEMO)
    assert (shown["gateway_ip"], shown["dns_nameservers"]) == ("10.99.0.1", ["10.99.0.2"])
    osc("subnet unset", "--dns-nameserver", "10.99.0.2", "tour-subnet", cloud=DEMO)
    assert osc.json("subnet show", "tour-subnet", cloud=DEMO)["dns_nameservers"] == []
    assert "tour-subnet" in osc.column("subnet list", cloud=DEMO)

    osc("port create", "--network", "tour-net", "tour-port", cloud=DEMO)
    osc("port set", "--fixed-ip", "ip-address=10.99.0.77", "--tag", "t", "tour-port", cloud=DEMO)
    shown = osc.json("port show", "tour-port", cloud=DEMO)
    assert "10.99.0.77" in [address["ip_address"] for address in shown["fixed_ips"]]
    osc("port unset", "--tag", "t", "tour-port", cloud=DEMO)
    assert osc.column("port list", "--network", "tour-net", cloud=DEMO) == ["tour-port"]
    assert osc.json("ip availability show", "tour-net")["used_ips"] >= 1
    assert "tour-net" in osc.column("ip availability list", name="Network Name")
    routers(osc)
    osc("port delete", "tour-port", cloud=DEMO)
    osc("subnet delete", "tour-subnet", cloud=DEMO)
    osc("network delete", "tour-net", cloud=DEMO)
    assert osc.column("network list", "--internal", cloud=DEMO) == ["private"]


def routers(osc: OpenStackClient) -> None:
    """A router between the tour's subnet and the public network, and a floating IP of its port."""
    osc("router create", "tour-router", cloud=DEMO)
    osc("router add subnet", "tour-router", "tour-subnet", cloud=DEMO)
    assert "10.99.0.1" in osc("router show", "tour-router", cloud=DEMO)
    assert "tour-router" in osc.column("router list", cloud=DEMO)
    osc("router set", "--external-gateway", "public", "--description", "way out", "tour-router", cloud=DEMO)
    assert osc.json("router show", "tour-router", cloud=DEMO)["description"] == "way out"

    floating = osc.json("floating ip create", "--port", "tour-port", "--fixed-ip-address", "10.99.0.77", "public",
                        cloud=DEMO)  # fmt: skip
    assert osc.json("floating ip show", floating["id"], cloud=DEMO)["fixed_ip_address"] == "10.99.0.77"
    assert len(osc.json("floating ip list", cloud=DEMO)) == 1
    osc("floating ip unset", "--port", floating["floating_ip_address"], cloud=DEMO)
    assert osc.json("floating ip show", floating["id"], cloud=DEMO)["fixed_ip_address"] is None
    osc("floating ip set", "--port", "tour-port", "--fixed-ip-address", "10.99.0.77", floating["id"], cloud=DEMO)
    assert "409" in osc.refused("router unset", "--external-gateway", "tour-router", cloud=DEMO)
    osc("floating ip delete", floating["id"], cloud=DEMO)

    osc("router add route", "--route", "destination=10.50.0.0/16,gateway=10.99.0.9", "tour-router", cloud=DEMO)
    assert "10.50.0.0/16" in osc("router show", "tour-router", cloud=DEMO)
    osc("router remove route", "--route", "destination=10.50.0.0/16,gateway=10.99.0.9", "tour-router", cloud=DEMO)
    assert "10.50.0.0/16" not in osc("router show", "tour-router", cloud=DEMO)
    osc("router unset", "--external-gateway", "tour-router", cloud=DEMO)
    osc("router add gateway", "tour-router", "public", cloud=DEMO)
    assert osc.json("router show", "tour-router", cloud=DEMO)["external_gateway_info"]["external_fixed_ips"]
    assert "one at most" in osc.refused("router add gateway", "tour-router", "public", cloud=DEMO)
    osc("router remove gateway", "tour-router", "public", cloud=DEMO)
    assert osc.json("router show", "tour-router", cloud=DEMO)["external_gateway_info"] is None
    osc("router remove subnet", "tour-router", "tour-subnet", cloud=DEMO)
    osc("port create", "--network", "tour-net", "--fixed-ip", "ip-address=10.99.0.5", "router-port", cloud=DEMO)
    osc("router add port", "tour-router", "router-port", cloud=DEMO)
    assert "10.99.0.5" in osc("router show", "tour-router", cloud=DEMO)
    osc("router remove port", "tour-router", "router-port", cloud=DEMO)
    assert "10.99.0.5" not in osc("router show", "tour-router", cloud=DEMO)
    osc("router delete", "tour-router", cloud=DEMO)


def subnet_pools(osc: OpenStackClient) -> None:
    """A pool of which subnets take their ranges."""
    osc("subnet pool create", "--pool-prefix", "10.200.0.0/16", "tour-pool", cloud=DEMO)
    osc("subnet pool set", "--default-prefix-length", "26", "--tag", "t", "tour-pool", cloud=DEMO)
    shown = osc.json("subnet pool show", "tour-pool", cloud=DEMO)
    assert (shown["prefixes"], shown["default_prefixlen"], shown["tags"]) == (["10.200.0.0/16"], 26, ["t"])
    osc("subnet pool unset", "--tag", "t", "tour-pool", cloud=DEMO)
    assert osc.json("subnet pool show", "tour-pool", cloud=DEMO)["tags"] == []
    assert "tour-pool" in osc.column("subnet pool list", cloud=DEMO)
    osc("address scope create", "tour-scope", cloud=DEMO)
    osc("address scope set", "--name", "tour-scope-4", "tour-scope", cloud=DEMO)
    scope = osc.json("address scope show", "tour-scope-4", cloud=DEMO)["id"]
    assert osc.column("address scope list", cloud=DEMO) == ["tour-scope-4"]
    osc("subnet pool set", "--address-scope", "tour-scope-4", "tour-pool", cloud=DEMO)
    osc("network create", "pooled", cloud=DEMO)
    made = osc.json("subnet create", "--network", "pooled", "--subnet-pool", "tour-pool", "from-pool", cloud=DEMO)
    assert made["cidr"] == "10.200.0.0/26"
    assert osc.json("network show", "pooled", cloud=DEMO)["ipv4_address_scope"] == scope
    assert "409" in osc.refused("address scope delete", "tour-scope-4", cloud=DEMO)
    osc("network delete", "pooled", cloud=DEMO)
    osc("subnet pool delete", "tour-pool", cloud=DEMO)
    osc("address scope delete", "tour-scope-4", cloud=DEMO)


def security_groups(osc: OpenStackClient) -> None:
    """A group and its rules."""
    osc("security group create", "tour-group", cloud=DEMO)
    osc("security group set", "--description", "ssh", "--tag", "t", "tour-group", cloud=DEMO)
    osc("security group unset", "--tag", "t", "tour-group", cloud=DEMO)
    rule = osc.json("security group rule create", "--protocol", "tcp", "--dst-port", "22", "tour-group", cloud=DEMO)
    assert rule["id"] in osc.column("security group rule list", "tour-group", name="ID", cloud=DEMO)
    assert osc.json("security group rule show", rule["id"], cloud=DEMO)["port_range_min"] == 22
    osc("security group rule delete", rule["id"], cloud=DEMO)
    shown = osc.json("security group show", "tour-group", cloud=DEMO)
    assert (shown["description"], len(shown["rules"]), shown["tags"]) == ("ssh", 2, [])
    assert set(osc.column("security group list", cloud=DEMO)) == {"default", "tour-group"}
    osc("security group delete", "tour-group", cloud=DEMO)
    assert osc.column("security group list", cloud=DEMO) == ["default"]


def qos(osc: OpenStackClient) -> None:
    """A policy that limits bandwidth."""
    assert "bandwidth_limit" in osc.column("network qos rule type list", name="Type")
    assert osc.json("network qos rule type show", "bandwidth_limit")["rule_type_name"] == "bandwidth_limit"
    osc("network qos policy create", "tour-qos")
    osc("network qos policy set", "--description", "slow", "--share", "tour-qos")
    assert "tour-qos" in osc.column("network qos policy list", cloud=DEMO)
    rule = osc.json("network qos rule create", "--type", "bandwidth-limit", "--max-kbps", "1000", "tour-qos")["id"]
    osc("network qos rule set", "--max-kbps", "2000", "tour-qos", rule)
    assert osc.json("network qos rule show", "tour-qos", rule)["max_kbps"] == 2000
    assert osc.column("network qos rule list", "tour-qos", name="ID") == [rule]
    shown = osc.json("network qos policy show", "tour-qos")
    assert (shown["description"], shown["shared"]) == ("slow", True)
    mark = osc.json("network qos rule create", "--type", "dscp-marking", "--dscp-mark", "26", "tour-qos")["id"]
    assert osc.json("network qos rule show", "tour-qos", mark)["dscp_mark"] == 26
    osc("network qos rule delete", "tour-qos", mark)
    least = ("--type", "minimum-bandwidth", "--min-kbps", "10", "--egress", "tour-qos")
    least_id = osc.json("network qos rule create", *least)["id"]
    osc("network create", "--qos-policy", "tour-qos", "tour-guaranteed")
    osc("network delete", "tour-guaranteed")
    osc("network qos rule delete", "tour-qos", least_id)
    osc("network qos rule delete", "tour-qos", rule)
    osc("network qos policy delete", "tour-qos")
    assert "tour-qos" not in osc.column("network qos policy list")


def trunks(osc: OpenStackClient) -> None:
    """A trunk with a subport in a VLAN."""
    for name, cidr in (("tour-trunk", "10.97.0.0/24"), ("tour-vlan", "10.98.0.0/24")):
        osc("network create", name, cloud=DEMO)
        osc("subnet create", "--network", name, "--subnet-range", cidr, name, cloud=DEMO)
        osc("port create", "--network", name, name, cloud=DEMO)
    vlan = "port=tour-vlan,segmentation-type=vlan,segmentation-id=7"
    osc("network trunk create", "--parent-port", "tour-trunk", "--subport", vlan, "tour-trunk", cloud=DEMO)
    osc("network trunk set", "--description", "many", "tour-trunk", cloud=DEMO)
    assert osc.json("network trunk show", "tour-trunk", cloud=DEMO)["description"] == "many"
    assert osc.column("network trunk list", cloud=DEMO) == ["tour-trunk"]
    listed = osc.column("network subport list", "--trunk", "tour-trunk", name="Segmentation ID", cloud=DEMO)
    assert listed == [7]
    assert osc.json("port show", "tour-trunk", cloud=DEMO)["trunk_details"]["sub_ports"][0]["segmentation_id"] == 7
    osc("network trunk unset", "--subport", "tour-vlan", "tour-trunk", cloud=DEMO)
    assert osc.json("network trunk show", "tour-trunk", cloud=DEMO)["sub_ports"] == []
    osc("network trunk delete", "tour-trunk", cloud=DEMO)
    for name in ("tour-trunk", "tour-vlan"):
        osc("port delete", name, cloud=DEMO)
        osc("network delete", name, cloud=DEMO)


def sharing(osc: OpenStackClient) -> None:
    """What an administrator shares with one project, and not with all."""
    demo, admin = (osc.json("project show", name)["id"] for name in ("demo", "admin"))
    osc("network create", "tour-lent")
    osc("security group create", "tour-lent")
    for kind in ("network", "security_group"):
        to_demo = ("--action", "access_as_shared", "--target-project", demo)
        entry = osc.json("network rbac create", "--type", kind, *to_demo, "tour-lent")["id"]
        assert entry in osc.column("network rbac list", "--type", kind, name="ID")
        listed = osc.column(f"{kind.replace('_', ' ')} list", cloud=DEMO)
        assert "tour-lent" in listed
        osc("network rbac set", "--target-project", admin, entry)
        assert osc.json("network rbac show", entry)["target_project_id"] == admin
        assert "tour-lent" not in osc.column(f"{kind.replace('_', ' ')} list", cloud=DEMO)
        osc("network rbac delete", entry)
    osc("security group delete", "tour-lent")
    osc("network delete", "tour-lent")


def default_rules(osc: OpenStackClient) -> None:
    """The rules that new security groups get."""
    ssh = ("--ingress", "--protocol", "tcp", "--dst-port", "22", "--for-custom-sg")
    rule = osc.json("default security group rule create", *ssh)["id"]
    assert rule in osc.column("default security group rule list", name="ID", cloud=DEMO)
    assert osc.json("default security group rule show", rule)["port_range_min"] == 22
    made = osc.json("security group create", "tour-ssh", cloud=DEMO)
    assert [each["port_range_min"] for each in made["rules"] if each["direction"] == "ingress"] == [22]
    osc("security group delete", "tour-ssh", cloud=DEMO)
    osc("default security group rule delete", rule)
    assert rule not in osc.column("default security group rule list", name="ID")


def agents(osc: OpenStackClient) -> None:
    """Agents of networks, where there are any, and what the service offers."""
    rows: list[dict[str, Any]] = osc.json("network agent list")
    for row in rows:
        assert osc.json("network agent show", row["ID"])["host"] == row["Host"]
    osc("network service provider list")
    topology = osc.json("network auto allocated topology create", "--check-resources", cloud=DEMO)
    assert topology

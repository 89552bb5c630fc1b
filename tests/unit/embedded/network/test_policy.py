from pathlib import Path

import pytest

from micronova.embedded.network.core import Core, NetworkServiceSettings
from micronova.embedded.network.service import routes
from micronova.objects.context import RequestContext
from micronova.policies.enforcer import Enforcer
from micronova.policies.network import NAMES, RULES


def caller(project: str = "p1", *roles: str) -> RequestContext:
    return RequestContext(request_id="r", user_id="u", project_id=project, roles=roles or ("member", "reader"))


def test_every_rule_decides_without_failing() -> None:
    enforcer = Enforcer(RULES)
    for rule in RULES:
        for target in (None, {}, {"project_id": "p2", "device_owner": "compute:", "network:shared": True}):
            enforcer.allows(rule.name, caller(), target)
        assert enforcer.allows(rule.name, caller("p0", "admin", "member", "reader"), None) or rule.name in (
            "context_is_advsvc", "service_api", "shared", "external", "external_network", "shared_subnetpools",
            "shared_address_scopes", "shared_security_group", "shared_qos_policy", "network_device", "compute_device",
            "baremetal_device", "manila_device",
        ), rule.name  # fmt: skip


def test_every_route_names_a_rule_that_exists() -> None:
    core = Core(None, None, None, NetworkServiceSettings(), None, None)  # type: ignore[arg-type]
    for route in routes(core):
        assert route.policy in (None, "") or route.policy in NAMES, route.label


def test_networks_of_others() -> None:
    enforcer = Enforcer(RULES)
    theirs = {"project_id": "p2", "shared": False, "router:external": False}
    assert not enforcer.allows("get_network", caller(), theirs)
    assert enforcer.allows("get_network", caller(), {**theirs, "shared": True})
    assert enforcer.allows("get_network", caller(), {**theirs, "router:external": True})
    port = {"project_id": "p1", "network:project_id": "p2", "network:shared": False, "device_owner": ""}
    assert not enforcer.allows("create_port", caller(), port)
    assert enforcer.allows("create_port", caller(), {**port, "network:shared": True})
    assert not enforcer.allows("create_port", caller("p1", "reader"), {**port, "network:shared": True})
    assert enforcer.allows("create_port", caller(), {**port, "network:project_id": "p1"})
    assert enforcer.allows("get_port", caller("p2", "reader"), port)
    assert not enforcer.allows("get_port", caller("p3", "reader"), port)


@pytest.mark.parametrize(
    ("owner", "allowed"), [("compute:", False), ("baremetal:", False), ("", True), ("network:", True)]
)
def test_ports_of_servers_are_deleted_by_services(owner: str, allowed: bool) -> None:
    target = {"project_id": "p1", "network:project_id": "p1", "device_owner": owner}
    assert Enforcer(RULES).allows("delete_port", caller(), target) is allowed
    assert Enforcer(RULES).allows("delete_port", caller("x", "service"), target)


def test_an_operators_file_written_for_neutron(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text('"get_network": "rule:admin_only or field:networks:shared=True"\n"create_port:device_owner": "!"\n')
    enforcer = Enforcer(RULES, file)
    assert not enforcer.allows("get_network", caller(), {"project_id": "p1", "shared": False})
    assert enforcer.allows("get_network", caller(), {"project_id": "p1", "shared": True})
    assert not enforcer.allows("create_port:device_owner", caller("p0", "admin"), {"project_id": "p1"})

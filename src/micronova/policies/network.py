"""The policy rules of the network service: Neutron's names and its defaults for scoped roles, as data.

Some defaults differ from Neutron's. Creating a port on a shared network needs the role member, not only reader. Admins
may set binding:profile. An RBAC policy makes a network external only if the caller may do so by an update. Callers
that may see a shared QoS policy may also list its rules. The role `service` suffices for compute's user, so it may also
read security groups and floating IPs, and create the topology of a project.
"""

import re
from collections.abc import Mapping
from typing import Any

from oslo_policy import policy as oslo

from micronova.policies.enforcer import Rule


class FieldCheck(oslo.Check):
    """Compares an attribute of the target: `field:networks:shared=True`, `field:port:device_owner=~^network:`.

    A policy.yaml for Neutron uses this form. If the target is a resource on a network, `network:NAME` is the
    attribute of the network.
    """

    def __init__(self, kind: str, match: str) -> None:
        super().__init__(kind, match)
        _, _, condition = match.partition(":")
        self._name, _, value = condition.partition("=")
        self._pattern = re.compile(value[1:]) if value.startswith("~") else None
        self._value = value

    def __call__(self, target: Mapping[str, Any], creds: Any, enforcer: Any, current_rule: Any = None) -> bool:
        value = target.get(f"network:{self._name}", target.get(self._name))
        if value is None:
            return False
        if self._pattern is not None:
            return self._pattern.match(str(value)) is not None
        return str(value) == self._value


oslo.register("field", FieldCheck)

ADMIN = "rule:admin_only"
SERVICE = "rule:service_api"
READER = f"({ADMIN}) or (role:reader and project_id:%(project_id)s)"
MEMBER = f"({ADMIN}) or (role:member and project_id:%(project_id)s)"
MANAGER = f"({ADMIN}) or (role:manager and project_id:%(project_id)s)"
ADMIN_OR_SERVICE = f"({ADMIN}) or ({SERVICE})"
MEMBER_OR_SERVICE = f"{MEMBER} or {SERVICE}"
NETWORK_MEMBER = f"{ADMIN_OR_SERVICE} or (role:member and rule:network_owner)"
SUBNET_MEMBER = f"{MEMBER} or (role:member and rule:network_owner)"
SUBNET_READER = f"{READER} or rule:shared or rule:external_network or (role:reader and rule:network_owner)"
GROUP_MEMBER = f"({ADMIN}) or (role:member and rule:sg_owner)"
GROUP_READER = f"({ADMIN}) or (role:reader and rule:sg_owner)"
POLICY_READER = f"{READER} or rule:shared_qos_policy"
LIMIT_READER = f"({ADMIN}) or (role:reader and rule:ext_parent_owner) or rule:shared_qos_policy"
LIMIT_MANAGER = f"({ADMIN}) or (role:manager and rule:ext_parent_owner)"
OWN_PORT = "(role:member and rule:network_owner) or (role:member and project_id:%(project_id)s)"
ATTACHED = "rule:compute_device or rule:baremetal_device or rule:manila_device"

_CHECKS: dict[str, str] = {
    # what the other rules are made of
    "context_is_admin": "role:admin",
    "context_is_advsvc": "role:advsvc",
    "service_api": "role:service",
    "admin_only": "rule:context_is_admin",
    "regular_user": "",
    "owner": "project_id:%(project_id)s",
    "admin_or_owner": "rule:context_is_admin or rule:owner",
    "default": "rule:admin_or_owner",
    "network_owner": "project_id:%(network:project_id)s",
    "sg_owner": "project_id:%(security_group:project_id)s",
    "shared": "field:networks:shared=True",
    "external": "field:networks:router:external=True",
    "external_network": "field:subnets:router:external=True",
    "shared_subnetpools": "field:subnetpools:shared=True",
    "shared_address_scopes": "field:address_scopes:shared=True",
    "shared_security_group": "field:security_groups:shared=True",
    "shared_qos_policy": "field:policies:shared=True",
    "ext_parent_owner": "project_id:%(ext_parent:project_id)s",
    "network_device": "field:port:device_owner=~^network:",
    "compute_device": "field:port:device_owner=~^compute:",
    "baremetal_device": "field:port:device_owner=~^baremetal:",
    "manila_device": "field:port:device_owner=~^manila:",
    # networks
    "create_network": MEMBER,
    "create_network:shared": ADMIN,
    "create_network:router:external": ADMIN,
    "create_network:is_default": ADMIN,
    "create_network:port_security_enabled": MEMBER,
    "create_network:provider:network_type": ADMIN,
    "create_network:provider:physical_network": ADMIN,
    "create_network:provider:segmentation_id": ADMIN,
    "create_network:tags": MEMBER,
    "get_network": f"{READER} or {SERVICE} or rule:shared or rule:external or rule:context_is_advsvc",
    "get_network:provider:network_type": ADMIN,
    "get_network:provider:physical_network": ADMIN,
    "get_network:provider:segmentation_id": ADMIN,
    "get_network:tags": f"{READER} or {SERVICE} or rule:shared or rule:external or rule:context_is_advsvc",
    "update_network": MEMBER,
    "update_network:shared": ADMIN,
    "update_network:router:external": ADMIN,
    "update_network:is_default": ADMIN,
    "update_network:port_security_enabled": MEMBER,
    "update_network:provider:network_type": ADMIN,
    "update_network:provider:physical_network": ADMIN,
    "update_network:provider:segmentation_id": ADMIN,
    "update_network:tags": MEMBER,
    "delete_network": MEMBER,
    "delete_network:tags": MEMBER,
    # subnets
    "create_subnet": f"({ADMIN}) or (role:member and rule:network_owner)",
    "create_subnet:segment_id": ADMIN,
    "create_subnet:service_types": ADMIN,
    "create_subnet:tags": SUBNET_MEMBER,
    "get_subnet": f"{SUBNET_READER} or {SERVICE}",
    "get_subnet:segment_id": ADMIN,
    "get_subnet:tags": f"{SUBNET_READER} or {SERVICE}",
    "update_subnet": SUBNET_MEMBER,
    "update_subnet:segment_id": ADMIN,
    "update_subnet:service_types": ADMIN,
    "update_subnet:tags": SUBNET_MEMBER,
    "delete_subnet": SUBNET_MEMBER,
    "delete_subnet:tags": SUBNET_MEMBER,
    # subnet pools
    "create_subnetpool": MEMBER,
    "create_subnetpool:shared": ADMIN,
    "create_subnetpool:is_default": ADMIN,
    "create_subnetpool:tags": MEMBER,
    "get_subnetpool": f"{READER} or rule:shared_subnetpools",
    "get_subnetpool:tags": f"{READER} or rule:shared_subnetpools",
    "update_subnetpool": MEMBER,
    "update_subnetpool:is_default": ADMIN,
    "update_subnetpool:tags": MEMBER,
    "delete_subnetpool": MEMBER,
    "delete_subnetpool:tags": MEMBER,
    # address scopes
    "create_address_scope": MEMBER,
    "create_address_scope:shared": ADMIN,
    "get_address_scope": f"{READER} or rule:shared_address_scopes",
    "update_address_scope": MEMBER,
    "update_address_scope:shared": ADMIN,
    "delete_address_scope": MEMBER,
    # ports
    "create_port": f"{NETWORK_MEMBER} or (role:member and rule:shared)",
    "create_port:device_id": MEMBER_OR_SERVICE,
    "create_port:device_owner": f"not rule:network_device or {NETWORK_MEMBER}",
    "create_port:mac_address": NETWORK_MEMBER,
    "create_port:fixed_ips": f"{NETWORK_MEMBER} or rule:shared",
    "create_port:fixed_ips:ip_address": NETWORK_MEMBER,
    "create_port:fixed_ips:subnet_id": f"{NETWORK_MEMBER} or rule:shared",
    "create_port:port_security_enabled": NETWORK_MEMBER,
    "create_port:binding:host_id": ADMIN_OR_SERVICE,
    "create_port:binding:profile": ADMIN_OR_SERVICE,
    "create_port:binding:vnic_type": MEMBER_OR_SERVICE,
    "create_port:allowed_address_pairs": NETWORK_MEMBER,
    "create_port:allowed_address_pairs:mac_address": NETWORK_MEMBER,
    "create_port:allowed_address_pairs:ip_address": NETWORK_MEMBER,
    "create_port:tags": f"{MEMBER_OR_SERVICE} or rule:context_is_advsvc",
    "get_port": f"{ADMIN_OR_SERVICE} or (role:reader and rule:network_owner) or (role:reader and rule:owner)",
    "get_port:binding:vif_type": ADMIN_OR_SERVICE,
    "get_port:binding:vif_details": ADMIN_OR_SERVICE,
    "get_port:binding:host_id": ADMIN_OR_SERVICE,
    "get_port:binding:profile": ADMIN_OR_SERVICE,
    "get_port:resource_request": ADMIN_OR_SERVICE,
    "get_port:tags": f"{ADMIN_OR_SERVICE} or (role:reader and rule:network_owner) or (role:reader and rule:owner)",
    "update_port": f"{ADMIN_OR_SERVICE} or (role:member and project_id:%(project_id)s)",
    "update_port:device_id": MEMBER_OR_SERVICE,
    "update_port:device_owner": f"not rule:network_device or {NETWORK_MEMBER}",
    "update_port:mac_address": f"{ADMIN_OR_SERVICE} or (role:manager and rule:network_owner)",
    "update_port:fixed_ips": NETWORK_MEMBER,
    "update_port:fixed_ips:ip_address": NETWORK_MEMBER,
    "update_port:fixed_ips:subnet_id": f"{NETWORK_MEMBER} or rule:shared",
    "update_port:port_security_enabled": NETWORK_MEMBER,
    "update_port:binding:host_id": ADMIN_OR_SERVICE,
    "update_port:binding:profile": ADMIN_OR_SERVICE,
    "update_port:binding:vnic_type": MEMBER_OR_SERVICE,
    "update_port:allowed_address_pairs": NETWORK_MEMBER,
    "update_port:allowed_address_pairs:mac_address": NETWORK_MEMBER,
    "update_port:allowed_address_pairs:ip_address": NETWORK_MEMBER,
    "update_port:tags": f"{MEMBER_OR_SERVICE} or rule:context_is_advsvc",
    "delete_port": f"{ADMIN_OR_SERVICE} or (service_roles:service and ({OWN_PORT})) "
    f"or (not ({ATTACHED}) and ({OWN_PORT}))",
    "delete_port:tags": f"{MEMBER_OR_SERVICE} or (role:member and rule:network_owner)",
    # security groups and rules
    "create_security_group": MEMBER,
    "create_security_group:tags": MEMBER,
    "get_security_group": f"{READER} or {SERVICE} or rule:shared_security_group",
    "get_security_group:tags": f"{READER} or {SERVICE} or rule:shared_security_group",
    "update_security_group": MEMBER,
    "update_security_group:tags": MEMBER,
    "delete_security_group": MEMBER,
    "delete_security_group:tags": MEMBER,
    "create_default_security_group": f"{ADMIN_OR_SERVICE} or (role:reader and project_id:%(project_id)s)",
    "create_security_group_rule": GROUP_MEMBER,
    "get_security_group_rule": f"{GROUP_READER} or {SERVICE}",
    "delete_security_group_rule": GROUP_MEMBER,
    "create_default_security_group_rule": ADMIN,
    "get_default_security_group_rule": "role:reader",
    "delete_default_security_group_rule": ADMIN,
    # routers
    "create_router": MEMBER,
    "create_router:distributed": ADMIN,
    "create_router:ha": ADMIN,
    "create_router:external_gateway_info": MEMBER,
    "create_router:external_gateway_info:network_id": MEMBER,
    "create_router:external_gateway_info:enable_snat": ADMIN,
    "create_router:external_gateway_info:external_fixed_ips": ADMIN,
    "create_router:tags": MEMBER,
    "get_router": READER,
    "get_router:distributed": ADMIN,
    "get_router:ha": ADMIN,
    "get_router:tags": READER,
    "update_router": MEMBER,
    "update_router:distributed": ADMIN,
    "update_router:ha": ADMIN,
    "update_router:external_gateway_info": MEMBER,
    "update_router:external_gateway_info:network_id": MEMBER,
    "update_router:external_gateway_info:enable_snat": ADMIN,
    "update_router:external_gateway_info:external_fixed_ips": ADMIN,
    "update_router:tags": MEMBER,
    "delete_router": MEMBER,
    "delete_router:tags": MEMBER,
    "add_router_interface": MEMBER,
    "remove_router_interface": MEMBER,
    "add_extraroutes": MEMBER,
    "remove_extraroutes": MEMBER,
    "add_external_gateways": MEMBER,
    "add_external_gateways:external_gateways": MEMBER,
    "add_external_gateways:external_gateways:network_id": MEMBER,
    "add_external_gateways:external_gateways:enable_snat": ADMIN,
    "add_external_gateways:external_gateways:external_fixed_ips": ADMIN,
    "update_external_gateways": MEMBER,
    "update_external_gateways:external_gateways": MEMBER,
    "update_external_gateways:external_gateways:network_id": MEMBER,
    "update_external_gateways:external_gateways:enable_snat": ADMIN,
    "update_external_gateways:external_gateways:external_fixed_ips": ADMIN,
    "remove_external_gateways": MEMBER,
    "remove_external_gateways:external_gateways": MEMBER,
    # trunks
    "create_trunk": MEMBER,
    "create_trunk:tags": MEMBER,
    "get_trunk": READER,
    "get_trunk:tags": READER,
    "update_trunk": MEMBER,
    "update_trunk:tags": MEMBER,
    "delete_trunk": MEMBER,
    "delete_trunk:tags": MEMBER,
    "get_subports": READER,
    "add_subports": MEMBER,
    "remove_subports": MEMBER,
    # floating IPs
    "create_floatingip": MEMBER,
    "create_floatingip:floating_ip_address": MANAGER,
    "create_floatingip:tags": MEMBER,
    "get_floatingip": f"{READER} or {SERVICE}",
    "get_floatingip:tags": f"{READER} or {SERVICE}",
    "update_floatingip": MEMBER,
    "update_floatingip:tags": MEMBER,
    "delete_floatingip": MEMBER,
    "delete_floatingip:tags": MEMBER,
    # quality of service
    "create_policy": MANAGER,
    "create_policy:tags": MANAGER,
    "get_policy": POLICY_READER,
    "get_policy:tags": POLICY_READER,
    "update_policy": MANAGER,
    "update_policy:tags": MANAGER,
    "delete_policy": MANAGER,
    "delete_policy:tags": MANAGER,
    "get_rule_type": "role:reader",
    "create_policy_bandwidth_limit_rule": LIMIT_MANAGER,
    "get_policy_bandwidth_limit_rule": LIMIT_READER,
    "update_policy_bandwidth_limit_rule": LIMIT_MANAGER,
    "delete_policy_bandwidth_limit_rule": LIMIT_MANAGER,
    "create_policy_dscp_marking_rule": LIMIT_MANAGER,
    "get_policy_dscp_marking_rule": LIMIT_READER,
    "update_policy_dscp_marking_rule": LIMIT_MANAGER,
    "delete_policy_dscp_marking_rule": LIMIT_MANAGER,
    "create_policy_minimum_bandwidth_rule": LIMIT_MANAGER,
    "get_policy_minimum_bandwidth_rule": LIMIT_READER,
    "update_policy_minimum_bandwidth_rule": LIMIT_MANAGER,
    "delete_policy_minimum_bandwidth_rule": LIMIT_MANAGER,
    # RBAC policies
    "restrict_wildcard": f"(not field:rbac_policy:target_tenant=*) or {ADMIN}",
    "create_rbac_policy": MEMBER,
    "create_rbac_policy:target_tenant": f"({ADMIN}) or rule:restrict_wildcard",
    "get_rbac_policy": READER,
    "update_rbac_policy": MEMBER,
    "update_rbac_policy:target_tenant": f"({ADMIN}) or rule:restrict_wildcard",
    "delete_rbac_policy": MEMBER,
    # the rest
    "get_quota": MANAGER,
    "update_quota": ADMIN,
    "delete_quota": ADMIN,
    "get_auto_allocated_topology": f"{READER} or {SERVICE}",
    "delete_auto_allocated_topology": MEMBER,
    "get_availability_zone": "role:reader",
    "get_agent": ADMIN_OR_SERVICE,  # the audit of compute reads it
    "update_agent": ADMIN,
    "delete_agent": ADMIN_OR_SERVICE,  # compute deletes the agent of a host whose service is deleted
    "get_agent_state": ADMIN_OR_SERVICE,
    "report_agent": ADMIN_OR_SERVICE,
    "get_network_ip_availability": ADMIN_OR_SERVICE,
    "get_service_provider": "role:reader",
}

RULES: list[Rule] = [Rule(name, check) for name, check in _CHECKS.items()]
NAMES = frozenset(_CHECKS)

"""Errors in Neutron's form: the status comes from the domain error, and clients dispatch on the `type`."""

from typing import Any

from micronova.embedded.common.revisions import Contended
from micronova.http.faults import network_fault
from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Invalid,
    MethodNotAllowed,
    MicronovaError,
    NotFound,
    PreconditionFailed,
    Unauthorized,
)

# The name of a resource in the type of its NotFound error and in messages.
_TITLES = {
    "network": ("NetworkNotFound", "Network"),
    "network_ip_availability": ("NetworkNotFound", "Network"),
    "subnet": ("SubnetNotFound", "Subnet"),
    "subnetpool": ("SubnetPoolNotFound", "Subnet pool"),
    "address_scope": ("AddressScopeNotFound", "Address scope"),
    "port": ("PortNotFound", "Port"),
    "security_group": ("SecurityGroupNotFound", "Security group"),
    "security_group_rule": ("SecurityGroupRuleNotFound", "Security group rule"),
    "default_security_group_rule": ("DefaultSecurityGroupRuleNotFound", "Default security group rule"),
    "router": ("RouterNotFound", "Router"),
    "floatingip": ("FloatingIPNotFound", "Floating IP"),
    "agent": ("AgentNotFound", "Agent"),
    "policy": ("QosPolicyNotFound", "QoS policy"),
    "trunk": ("TrunkNotFound", "Trunk"),
    "rbac_policy": ("RbacPolicyNotFound", "RBAC policy"),
}

# The types of errors from code that all services share, which sets no type.
_GENERAL: dict[type[MicronovaError], str] = {
    Invalid: "HTTPBadRequest",
    NotFound: "HTTPNotFound",
    Forbidden: "PolicyNotAuthorized",
    MethodNotAllowed: "HTTPMethodNotAllowed",
    Unauthorized: "Unauthorized",
    Contended: "Unavailable",
}


class RevisionMismatch(PreconditionFailed):
    """The resource has another revision than If-Match names (412)."""

    code = "revision_mismatch"


def not_found(kind: str, identifier: object) -> NotFound:
    """Return the error for a resource that does not exist or that the caller may not see."""
    type_, title = _TITLES[kind]
    return NotFound(f"{title} {str(identifier)[:64]} could not be found.", type=type_)


def invalid(message: str, type_: str = "InvalidInput") -> Invalid:
    """Return the error for a request with bad values."""
    return Invalid(message, type=type_)


def conflict(message: str, type_: str) -> Conflict:
    """Return the error for a request that conflicts with existing resources."""
    return Conflict(message, type=type_)


def fault_body(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body of an error; an error without a type gets the one that Neutron uses."""
    body = network_fault(status, message, error)
    details = getattr(error, "details", {})
    if "type" not in details and type(error) in _GENERAL:
        body["NeutronError"]["type"] = _GENERAL[type(error)]  # type: ignore[index]
    return body

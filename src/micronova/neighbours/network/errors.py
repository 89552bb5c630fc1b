"""The errors that network clients know: a status from our domain errors, a `type` that clients dispatch on."""

from typing import Any

from micronova.http.faults import network_fault
from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Invalid,
    MethodNotAllowed,
    MicronovaError,
    NotFound,
    Unauthorized,
)

# What a resource is called in the type of its 404 and in messages.
_TITLES = {
    "network": ("NetworkNotFound", "Network"),
    "subnet": ("SubnetNotFound", "Subnet"),
    "subnetpool": ("SubnetPoolNotFound", "Subnet pool"),
    "port": ("PortNotFound", "Port"),
    "security_group": ("SecurityGroupNotFound", "Security group"),
    "security_group_rule": ("SecurityGroupRuleNotFound", "Security group rule"),
    "router": ("RouterNotFound", "Router"),
    "floatingip": ("FloatingIPNotFound", "Floating IP"),
    "agent": ("AgentNotFound", "Agent"),
    "policy": ("QosPolicyNotFound", "QoS policy"),
}

# The types of errors that are raised by what all services share, and so do not name one.
_GENERAL: dict[type[MicronovaError], str] = {
    Invalid: "HTTPBadRequest",
    NotFound: "HTTPNotFound",
    Forbidden: "PolicyNotAuthorized",
    MethodNotAllowed: "HTTPMethodNotAllowed",
    Unauthorized: "Unauthorized",
}


class RevisionMismatch(MicronovaError):
    """The thing has changed since the revision that the caller named in If-Match (412)."""

    code = "revision_mismatch"
    http_status = 412


def not_found(kind: str, identifier: object) -> NotFound:
    """No such thing, or none that the caller may know of."""
    type_, title = _TITLES[kind]
    return NotFound(f"{title} {str(identifier)[:64]} could not be found.", type=type_)


def invalid(message: str, type_: str = "InvalidInput") -> Invalid:
    """The request asks for something that cannot be."""
    return Invalid(message, type=type_)


def conflict(message: str, type_: str) -> Conflict:
    """The request contradicts what there is."""
    return Conflict(message, type=type_)


def fault_body(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """The body that network clients read; what carries no type of its own gets the one that Neutron uses."""
    body = network_fault(status, message, error)
    details = getattr(error, "details", {})
    if "type" not in details and type(error) in _GENERAL:
        body["NeutronError"]["type"] = _GENERAL[type(error)]  # type: ignore[index]
    return body

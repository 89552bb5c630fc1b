"""Checks of the attributes of ports, and their conversion to columns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.request_bodies import ip_network, mac_address
from micronova.embedded.network.row_types import PortChanges, PortRow

PLAIN = (
    "name", "description", "admin_state_up", "device_id", "device_owner", "port_security_enabled", "dns_domain",
    "qos_policy_id",
)  # fmt: skip
VNIC_TYPES = (
    "accelerator-direct",
    "accelerator-direct-physical",
    "baremetal",
    "direct",
    "direct-physical",
    "macvtap",
    "normal",
    "remote-managed",
    "smart-nic",
    "vdpa",
    "virtio-forwarder",
)
MAX_PAIRS = 10
_LABEL = re.compile(r"^(?!-)[a-zA-Z0-9-]{1,63}(?<!-)\Z")


def requested_columns(given: Mapping[str, Any], before: PortRow) -> PortChanges:
    """Return the columns that a request sets; raise Invalid for bad values."""
    found = cast(PortChanges, {name: given[name] for name in PLAIN if name in given})
    if "binding:host_id" in given:
        found["host"] = given["binding:host_id"] or ""
    if "binding:profile" in given:
        found["profile"] = given["binding:profile"] or {}
    if "binding:vnic_type" in given:
        if given["binding:vnic_type"] not in VNIC_TYPES:
            raise invalid(
                f"Invalid input for binding:vnic_type: '{given['binding:vnic_type']}' is not in {list(VNIC_TYPES)}.",
                "HTTPBadRequest",
            )
        found["vnic_type"] = given["binding:vnic_type"]
    if "dns_name" in given:
        found["dns_name"] = _dns_name(given["dns_name"])
    if "allowed_address_pairs" in given:
        found["allowed_address_pairs"] = _pairs(given["allowed_address_pairs"] or [], before["mac_address"])
    if "extra_dhcp_opts" in given:
        found["extra_dhcp_opts"] = _options(given["extra_dhcp_opts"] or [], before["extra_dhcp_opts"])
    return found


def check_port_security(row: PortRow, groups: Sequence[str]) -> None:
    """Raise Conflict if a port without port security has security groups or address pairs."""
    if row["port_security_enabled"]:
        return
    if groups:
        raise conflict(
            "Port has security group associated. Cannot disable port security or ip address until security group "
            "is removed.",
            "PortSecurityPortHasSecurityGroup",
        )
    if row["allowed_address_pairs"]:
        raise conflict(
            "Port Security must be enabled in order to have allowed address pairs on a port.",
            "AddressPairAndPortSecurityRequired",
        )


def _pairs(given: list[dict[str, Any]], mac: str) -> list[dict[str, str]]:
    """Return address pairs in canonical form; a pair without a MAC address gets the port's."""
    found = []
    for pair in given:
        network = ip_network(pair["ip_address"], "allowed_address_pairs")
        text = str(network) if "/" in pair["ip_address"] else str(network.network_address)
        own = pair.get("mac_address") or mac
        found.append({"ip_address": text, "mac_address": mac_address(own, "allowed_address_pairs") if own else ""})
    if len(found) > MAX_PAIRS:
        raise invalid(
            f"The number of allowed address pair exceeds the maximum {MAX_PAIRS}.", "AllowedAddressPairExhausted"
        )
    if len({(pair["ip_address"], pair["mac_address"]) for pair in found}) != len(found):
        raise invalid("Request contains duplicate address pair.", "DuplicateAddressPairInRequest")
    return found


def _dns_name(text: str) -> str:
    if text and not (len(text) <= 253 and all(_LABEL.match(part) for part in text.rstrip(".").split("."))):
        raise invalid(f"Invalid input for dns_name: '{text[:64]}' is not a valid DNS name.", "HTTPBadRequest")
    return text.rstrip(".")


def _options(given: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the existing DHCP options with the given ones merged in; one without a value is removed."""
    found = {(option["opt_name"], option["ip_version"]): option for option in before}
    for option in given:
        version = option.get("ip_version", 4)
        if str(version) not in ("4", "6"):
            raise invalid("Invalid input for extra_dhcp_opts: ip_version must be 4 or 6.", "HTTPBadRequest")
        key = (option["opt_name"], int(version))
        value = option.get("opt_value")
        if value is None:
            found.pop(key, None)
        elif not value.strip() and option["opt_name"] not in ("router", "classless-static-route"):
            raise invalid("Invalid input for extra_dhcp_opts: opt_value must not be empty.", "HTTPBadRequest")
        else:
            found[key] = {"opt_name": key[0], "opt_value": value, "ip_version": key[1]}
    return list(found.values())

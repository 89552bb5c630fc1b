"""Binding: what becomes of a port when a host is named for it, and what compute is told.

A host plugs a guest into the Linux bridge of the network, so a bound port says `bridge` and the bridge's name, in
the form in which Neutron names one (compute can plug it with or without an agent of ours around). Where a host has a
network agent the port stays DOWN until the agent has wired it. Where it has none (simulated hosts, say) there is
nothing to wait for: the port becomes ACTIVE with the binding itself.
"""

from collections.abc import Mapping
from typing import Any

from micronova.neighbours.network.core import Core
from micronova.neighbours.network.notifier import Event

PLUGGED = "network-vif-plugged"
UNPLUGGED = "network-vif-unplugged"
DELETED = "network-vif-deleted"
CHANGED = "network-changed"


def bound(network_id: str, host: str, vnic_type: str, port_security: bool) -> dict[str, Any]:
    """Return the columns that follow from the host that a port is bound to."""
    if not host:
        return {"host": "", "vif_type": "unbound", "vif_details": {}}
    if vnic_type != "normal":  # no device of ours can be handed through to a guest
        return {"host": host, "vif_type": "binding_failed", "vif_details": {}}
    details = {
        "port_filter": port_security,
        "bridge_name": bridge_name(network_id),
        "connectivity": "l2",
        "bound_drivers": {"0": "micronova"},
    }
    return {"host": host, "vif_type": "bridge", "vif_details": details}


def bridge_name(network_id: str) -> str:
    """Return the name of a network's bridge on every host."""
    return f"brq{network_id[:11]}"


def status_of(row: Mapping[str, Any], agent_on_host: bool) -> str:
    """Return the status of a port that was just bound, unbound, or switched up or down."""
    if not row["admin_state_up"] or not row["host"] or row["vif_type"] == "binding_failed":
        return "DOWN"
    return "DOWN" if agent_on_host else "ACTIVE"


def news_of(core: Core, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None,
            shown_otherwise: bool = False) -> list[Event]:
    """Return what compute must hear about a port that was created, changed or deleted.

    `shown_otherwise`: its addresses or groups changed, which servers show.
    """
    now = after if after is not None else before
    assert now is not None
    if not concerns_server(now) and not (before is not None and concerns_server(before)):
        return []
    if after is None:
        return [event(core, DELETED, now)]
    found = []
    was = before["status"] if before is not None else "DOWN"
    if was != "ACTIVE" and after["status"] == "ACTIVE":
        found.append(event(core, PLUGGED, now))
    elif was == "ACTIVE" and after["status"] != "ACTIVE":
        found.append(event(core, UNPLUGGED, now))
    if shown_otherwise and before is not None:
        found.append(event(core, CHANGED, now))
    return found


def concerns_server(port: Mapping[str, Any]) -> bool:
    """Say whether compute has bound the port to a server.

    Users may write any server's id on their ports; only services bind. So nobody can send events about others'.
    """
    return bool(port["host"] and port["device_id"] and port["device_owner"].startswith("compute:"))


def event(core: Core, name: str, port: Mapping[str, Any]) -> Event:
    """Make an event about a port's server."""
    return Event(
        id=core.new_id(), name=name, server_id=port["device_id"], tag=port["id"], created_at=core.now()
    )

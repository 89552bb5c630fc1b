"""Port binding: the columns that follow from a port's host, its status, and the events for compute.

A host plugs a guest into the Linux bridge of the network, so the vif_type of a bound port is `bridge`, and its details
name the bridge as Neutron does. On a host with a network agent, silent or not, the port stays DOWN until the agent has
wired it. On a host that never had one, such as a simulated host, the port becomes ACTIVE when it is bound.
"""

from micronova.embedded.common.compute_events import Event
from micronova.embedded.network.core import Core
from micronova.embedded.network.port_events import CHANGED, DELETED, PLUGGED, UNPLUGGED
from micronova.embedded.network.row_types import PortChanges, PortRow
from micronova.privileged.names import bridge_name


def binding_columns(network_id: str, host: str, vnic_type: str, port_security: bool) -> PortChanges:
    """Return the columns that follow from the host that a port is bound to."""
    if not host:
        return {"host": "", "vif_type": "unbound", "vif_details": {}}
    if vnic_type != "normal":  # passthrough of host devices is not supported
        return {"host": host, "vif_type": "binding_failed", "vif_details": {}}
    details = {
        "port_filter": port_security,
        "bridge_name": bridge_name(network_id),
        "connectivity": "l2",
        "bound_drivers": {"0": "micronova"},
    }
    return {"host": host, "vif_type": "bridge", "vif_details": details}


def status_of(row: PortRow, agent_on_host: bool) -> str:
    """Return the status of a port after a change of its binding or its admin state."""
    if not row["admin_state_up"] or not row["host"] or row["vif_type"] == "binding_failed":
        return "DOWN"
    return "DOWN" if agent_on_host else "ACTIVE"


def events_of(core: Core, before: PortRow | None, after: PortRow | None, changed: bool = False) -> list[Event]:
    """Return the events for compute about a port that was created, changed or deleted.

    `changed` says that its addresses or security groups changed, which compute shows with the server.
    """
    now = after if after is not None else before
    assert now is not None
    if not belongs_to_server(now) and not (before is not None and belongs_to_server(before)):
        return []
    if after is None:
        return [event(core, DELETED, now)]
    found = []
    was = before["status"] if before is not None else "DOWN"
    if was != "ACTIVE" and after["status"] == "ACTIVE":
        found.append(event(core, PLUGGED, now))
    elif was == "ACTIVE" and after["status"] != "ACTIVE":
        found.append(event(core, UNPLUGGED, now))
    if changed and before is not None:
        found.append(event(core, CHANGED, now))
    return found


def belongs_to_server(port: PortRow) -> bool:
    """Return whether compute has bound the port to a server.

    Users may set any device_id on their ports, but only services may bind them. So users cannot cause events about
    the servers of others.
    """
    return bool(port["host"] and port["device_id"] and port["device_owner"].startswith("compute:"))


def event(core: Core, name: str, port: PortRow) -> Event:
    """Return an event for the server of a port."""
    return Event(id=core.new_id(), name=name, server_id=port["device_id"], tag=port["id"], created_at=core.now())

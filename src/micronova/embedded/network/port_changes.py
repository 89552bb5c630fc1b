"""The transactions that create, change and delete ports; each returns the events for compute."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.compute_events import Event
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import AddressRequest
from micronova.embedded.network.binding import binding_columns, events_of, status_of
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.host_changes import note, topics_of_ports
from micronova.embedded.network.port_input import check_port_security, requested_columns
from micronova.embedded.network.port_rows import (
    CreatedPort,
    PortPlan,
    add_to_groups,
    allocate_addresses,
    belongs_to_service,
    groups_of,
    insert_port,
    locked_port,
    mac_in_use,
    remove_port,
)
from micronova.embedded.network.qos_use import check_port_change, hold_guarantees
from micronova.embedded.network.quotas import charge_all
from micronova.embedded.network.row_types import PortRow, port_with
from micronova.embedded.network.sharing import Use, check_still_shared
from micronova.embedded.network.slaac import follow_mac
from micronova.embedded.network.tables import addresses, floatingips, port_security_groups, ports
from micronova.embedded.network.topics import members_topic
from micronova.embedded.network.trunk_ports import (
    check_free_of_trunks,
    check_is_no_subport,
    follow_parent,
    refresh_status,
)


def create_ports(conn: sa.Connection, core: Core, plans: Sequence[PortPlan]) -> tuple[list[CreatedPort], list[Event]]:
    """Create ports and charge the quota."""
    made, events = [], []
    for plan in plans:
        each = insert_port(conn, plan)
        made.append(each)
        events += events_of(core, None, each.row)
    of_networks = hold_guarantees(conn, [each.row for each in made])
    for each in made:
        each.network_qos_policy = of_networks.get(each.row["network_id"], each.network_qos_policy)
    check_still_shared(conn, (use for plan in plans for use in plan.relies_on))
    charge_all(conn, (plan.row["project_id"] for plan in plans), "port", core.settings.quotas)
    return made, events


def update_port(
    conn: sa.Connection,
    core: Core,
    id: str,
    given: Mapping[str, Any],
    *,
    agent_hosts: set[str],
    revision: int | None = None,
    groups: list[str] | None = None,
    address_requests: list[AddressRequest] | None = None,
    mac: str | None = None,
    relies_on: Sequence[Use] = (),
) -> tuple[None, list[Event]]:
    """Update a port; with a revision, raise Changed if the port has another one.

    `groups`, `address_requests` and `mac` replace what the port has; None leaves it. `agent_hosts` are hosts with a
    network agent, alive or not. The row is locked and read here, so concurrent updates are all kept. What the
    caller checked before (project and network of the port) never changes.
    """
    before = locked_port(conn, id)
    if revision not in (None, before["revision"]):
        raise Changed
    after = port_with(before, requested_columns(given, before))
    _check_service_port(conn, before, after)
    addresses_changed = False
    if mac is not None and mac != before["mac_address"]:
        _check_mac(conn, before, mac)
        after["mac_address"] = mac
        addresses_changed = follow_mac(conn, id, before["mac_address"], mac)
    rebound = (after["host"], after["vnic_type"]) != (before["host"], before["vnic_type"])
    _check_vnic_type(before, after)
    check_port_change(conn, before, after)
    if after["host"] != before["host"]:
        check_is_no_subport(conn, id)
    if rebound or after["port_security_enabled"] != before["port_security_enabled"]:
        binding = binding_columns(
            after["network_id"], after["host"], after["vnic_type"], after["port_security_enabled"]
        )
        after = port_with(after, binding)
    switched = rebound or after["admin_state_up"] != before["admin_state_up"]
    if switched and not device_owners.is_service(after["device_owner"]):
        after["status"] = status_of(after, after["host"] in agent_hosts)
    held = groups_of(conn, [id]).get(id, [])
    check_port_security(after, held if groups is None else groups)
    if address_requests is not None:
        addresses_changed = _readdress(conn, id, after["mac_address"], address_requests) or addresses_changed
    groups_changed = groups is not None and set(groups) != set(held)
    if groups_changed:
        conn.execute(port_security_groups.delete().where(port_security_groups.c.port_id == id))
        add_to_groups(conn, id, groups or ())
    old = cast(dict[str, Any], before)
    changes = {name: value for name, value in after.items() if value != old[name]}
    revisions.update(conn, ports.c.revision, id, before["revision"], changes, core.now())
    check_still_shared(conn, relies_on)
    if after["host"] != before["host"]:
        follow_parent(conn, core, after, agent_hosts)
    if switched:
        refresh_status(conn, [id])
    topics = topics_of_ports(before, after)
    if addresses_changed or groups_changed or after["allowed_address_pairs"] != before["allowed_address_pairs"]:
        topics.update(members_topic(group) for group in (*held, *(groups or ())))
    note(conn, core.now(), topics)
    # If the request also removes the port from its server, the events are for that server.
    subject = after
    if not after["device_id"]:
        subject = port_with(after, {"device_id": before["device_id"], "device_owner": before["device_owner"]})
    return None, events_of(core, before, subject, addresses_changed or groups_changed)


def _check_service_port(conn: sa.Connection, before: PortRow, after: PortRow) -> None:
    same = before["device_id"] == after["device_id"] and before["device_owner"] == after["device_owner"]
    if same or not device_owners.is_service(before["device_owner"]):
        return
    if belongs_to_service(conn, before["id"]):
        raise conflict(
            f"Operation update is not supported for device_owner {before['device_owner']} on port {before['id']}.",
            "UnsupportedPortDeviceOwner",
        )


def _check_vnic_type(before: PortRow, after: PortRow) -> None:
    if after["vnic_type"] != before["vnic_type"] and before["vif_type"] != "unbound":
        raise conflict(
            f"Unable to complete operation on port {before['id']} for network {before['network_id']}. Port already has "
            f"an attached device {before['device_id']}: its binding:vnic_type cannot change while it is bound.",
            "PortInUse",
        )


def _check_mac(conn: sa.Connection, before: PortRow, mac: str) -> None:
    if before["host"] and before["vif_type"] not in ("unbound", "binding_failed"):
        raise conflict(
            f"Unable to complete operation on port {before['id']}, port is already bound, port type: "
            f"{before['vif_type']}, old_mac {before['mac_address']}, new_mac {mac}.",
            "PortBound",
        )
    same = sa.select(ports.c.id).where(ports.c.network_id == before["network_id"], ports.c.mac_address == mac)
    if conn.execute(same).first() is not None:
        raise mac_in_use(before["network_id"], mac)


def _readdress(conn: sa.Connection, id: str, mac: str, address_requests: Sequence[AddressRequest]) -> bool:
    """Replace the addresses of a port, keep those that are requested again; return whether any changed."""
    a = addresses.c
    held = list(conn.execute(sa.select(a.subnet_id, a.address).where(a.port_id == id).order_by(a.position)))
    keep: set[tuple[str, str]] = set()
    new: list[AddressRequest] = []
    for request in sorted(address_requests, key=lambda w: w.address is None):
        subnet = request.choices[0]
        kept = next(
            (
                (row.subnet_id, row.address)
                for row in held
                if row.subnet_id == subnet.id
                and (request.address is None or row.address == str(request.address))
                and (row.subnet_id, row.address) not in keep
            ),
            None,
        )
        if kept is not None:
            keep.add(kept)
        else:
            new.append(request)
    gone = [row for row in held if (row.subnet_id, row.address) not in keep]
    _check_no_floating(conn, id, [row.address for row in gone])
    for row in gone:
        conn.execute(addresses.delete().where(a.subnet_id == row.subnet_id, a.address == row.address))
    allocate_addresses(conn, new, id, mac, start=len(held))
    return bool(gone or new)


def _check_no_floating(conn: sa.Connection, id: str, gone: Sequence[str]) -> None:
    """Raise Invalid, as Neutron does, if a floating IP leads to or is one of these addresses of a port.

    The next port with the address may belong to another project. A transaction that
    associates a floating IP locks its port, too.
    """
    if not gone:
        return
    f = floatingips.c
    inside = sa.and_(f.port_id == id, f.fixed_ip_address.in_(gone))
    outside = sa.and_(f.floating_port_id == id, f.floating_ip_address.in_(gone))
    used = conn.execute(sa.select(floatingips).where(inside | outside).order_by(f.id).limit(1)).first()
    if used is None:
        return
    if used.floating_port_id == id:
        address, reason = used.floating_ip_address, f"it is the address of floating IP {used.id}"
    else:
        address = used.fixed_ip_address
        reason = f"floating IP {used.floating_ip_address} leads to it: disassociate that first"
    raise invalid(f"Bad port request: {address} cannot be taken from port {id}: {reason}.", "BadRequest")


def delete_port(conn: sa.Connection, core: Core, id: str) -> tuple[None, list[Event]]:
    """Delete a port that does not belong to a router or a floating IP."""
    check_free_of_trunks(conn, id)
    gone = remove_port(conn, id, core.now())
    return None, events_of(core, gone, None)

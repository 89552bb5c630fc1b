"""The transactions that create, change and delete ports; each returns the events for compute."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import sqlalchemy as sa

from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import AddressRequest
from micronova.embedded.network.binding import binding_columns, events_of, status_of
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.host_changes import members_topic, note, topics_of_ports
from micronova.embedded.network.notifier import Event
from micronova.embedded.network.port_input import checked_values
from micronova.embedded.network.port_rows import (
    LOCK,
    CreatedPort,
    PortPlan,
    allocate_addresses,
    belongs_to_service,
    insert_port,
    mac_in_use,
    remove_port,
)
from micronova.embedded.network.quotas import charge_all
from micronova.embedded.network.row_types import PortRow, port_with
from micronova.embedded.network.slaac import follow_mac
from micronova.embedded.network.tables import addresses, port_security_groups, ports


def groups_of(conn: sa.Connection, port_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the security groups of ports."""
    found: dict[str, list[str]] = {}
    for part in chunks(port_ids):
        for row in conn.execute(_GROUPS, {"ids": part}):
            found.setdefault(row.port_id, []).append(row.security_group_id)
    return found


_GROUPS = (
    sa.select(port_security_groups)
    .where(port_security_groups.c.port_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(port_security_groups.c.port_id, port_security_groups.c.security_group_id)
)


def check_security(row: PortRow, groups: Sequence[str]) -> None:
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


def insert_ports(conn: sa.Connection, core: Core, plans: Sequence[PortPlan]) -> tuple[list[CreatedPort], list[Event]]:
    """Create ports and charge the quota."""
    made, events = [], []
    for plan in plans:
        each = insert_port(conn, plan)
        made.append(each)
        events += events_of(core, None, each.row)
    charge_all(conn, (plan.row["project_id"] for plan in plans), "port", core.settings.quotas)
    return made, events


def change_port(
    conn: sa.Connection,
    core: Core,
    id: str,
    revision: int | None,
    given: Mapping[str, Any],
    groups: list[str] | None,
    wanted: list[AddressRequest] | None,
    mac: str | None,
    agent_hosts: set[str],
) -> tuple[None, list[Event]]:
    """Change a port; with a revision, raise Changed if the port has another one.

    The row is locked and read here, so concurrent changes are all kept. What the caller checked before (project and
    network of the port) never changes.
    """
    found = conn.execute(LOCK, {"id": id}).mappings().first()
    if found is None or revision not in (None, found["revision"]):
        raise Changed
    before = cast(PortRow, dict(found))
    after = port_with(before, checked_values(given, before))
    _check_service_port(conn, before, after)
    moved = False
    if mac is not None and mac != before["mac_address"]:
        _check_mac(conn, before, mac)
        after["mac_address"] = mac
        moved = follow_mac(conn, id, before["mac_address"], mac)
    rebound = (after["host"], after["vnic_type"]) != (before["host"], before["vnic_type"])
    if rebound or after["port_security_enabled"] != before["port_security_enabled"]:
        binding = binding_columns(
            after["network_id"], after["host"], after["vnic_type"], after["port_security_enabled"]
        )
        after = port_with(after, binding)
    switched = rebound or after["admin_state_up"] != before["admin_state_up"]
    if switched and not device_owners.is_service(after["device_owner"]):
        after["status"] = status_of(after, after["host"] in agent_hosts)
    held = groups_of(conn, [id]).get(id, [])
    check_security(after, held if groups is None else groups)
    if wanted is not None:
        moved = _readdress(conn, id, after["mac_address"], wanted) or moved
    regrouped = groups is not None and set(groups) != set(held)
    if regrouped:
        conn.execute(port_security_groups.delete().where(port_security_groups.c.port_id == id))
        if groups:
            rows = [{"port_id": id, "security_group_id": group} for group in groups]
            conn.execute(port_security_groups.insert(), rows)
    old = cast(dict[str, Any], before)
    changes = {name: value for name, value in after.items() if value != old[name]}
    revisions.update(conn, ports.c.revision, id, before["revision"], changes, core.now())
    topics = topics_of_ports(before, after)
    if moved or regrouped or after["allowed_address_pairs"] != before["allowed_address_pairs"]:
        topics.update(members_topic(group) for group in (*held, *(groups or ())))
    note(conn, core.now(), topics)
    # If the request also removes the port from its server, the events are for that server.
    subject = after
    if not after["device_id"]:
        subject = port_with(after, {"device_id": before["device_id"], "device_owner": before["device_owner"]})
    return None, events_of(core, before, subject, moved or regrouped)


def _check_service_port(conn: sa.Connection, before: PortRow, after: PortRow) -> None:
    same = before["device_id"] == after["device_id"] and before["device_owner"] == after["device_owner"]
    if same or not device_owners.is_service(before["device_owner"]):
        return
    if belongs_to_service(conn, before["id"]):
        raise conflict(
            f"Operation update is not supported for device_owner {before['device_owner']} on port {before['id']}.",
            "UnsupportedPortDeviceOwner",
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


def _readdress(conn: sa.Connection, id: str, mac: str, wanted: Sequence[AddressRequest]) -> bool:
    """Replace the addresses of a port, keep those that are requested again; return whether any changed."""
    a = addresses.c
    held = list(conn.execute(sa.select(a.subnet_id, a.address).where(a.port_id == id).order_by(a.position)))
    keep: set[tuple[str, str]] = set()
    new: list[AddressRequest] = []
    for request in sorted(wanted, key=lambda w: w.address is None):
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
    for row in gone:
        conn.execute(addresses.delete().where(a.subnet_id == row.subnet_id, a.address == row.address))
    allocate_addresses(conn, new, id, mac, start=len(held))
    return bool(gone or new)


def delete_port(conn: sa.Connection, core: Core, id: str) -> tuple[None, list[Event]]:
    """Delete a port that does not belong to a router or a floating IP."""
    gone = remove_port(conn, id, core.now())
    return None, events_of(core, gone, None)

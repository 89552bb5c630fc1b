"""The ports of trunks: subports follow their parent to its host, and the status of a trunk follows from its ports.

A guest sends and receives frames of a subport's network with a VLAN tag at the parent's interface. Transactions lock
ports in the order of their ids where they can, and trunks after ports.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import device_owners
from micronova.embedded.network.binding import binding_columns, status_of
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.host_changes import note, topics_of_ports
from micronova.embedded.network.port_rows import locked_port
from micronova.embedded.network.row_types import PortChanges, PortRow, SubportRow, port_with
from micronova.embedded.network.tables import ports, subports, trunks
from micronova.objects.errors import Conflict

ACTIVE, DOWN, DEGRADED, ERROR = "ACTIVE", "DOWN", "DEGRADED", "ERROR"


def trunk_details_of(conn: sa.Connection, port_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what the parent ports of trunks show of them."""
    found: dict[str, dict[str, Any]] = {}
    parents: dict[str, str] = {}
    for part in chunks(port_ids):
        for row in conn.execute(_BY_PARENT, {"ids": part}):
            found[row.port_id] = {"trunk_id": row.id, "sub_ports": []}
            parents[row.id] = row.port_id
    for part in chunks(sorted(parents)):
        for row in conn.execute(_SUBPORTS_WITH_MAC, {"ids": part}):
            shown = {**subport_values(row), "mac_address": row.mac_address}
            found[parents[row.trunk_id]]["sub_ports"].append(shown)
    return found


def subport_values(row: SubportRow) -> dict[str, Any]:
    """Return a subport as the API shows it."""
    return {
        "port_id": row.port_id,
        "segmentation_type": row.segmentation_type,
        "segmentation_id": row.segmentation_id,
    }


_TRUNKS = sa.select(trunks.c.id, trunks.c.port_id, trunks.c.status)
_BY_PARENT = _TRUNKS.where(trunks.c.port_id.in_(sa.bindparam("ids", expanding=True)))
_BY_SUBPORT = _TRUNKS.join(subports, subports.c.trunk_id == trunks.c.id).where(
    subports.c.port_id.in_(sa.bindparam("ids", expanding=True))
)
_SUBPORTS_WITH_MAC = (
    sa.select(subports, ports.c.mac_address)
    .join(ports, ports.c.id == subports.c.port_id)
    .where(subports.c.trunk_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(subports.c.segmentation_id, subports.c.port_id)
)


def check_free_of_trunks(conn: sa.Connection, port_id: str) -> None:
    """Raise Conflict if a trunk has this port; such a port is not deleted."""
    if found := conn.execute(_TRUNK_OF_SUBPORT, {"id": port_id}).scalar():
        raise subport_in_use(port_id, found)
    if found := conn.execute(_TRUNK_OF_PARENT, {"id": port_id}).scalar():
        raise conflict(f"Port {port_id} is currently a parent port for trunk {found}.", "PortInUseAsTrunkParent")


_TRUNK_OF_SUBPORT = sa.select(subports.c.trunk_id).where(subports.c.port_id == sa.bindparam("id"))
_TRUNK_OF_PARENT = sa.select(trunks.c.id).where(trunks.c.port_id == sa.bindparam("id"))


def check_is_no_subport(conn: sa.Connection, port_id: str) -> None:
    """Raise Conflict if a port is a subport: its host is that of its trunk."""
    if found := conn.execute(_TRUNK_OF_SUBPORT, {"id": port_id}).scalar():
        raise subport_in_use(port_id, found)


def subport_in_use(port_id: str, trunk_id: str) -> Conflict:
    """Return the error for a port that is a subport."""
    return conflict(f"Port {port_id} is currently a subport for trunk {trunk_id}.", "PortInUseAsSubPort")


def follow_parent(conn: sa.Connection, core: Core, parent: PortRow, agent_hosts: set[str]) -> None:
    """Bind the subports of a port, which the transaction has locked, to the host of that port."""
    mine = sa.select(subports.c.port_id).join(trunks, trunks.c.id == subports.c.trunk_id)
    for id in sorted(conn.execute(mine.where(trunks.c.port_id == parent["id"])).scalars()):
        bind_subport(conn, core, locked_port(conn, id), parent["host"], agent_hosts)


def bind_subport(conn: sa.Connection, core: Core, row: PortRow, host: str, agent_hosts: set[str]) -> None:
    """Bind a subport to a host, or without a host unbind it."""
    changes: PortChanges = {
        **binding_columns(row["network_id"], host, row["vnic_type"], row["port_security_enabled"]),
        "device_owner": device_owners.SUBPORT if host else "",
        "updated_at": core.now(),
        "revision": row["revision"] + 1,
    }
    after = port_with(row, changes)
    changes["status"] = status_of(after, host in agent_hosts)
    note(conn, core.now(), topics_of_ports(row, after))
    conn.execute(ports.update().where(ports.c.id == row["id"]).values(**changes))


def refresh_status(conn: sa.Connection, port_ids: Iterable[str]) -> None:
    """Set the status of the trunks that have these ports, after the status of a port has changed."""
    for part in chunks(sorted(set(port_ids))):
        below = conn.execute(_BY_SUBPORT, {"ids": part}).all()
        found = {row.id: row for row in (*below, *conn.execute(_BY_PARENT, {"ids": part}))}
        # Transactions that change other ports of a trunk at this moment are waited for: its status is that of all.
        locked = sa.select(trunks.c.id).where(trunks.c.id.in_(found)).order_by(trunks.c.id).with_for_update()
        for id in conn.execute(locked).scalars().all():
            row = found[id]
            status = status_of_trunk(conn, row.id, row.port_id)
            if status != row.status:
                conn.execute(trunks.update().where(trunks.c.id == row.id).values(status=status))


def status_of_trunk(conn: sa.Connection, id: str, parent_id: str) -> str:
    """Return the status of a trunk: ACTIVE if all its ports are, DEGRADED if only its parent is."""
    p = ports.c
    parent = conn.execute(sa.select(p.status, p.vif_type).where(p.id == parent_id)).one()
    columns = sa.select(p.status, p.vif_type, p.admin_state_up)
    below = conn.execute(columns.join(subports, subports.c.port_id == p.id).where(subports.c.trunk_id == id)).all()
    if any(row.vif_type == "binding_failed" for row in (parent, *below)):
        return ERROR
    if parent.status != ACTIVE:
        return DOWN
    return ACTIVE if all(row.status == ACTIVE or not row.admin_state_up for row in below) else DEGRADED

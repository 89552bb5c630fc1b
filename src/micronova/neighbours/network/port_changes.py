"""Changes of ports as transactions: what a request decided is written whole, together with the news for compute."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.network.addresses import Wish
from micronova.neighbours.network.binding import bound, news_of, status_of
from micronova.neighbours.network.collection import chunks
from micronova.neighbours.network.core import Changed, Core
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.notifier import Event
from micronova.neighbours.network.port_input import checked_values
from micronova.neighbours.network.port_rows import (
    LOCK,
    Made,
    Plan,
    belongs_to_service,
    insert,
    mac_in_use,
    remove,
    take_all,
)
from micronova.neighbours.network.quotas import charge_all
from micronova.neighbours.network.rows import bump
from micronova.neighbours.network.slaac import follow_mac
from micronova.neighbours.network.tables import addresses, port_security_groups, ports


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


def check_security(row: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Refuse groups and address pairs on a port that is not filtered."""
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


def insert_all(conn: sa.Connection, core: Core, plans: Sequence[Plan]) -> tuple[list[Made], list[Event]]:
    """Make ports, all or none."""
    made, news = [], []
    for plan in plans:
        each = insert(conn, plan)
        made.append(each)
        news += news_of(core, None, each.row)
    charge_all(conn, (plan.row["project_id"] for plan in plans), "port", core.settings.quotas)
    return made, news


def change(
    conn: sa.Connection,
    core: Core,
    id: str,
    revision: int | None,
    given: Mapping[str, Any],
    groups: list[str] | None,
    wanted: list[Wish] | None,
    mac: str | None,
    watched: set[str],
) -> tuple[None, list[Event]]:
    """Change a port; with a revision, only if it is still at that.

    The row is locked and read here, so changes that come together are all kept: nothing that was decided before
    (whose it is, its network) ever changes.
    """
    found = conn.execute(LOCK, {"id": id}).mappings().first()
    if found is None or revision not in (None, found["revision"]):
        raise Changed
    before = dict(found)
    after = {**before, **checked_values(given, before)}
    _check_service_port(conn, before, after)
    moved = False
    if mac is not None and mac != before["mac_address"]:
        _check_mac(conn, before, mac)
        after["mac_address"] = mac
        moved = follow_mac(conn, id, before["mac_address"], mac)
    rebound = (after["host"], after["vnic_type"]) != (before["host"], before["vnic_type"])
    if rebound or after["port_security_enabled"] != before["port_security_enabled"]:
        after.update(bound(after["network_id"], after["host"], after["vnic_type"], after["port_security_enabled"]))
    switched = rebound or after["admin_state_up"] != before["admin_state_up"]
    if switched and not after["device_owner"].startswith("network:"):
        after["status"] = status_of(after, after["host"] in watched)
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
    changes = {name: value for name, value in after.items() if value != before[name]}
    bump(conn, ports, id, before["revision"], core.now(), changes)
    # A server that lets its port go (device_id "" in the same request) is told under its old name.
    subject = after if after["device_id"] else {**after, **{n: before[n] for n in ("device_id", "device_owner")}}
    return None, news_of(core, before, subject, moved or regrouped)


def _check_service_port(conn: sa.Connection, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    same = all(before[name] == after[name] for name in ("device_id", "device_owner"))
    if same or not before["device_owner"].startswith("network:"):
        return
    if belongs_to_service(conn, before["id"]):
        raise conflict(
            f"Operation update is not supported for device_owner {before['device_owner']} on port {before['id']}.",
            "UnsupportedPortDeviceOwner",
        )


def _check_mac(conn: sa.Connection, before: Mapping[str, Any], mac: str) -> None:
    if before["host"] and before["vif_type"] not in ("unbound", "binding_failed"):
        raise conflict(
            f"Unable to complete operation on port {before['id']}, port is already bound, port type: "
            f"{before['vif_type']}, old_mac {before['mac_address']}, new_mac {mac}.",
            "PortBound",
        )
    same = sa.select(ports.c.id).where(ports.c.network_id == before["network_id"], ports.c.mac_address == mac)
    if conn.execute(same).first() is not None:
        raise mac_in_use(before["network_id"], mac)


def _readdress(conn: sa.Connection, id: str, mac: str, wanted: Sequence[Wish]) -> bool:
    """Give a port the addresses that it is to have from now on; what it has already of them it keeps."""
    a = addresses.c
    held = list(conn.execute(sa.select(a.subnet_id, a.address).where(a.port_id == id).order_by(a.position)))
    keep: set[tuple[str, str]] = set()
    new: list[Wish] = []
    for wish in sorted(wanted, key=lambda w: w.address is None):  # those that name an address have the first word
        subnet = wish.choices[0]
        kept = next(
            (
                (row.subnet_id, row.address)
                for row in held
                if row.subnet_id == subnet.id
                and (wish.address is None or row.address == str(wish.address))
                and (row.subnet_id, row.address) not in keep
            ),
            None,
        )
        if kept is not None:
            keep.add(kept)
        else:
            new.append(wish)
    gone = [row for row in held if (row.subnet_id, row.address) not in keep]
    for row in gone:
        conn.execute(addresses.delete().where(a.subnet_id == row.subnet_id, a.address == row.address))
    take_all(conn, new, id, mac, start=len(held))
    return bool(gone or new)


def delete(conn: sa.Connection, core: Core, id: str) -> tuple[None, list[Event]]:
    """Delete a port that neither a router nor a floating IP lives on."""
    gone = remove(conn, id, core.now())
    return None, news_of(core, gone, None)

"""The interfaces of servers, as compute keeps and shows them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from micronova.db import instances
from micronova.objects import states
from micronova.objects.instance import InstanceChanges
from micronova.objects.network import VIF


def record(
    conn: sa.Connection, uuid: str, seen: int, found: tuple[VIF, ...], security_groups: list[str], now: int
) -> Literal["same", "changed", "stale"]:
    """Record the interfaces and security groups that the network service has.

    Return "stale", and record nothing, if the server has changed since it was read (`seen`).
    """
    row = instances.lock(conn, uuid)
    if row is None:
        return "same"
    if row["updated_at"] != seen:
        return "stale"
    values = differences(row, found, security_groups)
    if not values:
        return "same"
    instances.update(conn, uuid, now, values)
    return "changed"


def differences(row: instances.InterfacesRow, found: tuple[VIF, ...], security_groups: list[str]) -> InstanceChanges:
    """Return what a server has to get so that it shows what the network service has; empty: nothing."""
    values: InstanceChanges = {}
    # As the database returns them: lists and no tuples.
    interfaces = msgspec.json.decode(msgspec.json.encode(in_order(found, row["network_info"])))
    if interfaces != row["network_info"]:
        values["network_info"] = interfaces
    # During the build the row has the requested security groups.
    if row["vm_state"] != states.BUILDING and security_groups != row["security_groups"]:
        values["security_groups"] = security_groups
    return values


def in_order(found: tuple[VIF, ...], known: Sequence[Any]) -> tuple[VIF, ...]:
    """Return interfaces in the order in which the guest has them, new ones last."""
    places = {vif["port_id"]: place for place, vif in enumerate(known)}
    return tuple(sorted(found, key=lambda vif: places.get(vif.port_id, len(places))))

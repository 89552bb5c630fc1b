"""The events of ports for compute, and when an event that was not sent yet is not true any more."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event, Outbox
from micronova.embedded.network.tables import events, ports

# The names of events.
PLUGGED = "network-vif-plugged"
UNPLUGGED = "network-vif-unplugged"
DELETED = "network-vif-deleted"
CHANGED = "network-changed"


def _still_true(conn: sa.Connection, found: Sequence[Event]) -> set[str]:
    p = ports.c
    chosen = sa.select(p.id, p.status, p.device_id).where(p.id.in_([event.tag for event in found]))
    known = {row.id: row for row in conn.execute(chosen)}
    return {event.id for event in found if _is_true(event, known.get(event.tag))}


def _is_true(event: Event, port: Any) -> bool:
    """Return whether an event still describes its port; if not, a later event about the port does."""
    plugged = port is not None and port.device_id == event.server_id and port.status == "ACTIVE"
    if event.name == PLUGGED:
        return plugged
    if event.name == UNPLUGGED:
        return port is not None and not plugged
    return event.name == DELETED or port is not None


OUTBOX = Outbox(events, _still_true)
LOST = "servers may show old interfaces until their ports change"

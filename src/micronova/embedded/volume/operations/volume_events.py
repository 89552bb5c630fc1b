"""The events that tell compute of changed volumes. An event is not sent if its volume was detached meanwhile."""

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event, Outbox
from micronova.embedded.volume.store import attachment_queries
from micronova.embedded.volume.tables import events

EXTENDED: Final = "volume-extended"
REIMAGED: Final = "volume-reimaged"


def _still_true(conn: sa.Connection, found: Sequence[Event]) -> set[str]:
    """Return the events about volumes that are still attached to their servers."""
    attached = attachment_queries.servers(conn, [event.tag for event in found])
    return {event.id for event in found if (event.tag, event.server_id) in attached}


OUTBOX: Final = Outbox(events, _still_true)
LOST: Final = "guests may not see that their volumes have grown until they are started again"

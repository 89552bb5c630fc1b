"""Purges what is kept for a time only: finished operations, and deleted servers with their actions.

Each function deletes a bounded number of rows, so that a transaction is short, and finds them by an index.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import departures, server_migrations
from micronova.db.listed import one_of
from micronova.db.tables import deleted_instances, instance_action_events, instance_actions, operations

BATCH = 1000
"""Rows that one transaction deletes: operations, or servers with all that belongs to them."""

_o, _d, _a, _e = operations.c, deleted_instances.c, instance_actions.c, instance_action_events.c


def _oldest(key: Any, time: Any) -> sa.Select[Any]:
    """Return the keys of the oldest rows before a time. Rows that another purge has locked are left to it."""
    query = sa.select(key).where(time < bindparam("before")).order_by(time).limit(bindparam("most"))
    return query.with_for_update(skip_locked=True)


_FINISHED = _oldest(_o.id, _o.finished_at)
_DELETED = _oldest(_d.uuid, _d.deleted_at)
_PURGE_FINISHED = operations.delete().where(one_of(_o.id, "keys"))
_REQUESTS = sa.select(_a.request_id).where(one_of(_a.instance_uuid, "keys"))
_PURGE_EVENTS = instance_action_events.delete().where(
    one_of(_e.request_id, "requests"), one_of(_e.instance_uuid, "keys")
)
_PURGE_ACTIONS = instance_actions.delete().where(one_of(_a.instance_uuid, "keys"))
_PURGE_DELETED = deleted_instances.delete().where(one_of(_d.uuid, "keys"))


def purge_operations(conn: sa.Connection, before: int, most: int = BATCH) -> int:
    """Delete the oldest operations that ended before this time; return how many."""
    keys = list(conn.execute(_FINISHED, {"before": before, "most": most}).scalars())
    if keys:
        conn.execute(_PURGE_FINISHED, {"keys": keys})
    return len(keys)


def purge_servers(conn: sa.Connection, before: int, most: int = BATCH) -> int:
    """Delete the records of the oldest servers that were deleted before this time; return how many.

    Their actions, events, faults, migrations and usage go with them, and their departures from hosts that are gone.
    """
    keys = list(conn.execute(_DELETED, {"before": before, "most": most}).scalars())
    if keys:
        requests = sorted(set(conn.execute(_REQUESTS, {"keys": keys}).scalars()))
        conn.execute(_PURGE_EVENTS, {"requests": requests, "keys": keys})
        conn.execute(_PURGE_ACTIONS, {"keys": keys})
        server_migrations.purge(conn, keys)
        departures.purge(conn, keys)
        conn.execute(_PURGE_DELETED, {"keys": keys})
    return len(keys)


def count_operations(conn: sa.Connection, before: int) -> int:
    """Return how many operations ended before this time."""
    return int(conn.execute(sa.select(sa.func.count()).where(_o.finished_at < before)).scalar_one())


def count_servers(conn: sa.Connection, before: int) -> int:
    """Return how many servers were deleted before this time."""
    return int(conn.execute(sa.select(sa.func.count()).where(_d.deleted_at < before)).scalar_one())

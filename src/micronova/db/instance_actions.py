"""Instance actions: the requests that changed a server, and the events of each.

The key of an action is the id of its request and the server. The key of an event is also its sequence number within
the action, which the worker chooses. Writes may be repeated: the first start and the first end are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from micronova.db.listed import as_pairs, pairs
from micronova.db.prepared import Prepared
from micronova.db.tables import instance_action_events, instance_actions, instances
from micronova.db.upsert import PerDialect, insert_if_absent
from micronova.objects.context import Context, RequestContext
from micronova.objects.instance import InstanceRow

_a, _e = instance_actions.c, instance_action_events.c


class InstanceActionRow(Protocol):
    """A row of `instance_actions`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    request_id: str
    instance_uuid: str
    action: str
    user_id: str | None
    project_id: str | None
    start_time: int
    finish_time: int | None
    updated_at: int
    message: str | None


class InstanceActionEventRow(Protocol):
    """A row of `instance_action_events`, as a cursor returns it. Times are microseconds since 1970 (UTC)."""

    request_id: str
    instance_uuid: str
    sequence: int
    event: str
    start_time: int
    finish_time: int | None
    result: str | None
    traceback: str | None
    host: str | None
    details: str | None


_START = Prepared(PerDialect(lambda insert: insert(instance_actions).on_conflict_do_nothing()).on)


def _event_finish(insert: Any) -> sa.Executable:
    statement = insert(instance_action_events)
    new = statement.excluded
    kept: sa.Executable = statement.on_conflict_do_update(
        index_elements=[_e.request_id, _e.instance_uuid, _e.sequence],
        set_={
            "finish_time": new.finish_time,
            "result": new.result,
            "details": new.details,
            "traceback": new.traceback,
            "host": sa.func.coalesce(new.host, _e.host),
        },
        where=_e.finish_time.is_(None),
    )
    return kept


_EVENT_FINISH = Prepared(PerDialect(_event_finish).on)
_FINISH = Prepared(
    sa.update(instance_actions)
    .where(_a.request_id == sa.bindparam("request"), _a.instance_uuid == sa.bindparam("instance"))
    .where(_a.finish_time.is_(None))
    .values(
        finish_time=sa.bindparam("now"),
        updated_at=sa.bindparam("now"),
        message=sa.func.coalesce(sa.bindparam("text", type_=sa.String), _a.message),
    )
)
_CUT_SHORT = Prepared(
    sa.update(instance_action_events)
    .where(_e.request_id == sa.bindparam("request"), _e.instance_uuid == sa.bindparam("instance"))
    .where(_e.finish_time.is_(None))
    .values(finish_time=sa.bindparam("now"), result="Error", details="Overtaken by a later request.")
)
_FAILED = Prepared(
    sa.update(instance_actions)
    .where(_a.request_id == sa.bindparam("request"), _a.instance_uuid == sa.bindparam("instance"))
    .where(_a.message.is_(None))
    .values(message="Error", updated_at=sa.bindparam("now"))
)


def _record_finished(insert: Any, dialect: str) -> tuple[sa.Executable, sa.Executable]:
    requests = pairs("requests", dialect)
    now = sa.bindparam("now", type_=sa.BigInteger)

    def each(table: sa.Table, values: dict[str, Any]) -> sa.Executable:
        shared = {
            "request_id": requests.c.value,
            "instance_uuid": instances.c.uuid,
            "start_time": now,
            "finish_time": now,
        }
        named = shared | values
        found = sa.select(*named.values()).where(instances.c.uuid == requests.c.key)
        inserted: sa.Executable = insert(table).from_select(list(named), found).on_conflict_do_nothing()
        return inserted

    def text(name: str) -> sa.ColumnElement[Any]:
        return sa.bindparam(name, type_=sa.String)

    return (
        each(instance_actions, {"action": text("action"), "updated_at": now, "message": text("message")}),
        each(
            instance_action_events,
            {
                "sequence": instances.c.epoch,
                "event": text("event"),
                "host": instances.c.host,
                "result": text("result"),
                "details": text("details"),
            },
        ),
    )


_RECORD_FINISHED = {
    "sqlite": _record_finished(sqlite.insert, "sqlite"),
    "postgresql": _record_finished(postgresql.insert, "postgresql"),
}


def start(
    conn: sa.Connection,
    instance_uuid: str | Sequence[str],
    request_id: str,
    action: str,
    user: str,
    project: str,
    now: int,
    *,
    finished: bool = False,
) -> None:
    """Record the start of an action of one or more servers, or with `finished` also its end.

    The user and the project of an action that nobody asked for are empty, and null in the API.
    """
    uuids = [instance_uuid] if isinstance(instance_uuid, str) else instance_uuid
    shared = {
        "request_id": request_id,
        "action": action,
        "user_id": user or None,
        "project_id": project or None,
        "start_time": now,
        "updated_at": now,
        "finish_time": now if finished else None,
        "message": None,
    }
    _START.run_each(conn, [{**shared, "instance_uuid": uuid} for uuid in uuids])


def record_done(
    conn: sa.Connection,
    row: InstanceRow,
    context: Context | RequestContext,
    action: str,
    now: int,
    *,
    event: str = "",
    host: str | None = None,
) -> None:
    """Record an action that the API has done, with its event if it has one, in the transaction that does it."""
    id, request = row["uuid"], context.request_id
    start(conn, id, request, action, context.user_id, context.project_id, now, finished=True)
    if event:
        event_finish(conn, id, request, row["epoch"], event, now, host=host)


def event_start(
    conn: sa.Connection,
    instance_uuid: str,
    request_id: str,
    sequence: int,
    event: str,
    now: int,
    host: str | None = None,
) -> None:
    """Record that an event of an action began."""
    row = {
        "request_id": request_id,
        "instance_uuid": instance_uuid,
        "sequence": sequence,
        "event": event,
        "start_time": now,
        "host": host,
    }
    insert_if_absent(conn, instance_action_events, row)


def event_finish(
    conn: sa.Connection,
    instance_uuid: str,
    request_id: str,
    sequence: int,
    event: str,
    now: int,
    result: str = "Success",
    host: str | None = None,
    details: str | None = None,
    traceback: str | None = None,
    start_time: int | None = None,
) -> None:
    """Record how an event ended, and its start if that was not recorded."""
    row = {
        "request_id": request_id,
        "instance_uuid": instance_uuid,
        "sequence": sequence,
        "event": event,
        "start_time": now if start_time is None else start_time,
        "finish_time": now,
        "result": result,
        "host": host,
        "details": details,
        "traceback": traceback,
    }
    _EVENT_FINISH.run(conn, row)
    if result == "Error":
        _FAILED.run(conn, {"request": request_id, "instance": instance_uuid, "now": now})


def record_finished(
    conn: sa.Connection,
    requests: Mapping[str, str],
    action: str,
    event: str,
    now: int,
    *,
    result: str,
    details: str,
) -> None:
    """Record an action that nobody asked for and that has ended, with its event, of several servers: two statements.

    `requests` are the ids of the requests by server. The event's sequence number is the server's epoch.
    """
    parameters = {"requests": as_pairs(requests), "now": now}
    actions, events = _RECORD_FINISHED[conn.dialect.name]
    conn.execute(actions, {**parameters, "action": action, "message": "Error" if result == "Error" else None})
    conn.execute(events, {**parameters, "event": event, "result": result, "details": details})


def finish(conn: sa.Connection, instance_uuid: str, request_id: str, now: int, message: str | None = None) -> None:
    """Record that an action ended; the message is "Error" when it failed."""
    row = {
        "request": request_id,
        "instance": instance_uuid,
        "now": now,
        "text": message[:255] if message else None,
    }
    _FINISH.run(conn, row)


def cancel(conn: sa.Connection, instance_uuid: str, request_id: str, now: int) -> None:
    """Record that an action and its open events ended early, because another action replaced it."""
    row = {"request": request_id, "instance": instance_uuid, "now": now, "text": "Error"}
    _CUT_SHORT.run(conn, row)
    _FINISH.run(conn, row)


def list_for(
    conn: sa.Connection,
    instance_uuid: str,
    *,
    changes_since: int | None = None,
    changes_before: int | None = None,
    marker: str | None = None,
    limit: int | None = None,
) -> Sequence[InstanceActionRow] | None:
    """Return a server's actions, the newest first, after the marker; None if the marker is unknown."""
    query = sa.select(instance_actions).where(_a.instance_uuid == instance_uuid)
    if changes_since is not None:
        query = query.where(_a.updated_at >= changes_since)
    if changes_before is not None:
        query = query.where(_a.updated_at <= changes_before)
    if marker is not None:
        last = get(conn, instance_uuid, marker)
        if last is None:
            return None
        query = query.where(
            sa.or_(
                _a.start_time < last.start_time,
                sa.and_(_a.start_time == last.start_time, _a.request_id < last.request_id),
            )
        )
    query = query.order_by(_a.start_time.desc(), _a.request_id.desc())
    return cast(Sequence[InstanceActionRow], conn.execute(query if limit is None else query.limit(limit)).all())


def get(conn: sa.Connection, instance_uuid: str, request_id: str) -> InstanceActionRow | None:
    """Return the action of a request on a server."""
    query = sa.select(instance_actions).where(_a.request_id == request_id, _a.instance_uuid == instance_uuid)
    return cast(InstanceActionRow | None, conn.execute(query).first())


def events(conn: sa.Connection, instance_uuid: str, request_id: str) -> Sequence[InstanceActionEventRow]:
    """Return the events of an action, the newest first."""
    query = sa.select(instance_action_events).where(_e.request_id == request_id, _e.instance_uuid == instance_uuid)
    return cast(
        Sequence[InstanceActionEventRow], conn.execute(query.order_by(_e.start_time.desc(), _e.sequence.desc())).all()
    )

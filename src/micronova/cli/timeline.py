"""`micronova timeline`: a server's actions, read from the database and drawn as a chart."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from micronova.cli.state import StateDirectory, ask, default_directory
from micronova.objects.errors import MicronovaError, NotFound

if TYPE_CHECKING:
    from micronova.cli.wiring import Process


def timeline(server: str, directory: Path | None, config: Path | None) -> None:
    """Draw the actions of a server, which is given by its id or name."""
    if config is None:
        from urllib.parse import quote

        found = ask(StateDirectory(directory or default_directory()).control, f"/timeline?server={quote(server)}")
    else:

        async def read(process: "Process") -> Any:
            assert process.database is not None
            return await process.database.read(find_timeline, server)

        from micronova.cli.wiring import run_connected

        found = run_connected(config, directory, read)
    from micronova.cli.timeline_chart import draw

    draw(found)


def find_timeline(conn: sa.Connection, server: str) -> dict[str, Any]:
    """Return a server's actions with their events and the steps of their operations."""
    from micronova.db.tables import instance_action_events, instance_actions, operations

    row = find_server(conn, server)
    actions = conn.execute(
        sa.select(instance_actions)
        .where(instance_actions.c.instance_uuid == row["uuid"])
        .order_by(instance_actions.c.start_time)
    ).mappings()
    events = conn.execute(
        sa.select(instance_action_events)
        .where(instance_action_events.c.instance_uuid == row["uuid"])
        .order_by(instance_action_events.c.start_time)
    ).mappings()
    return {
        "server": {
            "uuid": row["uuid"],
            "name": row["display_name"],
            "created_at": row["created_at"],
            "launched_at": row["launched_at"],
            "host": row["host"],
            "fault": row["fault"],
        },
        "actions": [dict(each) for each in actions],
        "events": [dict(each) for each in events],
        "operations": [
            _operation(conn, each)
            for each in conn.execute(
                sa.select(operations).where(operations.c.instance_uuid == row["uuid"]).order_by(operations.c.created_at)
            ).mappings()
        ],
    }


def find_server(conn: sa.Connection, server: str) -> sa.RowMapping:
    """Return the row of a server by id or name: of one that exists, else of one that was deleted."""
    from micronova.db.tables import deleted_instances, instances

    for table, called in ((instances, "servers are"), (deleted_instances, "deleted servers were")):
        query = sa.select(table).where(sa.or_(table.c.uuid == server, table.c.display_name == server))
        rows = conn.execute(query).mappings().all()
        if len(rows) > 1:
            raise MicronovaError(f"{len(rows)} {called} called {server}: give the id of one.")
        if rows:
            return rows[0]
    raise NotFound(f"There is no server {server}.")


def _explanation(conn: sa.Connection, stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return how the scheduler decided, with the attempts before."""
    from micronova.db import explanations

    if stored is None:
        return None
    *earlier, last = explanations.whole(conn, stored)
    plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(last, earlier=tuple(earlier)))
    return plain


def _operation(conn: sa.Connection, row: sa.RowMapping) -> dict[str, Any]:
    """Return the parts of an operation that the chart shows."""
    from micronova.objects.context import Context
    from micronova.objects.operations import BuildPayload

    build = BuildPayload.decode(row["payload"]) if row["kind"] == "build" else None
    return {
        "request_id": msgspec.msgpack.decode(row["context"], type=Context).request_id,
        "kind": row["kind"],
        "created_at": row["created_at"],
        "finished_at": row["finished_at"],
        "result": row["result"],
        "dispatches": [msgspec.structs.asdict(times) for times in build.dispatches] if build is not None else [],
        "explanation": _explanation(conn, row["explanation"]),
    }

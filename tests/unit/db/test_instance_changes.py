"""A watched database tells of the changes of instances that are committed, and of no others."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import instance_actions, instances
from micronova.db.engine import Database
from micronova.db.instance_changes import InstanceChange, StatesBefore, WatchedDatabase
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_changes_are_told_after_the_commit(database: Database) -> None:
    told: list[InstanceChange] = []
    watched = WatchedDatabase(database, told.append)
    await watched.write(add_instances, "i-1", "i-2")
    told.clear()

    def act(conn: sa.Connection) -> str:
        instances.update(conn, "i-1", 5, {"task_state": "powering-off"})
        instance_actions.start(conn, "i-1", "req-1", "stop", "ada", "engines", 5)
        return "done"

    assert await watched.write(act) == "done"
    [change] = told
    assert change.before.task_state != "powering-off"
    assert (change.row["uuid"], change.row["task_state"]) == ("i-1", "powering-off")
    assert (change.context.request_id, change.context.user_id) == ("req-1", "ada")
    told.clear()
    await watched.write(instances.update_many, ["i-1", "i-2"], 6, {"vm_state": "error", "task_state": None})
    assert {each.row["uuid"]: each.row["vm_state"] for each in told} == {"i-1": "error", "i-2": "error"}
    assert {each.before.task_state for each in told} == {"powering-off", None}
    told.clear()
    row = await watched.read(instances.get, "i-1")
    assert row is not None
    await watched.write(instances.move_to_deleted, row, 7)
    assert [(each.before.vm_state, each.row["vm_state"]) for each in told] == [("error", "deleted")]


async def test_what_is_not_committed_is_not_told(database: Database) -> None:
    told: list[InstanceChange] = []
    watched = WatchedDatabase(database, told.append)
    await database.write(add_instances, "i-1")  # not through the watcher

    def fail(conn: sa.Connection) -> None:
        instances.update(conn, "i-1", 5, {"task_state": "powering-off"})
        raise LookupError

    with pytest.raises(LookupError):
        await watched.write(fail)
    await watched.write(instances.update, "i-1", 5, {"task_state": "x"}, epoch=99)  # another epoch: nothing changes
    await database.write(instances.update, "i-1", 5, {"task_state": "y"})
    assert told == []
    await watched.write(instances.update, "i-1", 6, {"display_name": "new"})
    assert [each.row["display_name"] for each in told] == ["new"]
    assert isinstance(told[0].before, StatesBefore) and told[0].before.display_name == "i-1"


async def test_the_statements_do_not_depend_on_the_number_of_changes(database: Database) -> None:
    told: list[InstanceChange] = []
    watched = WatchedDatabase(database, told.append)
    names = [f"i-{number}" for number in range(40)]
    await database.write(add_instances, *names)

    def act(conn: sa.Connection, some: list[str]) -> None:
        for number, name in enumerate(some):
            instance_actions.start(conn, name, f"old-{name}", "stop", "ada", "engines", 2 * number)
            instance_actions.start(conn, name, f"new-{name}", "start", "ada", "engines", 2 * number + 1)

    await database.write(act, names)
    counts = []
    for some in (names[:1], names):
        statements: list[str] = []

        def change(conn: sa.Connection, some: list[str] = some, statements: list[str] = statements) -> None:
            def note(_: object, __: object, statement: str, *___: object) -> None:
                statements.append(statement)

            sa.event.listen(conn, "before_cursor_execute", note)
            instances.update_many(conn, some, 6, {"vm_state": "stopped"})

        told.clear()
        await watched.write(change)
        counts.append(len(statements))
        assert {each.row["uuid"]: each.context.request_id for each in told} == {id: f"new-{id}" for id in some}
    assert counts[0] == counts[1]

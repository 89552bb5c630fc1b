"""Waiting for operations: for the end of one, or until those that change a server's devices have ended."""

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import OperationRow

R = TypeVar("R")

FIRST_POLL = 0.02
LONGEST_POLL = 0.5  # seconds between two reads; the pause grows from FIRST_POLL to this
GRACE = 30.0  # seconds after its deadline within which an operation certainly ends


async def wait_for_operation(
    database: Database,
    clock: Clock,
    operation: str,
    late: str,
    steps: Collection[str] | None = None,
    *,
    follow_up: float | None = None,
) -> OperationRow | None:
    """Wait until an operation has ended, or with `steps` has left these; return it, or None if it was purged.

    Raise Unavailable with the text `late` if it is still open `GRACE` seconds after its deadline. An operation that
    follows from another change has no deadline: with `follow_up` it is returned after that many seconds, open or not.
    """
    pause = FIRST_POLL
    until = None if follow_up is None else clock.monotonic() + follow_up
    while True:
        found = await database.read(operation_rows.get, operation)
        if found is None or found["finished_at"] is not None or (steps is not None and found["step"] not in steps):
            return found
        if until is not None and found["deadline"] == operation_rows.NO_DEADLINE and clock.monotonic() >= until:
            return found
        if clock.now() > found["deadline"] / 1e6 + GRACE:
            raise Unavailable(late)
        await clock.sleep(pause)
        pause = min(LONGEST_POLL, pause * 1.5)


class DeviceChanges:
    """Lets requests that change the devices of one server follow each other."""

    def __init__(self, database: Database, clock: Clock, busy: Collection[str]) -> None:
        """`busy` are the task states of servers whose devices an operation changes."""
        self._database = database
        self._clock = clock
        self._busy = busy

    async def wait(self, row: InstanceRow, seconds: float) -> InstanceRow:
        """Wait until no operation changes the server's devices, at most these seconds; return the server then."""
        until = self._clock.monotonic() + seconds
        pause = FIRST_POLL
        while row["task_state"] in self._busy and self._clock.monotonic() < until:
            await self._clock.sleep(pause)
            pause = min(LONGEST_POLL, pause * 1.5)
            row = await self._database.read(instances.get_existing, row["uuid"])
        return row

    async def begin(self, row: InstanceRow, seconds: float, begin: Callable[[InstanceRow], Awaitable[R]]) -> R:
        """Call `begin` with the server when no operation changes its devices; raise its Conflict after the seconds."""
        until = self._clock.monotonic() + seconds
        while True:
            row = await self.wait(row, until - self._clock.monotonic())
            try:
                return await begin(row)
            except Conflict:
                row = await self._database.read(instances.get_existing, row["uuid"])
                if row["task_state"] not in self._busy or self._clock.monotonic() >= until:
                    raise

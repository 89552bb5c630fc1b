"""Waiting for an operation, by requests whose answer depends on how it ends."""

from collections.abc import Collection

from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import Clock
from micronova.objects.errors import Unavailable
from micronova.objects.operations import OperationRow

FIRST_POLL = 0.02
LONGEST_POLL = 0.5  # seconds between looks at an operation; the pause grows from FIRST_POLL to this
GRACE = 30.0  # seconds after its deadline within which an operation certainly ends


async def wait_for_operation(
    database: Database, clock: Clock, operation: str, late: str, steps: Collection[str] | None = None
) -> OperationRow | None:
    """Wait until an operation has ended, or with `steps` is at none of them; return it, or None if it was purged.

    Raise Unavailable with the text `late` if that is not so long after its deadline.
    """
    pause = FIRST_POLL
    while True:
        found = await database.read(operation_rows.get, operation)
        if found is None or found["finished_at"] is not None or (steps is not None and found["step"] not in steps):
            return found
        if clock.now() > found["deadline"] / 1e6 + GRACE:
            raise Unavailable(late)
        await clock.sleep(pause)
        pause = min(LONGEST_POLL, pause * 1.5)

"""Operations: the work that goes on after the answer to a request, and that survives the death of its process.

A request writes the row of an operation in the transaction that changes the status of the volume, and only then is a
file touched. The transaction that records the result removes the row. Whatever happens in between may run twice.

Processes that share a directory share the work. Who holds the lock (flock) of an operation works on it, and the lock
ends with its process. So the next sweep of any process, or the next start, takes up what a killed one has left.
Operations on one resource run one after the other, and nothing changes or deletes what an earlier one still reads.
Projects take turns: however much one of them has requested, the first operation of another is among the next to run.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event, EventSender
from micronova.embedded.volume.backend.files import Files, Interrupted
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.operations.base import Apply, Attempt, Failed, OperationKind
from micronova.embedded.volume.store import message_queries, operation_queries, service_queries
from micronova.embedded.volume.store.operation_queries import Ready
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError, Unavailable, resource_exhausted

log = logging.getLogger(__name__)

SWEEP: Final = 5.0  # seconds between searches for operations that other processes have left
MOST_RUNNING: Final = 100  # operations that a process works on at once; each has up to three descriptors
MOST_RUNNING_OF_PROJECT: Final = 8  # operations of one project among these
MOST_LISTED: Final = 200  # operations that one read finds; the next read follows when those of a project run
RECENT: Final = 5.0  # seconds within which a transaction that records an operation ends
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an operation that lacked something for the moment is repeated


def _end(
    conn: sa.Connection, id: str, apply: Apply, give_back: Apply, sender: EventSender, now: int
) -> tuple[bool, Sequence[Event]]:
    """Remove the row and record the result, or give back if the operation was cancelled.

    Return whether it was not cancelled, and the events for compute, which are in the outbox.
    """
    cancelled = operation_queries.lock(conn, id)
    if cancelled is None:
        return True, ()  # the answer to the first commit was lost
    operation_queries.remove(conn, id)
    events = (give_back if cancelled else apply)(conn, now) or ()
    sender.put(conn, events)
    return not cancelled, events


class Engine:
    """Works on the operations of this host."""

    def __init__(self, core: Core, files: Files, kinds: Iterable[OperationKind]) -> None:
        self._core = core
        self._files = files
        self._kinds = {kind.name: kind for kind in kinds}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._projects: Counter[str] = Counter()  # how many operations run, by project
        self._attempts: dict[str, Attempt] = {}
        self._set_aside: set[str] = set()  # operations that this process does not try again before the next sweep
        # What the last read has found and does not run. It waits for no other operation, whatever happens meanwhile.
        self._listed: Sequence[Ready] = ()
        self._all_listed = True  # the last read has found all that could begin
        self._recorded = False  # since then requests have recorded operations
        self._ended: set[str] = set()  # projects of which operations have ended since then
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take up what is left of earlier processes, and wait for more."""
        self._core.on_operation = self._on_operation
        self._on_operation()
        clock = self._core.clock
        self._tasks = [
            keep_running(self._take_forever, name="volume-operations", clock=clock),
            keep_running(self._sweep_forever, name="volume-operations-sweep", clock=clock),
        ]

    async def stop(self) -> None:
        """Stop; the next start continues what is not finished."""
        await end_tasks(*self._tasks)
        await end_tasks(*self._running.values())

    async def _sweep_forever(self) -> None:
        while True:
            await self._core.clock.sleep(SWEEP)
            await self.sweep()

    async def sweep(self) -> None:
        """Show that this host is alive and how far its work is, and look for operations that others have left."""
        await self._core.database.write(service_queries.record_alive, self._core.host, self._core.now())
        progress = {id: attempt.progress for id, attempt in self._attempts.items() if attempt.progress}
        if progress:
            await self._core.database.write(operation_queries.note_progress, progress)
        self._set_aside.clear()
        self._listed, self._all_listed = (), True
        self._on_operation()

    def _on_operation(self) -> None:
        self._recorded = True
        self._wake.set()

    async def _take_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._note_cancelled()
            if len(self._running) < MOST_RUNNING:
                if await self._may_find_more():
                    await self._read_ready()
                self._take_listed()

    async def _note_cancelled(self) -> None:
        """Let attempts at operations that were cancelled end."""
        if self._attempts:
            for id in await self._core.database.read(operation_queries.cancelled, list(self._attempts)):
                if attempt := self._attempts.get(id):
                    attempt.cancelled = True

    async def _may_find_more(self) -> bool:
        """Return whether a read may find the operation of a project of which none is listed.

        A read takes time for each operation that waits. One project may have thousands of them, and end and begin some
        all the time.
        """
        changed, self._ended = self._ended, set()
        if self._recorded:
            self._recorded = False
            if self._all_listed:  # few wait
                return True
            since = self._core.now() - micros(RECENT)
            changed |= await self._core.database.read(operation_queries.projects_since, self._core.host, since)
        return not changed.issubset(each.project_id for each in self._listed)

    async def _read_ready(self) -> None:
        now = self._core.now()
        self._listed = await self._core.database.read(operation_queries.ready, self._core.host, now, MOST_LISTED)
        self._all_listed = len(self._listed) < MOST_LISTED

    def _take_listed(self) -> None:
        """Begin to work on operations, except those that run, wait for the next sweep or exceed a limit."""
        left = []
        for ready in self._listed:
            if ready.id in self._running or ready.id in self._set_aside:
                continue
            if len(self._running) >= MOST_RUNNING or self._projects[ready.project_id] >= MOST_RUNNING_OF_PROJECT:
                left.append(ready)
                continue
            self._projects[ready.project_id] += 1
            run = self._run(ready.id, ready.project_id)
            self._running[ready.id] = asyncio.get_running_loop().create_task(run, name=ready.kind)
        self._listed = left

    async def _run(self, id: str, project_id: str) -> None:
        try:
            lock = self._files.lock(id)
            if lock is None:
                self._set_aside.add(id)  # another process works on it
                return
            try:
                operation = await self._core.database.read(operation_queries.get, id)
                if operation is not None and operation.not_before <= self._core.now():  # else another process tried it
                    await self._attempt(operation)
            finally:
                self._files.unlock(id, lock)
        except Exception:
            self._set_aside.add(id)
            log.exception("operation %s stopped and is taken up again in %g s", id, SWEEP)
        finally:
            self._attempts.pop(id, None)
            del self._running[id]
            self._projects -= Counter((project_id,))  # removes a project of which no operation runs
            self._ended.add(project_id)
            self._wake.set()  # operations that waited for this one, or for a limit, may run now

    async def _attempt(self, operation: Operation) -> None:
        kind, attempt = self._kinds[operation.kind], Attempt(operation)
        self._attempts[operation.id] = attempt
        try:
            apply = await kind.run(attempt) if not operation.cancelled else _nothing
        except Interrupted:
            return
        except Exception as error:
            if (lack := _temporary_lack(error)) is not None:
                await self._repeat_later(operation, lack)
            else:
                await self._fail(kind, operation, error)
            return
        if not await self._finish(kind, operation, apply):
            await kind.undo(operation)

    async def _finish(self, kind: OperationKind, operation: Operation, apply: Apply) -> bool:
        def give_back(conn: sa.Connection, now: int) -> None:
            kind.give_back(conn, operation, now)

        core = self._core
        wanted, events = await core.database.write(_end, operation.id, apply, give_back, core.events, core.now())
        core.events.hand_over(events)
        return wanted

    async def _repeat_later(self, operation: Operation, error: Unavailable) -> None:
        pause = min(FIRST_PAUSE * 2 ** min(operation.attempts, 16), LONGEST_PAUSE)
        log.warning("%s of %s waits for %g s: %s", operation.kind, operation.resource_id, pause, error)
        await self._core.database.write(operation_queries.postpone, operation, self._core.now() + micros(pause))

    async def _fail(self, kind: OperationKind, operation: Operation, error: Exception) -> None:
        if isinstance(error, Failed):
            detail, known = error.detail, True
        else:
            detail, known = messages.detail_of(error, operation), isinstance(error, MicronovaError | OSError)
        log.error(
            "%s of %s failed: %s", operation.kind, operation.resource_id, error, exc_info=None if known else error
        )
        await kind.undo(operation)
        message_id = self._core.new_id()

        def record(conn: sa.Connection, now: int) -> None:
            kind.fail(conn, operation, now)
            message = messages.message(message_id, operation, kind.resource, kind.action, detail, now)
            message_queries.add(conn, message)

        await self._finish(kind, operation, record)


def _temporary_lack(error: Exception) -> Unavailable | None:
    """Return what is missing for the moment, else None. A full file system is an error: users can delete something."""
    if isinstance(error, Unavailable):
        return error
    return None if messages.is_no_space(error) else resource_exhausted(error)


def _nothing(conn: sa.Connection, now: int) -> None:
    """Record nothing: the operation was cancelled."""

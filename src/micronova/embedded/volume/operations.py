"""Operations: the work that goes on after the answer to a request, and that survives the death of its process.

A request writes the row of an operation in the transaction that changes the status of the volume, and only then is a
file touched. The transaction that records the result removes the row. Whatever happens in between may run twice.

Processes that share a directory share the work. Who holds the lock (flock) of an operation works on it, and the lock
ends with its process. So the next sweep of any process, or the next start, takes up what a killed one has left.
Operations on one resource run one after the other, and nothing changes or deletes what an earlier one still reads.
Projects take turns: however much one of them has begun, the first operation of another is among the next to run.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.compute_events import Event, Notifier
from micronova.embedded.volume import messages, service_rows
from micronova.embedded.volume.backend.files import Files, Interrupted
from micronova.embedded.volume.connecting import Connector
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.images import Images
from micronova.embedded.volume.model import Operation
from micronova.embedded.volume.tables import operations
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError, Unavailable, resource_exhausted

log = logging.getLogger(__name__)

SWEEP: Final = 5.0  # seconds between two looks for operations that other processes have left
MOST: Final = 100  # operations that a process works on at once; each has up to three descriptors
MOST_OF_PROJECT: Final = 8  # of them those of one project
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an operation that lacked something for the moment is repeated

IMAGE: Final = "image"  # tells the file of an image that was not converted yet from that of the volume

R = TypeVar("R")

Apply = Callable[[sa.Connection, int], Sequence[Event] | None]
"""Records the result of an operation, in the transaction that removes its row; the number is the time.

It returns the events that compute has to be told."""


class Failed(Exception):
    """An operation cannot succeed; the message is for the user."""

    def __init__(self, detail: messages.Detail, log_text: str = "") -> None:
        super().__init__(log_text or detail.text)
        self.detail = detail


class Work:
    """One attempt at an operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.progress = 0  # in percent; written by any thread
        self.unwanted = False  # the operation was cancelled meanwhile

    def reporter(self, size: int) -> Callable[[int], None]:
        """Return the function that is told how many bytes of `size` are done; it ends work that is not wanted."""

        def report(done: int) -> None:
            if self.unwanted:
                raise Interrupted
            self.progress = min(100, 100 * done // max(size, 1))

        return report


class OperationKind(ABC):
    """One kind of work."""

    name: ClassVar[str]
    action: ClassVar[messages.Action]  # what the message about a failure says was tried
    resource: ClassVar[messages.Resource]
    directory: ClassVar[str]  # of the files that it writes

    def __init__(self, core: Core, files: Files, images: Images | None, connector: Connector) -> None:
        self.core = core
        self.files = files
        self.images = images
        self.connector = connector

    @abstractmethod
    async def run(self, work: Work) -> Apply:
        """Do the work, which an earlier attempt may have done in part, and return what records the result.

        Raise Unavailable if something is missing for the moment, Failed or another error if it cannot succeed.
        """

    async def existing(self, get: Callable[[sa.Connection, str], R | None], id: str) -> R:
        """Return what an operation changes, whose row exists for as long as the operation does."""
        found = await self.core.database.read(get, id)
        assert found is not None
        return found

    async def undo(self, operation: Operation) -> None:
        """Remove the files that a failed or cancelled attempt has not completed; it may run twice."""
        for what in ("", IMAGE):
            part = self.files.part(self.directory, operation.resource_id, operation.id, what)
            await self.files.remove(self.directory, part.name)

    @abstractmethod
    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Record that the operation has failed."""

    def cancelled(self, conn: sa.Connection, operation: Operation, now: int) -> None:  # noqa: B027 (most hold nothing)
        """Give back what the operation holds besides its own resource: a quota, the status of its source."""


def begin(
    conn: sa.Connection,
    core: Core,
    kind: type[OperationKind],
    *,
    id: str,
    resource_id: str,
    project_id: str,
    request_id: str,
    source_id: str | None = None,
    payload: dict[str, Any] | None = None,
) -> bool:
    """Write the row of an operation. Transactions do this before they change other rows; see ARCHITECTURE.md.

    Raise Invalid if the storage service is frozen.

    Return False if the row exists already, because the answer to the first commit was lost: then the transaction has
    nothing left to do.
    """
    service_rows.check_not_frozen(conn, core.host)
    # After all that it has to wait for, also if the clock was set back.
    ids = (resource_id, source_id or resource_id)
    before = sa.or_(operations.c.resource_id.in_(ids), operations.c.source_id == resource_id)
    latest = conn.execute(sa.select(sa.func.max(operations.c.created_at)).where(before)).scalar_one()
    row = Operation(
        id=id,
        kind=kind.name,
        host=core.host,
        resource_id=resource_id,
        source_id=source_id,
        project_id=project_id,
        request_id=request_id,
        payload=payload or {},
        cancelled=False,
        progress=0,
        attempts=0,
        not_before=0,
        created_at=max(core.now(), (latest or 0) + 1),
    )
    return insert_if_absent(conn, operations, msgspec.structs.asdict(row))


def exists(conn: sa.Connection, id: str) -> bool:
    """Return whether there is the row of an operation."""
    return _get(conn, id) is not None


def cancel(conn: sa.Connection, resource_id: str, *, but: str) -> None:
    """Cancel the operations of a resource, except for one: their results are not wanted any more."""
    of_resource = operations.c.resource_id == resource_id
    conn.execute(operations.update().where(of_resource, operations.c.id != but).values(cancelled=True))


_earlier = operations.alias("earlier")
_waiting = (
    sa.select(
        operations,
        # How many operations of the project come before it, those that run included.
        sa.func.row_number()
        .over(partition_by=operations.c.project_id, order_by=(operations.c.created_at, operations.c.id))
        .label("turn"),
    )
    .where(
        operations.c.host == sa.bindparam("here"),
        operations.c.not_before <= sa.bindparam("now"),
        ~sa.exists().where(
            sa.or_(
                _earlier.c.created_at < operations.c.created_at,
                sa.and_(_earlier.c.created_at == operations.c.created_at, _earlier.c.id < operations.c.id),
            ),
            sa.or_(
                _earlier.c.resource_id.in_((operations.c.resource_id, operations.c.source_id)),
                _earlier.c.source_id == operations.c.resource_id,
            ),
        ),
    )
    .subquery()
)
_READY = (
    sa.select(_waiting.c.id, _waiting.c.kind, _waiting.c.project_id)
    .where(_waiting.c.turn <= 2 * MOST_OF_PROJECT)
    .order_by(_waiting.c.turn, _waiting.c.created_at, _waiting.c.id)
    .limit(2 * MOST)
)


class Ready(NamedTuple):
    """An operation that waits for no earlier one."""

    id: str
    kind: str
    project_id: str


def _ready(conn: sa.Connection, host: str, now: int) -> list[Ready]:
    return [Ready(*row) for row in conn.execute(_READY, {"here": host, "now": now})]


def _unwanted(conn: sa.Connection, ids: Sequence[str]) -> list[str]:
    chosen = sa.select(operations.c.id).where(operations.c.id.in_(ids), operations.c.cancelled)
    return list(conn.execute(chosen).scalars())


def _get(conn: sa.Connection, id: str) -> Operation | None:
    row = conn.execute(sa.select(operations).where(operations.c.id == id)).one_or_none()
    return None if row is None else Operation(**row._mapping)


def _end(
    conn: sa.Connection, id: str, apply: Apply, give_back: Apply, notifier: Notifier, now: int
) -> tuple[bool, Sequence[Event]]:
    """Remove the row and record the result, or give back if the operation was cancelled.

    Return whether it was not cancelled, and the events for compute, which are in the outbox.
    """
    found = conn.execute(sa.select(operations.c.cancelled).where(operations.c.id == id).with_for_update()).one_or_none()
    if found is None:
        return True, ()  # the answer to the first commit was lost
    conn.execute(operations.delete().where(operations.c.id == id))
    events = (give_back if found.cancelled else apply)(conn, now) or ()
    notifier.put(conn, events)
    return not found.cancelled, events


def _postpone(conn: sa.Connection, operation: Operation, until: int) -> None:
    values = {"attempts": operation.attempts + 1, "not_before": until, "progress": 0}
    conn.execute(operations.update().where(operations.c.id == operation.id).values(values))


def _note_progress(conn: sa.Connection, progress: dict[str, int]) -> None:
    for id, percent in sorted(progress.items()):
        conn.execute(operations.update().where(operations.c.id == id).values(progress=percent))


class Engine:
    """Works on the operations of this host."""

    def __init__(self, core: Core, files: Files, kinds: Iterable[OperationKind]) -> None:
        self._core = core
        self._files = files
        self._kinds = {kind.name: kind for kind in kinds}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._projects: Counter[str] = Counter()  # how many operations run, by project
        self._works: dict[str, Work] = {}
        self._left: set[str] = set()  # operations that this process does not try again before the next sweep
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take up what is left of earlier processes, and wait for more."""
        self._core.on_operation = self._wake.set
        self._wake.set()
        clock = self._core.clock
        self._tasks = [
            keep_running(self._take_forever, name="volume-operations", clock=clock),
            keep_running(self._sweep_forever, name="volume-operations-sweep", clock=clock),
        ]

    async def stop(self) -> None:
        """Stop; the next start goes on with what is not finished."""
        await end_tasks(*self._tasks)
        await end_tasks(*self._running.values())

    async def _sweep_forever(self) -> None:
        while True:
            await self._core.clock.sleep(SWEEP)
            await self.sweep()

    async def sweep(self) -> None:
        """Show that this host is alive and how far its work is, and look for operations that others have left."""
        await self._core.database.write(service_rows.record_alive, self._core.host, self._core.now())
        progress = {id: work.progress for id, work in self._works.items() if work.progress}
        if progress:
            await self._core.database.write(_note_progress, progress)
        self._left.clear()
        self._wake.set()

    async def _take_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for id in await self._core.database.read(_unwanted, list(self._works)) if self._works else ():
                if work := self._works.get(id):
                    work.unwanted = True
            for ready in await self._core.database.read(_ready, self._core.host, self._core.now()):
                self._take(ready)

    def _take(self, ready: Ready) -> None:
        """Begin to work on an operation, unless it runs, its project or this process has enough, or it is to wait."""
        if ready.id in self._running or ready.id in self._left or len(self._running) >= MOST:
            return
        if self._projects[ready.project_id] >= MOST_OF_PROJECT:
            return
        self._projects[ready.project_id] += 1
        work = self._work(ready.id, ready.project_id)
        self._running[ready.id] = asyncio.get_running_loop().create_task(work, name=ready.kind)

    async def _work(self, id: str, project_id: str) -> None:
        try:
            lock = self._files.lock(id)
            if lock is None:
                self._left.add(id)  # another process works on it
                return
            try:
                operation = await self._core.database.read(_get, id)
                if operation is not None:
                    await self._attempt(operation)
            finally:
                self._files.unlock(id, lock)
        except Exception:
            self._left.add(id)
            log.exception("operation %s stopped and is taken up again in %g s", id, SWEEP)
        finally:
            self._works.pop(id, None)
            del self._running[id]
            self._projects -= Counter((project_id,))  # without those of which none runs
            self._wake.set()  # what waited for it, or for room

    async def _attempt(self, operation: Operation) -> None:
        kind, work = self._kinds[operation.kind], Work(operation)
        self._works[operation.id] = work
        try:
            apply = await kind.run(work) if not operation.cancelled else _nothing
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
            kind.cancelled(conn, operation, now)

        core = self._core
        wanted, events = await core.database.write(_end, operation.id, apply, give_back, core.notifier, core.now())
        core.notifier.hand_over(events)
        return wanted

    async def _repeat_later(self, operation: Operation, error: Unavailable) -> None:
        pause = min(FIRST_PAUSE * 2 ** min(operation.attempts, 16), LONGEST_PAUSE)
        log.warning("%s of %s waits for %g s: %s", operation.kind, operation.resource_id, pause, error)
        await self._core.database.write(_postpone, operation, self._core.now() + micros(pause))

    async def _fail(self, kind: OperationKind, operation: Operation, error: Exception) -> None:
        if isinstance(error, Failed):
            detail, known = error.detail, True
        else:
            detail, known = messages.detail_of(error), isinstance(error, MicronovaError | OSError)
        log.error(
            "%s of %s failed: %s", operation.kind, operation.resource_id, error, exc_info=None if known else error
        )
        await kind.undo(operation)
        message_id = self._core.new_id()

        def record(conn: sa.Connection, now: int) -> None:
            kind.fail(conn, operation, now)
            messages.add(conn, message_id, operation, kind.resource, kind.action, detail, now)

        await self._finish(kind, operation, record)


def _temporary_lack(error: Exception) -> Unavailable | None:
    """Return what is missing for the moment, else None. A full file system is an error: users can delete something."""
    if isinstance(error, Unavailable):
        return error
    return None if messages.detail_of(error) is messages.Detail.NO_SPACE else resource_exhausted(error)


def _nothing(conn: sa.Connection, now: int) -> None:
    """Record nothing: the operation was cancelled."""

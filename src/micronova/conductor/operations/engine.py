"""Durable operations: which conductor or host works on which operation, from which step, until when.

An operation is a row (`db.operations`). A conductor *leases* rows, runs the kind's step that the row names, and
persists each step together with the change that the step made. When a lease expires, another conductor continues from
the persisted step; every step may therefore run twice and must tolerate it. While a host works on an order, the host
is the owner and its heartbeat renews the lease.

A message that announces new operations is only a hint: the sweep finds operations whose message was lost.

CONTRIBUTING.md has the checklists *Add a server action* and *Add an operation step*; `conductor/operations/power.py` is
the smallest example.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.conductor.operations.health import Health
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.background import keep_running
from micronova.objects.clock import Clock, micros, seconds
from micronova.objects.context import Context
from micronova.objects.errors import (
    HostUnavailable,
    MicronovaError,
    SecretNotReadable,
    Stale,
    Unavailable,
    resource_exhausted,
)
from micronova.objects.explanation import counted
from micronova.objects.operations import BACKGROUND_KINDS, VERSIONS, OperationRow, Payload, Result, Step
from micronova.telemetry.logs import server_id

log = logging.getLogger(__name__)

MOST_SWEPT = 200  # operations that sweeps take before others have ended; more to complete a batch
LONGEST_PAUSE = 30.0  # seconds until an operation is tried again

P = ParamSpec("P")
T = TypeVar("T")
PayloadType = TypeVar("PayloadType", bound=Payload)


class Crash(BaseException):
    """Raised by the `after_commit` of a test to stop the work on an operation as a crash would."""


class Operation(msgspec.Struct, kw_only=True):
    """An operation with its owner."""

    id: str
    kind: str
    version: int
    instance_uuid: str
    batch_id: str
    step: Step
    owner: str
    epoch: int
    deadline: int
    leases: int  # how often a conductor has leased it
    payload: bytes
    secrets: bytes | None
    context: Context
    created_at: int

    @classmethod
    def of(cls, row: OperationRow) -> "Operation":
        """Return the operation of a row that has an owner."""
        return cls(
            id=row["id"],
            kind=row["kind"],
            version=row["version"],
            instance_uuid=row["instance_uuid"],
            batch_id=row["batch_id"],
            step=row["step"],
            owner=row["owner"] or "",
            epoch=row["epoch"],
            deadline=row["deadline"],
            leases=row["leases"],
            payload=row["payload"],
            secrets=row["secrets"],
            context=msgspec.msgpack.decode(row["context"], type=Context),
            created_at=row["created_at"],
        )

    @property
    def lease(self) -> operation_rows.Lease:
        """The lease with which its owner may change the row."""
        return operation_rows.Lease(self.owner, self.epoch, self.leases)

    def payload_as(self, type: type[PayloadType]) -> PayloadType:
        """Return the decoded payload."""
        return type.decode(self.payload)

    def is_late(self, now: int, undisturbed: int) -> bool:
        """Return whether it has not ended in time, although the conductor was `undisturbed`; times in microseconds."""
        return operation_rows.is_late(self.deadline, self.created_at, now, undisturbed)

    def is_current(self, row: OperationRow | None) -> bool:
        """Return whether nobody has ended, taken over or leased the operation since, according to its present row."""
        return operation_rows.is_held(row, self.lease)


def retry_pause(operation: Operation) -> float:
    """Return the seconds until an operation is tried again; they grow with its leases."""
    return min(LONGEST_PAUSE, 0.5 * float(2 ** min(operation.leases, 6)))


def _deadline_error(operation: Operation) -> MicronovaError:
    """Return the error of an operation whose deadline is over, or that an operator has cancelled."""
    if operation.deadline == operation_rows.CANCELLED:
        return MicronovaError(f"{operation.kind} was cancelled by an operator.")
    last = operation.payload_as(Payload).last_error
    return MicronovaError(f"{operation.kind} did not end in time.{f' Last error: {last}' if last else ''}")


def _lateness(kind: "Kind", operation: Operation, now: int, undisturbed: int) -> Exception | None:
    """Return the error of an operation whose deadline is over and that may fail, None of others."""
    try:
        late = operation.is_late(now, undisturbed) and kind.may_fail(operation)
        return _deadline_error(operation) if late else None
    except Exception as error:  # such as a payload that cannot be decoded
        log.exception("operation %s (%s) is late and cannot be read", operation.id, kind.name)
        return error


class Kind(ABC):
    """One kind of operation, as the engine sees it: what its steps do.

    `OperationKind`, the base of all kinds, is in another module: it imports modules that import this one.
    """

    name: str

    @property
    def version(self) -> int:
        """The newest version of such operations that this conductor runs."""
        return VERSIONS[self.name]

    def may_fail(self, operation: Operation) -> bool:
        """Return whether an operation may fail at its step; else the step is repeated until it succeeds.

        The engine calls `fail` only if this is True; `NeverFails` is for a kind that may fail at no step.
        """
        return True

    @abstractmethod
    async def run(self, operations: list[Operation]) -> None:
        """Run operations of one request from their persisted steps until each is finished or owned by a host."""

    @abstractmethod
    async def fail(self, operation: Operation, error: Exception) -> None:
        """End an operation that cannot succeed: set the instance to the state that the failure of this kind means."""


class NeverFails(Kind):
    """A kind of operation whose steps are repeated, with growing pauses, until they succeed."""

    def may_fail(self, operation: Operation) -> bool:
        """Return False."""
        return False

    async def fail(self, operation: Operation, error: Exception) -> None:
        """Raise AssertionError: nothing calls this."""
        raise AssertionError(f"{self.name} never fails") from error


class Observer(Protocol):
    """What telemetry observes of operations."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """Return a context that is entered while a conductor works on an operation."""

    def ended(self, kind: str, result: Result, seconds: float) -> None:
        """Count an operation that has ended, and the time since it was accepted."""

    def retried(self, kind: str) -> None:
        """Count that an operation is tried again."""


class _NoObserver:
    def running(self, operation: Operation) -> AbstractContextManager[None]:
        return nullcontext()

    def ended(self, kind: str, result: Result, seconds: float) -> None:
        pass

    def retried(self, kind: str) -> None:
        pass


class _Slot:
    """One of the slots of a conductor, which a batch takes, but not while a part of it waits for another service."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False
        self.waiting = 0  # parts of the batch

    async def __aenter__(self) -> None:
        await self._take()
        self._before = _slot.set(self)

    async def __aexit__(self, *_: object) -> None:
        _slot.reset(self._before)
        self._give_back()

    @contextlib.asynccontextmanager
    async def given_back(self) -> AsyncIterator[None]:
        """Give the slot back; the last part that waits takes one again at the end, unless it is cancelled."""
        self.waiting += 1
        self._give_back()
        goes_on = True
        try:
            yield
        except asyncio.CancelledError:
            goes_on = False
            raise
        finally:
            self.waiting -= 1
            if goes_on and not self.waiting:
                await self._take()

    async def _take(self) -> None:
        await self._slots.acquire()
        if self._held:  # another part took one meanwhile
            self._slots.release()
        self._held = True

    def _give_back(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


_slot: ContextVar[_Slot | None] = ContextVar("slot", default=None)
"""Of the batch that the present task works on."""


class Engine:
    """Leases operations, runs their kinds, and sweeps for operations without a valid lease."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        owner: str,
        lease_seconds: float,
        sweep_interval: float,
        concurrency: int,
        proof_valid: float,
        after_commit: Callable[[str, str], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.database = database
        self.clock = clock
        self.owner = owner
        self.lease_seconds = lease_seconds
        self._sweep_interval = sweep_interval
        self._kinds: Mapping[str, Kind] = {}
        self._known: operation_rows.Known = ()
        self._leased: dict[str, Operation] = {}  # the operations that this conductor has leased and works on
        self._again: set[str] = set()  # of these, the ones to lease again when the work on them ends
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches = 0  # that it works on or that wait for a slot, without those in the background
        self._slots_of_batches: set[_Slot] = set()  # of these
        self._slots = asyncio.Semaphore(concurrency)
        # Of BACKGROUND_KINDS.
        self._background = asyncio.Semaphore(max(1, concurrency // 8))
        self._after_commit = after_commit
        self._observer = observer or _NoObserver()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self.health = Health(clock, settle=lease_seconds, proof_valid=proof_valid)

    def set_kinds(self, kinds: Mapping[str, Kind]) -> None:
        """Take the kinds of operations to run, by name."""
        self._kinds = kinds
        # Newer versions and other kinds are left to conductors that know them.
        self._known = tuple(sorted((each.name, each.version) for each in kinds.values()))

    async def start(self) -> None:
        """Start the loops that renew leases and sweep."""
        self.health.outage_noticed()
        self._loops = [
            keep_running(partial(self._forever, work, what, interval), name=f"operations-{name}", clock=self.clock)
            for name, work, what, interval in (
                ("sweep", self._sweep, "the search for operations without a valid lease", self._sweep_interval),
                ("renew", self.renew, "the renewal of leases of operations", self.lease_seconds / 4),
            )
        ]

    async def stop(self, grace: float = 2.0) -> None:
        """Let running steps end, then release all leases so that other conductors continue at once."""
        self._stopping = True
        for task in self._loops:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for work in self._tasks:
            work.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        try:
            await self.database.write(operation_rows.release_leases, self.owner)
        except Exception as error:
            log.warning("leases could not be released: %s; they expire in %.0f s", error, self.lease_seconds)

    def until(self, lease_seconds: float | None = None) -> int:
        """Return the time at which a lease taken now expires."""
        return micros(self.clock.now() + (self.lease_seconds if lease_seconds is None else lease_seconds))

    def now(self) -> int:
        """Return the time as the database keeps it."""
        return micros(self.clock.now())

    def undisturbed(self) -> int:
        """Return for how many microseconds this conductor has worked without an outage."""
        return micros(self.health.undisturbed_for())

    async def write_for_host(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a transaction on behalf of a host; note it if the database does not answer."""
        try:
            return await self.database.write(fn, *args, **kwargs)
        except (HostUnavailable, SecretNotReadable):  # the database has answered
            raise
        except Unavailable:
            self.health.outage_noticed()
            raise

    def committed(self, kind: str, change: str) -> None:
        """Note that a change is committed, by the name of its step or by another one; tests crash here."""
        if self._after_commit is not None:
            self._after_commit(kind, change)

    def ended(self, operation: Operation, result: Result) -> None:
        """Note that the end of an operation is persisted."""
        took = seconds(self.now() - operation.created_at)
        log.info("%s of instance %s has ended after %.2f s: %s", operation.kind, operation.instance_uuid, took, result)
        self._observer.ended(operation.kind, result, took)

    def retried(self, operation: Operation, pause: float, reason: str) -> None:
        """Note that an operation is tried again after a pause."""
        uuid = operation.instance_uuid
        log.warning("%s of instance %s is tried again in %.1f s: %s", operation.kind, uuid, pause, reason)
        self._observer.retried(operation.kind)

    def step_begins(self, batch: Sequence[Operation]) -> None:
        """Log that this conductor begins a step of operations of one request."""
        first = batch[0]
        servers = f"instance {first.instance_uuid}"
        if len(batch) > 1:
            servers = f"{counted(len(batch), 'instance')} (the first is {first.instance_uuid})"
        after = seconds(self.now() - first.created_at)
        log.info("%s of %s: step %s begins, %.2f s after the request", first.kind, servers, first.step, after)

    async def lease_and_run(self, ids: Sequence[str]) -> None:
        """Lease these operations and start to run those that were free.

        After a standstill the lease of an operation that this conductor works on may have expired. It is leased when
        that work has ended, because a conductor does not work on an operation twice at the same time.
        """
        if self._stopping:
            return
        self._again.update(id for id in ids if id in self._leased)
        free = [id for id in ids if id not in self._leased]
        if not free:
            return
        taken = await self.database.write(operation_rows.lease, free, self.owner, self.now(), self.until(), self._known)
        batches: dict[tuple[str, str, str], list[Operation]] = {}
        for row in taken:
            operation = Operation.of(row)
            batches.setdefault((operation.batch_id, operation.kind, operation.step), []).append(operation)
        for batch in batches.values():
            self.run(batch)

    def run(self, batch: list[Operation]) -> None:
        """Run operations that this conductor has leased."""
        for operation in batch:
            self._leased[operation.id] = operation
        task = asyncio.create_task(self._run(batch), name=f"{batch[0].kind}-{batch[0].batch_id}")
        if batch[0].kind not in BACKGROUND_KINDS:
            self._batches += 1
            task.add_done_callback(self._batch_done)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _batch_done(self, task: asyncio.Task[None]) -> None:
        self._batches -= 1

    async def _run(self, batch: list[Operation]) -> None:
        server_id.set(batch[0].instance_uuid if len(batch) == 1 else "")
        try:
            with self._observer.running(batch[0]):
                await self._work(batch)
        finally:
            for operation in batch:
                if self._leased.get(operation.id) is operation:  # else a newer run has it
                    del self._leased[operation.id]
        if again := [operation.id for operation in batch if operation.id in self._again]:
            self._again.difference_update(again)
            try:
                await self.lease_and_run(again)
            except Unavailable as error:
                log.warning("operations are not leased again before the next sweep: %s", error)

    async def _work(self, batch: list[Operation]) -> None:
        kind = self._kinds[batch[0].kind]
        timely: list[Operation] = []
        slot = _Slot(self._slots)
        if kind.name not in BACKGROUND_KINDS:
            self._slots_of_batches.add(slot)
        try:
            background = self._background if kind.name in BACKGROUND_KINDS else contextlib.nullcontext()
            async with background, slot:
                now, undisturbed = self.now(), self.undisturbed()
                late = [(each, error) for each in batch if (error := _lateness(kind, each, now, undisturbed))]
                timely = [each for each in batch if all(each is not operation for operation, _ in late)]
                for operation, error in late:
                    await self._fail(kind, [operation], error)
                if timely:
                    self.step_begins(timely)
                    await kind.run(timely)
        except Crash as crash:
            log.info("the work stops as in a crash after %s", crash)
        except Unavailable as unavailable:
            await self.postpone(timely, unavailable)
        except Stale as stale:
            # Another owner continues one of them, which `postpone` does not change.
            await self.postpone(timely, Unavailable(f"Another conductor has taken over: {stale}"))
        except Exception as cause:
            lack = resource_exhausted(cause)
            if lack is not None:
                await self.postpone(timely, lack)
            else:
                log.exception("operation %s (%s) failed", batch[0].id, kind.name)
                await self._fail(kind, timely, cause)
        finally:
            self._slots_of_batches.discard(slot)

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Enter while an operation that runs only waits for another service: it takes no slot meanwhile.

        Else those of one project could take all slots for as long as that service likes.
        """
        slot = _slot.get()
        async with slot.given_back() if slot is not None else contextlib.nullcontext():
            yield

    async def postpone(self, batch: list[Operation], error: Unavailable, *, longest: float = LONGEST_PAUSE) -> None:
        """Try again after a pause that grows with the leases: a service or the database does not answer.

        The lease of all of them expires at the same time, so that the sweep takes them together.
        """
        if not batch:
            return
        pause = min(longest, retry_pause(batch[0]))
        self.retried(batch[0], pause, str(error))
        # Other reasons may name hosts, or addresses of services.
        reason = str(error) if isinstance(error, SecretNotReadable) else ""
        try:
            leased = [(operation.id, operation.lease) for operation in batch]
            await self.database.write(operation_rows.postpone, leased, self.until(pause), reason)
        except Unavailable:
            self.health.outage_noticed()  # the lease expires

    async def _fail(self, kind: Kind, batch: list[Operation], error: Exception) -> None:
        for operation in batch:
            try:
                if kind.may_fail(operation):
                    await kind.fail(operation, error)
                else:
                    await self.postpone([operation], Unavailable(f"{type(error).__name__}: {error}"))
            except Unavailable as unavailable:
                await self.postpone([operation], unavailable)
            except Exception:
                log.exception("operation %s could not be ended; it runs again when its lease expires", operation.id)

    async def _forever(self, work: Callable[[], Awaitable[None]], what: str, interval: float) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                self.health.outage_noticed()
                log.warning("%s failed and is repeated in %g s: %s", what, interval, error)
            await self.clock.sleep(interval)

    async def _sweep(self) -> None:
        room = MOST_SWEPT - self._batches + sum(slot.waiting > 0 for slot in self._slots_of_batches)
        if room <= 0:
            return  # other conductors may have slots for them
        with_hosts = self.health.healthy()
        found = await self.database.read(operation_rows.expired, self.now(), room, self._known, with_hosts=with_hosts)
        if found:
            log.debug("sweep takes %d operations", len(found))
            await self.lease_and_run(found)

    async def renew(self) -> None:
        """Renew the leases of the operations that this conductor works on."""
        ids = [id for id, operation in self._leased.items() if operation.owner == self.owner]
        if ids:
            await self.database.write(operation_rows.renew, ids, self.owner, self.until())

    async def idle(self) -> None:
        """Wait until no operation is running."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

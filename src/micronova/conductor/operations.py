"""Durable operations: who works on what, from which step, until when.

An operation is a row (`db.operations`). A conductor *leases* rows, runs the kind's step from where it stands, and
persists each step together with the change that the step made. When a lease runs out another conductor takes over
from the persisted step; every step may therefore run twice and must not mind. While a host works on an order the
host is the owner and its heartbeat renews the lease.

A message that says "look now" is only a hint: the sweep finds whatever was lost.

To add an operation: give it a `Kind` (see `conductor/power.py` for the smallest), list it in `manager.py`, declare
its states in `compute/states.py`. CONTRIBUTING.md has the checklist.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import msgspec

from micronova.db import operations as rows
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.rpc.contract import Context

log = logging.getLogger(__name__)

SWEEP_BATCH = 200


class Crash(BaseException):
    """Raised by a test's `after_step` to end this conductor's work on an operation as a crash would."""


class Operation(msgspec.Struct, kw_only=True):
    """A leased operation in a conductor's hands."""

    id: str
    kind: str
    version: int
    instance_uuid: str
    group_id: str
    step: str
    owner: str
    epoch: int
    deadline: int
    attempts: int
    payload: bytes
    secrets: bytes | None
    context: Context
    created_at: int

    @classmethod
    def of(cls, row: Any) -> "Operation":
        """Make one from its row."""
        return cls(
            **{name: row[name] for name in cls.__struct_fields__ if name != "context"},
            context=msgspec.msgpack.decode(row["context"], type=Context),
        )


def new_row(
    *,
    id: str,
    kind: str,
    version: int,
    instance_uuid: str,
    group_id: str,
    step: str,
    epoch: int,
    now: int,
    deadline: int,
    context: Context,
    payload: msgspec.Struct | None = None,
    secrets: bytes | None = None,
) -> dict[str, Any]:
    """Make the row of a new operation, owned by nobody; who accepts a request inserts it with its own changes."""
    return {
        "id": id,
        "kind": kind,
        "version": version,
        "instance_uuid": instance_uuid,
        "group_id": group_id,
        "step": step,
        "owner": None,
        "epoch": epoch,
        "lease_until": 0,
        "deadline": deadline,
        "attempts": 0,
        "payload": msgspec.msgpack.encode(payload) if payload is not None else b"\x80",
        "secrets": secrets,
        "context": msgspec.msgpack.encode(context),
        "created_at": now,
        "finished_at": None,
        "result": None,
        "explanation": None,
    }


class Kind(ABC):
    """One kind of operation: what its steps do."""

    name: ClassVar[str]
    version: ClassVar[int] = 1

    @abstractmethod
    async def run(self, operations: list[Operation]) -> None:
        """Run operations of one request from their persisted steps; each ends finished, or owned by a host."""

    @abstractmethod
    async def fail(self, operation: Operation, error: Exception) -> None:
        """Give up: bring the instance into the state that the failure of this kind means."""


class Observer(Protocol):
    """Telemetry's view of operations."""

    def running(self, operation: Operation) -> AbstractContextManager[None]:
        """Give what is entered while a conductor works on an operation."""

    def ended(self, kind: str, result: str, seconds: float) -> None:
        """Count an operation that is over, and the time since it was accepted."""


class _Nobody:
    def running(self, operation: Operation) -> AbstractContextManager[None]:
        return nullcontext()

    def ended(self, kind: str, result: str, seconds: float) -> None:
        pass


class Engine:
    """Leases operations, runs their kinds, and sweeps for those that nobody works on."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        owner: str,
        lease: float,
        sweep_interval: float,
        concurrency: int,
        keep_finished: float,
        after_step: Callable[[str, str], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.database = database
        self.clock = clock
        self.owner = owner
        self.lease = lease
        self._sweep_interval = sweep_interval
        self._keep_finished = keep_finished
        self._kinds: dict[str, Kind] = {}
        self._known: rows.Known = ()
        self._hand: dict[str, Operation] = {}  # what this conductor holds
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(concurrency)
        self._after_step = after_step
        self._observer = observer or _Nobody()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        # Leases of hosts are believed to have run out only after we could have heard their heartbeats.
        self._healthy_since = clock.monotonic()

    def add(self, kind: Kind) -> None:
        """Know a kind of operation."""
        self._kinds[kind.name] = kind
        # What is newer than this, or of another kind, is left to conductors that know it.
        self._known = tuple(sorted((each.name, each.version) for each in self._kinds.values()))

    async def start(self) -> None:
        """Begin to renew and to sweep."""
        self._healthy_since = self.clock.monotonic()
        self._loops = [
            asyncio.create_task(self._forever(self._sweep, self._sweep_interval), name="operations-sweep"),
            asyncio.create_task(self._forever(self._renew, self.lease / 4), name="operations-renew"),
            asyncio.create_task(self._forever(self._purge, max(60.0, self.lease)), name="operations-purge"),
        ]

    async def stop(self, grace: float = 2.0) -> None:
        """Let running steps end, then give all leases back so that others go on at once."""
        self._stopping = True
        for task in self._loops:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for work in self._tasks:
            work.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        try:
            await self.database.write(rows.give_back, self.owner)
        except Exception as error:
            log.warning("could not give leases back: %s; they run out in %.0f s", error, self.lease)

    def until(self, seconds: float | None = None) -> int:
        """Return the moment at which a lease taken now ends."""
        return micros(self.clock.now() + (self.lease if seconds is None else seconds))

    def now(self) -> int:
        """Return the time as the database keeps it."""
        return micros(self.clock.now())

    def healthy(self) -> bool:
        """Say whether we have been able to hear hosts for longer than a lease, so that silence means something."""
        return self.clock.monotonic() - self._healthy_since > self.lease

    def disturbed(self) -> None:
        """The database or the bus failed: heartbeats may have been lost, so silence means nothing for a while."""
        self._healthy_since = self.clock.monotonic()

    def stepped(self, kind: str, step: str) -> None:
        """Called after a step is persisted; tests crash here."""
        if self._after_step is not None:
            self._after_step(kind, step)

    def ended(self, operation: Operation, result: str) -> None:
        """Called after the end of an operation is persisted."""
        self._observer.ended(operation.kind, result, (self.now() - operation.created_at) / 1e6)

    async def take(self, ids: Sequence[str]) -> None:
        """Lease these operations and start to work on what was taken."""
        if self._stopping:
            return
        taken = await self.database.write(rows.lease, ids, self.owner, self.now(), self.until(), self._known)
        groups: dict[tuple[str, str, str], list[Operation]] = {}
        for row in taken:
            operation = Operation.of(row)
            groups.setdefault((operation.group_id, operation.kind, operation.step), []).append(operation)
        for group in groups.values():
            self.run(group)

    def run(self, group: list[Operation]) -> None:
        """Work on operations that this conductor holds."""
        for operation in group:
            self._hand[operation.id] = operation
        task = asyncio.create_task(self._run(group), name=f"{group[0].kind}-{group[0].group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, group: list[Operation]) -> None:
        with self._observer.running(group[0]):
            await self._work(group)

    async def _work(self, group: list[Operation]) -> None:
        kind = self._kinds[group[0].kind]
        try:
            async with self._limit:
                late = [operation for operation in group if operation.deadline < self.now()]
                for operation in late:
                    await kind.fail(operation, MicronovaError(f"{kind.name} did not end in time."))
                group = [operation for operation in group if operation.deadline >= self.now()]
                if group:
                    await kind.run(group)
        except Crash as crash:
            log.info("crash after %s", crash)
        except Unavailable as error:
            await self.later(group, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("operation %s (%s) failed", group[0].id, kind.name)
            await self._give_up(kind, group, error)
        finally:
            for operation in group:
                self._hand.pop(operation.id, None)

    async def later(self, group: list[Operation], error: Unavailable) -> None:
        """Something we need does not answer: try again soon, and more and more slowly."""
        pause = min(30.0, 0.5 * 2 ** min(group[0].attempts, 6))
        log.warning("%s of %s waits %.1f s: %s", group[0].kind, group[0].instance_uuid, pause, error)
        try:
            for operation in group:
                await self.database.write(
                    rows.step,
                    operation.id,
                    owner=operation.owner,
                    epoch=operation.epoch,
                    step=operation.step,
                    payload=operation.payload,
                    until=self.until(pause),
                )
        except Unavailable:
            self.disturbed()  # the lease runs out by itself

    async def _give_up(self, kind: Kind, group: list[Operation], error: Exception) -> None:
        for operation in group:
            try:
                await kind.fail(operation, error)
            except Unavailable as unavailable:
                await self.later([operation], unavailable)
            except Exception:
                log.exception("operation %s could not be failed; it is taken up again later", operation.id)

    async def _forever(self, work: Callable[[], Awaitable[None]], interval: float) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                self.disturbed()
                log.warning("%s: %s", getattr(work, "__name__", "loop"), error)
            await self.clock.sleep(interval)

    async def _sweep(self) -> None:
        found = await self.database.read(rows.expired, self.now(), SWEEP_BATCH, self._known)
        mine = [row["id"] for row in found if self._may_take(row["owner"])]
        if mine:
            log.debug("sweep takes %d operations", len(mine))
            await self.take(mine)

    def _may_take(self, owner: str | None) -> bool:
        return owner is None or not owner.startswith("host:") or self.healthy()

    async def _renew(self) -> None:
        ids = [id for id, operation in self._hand.items() if operation.owner == self.owner]
        if ids:
            await self.database.write(rows.renew, ids, self.owner, self.until())

    async def _purge(self) -> None:
        await self.database.write(rows.purge, micros(self.clock.now() - self._keep_finished))

    def holds(self) -> Iterable[str]:
        """Return the ids of the operations in hand, for status."""
        return self._hand.keys()

    async def idle(self) -> None:
        """Wait until nothing is in hand."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

"""The orders that a host carries out, and the registry of them."""

import asyncio
import enum
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from micronova.compute.epochs import Epochs
from micronova.compute.vif_plugging import PlugWait
from micronova.objects.context import Context
from micronova.objects.errors import Stale
from micronova.objects.orders import OrderOutcome, Progress, ProgressReply, Report, RunningOrder, WorkOrder
from micronova.objects.volume import VolumeStatistics

FINISHED_REMEMBERED = 4_096

REMOVES: Final = frozenset({"delete"})
"""Kinds of orders that a record of the instance's departure from the host neither refuses nor cancels: both remove the
guest for good. Orders that remove the guest of a server that stays (`shelve_offload`, `revert_resize`,
`confirm_resize`) are not among them: the conductor has continued without them then, and the server may return to this
host."""

SendProgress = Callable[[Progress, Context], Awaitable[ProgressReply]]


class Phase(enum.Enum):
    """How far work on an order has come."""

    WORKING = enum.auto()
    UNDOING = enum.auto()
    REPORTING = enum.auto()


class Refusal(enum.Enum):
    """Why an order is not carried out."""

    RUNNING = "is being carried out already"
    FINISHED = "was finished and reported"
    STALE = "is stale"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an order ended; its report repeats these fields."""

    outcome: OrderOutcome
    power_state: int | None = None
    error_code: str | None = None  # of a build only that of Unavailable: see `Report.temporary`
    message: str | None = None
    details: str | None = None
    left_behind: bool = False
    config_drive: bool = False
    migrate_data: bytes = b""
    volume_statistics: VolumeStatistics | None = None


class Work:
    """One order that is being carried out."""

    __slots__ = (
        "_send_progress",
        "cancelled",
        "context",
        "database_is_behind",
        "left_behind",
        "order",
        "phase",
        "plug_wait",
        "power_state",
        "started_at",
        "task",
        "unchanged",
    )

    def __init__(
        self,
        order: WorkOrder,
        context: Context,
        plug_wait: PlugWait,
        started_at: float,
        send_progress: SendProgress,
        *,
        database_is_behind: bool = False,
    ) -> None:
        self.order = order
        self.context = context
        self.plug_wait = plug_wait
        self.started_at = started_at
        self._send_progress = send_progress
        self.database_is_behind = database_is_behind  # it was restored: the guest may be newer than what it says
        self.phase = Phase.WORKING
        self.cancelled = False
        self.left_behind = False  # it failed, and what it made could not be removed
        self.unchanged = False  # it failed before it changed the guest
        self.power_state: int | None = None  # of the guest, if the order changes it and fails afterwards
        self.task: asyncio.Task[None] | None = None

    async def progress(self, task_state: str, *, destroys: bool = False) -> ProgressReply:
        """Tell a conductor that the work has reached `task_state`, which users then see; return the reply.

        With `destroys` the host asks whether it may do what cannot be undone: see `check_stands`. Raise Stale if the
        operation is no longer this host's.
        """
        order = self.order
        reply = await self._send_progress(
            Progress(
                operation_id=order.operation_id,
                epoch=order.epoch,
                instance_uuid=order.instance.uuid,
                host=order.host,
                task_state=task_state,
                destroys=destroys,
            ),
            self.context,
        )
        if not reply.accepted:
            raise Stale(f"Operation {order.operation_id} no longer belongs to host {order.host}.")
        return reply

    async def check_stands(self) -> None:
        """Ask a conductor whether the order still stands; raise Stale if it does not.

        A handler asks once, right before what cannot be undone: the order may have been withdrawn while it waited, and
        a host that was cut off has not heard of it. The conductor answers when it may be done.
        """
        await self.progress("", destroys=True)

    def cancel(self) -> None:
        """Stop and undo the work. An undo that runs already is not interrupted: it would leave a half-removed guest."""
        if not self.cancelled:
            self.cancelled = True
            if self.phase is not Phase.UNDOING and self.task is not None:
                self.task.cancel()

    def report(self, outcome: Outcome, finished_at: float) -> Report:
        """Return the report that tells the conductor how the order ended."""
        order = self.order
        return Report(
            operation_id=order.operation_id,
            epoch=order.epoch,
            instance_uuid=order.instance.uuid,
            host=order.host,
            outcome=outcome.outcome,
            power_state=self.power_state if outcome.power_state is None else outcome.power_state,
            error_code=outcome.error_code,
            message=outcome.message,
            details=outcome.details,
            left_behind=outcome.left_behind or self.left_behind,
            config_drive=outcome.config_drive,
            unchanged=self.unchanged,
            migrate_data=outcome.migrate_data,
            volume_statistics=outcome.volume_statistics,
            started_at=self.started_at,
            finished_at=finished_at,
        )


class InstanceWork:
    """The work on one instance; it is done under the lock, one order at a time."""

    __slots__ = ("lock", "references", "works")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.works: list[Work] = []
        self.references = 0


class WorkRegistry:
    """The orders that a host carries out, those that it finished lately, and the epochs that it has seen."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self._by_operation: dict[str, Work] = {}
        self._by_instance: dict[str, InstanceWork] = {}
        self._finished: OrderedDict[tuple[str, int], None] = OrderedDict()

    def admit(self, order: WorkOrder, *, database_is_behind: bool = False) -> Refusal | None:
        """Note the epoch of an order and return None, or return why it must not be carried out.

        If the database is known to be behind this host, what the host remembers of the instance does not count.
        """
        running = self._by_operation.get(order.operation_id)
        if running is not None and running.order.epoch >= order.epoch:
            return Refusal.RUNNING
        if database_is_behind:
            self._finished.pop((order.operation_id, order.epoch), None)
            self.epochs.go_back(order.instance.uuid, order.epoch)
            return None
        if (order.operation_id, order.epoch) in self._finished:
            return Refusal.FINISHED
        if not self.epochs.admit(order.instance.uuid, order.epoch, removes=order.kind in REMOVES):
            return Refusal.STALE
        return None

    def add(self, work: Work) -> InstanceWork:
        """Register work, and cancel work on the same instance at an older epoch: another owner has taken that over."""
        order = work.order
        instance_work = self.acquire(order.instance.uuid)
        for other in instance_work.works:
            if other.order.epoch < order.epoch:
                other.cancel()
        instance_work.works.append(work)
        self._by_operation[order.operation_id] = work
        return instance_work

    def remove(self, work: Work) -> None:
        """Remove work that has ended."""
        order = work.order
        if self._by_operation.get(order.operation_id) is work:
            del self._by_operation[order.operation_id]
        self._by_instance[order.instance.uuid].works.remove(work)
        self.release(order.instance.uuid)

    def remember_finished(self, work: Work) -> None:
        """Refuse this order from now on: the conductor has received its report."""
        self._finished[work.order.operation_id, work.order.epoch] = None
        if len(self._finished) > FINISHED_REMEMBERED:
            self._finished.popitem(last=False)

    def acquire(self, uuid: str) -> InstanceWork:
        """Return the entry of an instance, made if necessary; it is kept until `release` is called as often."""
        entry = self._by_instance.get(uuid)
        if entry is None:
            entry = self._by_instance[uuid] = InstanceWork()
        entry.references += 1
        return entry

    def release(self, uuid: str) -> None:
        """Give the entry of an instance back."""
        entry = self._by_instance[uuid]
        entry.references -= 1
        if not entry.references:
            del self._by_instance[uuid]

    def of_instance(self, uuid: str) -> list[Work]:
        """Return the work on an instance."""
        entry = self._by_instance.get(uuid)
        return entry.works if entry is not None else []

    def find(self, operation_id: str) -> Work | None:
        """Return the work for an operation."""
        return self._by_operation.get(operation_id)

    def by_operation(self) -> dict[str, Work]:
        """Return the newest work for each operation."""
        return dict(self._by_operation)

    def busy_instances(self) -> set[str]:
        """Return the instances that are being worked on."""
        return set(self._by_instance)

    def all(self) -> list[Work]:
        """Return all work, including what a newer order has replaced and what is being undone."""
        return [work for entry in self._by_instance.values() for work in entry.works]

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of all work."""
        return [work.task for work in self.all() if work.task is not None]

    def running_orders(self) -> tuple[RunningOrder, ...]:
        """Return what a heartbeat says of the work."""
        return tuple(RunningOrder(operation_id, work.order.epoch) for operation_id, work in self._by_operation.items())

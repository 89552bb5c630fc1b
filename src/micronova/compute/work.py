"""The orders that a host has in hand."""

import asyncio
import enum
from collections import OrderedDict
from typing import Any

import msgspec

from micronova.compute.epochs import Epochs
from micronova.compute.plugs import PlugGate
from micronova.objects.orders import InHand, Report, WorkOrder
from micronova.rpc.contract import Context

FINISHED_REMEMBERED = 4_096


class Phase(enum.Enum):
    """How far work on an order has come."""

    WORKING = enum.auto()
    UNDOING = enum.auto()
    REPORTING = enum.auto()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a report will say."""

    outcome: str
    power_state: int | None = None
    error_code: str | None = None
    message: str | None = None
    details: str | None = None
    left_behind: bool = False


class Work:
    """One order being carried out."""

    __slots__ = ("cancelled", "context", "gate", "order", "phase", "progress", "started_at", "task")

    def __init__(self, order: WorkOrder, context: Context, gate: PlugGate, started_at: float) -> None:
        self.order = order
        self.context = context
        self.gate = gate
        self.started_at = started_at
        self.phase = Phase.WORKING
        self.progress = 0
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Have the work stopped and undone. Undoing itself is not interrupted: it would leave things."""
        if not self.cancelled:
            self.cancelled = True
            if self.phase is not Phase.UNDOING and self.task is not None:
                self.task.cancel()

    def report(self, outcome: Outcome, finished_at: float) -> Report:
        """Say how it ended."""
        order = self.order
        return Report(
            operation_id=order.operation_id,
            epoch=order.epoch,
            instance_uuid=order.instance.uuid,
            host=order.host,
            outcome=outcome.outcome,
            power_state=outcome.power_state,
            error_code=outcome.error_code,
            message=outcome.message,
            details=outcome.details,
            left_behind=outcome.left_behind,
            started_at=self.started_at,
            finished_at=finished_at,
        )


class Slot:
    """The one place per instance: whoever works on it holds the lock."""

    __slots__ = ("lock", "users", "works")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.works: list[Work] = []
        self.users = 0


class WorkBook:
    """What a host has in hand, what it has finished lately, and which epochs it has seen."""

    def __init__(self) -> None:
        self.epochs = Epochs()
        self._in_hand: dict[str, Work] = {}
        self._slots: dict[str, Slot] = {}
        self._finished: OrderedDict[tuple[str, int], None] = OrderedDict()

    def refusal(self, order: WorkOrder) -> str | None:
        """Say why an order is not to be carried out, or note its epoch."""
        held = self._in_hand.get(order.operation_id)
        if held is not None and held.order.epoch >= order.epoch:
            return "is in hand already"
        if (order.operation_id, order.epoch) in self._finished:
            return "was finished and reported"
        if not self.epochs.admit(order.instance.uuid, order.epoch, removes=order.kind == "delete"):
            return "is stale"
        return None

    def add(self, work: Work) -> Slot:
        """Take work in hand; older work on the same instance is not ours any more and is cancelled."""
        order = work.order
        slot = self.enter(order.instance.uuid)
        for other in slot.works:
            if other.order.epoch < order.epoch:
                other.cancel()
        slot.works.append(work)
        self._in_hand[order.operation_id] = work
        return slot

    def remove(self, work: Work) -> None:
        """Work has come to its end."""
        order = work.order
        if self._in_hand.get(order.operation_id) is work:
            del self._in_hand[order.operation_id]
        self._slots[order.instance.uuid].works.remove(work)
        self.exit(order.instance.uuid)

    def acknowledged(self, work: Work) -> None:
        """The conductor knows how it ended: the same order, coming once more, is void."""
        self._finished[work.order.operation_id, work.order.epoch] = None
        if len(self._finished) > FINISHED_REMEMBERED:
            self._finished.popitem(last=False)

    def enter(self, uuid: str) -> Slot:
        """Find an instance's place, or make it; to be followed by `exit`."""
        slot = self._slots.get(uuid)
        if slot is None:
            slot = self._slots[uuid] = Slot()
        slot.users += 1
        return slot

    def exit(self, uuid: str) -> None:
        """Leave an instance's place."""
        slot = self._slots[uuid]
        slot.users -= 1
        if not slot.users:
            del self._slots[uuid]

    def on(self, uuid: str) -> list[Work]:
        """List the work on an instance."""
        slot = self._slots.get(uuid)
        return slot.works if slot is not None else []

    def find(self, operation_id: str) -> Work | None:
        """Find work by its operation."""
        return self._in_hand.get(operation_id)

    def listed(self) -> dict[str, Work]:
        """All work, by operation."""
        return dict(self._in_hand)

    def busy(self) -> set[str]:
        """The instances that are being worked on."""
        return set(self._slots)

    def all(self) -> list[Work]:
        """All work, also what was overtaken and is just being undone."""
        return [work for slot in self._slots.values() for work in slot.works]

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks of all work."""
        return [work.task for work in self.all() if work.task is not None]

    def in_hand(self) -> tuple[InHand, ...]:
        """List it for a heartbeat."""
        return tuple(
            InHand(operation_id, work.order.epoch, work.progress) for operation_id, work in self._in_hand.items()
        )

"""One compute host as the agent knows it: its driver, the books of its nodes, its guests and its work."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec

from micronova.compute.boot_watch import BootWatch
from micronova.compute.plugs import PlugBoard
from micronova.compute.resource_tracker import ResourceTracker
from micronova.compute.settings import ComputeSettings
from micronova.compute.work import WorkBook
from micronova.objects.clock import Clock
from micronova.objects.errors import InsufficientResources
from micronova.objects.orders import NodeResources, PowerChange, ability
from micronova.virt import power_state
from micronova.virt.driver import CAPABILITIES, Driver, Lifecycle

log = logging.getLogger(__name__)

_POWER: dict[Lifecycle, int] = {
    "started": power_state.RUNNING,
    "resumed": power_state.RUNNING,
    "paused": power_state.PAUSED,
    "stopped": power_state.SHUTDOWN,
    "crashed": power_state.CRASHED,
    "suspended": power_state.SUSPENDED,
}


class _Known:
    """A guest: the epoch it was built at, its power state, and the one that the conductor was told."""

    __slots__ = ("epoch", "node", "power", "told")

    def __init__(self, epoch: int, node: str, power: int, told: int | None) -> None:
        self.epoch = epoch
        self.node = node
        self.power = power
        self.told = told


class Host:
    """What the parts of the agent share about one host; also what its driver may call back."""

    def __init__(self, name: str, driver: Driver, settings: ComputeSettings, clock: Clock) -> None:
        self.name = name
        self.driver = driver
        self.settings = settings
        self.clock = clock
        self.book = WorkBook()
        self.plugs = PlugBoard(settings, clock)
        self.boots = BootWatch(name, driver, settings, clock, self.book, self._power_of)
        self.build_slots: AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(settings.max_concurrent_builds) if settings.max_concurrent_builds > 0 else nullcontext()
        )
        self._abilities: dict[str, str] = {}  # what the driver can do, as it is reported with each node
        self._trackers: dict[str, ResourceTracker] = {}
        self._guests: dict[str, _Known] = {}
        self._restless: set[str] = set()  # guests whose power state the conductor may not know
        self._touched: set[str] = set()  # guests that changed while the hypervisor was being asked
        self.on_power_change: Callable[[PowerChange], None] | None = None

    async def start(self) -> None:
        """Get the driver ready and find what it holds."""
        await self.driver.init_host(self)
        able = self.driver.capabilities()
        self._abilities = {ability(name): str(name in able).lower() for name in CAPABILITIES}
        await self.update_available_resource()
        if "boot_signs" in able:
            self.boots.start([uuid for uuid, known in self._guests.items() if known.power == power_state.RUNNING])

    async def update_available_resource(self) -> None:
        """Ask the hypervisor and mend the books by it; what is being worked on is left alone."""
        before = self.book.busy()
        self._touched.clear()
        nodes = await self.driver.get_available_resources()
        guests = await self.driver.list_guests()
        busy = before | self.book.busy() | self._touched
        for resources in nodes:
            tracker = self._trackers.get(resources.node)
            if tracker is None:
                tracker = self._trackers[resources.node] = ResourceTracker(resources, self.settings)
            tracker.update(resources, [guest for guest in guests if guest.node == resources.node], busy)
        for node in self._trackers.keys() - {resources.node for resources in nodes}:
            log.warning("host %s: the node %s is gone", self.name, node)
            del self._trackers[node]
        for uuid in self._guests.keys() - {guest.uuid for guest in guests} - busy:
            self.gone(uuid)
        for guest in guests:
            if guest.uuid not in busy:
                self.book.epochs.note(guest.uuid, guest.epoch)
                known = self._guests.get(guest.uuid)
                told = None if known is None else known.told
                self._guests[guest.uuid] = _Known(guest.epoch, guest.node, guest.power_state, told)
                if guest.power_state != told:
                    self._restless.add(guest.uuid)

    def tracker(self, node: str | None) -> ResourceTracker:
        """Give the books of a node, or of the first one."""
        tracker = next(iter(self._trackers.values()), None) if node is None else self._trackers.get(node)
        if tracker is None:
            raise InsufficientResources(f"The host {self.name} has no node {node or 'at all'}.")
        return tracker

    def expect(self, uuid: str) -> None:
        """An order is about to change the guest's power state: what events say from now on is newer."""
        known = self._guests.get(uuid)
        if known is not None:
            known.power = power_state.NOSTATE

    def present(self, uuid: str, epoch: int, node: str, power: int = power_state.NOSTATE) -> None:
        """Note a guest that is here or is just coming to be."""
        self._guests[uuid] = _Known(epoch, node, power, power)
        self._touched.add(uuid)
        self.book.epochs.note(uuid, epoch)

    def switched(self, uuid: str, power: int) -> None:
        """Note the power state that an order brought about, and that its report tells."""
        known = self._guests.get(uuid)
        if known is not None:
            known.told = power
            self._touched.add(uuid)
            if known.power == power_state.NOSTATE:  # else an event knows better: it crashed at once, perhaps
                known.power = power

    def idle(self, uuid: str) -> None:
        """No work on this instance is left; one without a guest need not be remembered for ever."""
        if uuid not in self._guests:
            self.book.epochs.forget(uuid)

    def gone(self, uuid: str) -> None:
        """Note that there is no guest of this instance any more, and give back what it held."""
        for tracker in self._trackers.values():
            tracker.release(uuid)
        self._guests.pop(uuid, None)
        self.boots.gone(uuid)
        self._restless.discard(uuid)
        self._touched.add(uuid)
        self.book.epochs.forget(uuid)

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        """Take a driver's word for a guest's power state; what an order brings about is no news."""
        known = self._guests.get(uuid)
        if known is not None:
            known.power = _POWER[event]
            self._restless.add(uuid)
            if event == "started":
                self.boots.started(uuid)
            if self.on_power_change is not None and known.power != known.told and not self.book.on(uuid):
                # Whether the hint arrives is not known: what comes next is news in any case, until a beat is heard.
                known.told = None
                self.on_power_change(PowerChange(uuid, known.epoch, known.power))

    def _power_of(self, uuid: str) -> int | None:
        known = self._guests.get(uuid)
        return None if known is None else known.power

    def progress(self, uuid: str, percent: int) -> None:
        """Take a driver's word for how far it has come."""
        for work in self.book.on(uuid):
            work.progress = percent

    def nodes(self, *, everything: bool) -> tuple[NodeResources, ...]:
        """Describe the nodes, all or only those that changed since they were last described."""
        found = []
        for tracker in self._trackers.values():
            if everything or tracker.changed:
                tracker.changed = False
                running = sum(
                    known.power == power_state.RUNNING and known.node == tracker.node for known in self._guests.values()
                )
                workload = len(self.book.busy())
                report = tracker.report()
                found.append(
                    msgspec.structs.replace(
                        report,
                        running_vms=running,
                        current_workload=workload,
                        capabilities={**report.capabilities, **self._abilities},
                    )
                )
        return tuple(found)

    def power_changes(self) -> tuple[PowerChange, ...]:
        """List the power states that the conductor was not told, except where work is in hand."""
        changes = []
        for uuid in list(self._restless):
            known = self._guests[uuid]
            if known.power == known.told:
                self._restless.discard(uuid)
            elif known.power != power_state.NOSTATE and not self.book.on(uuid):
                changes.append(PowerChange(uuid, known.epoch, known.power))
        return tuple(changes)

    def told(self, changes: tuple[PowerChange, ...]) -> None:
        """The conductor has been told these power states."""
        for change in changes:
            known = self._guests.get(change.instance_uuid)
            if known is not None and known.epoch == change.epoch:
                known.told = change.power_state

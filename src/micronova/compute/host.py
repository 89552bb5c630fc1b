"""What the agent knows of one compute host: its driver, its nodes' resources, its guests and the orders it works on."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from micronova.compute import cpu_monitor
from micronova.compute.boot_watch import BootWatch
from micronova.compute.cpu_monitor import CPUMonitor
from micronova.compute.image_caching import ImageFetches
from micronova.compute.quiesced_guests import QuiescedGuests
from micronova.compute.resource_tracker import ResourceTracker
from micronova.compute.settings import ComputeAgentSettings
from micronova.compute.slots import Slots
from micronova.compute.vif_plugging import PlugEvents
from micronova.compute.work import WorkRegistry
from micronova.http.image_uploads import ImageUploads
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.errors import InsufficientResources
from micronova.objects.image import ImageMeta
from micronova.objects.orders import (
    ASKS_BEFORE_DESTRUCTION,
    DECRYPTS_VOLUMES,
    GuestAtEpoch,
    NodeResources,
    PowerChange,
    capability_key,
)
from micronova.virt.driver import (
    CAPABILITIES,
    POWER_AFTER,
    Driver,
    HostCPUStats,
    Lifecycle,
    capability_traits,
    if_capable,
    topology_traits,
)

log = logging.getLogger(__name__)

DESTROY_ATTEMPTS = 3
FIRST_PAUSE = 1.0
"""Seconds after the first attempt; doubled after each."""
SLOW_CALLS: Final = 4
"""Guests whose agents are asked for something at the same time, and guests whose memory is saved or restored.

Drivers have at least this many threads for each of the two. One project does not take all slots: a guest decides how
long its agent takes to answer."""


class _KnownGuest:
    """A guest: the epoch it was built at, its power state, and the power state that the conductor knows."""

    __slots__ = ("epoch", "node", "power", "reported")

    def __init__(self, epoch: int, node: str, power: int, reported: int | None) -> None:
        self.epoch = epoch
        self.node = node
        self.power = power
        self.reported = reported


def _cpu_monitor(name: str, driver: Driver, settings: ComputeAgentSettings, clock: Clock) -> CPUMonitor | None:
    if cpu_monitor.NAME not in settings.compute_monitors:
        return None
    measuring = if_capable(driver, HostCPUStats)
    if measuring is None:
        log.warning("host %s: its driver does not measure processors, so there are no metrics of them", name)
        return None
    return CPUMonitor(measuring, clock)


class Host:
    """The state of one host that the parts of its agent share; its driver reports events to it (`DriverEvents`)."""

    def __init__(
        self,
        name: str,
        driver: Driver,
        settings: ComputeAgentSettings,
        clock: Clock,
        uploads: ImageUploads | None = None,
    ) -> None:
        self.name = name
        self.driver = driver
        self.settings = settings
        self.clock = clock
        self.work_registry = WorkRegistry()
        self.plug_events = PlugEvents(settings, clock)
        self.boots = BootWatch(name, driver, settings, clock, self.work_registry, self._power_of)
        self.uploads = uploads or ImageUploads()
        self.cpu_monitor = _cpu_monitor(name, driver, settings, clock)
        self.image_caching = ImageFetches(name, driver, clock)
        self.quiesced_guests = QuiescedGuests(name, driver, clock)
        self.build_slots = Slots(settings.max_concurrent_builds)
        self.live_migration_slots = Slots(settings.max_concurrent_live_migrations)
        self.snapshot_slots = Slots(settings.max_concurrent_snapshots)
        self.agent_slots, self.memory_slots = Slots(SLOW_CALLS), Slots(SLOW_CALLS)
        self._capabilities: dict[str, str] = {}  # what the driver can do, as every node reports it
        self._traits: tuple[str, ...] = ()  # the same, as traits
        self._trackers: dict[str, ResourceTracker] = {}
        self._guests: dict[str, _KnownGuest] = {}
        self._found_off: set[str] = set()  # guests that did not run at the start and may have to
        self._unreported: set[str] = set()  # guests whose power state the conductor may not know
        self._uncertain: set[str] = set()  # of these, an unanswered heartbeat may still change what the conductor knows
        self._reported_workload = 0
        self._changed_during_update: set[str] = set()  # guests that changed while the hypervisor was queried
        self._connect_error = ""  # why the hypervisor was lost, until a heartbeat tells it
        self.on_power_change: Callable[[], None] | None = None

    async def start(self) -> None:
        """Start the driver, and read the nodes and guests that it has."""
        await self.driver.init_host(self)
        capabilities = self.driver.capabilities()
        self._capabilities = {capability_key(name): str(name in capabilities).lower() for name in CAPABILITIES}
        self._capabilities[ASKS_BEFORE_DESTRUCTION] = self._capabilities[DECRYPTS_VOLUMES] = "true"
        self._traits = capability_traits(capabilities)
        await self.update_available_resource()
        if self.settings.resume_guests_state_on_host_boot:
            self._found_off = {uuid for uuid, guest in self._guests.items() if guest.power == power_state.SHUTDOWN}
        self.boots.start([uuid for uuid, guest in self._guests.items() if guest.power == power_state.RUNNING])

    async def update_available_resource(self) -> None:
        """Take over nodes and guests as the hypervisor has them, except guests of instances that are worked on."""
        before = self.work_registry.busy_instances()
        self._changed_during_update.clear()
        nodes = await self.driver.get_available_resources()
        guests = await self.driver.list_guests()
        busy = before | self.work_registry.busy_instances() | self._changed_during_update
        for resources in nodes:
            tracker = self._trackers.get(resources.node)
            if tracker is None:
                tracker = self._trackers[resources.node] = ResourceTracker(resources, self.settings)
            tracker.update(resources, [guest for guest in guests if guest.node == resources.node], busy)
        for node in self._trackers.keys() - {resources.node for resources in nodes}:
            log.warning("host %s: the hypervisor has no node %s any more, which gets no more servers", self.name, node)
            del self._trackers[node]
        for uuid in self._guests.keys() - {guest.uuid for guest in guests} - busy:
            self.guest_gone(uuid)
        for guest in guests:
            if guest.uuid not in busy:
                self.work_registry.epochs.note(guest.uuid, guest.epoch)
                known = self._guests.get(guest.uuid)
                reported = None if known is None else known.reported
                self._guests[guest.uuid] = _KnownGuest(guest.epoch, guest.node, guest.power_state, reported)
                if guest.power_state != reported:
                    self._unreported.add(guest.uuid)
        if self.cpu_monitor is not None and nodes:
            await self.cpu_monitor.measure(nodes[0])

    def tracker(self, node: str | None) -> ResourceTracker:
        """Return the resource tracker of a node, or of the first node; raise InsufficientResources if there is none."""
        tracker = next(iter(self._trackers.values()), None) if node is None else self._trackers.get(node)
        if tracker is None:
            raise InsufficientResources("The host does not have the node.", details=f"{self.name}: {node or 'none'}")
        return tracker

    async def destroy(self, uuid: str) -> None:
        """Remove a guest; try again if the driver fails, and raise its error after the last attempt."""
        for attempt in range(1, DESTROY_ATTEMPTS + 1):
            try:
                await self.driver.destroy(uuid)
            except Exception as error:
                log.warning(
                    "host %s: the guest of instance %s could not be removed (attempt %d of %d): %s",
                    self.name,
                    uuid,
                    attempt,
                    DESTROY_ATTEMPTS,
                    error,
                )
                if attempt == DESTROY_ATTEMPTS:
                    raise
                await self.clock.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            else:
                self.guest_gone(uuid)
                return

    def shutdown_timeout(self, image: ImageMeta | None) -> float:
        """Return the seconds that a guest has to shut down: as its image says, or else the settings."""
        wanted = None if image is None else image.properties.get("os_shutdown_timeout")
        try:
            return self.settings.shutdown_timeout if wanted is None else max(0.0, float(wanted))
        except (TypeError, ValueError):
            return self.settings.shutdown_timeout

    def connection_failed(self, message: str) -> None:
        """Note, for the next heartbeat, that the hypervisor was lost and cannot be reached."""
        self._connect_error = message

    def take_connect_error(self) -> str:
        """Return why the hypervisor was lost since the last call; empty if it was not."""
        message, self._connect_error = self._connect_error, ""
        return message

    # --- guests ---

    def guest_present(self, uuid: str, epoch: int, node: str, power: int = power_state.NOSTATE) -> None:
        """Note a guest that exists or is being built."""
        self._guests[uuid] = _KnownGuest(epoch, node, power, power)
        self._changed_during_update.add(uuid)
        self.work_registry.epochs.note(uuid, epoch)

    def guest_gone(self, uuid: str) -> None:
        """Note that an instance has no guest here any more, and release its resources."""
        for tracker in self._trackers.values():
            tracker.release(uuid)
        self._guests.pop(uuid, None)
        self.boots.guest_gone(uuid)
        self._found_off.discard(uuid)
        self._unreported.discard(uuid)
        self._uncertain.discard(uuid)
        self._changed_during_update.add(uuid)
        self.work_registry.epochs.forget(uuid)

    def work_ended(self, uuid: str) -> None:
        """Forget the epoch of an instance without work and without a guest."""
        if uuid not in self._guests:
            self.work_registry.epochs.forget(uuid)

    # --- power states ---

    def power_change_begins(self, uuid: str) -> None:
        """Note that an order is about to change the guest's power state: events from now on are newer."""
        guest = self._guests.get(uuid)
        if guest is not None:
            guest.power = power_state.NOSTATE
            self._changed_during_update.add(uuid)

    def power_change_ended(self, uuid: str, power: int) -> None:
        """Note the power state after an order; its report tells the conductor."""
        guest = self._guests.get(uuid)
        if guest is not None:
            guest.reported = power
            self._found_off.discard(uuid)
            self._changed_during_update.add(uuid)
            if guest.power == power_state.NOSTATE:  # else an event has set it since: the guest may have crashed
                guest.power = power

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        """Note a power state that the driver reports; send it to the conductor unless an order caused it."""
        guest = self._guests.get(uuid)
        if guest is not None:
            guest.power = POWER_AFTER[event]
            self._changed_during_update.add(uuid)
            self._found_off.discard(uuid)
            self._unreported.add(uuid)
            if event == "started":
                self.boots.guest_started(uuid)
            if (
                self.on_power_change is not None
                and guest.power != guest.reported
                and not self.work_registry.of_instance(uuid)
            ):
                guest.reported = None  # what the conductor knows is unknown until a heartbeat is answered
                self.on_power_change()

    def found_off(self) -> tuple[GuestAtEpoch, ...]:
        """Return the guests that were off at the start, until the conductor has told which of them should run."""
        return tuple(GuestAtEpoch(uuid, self._guests[uuid].epoch) for uuid in sorted(self._found_off))

    def start_decided(self, asked: Iterable[GuestAtEpoch], to_start: Collection[str]) -> None:
        """Note which guests the conductor starts; the others stay off, and heartbeats say so."""
        for uuid in self._found_off.intersection(guest.instance_uuid for guest in asked):
            self._found_off.discard(uuid)
            if uuid in to_start:
                self._guests[uuid].reported = self._guests[uuid].power

    def power_changes(self) -> tuple[PowerChange, ...]:
        """Return the power states that the conductor does not know, except of instances that are worked on."""
        changes = []
        for uuid in self._unreported - self._found_off:
            guest = self._guests[uuid]
            if guest.power == guest.reported and uuid not in self._uncertain:
                self._unreported.discard(uuid)
            elif guest.power != power_state.NOSTATE and not self.work_registry.of_instance(uuid):
                changes.append(PowerChange(uuid, guest.epoch, guest.power))
        return tuple(changes)

    def power_changes_received(self, changes: tuple[PowerChange, ...]) -> None:
        """Note that the conductor knows these power states."""
        for change in changes:
            guest = self._guests.get(change.instance_uuid)
            if guest is not None and guest.epoch == change.epoch:
                guest.reported = change.power_state
                self._uncertain.discard(change.instance_uuid)
                self._unreported.add(change.instance_uuid)  # an order may have changed it since

    def power_changes_uncertain(self, changes: tuple[PowerChange, ...]) -> None:
        """Note that no conductor answered a heartbeat with these; it may still arrive, after the report of an order."""
        for change in changes:
            if change.instance_uuid in self._guests:
                self._uncertain.add(change.instance_uuid)
                self._unreported.add(change.instance_uuid)

    def _power_of(self, uuid: str) -> int | None:
        guest = self._guests.get(uuid)
        return None if guest is None else guest.power

    def set_allocation_ratios(self, ratios: Mapping[str, Mapping[str, float]]) -> None:
        """Take over the allocation ratios of nodes, by name."""
        for node, of_node in ratios.items():
            if node in self._trackers:
                self._trackers[node].set_allocation_ratios(of_node)

    # --- what heartbeats report ---

    def nodes(self, *, include_unchanged: bool) -> tuple[NodeResources, ...]:
        """Describe the nodes that changed since the last call, or all. They change, too, with the work of the host."""
        found = []
        workload = len(self.work_registry.busy_instances())
        include_unchanged = include_unchanged or workload != self._reported_workload
        self._reported_workload = workload
        for tracker in self._trackers.values():
            if include_unchanged or tracker.changed:
                report = tracker.take_report()
                found.append(
                    msgspec.structs.replace(
                        report,
                        running_vms=sum(guest.node == tracker.node for guest in self._guests.values()),
                        current_workload=workload,
                        capabilities={**report.capabilities, **self._capabilities},
                        traits=tuple(sorted({*report.traits, *self._traits, *topology_traits(report.topology)})),
                    )
                )
        return tuple(found)

"""A simulated host: its guests, what happens to them, and the faults that its rules cause."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final
from uuid import UUID, uuid5

import msgspec

from micronova.conf.hosts import FakeSettings
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.errors import (
    BuildAborted,
    Conflict,
    InstanceNotFound,
    InsufficientResources,
    MicronovaError,
    NotSupported,
    Unavailable,
)
from micronova.objects.image import ImageMeta
from micronova.objects.mediated_devices import NO_TYPES, MdevTypes
from micronova.objects.network import VIF
from micronova.objects.orders import NodeResources
from micronova.objects.topology import Assignment
from micronova.objects.volume import AttachedVolume
from micronova.placement import extra_specs
from micronova.virt.driver import DriverEvents, DriverFailed, GuestPlan, Lifecycle
from micronova.virt.fake import moves
from micronova.virt.fake.consoles import FakeConsoles
from micronova.virt.fake.faults import FaultRules
from micronova.virt.fake.guests import FakeGuest, FakeInterface, GuestStore
from micronova.virt.fake.topology import topology_of

log = logging.getLogger(__name__)

_NODES: Final = UUID("5f0c6a52-8a0e-4f1b-9f6b-6d6963726f6e")
"""Namespace of node uuids: the same node of the same cloud has the same uuid after every restart."""

_ERRORS: Final[dict[str, type[MicronovaError]]] = {
    "fail": DriverFailed,
    "abort": BuildAborted,
    "no_resources": InsufficientResources,
    "unavailable": Unavailable,
    "not_supported": NotSupported,
}


class SimulatedHost:
    """One simulated host."""

    def __init__(
        self,
        name: str,
        settings: FakeSettings,
        store: GuestStore,
        faults: FaultRules,
        cloud_id: str,
        clock: Clock,
        mdev_types: MdevTypes = NO_TYPES,
    ) -> None:
        self.events: DriverEvents | None = None
        self.consoles = FakeConsoles()
        self._name = name
        self._settings = settings
        self._store = store
        self._faults = faults
        self._cloud_id = cloud_id
        self._clock = clock
        self._topology = topology_of(settings, mdev_types)

    # --- the guests ---

    def __iter__(self) -> Iterator[FakeGuest]:
        """Yield this cloud's guests."""
        return (guest for guest in self._store if guest.cloud == self._cloud_id)

    def find(self, uuid: str) -> FakeGuest | None:
        """Return a guest of this cloud, or None."""
        guest = self._store.get(uuid)
        return guest if guest is not None and guest.cloud == self._cloud_id else None

    def require(self, uuid: str) -> FakeGuest:
        """Return a guest of this cloud; raise InstanceNotFound if there is none."""
        guest = self.find(uuid)
        if guest is None:
            raise InstanceNotFound(f"There is no guest {uuid} on this host.")
        return guest

    def require_unknown(self, uuid: str) -> None:
        """Raise Conflict if there is a guest with this uuid, of any cloud."""
        if self._store.get(uuid) is not None:
            raise Conflict(f"A guest {uuid} exists already on this host.")

    def new(self, plan: GuestPlan) -> FakeGuest:
        """Return a new guest by a plan; it is not stored. Raise Unavailable if another guest has its CPUs."""
        self.check_free(plan)
        instance, flavor = plan.instance, plan.instance.flavor
        return FakeGuest(
            uuid=instance.uuid,
            cloud=self._cloud_id,
            node=self._name,
            epoch=plan.epoch,
            name=instance.name,
            hostname=instance.hostname,
            project_id=instance.project_id,
            vcpus=flavor.vcpus,
            memory_mb=flavor.ram,
            local_gb=moves.local_gb(plan),
            claimed=extra_specs.node_resources(flavor, instance.image),
            assignment=instance.assignment,
            mdevs=moves.mdevs_of(plan),
            image=_image_of(plan),
            kernel=kernel_of(instance.image),
            interfaces=tuple(_interface(vif) for vif in plan.network_info),
            disks=moves.disks_of(plan),
            volumes=moves.volumes_of(plan),
            metadata=instance.metadata,
        )

    def check_free(self, plan: GuestPlan, *, keeps_old: bool = False) -> None:
        """Raise Unavailable if a guest has CPUs or devices of this plan, or had them before its resize.

        They are claimed for the plan, so that guest is about to leave. The guest of the plan itself may have them,
        unless it keeps what it has for a revert.
        """
        self._check_mdevs(plan, keeps_old=keeps_old)
        wanted = _parts(plan.instance.assignment)
        for guest in self._store:
            held = _parts(guest.assignment) if keeps_old or guest.uuid != plan.instance.uuid else set()
            if guest.previous is not None:
                held |= _parts(guest.previous.assignment)
            if both := sorted(wanted & held):
                log.warning("guest %s has %s, which guest %s gets", guest.uuid, ", ".join(both), plan.instance.uuid)
                raise Unavailable("CPUs or devices of the server belong to another guest, which has to leave.")

    def _check_mdevs(self, plan: GuestPlan, *, keeps_old: bool) -> None:
        """Raise an error if a device of the host cannot have the mediated devices of this plan as well."""
        wanted = Counter((each.parent, each.mdev_type) for each in moves.mdevs_of(plan))
        totals = {(each.name, each.mdev_type): each.total for each in self._topology.mdevs}
        held: Counter[tuple[str, str]] = Counter()
        for guest in self._store:
            own = guest.mdevs if keeps_old or guest.uuid != plan.instance.uuid else ()
            before = guest.previous.mdevs if guest.previous is not None else ()
            held.update((each.parent, each.mdev_type) for each in (*own, *before))
        for (parent, mdev_type), count in sorted(wanted.items()):
            total = totals.get((parent, mdev_type))
            if total is None:
                raise InsufficientResources(f"{parent} of this host offers no mediated devices of type {mdev_type}.")
            if held[parent, mdev_type] + count > total:
                raise Unavailable(f"All mediated devices of {parent} belong to guests, of which one has to leave.")

    def remove(self, uuid: str) -> None:
        """Remove a guest."""
        self._store.remove(uuid)
        self.consoles.end(uuid)

    # --- what happens to them ---

    async def call(self, call: str, guest: FakeGuest) -> bool:
        """Apply the delays and faults of a call; return whether the guest crashes after it."""
        return await self.fail_by_rule(call, guest.name, guest.metadata) == "crash"

    async def fail_by_rule(self, call: str, name: str, metadata: dict[str, str]) -> str | None:
        """Apply the delays and faults of a call; return the kind of a fault that is not an error."""
        fault = self._faults.draw(call, self._name, name, metadata)
        if fault.delay:
            await self._clock.sleep(fault.delay)
        if fault.kind == "hang":
            await asyncio.get_running_loop().create_future()
        error = _ERRORS.get(fault.kind)
        if error is not None:
            raise error(fault.message or f"Simulated fault {fault.kind!r} at {call} on this host.")
        return fault.kind

    def boot(self, guest: FakeGuest, *, crash: bool = False) -> None:
        """Let a guest boot, and perhaps crash then."""
        fault = self._faults.draw("boot", self._name, guest.name, guest.metadata)
        guest.boots += 1
        guest.interrupts = 0
        guest.frozen = False
        guest.disks = moves.booted(guest.disks)
        guest.booted_at = self._clock.now()
        guest.silent_for = fault.delay
        if fault.kind:
            guest.hung = (*guest.hung, guest.boots)
        self.set_power(guest, power_state.RUNNING, "started")
        if crash:
            self.crash(guest)

    async def shut_down(self, guest: FakeGuest, timeout: float) -> None:
        """Let a guest shut down; one with a `shutdown` fault does not react and is stopped after the timeout."""
        if timeout > 0:
            fault = self._faults.draw("shutdown", self._name, guest.name, guest.metadata)
            wait = timeout if fault.kind else min(fault.delay, timeout)
            if wait:
                await self._clock.sleep(wait)
        self.set_power(guest, power_state.SHUTDOWN, "stopped")

    def crash(self, guest: FakeGuest) -> None:
        """Let a guest crash."""
        self.set_power(guest, power_state.CRASHED, "crashed")

    def set_power(self, guest: FakeGuest, state: int, event: Lifecycle) -> None:
        """Change a guest's power state, and report it to the agent."""
        guest.power_state = state
        self._store.put(guest)
        if state not in (power_state.RUNNING, power_state.PAUSED):
            self.consoles.end(guest.uuid)
        if self.events is not None:
            self.events.lifecycle(guest.uuid, event)

    def set_frozen(self, guest: FakeGuest, *, frozen: bool) -> None:
        """Freeze or thaw the file systems of a guest, unless they are."""
        if guest.frozen != frozen:
            guest.frozen = frozen
            self._store.put(guest)

    def plug(self, guest: FakeGuest, vif: VIF) -> None:
        """Give a guest an interface."""
        guest.interfaces = (*_others(guest, vif), _interface(vif))
        self._store.put(guest)

    def unplug(self, guest: FakeGuest, vif: VIF) -> None:
        """Take an interface from a guest, if it has it."""
        guest.interfaces = _others(guest, vif)
        self._store.put(guest)

    def give_volumes(self, guest: FakeGuest, plan: GuestPlan) -> None:
        """Give a guest the volumes of a plan, and no others; the caller stores the guest."""
        known = {volume.attachment_id: volume for volume in guest.volumes}
        guest.volumes = tuple(known.get(each.attachment_id, each) for each in moves.volumes_of(plan))

    def give_volume(self, guest: FakeGuest, volume: AttachedVolume, *, instead: AttachedVolume | None = None) -> None:
        """Give a guest a volume, perhaps instead of another one."""
        leaving = {volume.volume_id} | (set() if instead is None else {instead.volume_id})
        others = tuple(each for each in guest.volumes if each.volume_id not in leaving)
        guest.volumes = (*others, moves.as_volume(volume))
        self._store.put(guest)

    def take_volume(self, guest: FakeGuest, volume: AttachedVolume) -> None:
        """Take a volume from a guest, if it has it."""
        guest.volumes = tuple(each for each in guest.volumes if each.volume_id != volume.volume_id)
        self._store.put(guest)

    def extend_volume(self, guest: FakeGuest, volume: AttachedVolume, size: int) -> None:
        """Let a guest see the new size of a volume."""
        guest.volumes = tuple(
            msgspec.structs.replace(each, size=size) if each.volume_id == volume.volume_id else each
            for each in guest.volumes
        )
        self._store.put(guest)

    async def console(self, protocol: ConsoleProtocol, uuid: str) -> ConsoleEndpoint:
        """Return where a console of a guest is."""
        guest = self.require(uuid)
        await self.call("console", guest)
        if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"Instance {uuid} does not run: its consoles are there again when it does.")
        return await self.consoles.open(protocol, guest)

    # --- its capacity ---

    def node(self) -> NodeResources:
        """Return what the host has, and what guests of any cloud use of it."""
        settings = self._settings
        guests = list(self._store)
        disk_used = sum(guest.local_gb for guest in guests)
        return NodeResources(
            node=self._name,
            node_uuid=str(uuid5(_NODES, f"{self._cloud_id}/{self._name}/{self._name}")),
            hypervisor_type="fake",
            hypervisor_version=1_000,
            vcpus=sum(len(cell.shared) for cell in self._topology.cells),
            pcpus=sum(len(cell.dedicated) for cell in self._topology.cells),
            topology=self._topology,
            memory_mb=settings.memory_mb,
            local_gb=settings.local_gb,
            vcpus_used=sum(guest.shared_vcpus for guest in guests),
            pcpus_used=sum(guest.pcpus for guest in guests),
            memory_mb_used=sum(guest.memory_mb for guest in guests),
            local_gb_used=disk_used,
            disk_available_gb=settings.local_gb - disk_used,
            running_vms=sum(guest.power_state == power_state.RUNNING for guest in guests),
            traits=settings.traits,
            cpu_info={
                "arch": "x86_64",
                "model": "simulated",
                "vendor": "Micronova",
                "features": ["vmx", "nx"],
                "topology": {
                    "cells": settings.numa_nodes,
                    "sockets": settings.numa_nodes,
                    "cores": settings.vcpus // settings.numa_nodes // settings.threads_per_core,
                    "threads": settings.threads_per_core,
                },
            },
            supported=(("x86_64", "fake", "hvm"), ("i686", "fake", "hvm")),
        )


def _parts(assignment: Assignment | None) -> set[str]:
    if assignment is None:
        return set()
    cpus = {f"CPU {cpu}" for cell in assignment.cells for cpu in cell.pins.values()}
    return (
        cpus | {f"CPU {cpu}" for cpu in assignment.emulator} | {f"device {each.address}" for each in assignment.devices}
    )


def expect(guest: FakeGuest, state: int, what: str) -> None:
    """Raise Conflict unless a guest is in a power state."""
    if guest.power_state != state:
        raise Conflict(f"The guest {guest.uuid} cannot be {what} in its power state {guest.power_state}.")


def _others(guest: FakeGuest, vif: VIF) -> tuple[FakeInterface, ...]:
    return tuple(each for each in guest.interfaces if each.port != vif.port_id)


def _interface(vif: VIF) -> FakeInterface:
    addresses = tuple(address.address for address in vif.fixed_ips)
    return FakeInterface(port=vif.port_id, mac=vif.mac_address, addresses=addresses)


def kernel_of(image: ImageMeta | None) -> str:
    """Return the name of an image's kernel; empty if it has none."""
    kernel = None if image is None else image.kernel
    return "" if kernel is None else kernel.name or kernel.id


def _image_of(plan: GuestPlan) -> str:
    """Return the name of the image that the first disk of a guest is made from; none if it is made empty."""
    image = plan.instance.image
    empty = any(device.boot_index == 0 and device.source_type == "blank" for device in plan.block_devices)
    return "" if image is None or empty else image.name or image.id

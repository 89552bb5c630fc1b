"""The fake driver: a simulator of one compute host, with capacity, latencies and faults."""

import asyncio
from typing import Any
from uuid import UUID, uuid5

from micronova.objects.clock import Clock
from micronova.objects.errors import (
    BuildAborted,
    Conflict,
    InstanceNotFound,
    InsufficientResources,
    MicronovaError,
)
from micronova.objects.orders import Guest, NodeResources
from micronova.virt import power_state
from micronova.virt.driver import DriverEvents, DriverFailed, GuestPlan, Lifecycle, RebootType, implemented
from micronova.virt.fake.console import console_text
from micronova.virt.fake.faults import FaultBook
from micronova.virt.fake.guests import FakeGuest, GuestStore
from micronova.virt.fake.settings import FakeSettings

_NODES = UUID("5f0c6a52-8a0e-4f1b-9f6b-6d6963726f6e")
"""Namespace of node uuids: the same node of the same cloud has the same uuid after every restart."""

_ERRORS: dict[str, type[MicronovaError]] = {
    "fail": DriverFailed,
    "abort": BuildAborted,
    "no_resources": InsufficientResources,
}


class FakeDriver:
    """One simulated host."""

    def __init__(
        self,
        host: str,
        *,
        settings: FakeSettings,
        store: GuestStore,
        faults: FaultBook,
        cloud_id: str,
        clock: Clock,
    ) -> None:
        self.host = host
        self._settings = settings
        self._store = store
        self._faults = faults
        self._cloud_id = cloud_id
        self._clock = clock
        self._events: DriverEvents | None = None
        self._up_since = clock.monotonic()
        count = settings.nodes_per_host
        self.nodes = [host] if count == 1 else [f"{host}-node-{number}" for number in range(1, count + 1)]

    async def init_host(self, events: DriverEvents) -> None:
        """Remember whom to tell of events."""
        self._events = events

    async def close(self) -> None:
        """Leave the guests as they are."""
        self._events = None

    def capabilities(self) -> frozenset[str]:
        """Everything that is implemented."""
        return implemented(self)

    async def get_available_resources(self) -> list[NodeResources]:
        """Describe the simulated nodes."""
        return [self._node(node) for node in self.nodes]

    async def list_guests(self) -> list[Guest]:
        """List this cloud's guests."""
        return [_view(guest) for guest in self._store if guest.cloud == self._cloud_id]

    async def info(self, uuid: str) -> Guest | None:
        """Describe a guest."""
        guest = self._find(uuid)
        return None if guest is None else _view(guest)

    async def spawn(self, plan: GuestPlan) -> None:
        """Make a guest."""
        instance = plan.instance
        if self._store.get(instance.uuid) is not None:
            raise Conflict(f"A guest {instance.uuid} exists already on {self.host}.")
        flavor = instance.flavor
        guest = FakeGuest(
            uuid=instance.uuid,
            cloud=self._cloud_id,
            node=instance.node or self.nodes[0],
            epoch=plan.epoch,
            name=instance.name,
            hostname=instance.hostname,
            vcpus=flavor.vcpus,
            memory_mb=flavor.ram,
            local_gb=flavor.resources().get("DISK_GB", 0),
            image="" if instance.image is None else instance.image.name or instance.image.id,
            addresses=tuple(address.address for vif in plan.network_info for address in vif.fixed_ips),
            metadata=instance.metadata,
        )
        # Kept before anything can go wrong, as a real hypervisor would have disks by now: undo must find it.
        self._store.put(guest)
        crash = await self._pass("spawn", guest)
        await plan.plugged()
        self._boot(guest)
        if crash:
            self._switch(guest, power_state.CRASHED, "crashed")

    async def destroy(self, uuid: str) -> None:
        """Remove a guest."""
        guest = self._find(uuid)
        if guest is not None:
            await self._pass("destroy", guest)
            self._store.remove(uuid)

    async def power_on(self, plan: GuestPlan) -> None:
        """Boot a guest that does not run."""
        guest = self._known(plan.instance.uuid)
        crash = await self._pass("power_on", guest)
        if guest.power_state != power_state.RUNNING:
            await plan.plugged()
            self._boot(guest)
        if crash:
            self._switch(guest, power_state.CRASHED, "crashed")

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Shut a guest down; one with a `shutdown` fault does not react and is switched off in the end."""
        guest = self._known(uuid)
        await self._pass("power_off", guest)
        if guest.power_state == power_state.SHUTDOWN:
            return
        if timeout > 0:
            draw = self._faults.draw("shutdown", self.host, guest.name, guest.metadata)
            wait = timeout if draw.kind else min(draw.delay, timeout)
            if wait:
                await self._clock.sleep(wait)
        self._switch(guest, power_state.SHUTDOWN, "stopped")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Boot a guest again."""
        guest = self._known(plan.instance.uuid)
        crash = await self._pass("reboot", guest)
        if kind == "HARD":
            await plan.plugged()
        self._boot(guest)
        if crash:
            self._switch(guest, power_state.CRASHED, "crashed")

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Make up a plausible log."""
        guest = self._known(uuid)
        await self._pass("console", guest)
        text = console_text(guest)
        if length is None or length < 0:
            return text
        return "".join(text.splitlines(keepends=True)[-length:]) if length else ""

    async def get_host_uptime(self) -> str:
        """Count from the start of the simulation."""
        minutes = int(self._clock.monotonic() - self._up_since) // 60
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        return f"up {days} days, {hours}:{minutes:02d}, 0 users, load average: 0.00, 0.00, 0.00"

    def fault_rules(self) -> list[dict[str, Any]]:
        """List the rules, which all simulated hosts of the process share."""
        return self._faults.listed()

    def set_fault_rules(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules."""
        self._faults.replace(rules)

    def guest_stops(self, uuid: str, *, crashed: bool = False) -> None:
        """Let a guest stop by itself, as if its owner had shut it down from inside."""
        guest = self._known(uuid)
        if crashed:
            self._switch(guest, power_state.CRASHED, "crashed")
        else:
            self._switch(guest, power_state.SHUTDOWN, "stopped")

    def _find(self, uuid: str) -> FakeGuest | None:
        guest = self._store.get(uuid)
        return guest if guest is not None and guest.cloud == self._cloud_id else None

    def _known(self, uuid: str) -> FakeGuest:
        guest = self._find(uuid)
        if guest is None:
            raise InstanceNotFound(f"There is no guest {uuid} on {self.host}.")
        return guest

    def _boot(self, guest: FakeGuest) -> None:
        guest.boots += 1
        guest.booted_at = self._clock.now()
        self._switch(guest, power_state.RUNNING, "started")

    def _switch(self, guest: FakeGuest, state: int, event: Lifecycle) -> None:
        guest.power_state = state
        self._store.put(guest)
        if self._events is not None:
            self._events.lifecycle(guest.uuid, event)

    async def _pass(self, operation: str, guest: FakeGuest) -> bool:
        """Take the time that an operation takes, suffer its faults; say whether the guest then crashes."""
        draw = self._faults.draw(operation, self.host, guest.name, guest.metadata)
        if draw.delay:
            await self._clock.sleep(draw.delay)
        if draw.kind == "hang":
            await asyncio.get_running_loop().create_future()
        error = _ERRORS.get(draw.kind)
        if error is not None:
            raise error(draw.message or f"Simulated fault {draw.kind!r} at {operation} on {self.host}.")
        return draw.kind == "crash"

    def _node(self, node: str) -> NodeResources:
        settings = self._settings
        guests = [guest for guest in self._store if guest.node == node]
        disk_used = sum(guest.local_gb for guest in guests)
        return NodeResources(
            node=node,
            node_uuid=str(uuid5(_NODES, f"{self._cloud_id}/{self.host}/{node}")),
            hypervisor_type="fake",
            hypervisor_version=1_000,
            vcpus=settings.vcpus,
            memory_mb=settings.memory_mb,
            local_gb=settings.local_gb,
            vcpus_used=sum(guest.vcpus for guest in guests),
            memory_mb_used=sum(guest.memory_mb for guest in guests),
            local_gb_used=disk_used,
            disk_available_gb=settings.local_gb - disk_used,
            running_vms=sum(guest.power_state == power_state.RUNNING for guest in guests),
            cpu_info={
                "arch": "x86_64",
                "model": "simulated",
                "vendor": "Micronova",
                "features": ["vmx", "nx"],
                "topology": {"cells": 1, "sockets": 1, "cores": settings.vcpus, "threads": 1},
            },
            supported=(("x86_64", "fake", "hvm"), ("i686", "fake", "hvm")),
        )


def _view(guest: FakeGuest) -> Guest:
    return Guest(
        uuid=guest.uuid,
        node=guest.node,
        epoch=guest.epoch,
        power_state=guest.power_state,
        name=guest.name,
        vcpus=guest.vcpus,
        memory_mb=guest.memory_mb,
        local_gb=guest.local_gb,
    )

"""The fake driver: a simulator of one compute host, with capacity, latencies and faults."""

import asyncio
from collections.abc import Collection
from typing import Any
from uuid import UUID, uuid5

from micronova.conf.hosts import FakeSettings
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import (
    BuildAborted,
    Conflict,
    InstanceNotFound,
    InsufficientResources,
    MicronovaError,
    Unavailable,
)
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, NodeResources
from micronova.virt.driver import (
    POWER_AFTER,
    BootSign,
    DriverEvents,
    DriverFailed,
    GuestPlan,
    Lifecycle,
    RebootType,
    implemented,
    last_lines,
)
from micronova.virt.fake.console_log import console_text
from micronova.virt.fake.consoles import FakeConsoles
from micronova.virt.fake.diagnostics import boot_sign, diagnose
from micronova.virt.fake.faults import FaultRules
from micronova.virt.fake.guests import FakeGuest, FakeInterface, GuestStore

_NODES = UUID("5f0c6a52-8a0e-4f1b-9f6b-6d6963726f6e")
"""Namespace of node uuids: the same node of the same cloud has the same uuid after every restart."""

_ERRORS: dict[str, type[MicronovaError]] = {
    "fail": DriverFailed,
    "abort": BuildAborted,
    "no_resources": InsufficientResources,
    "unavailable": Unavailable,
}


class FakeDriver:
    """One simulated host."""

    def __init__(
        self,
        host: str,
        *,
        settings: FakeSettings,
        store: GuestStore,
        faults: FaultRules,
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
        self._consoles = FakeConsoles()
        self._up_since = clock.monotonic()

    async def init_host(self, events: DriverEvents) -> None:
        """Remember the agent's callbacks."""
        self._events = events

    async def close(self) -> None:
        """Leave the guests as they are."""
        self._events = None
        await self._consoles.close()

    def capabilities(self) -> frozenset[str]:
        """Return everything that is implemented."""
        return implemented(self)

    async def get_available_resources(self) -> list[NodeResources]:
        """Return the node of the host."""
        return [self._node()]

    async def list_guests(self) -> list[Guest]:
        """Return this cloud's guests."""
        return [_view(guest) for guest in self._store if guest.cloud == self._cloud_id]

    async def info(self, uuid: str) -> Guest | None:
        """Return a guest, or None."""
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
            node=self.host,
            epoch=plan.epoch,
            name=instance.name,
            hostname=instance.hostname,
            vcpus=flavor.vcpus,
            memory_mb=flavor.ram,
            local_gb=flavor.resources().get("DISK_GB", 0),
            image="" if instance.image is None else instance.image.name or instance.image.id,
            interfaces=tuple(_interface(vif) for vif in plan.network_info),
            metadata=instance.metadata,
        )
        # Stored before a fault can occur, as a real hypervisor has disks by now: `destroy` must find it.
        self._store.put(guest)
        crash = await self._simulate("spawn", guest)
        await plan.plugged()
        self._boot(guest)
        if crash:
            self._set_power(guest, power_state.CRASHED, "crashed")

    async def destroy(self, uuid: str) -> None:
        """Remove a guest."""
        guest = self._find(uuid)
        if guest is not None:
            await self._simulate("destroy", guest)
            self._store.remove(uuid)
            self._consoles.end(uuid)

    async def power_on(self, plan: GuestPlan) -> None:
        """Boot a guest that does not run."""
        guest = self._known(plan.instance.uuid)
        crash = await self._simulate("power_on", guest)
        if guest.power_state != power_state.RUNNING:
            await plan.plugged()
            self._boot(guest)
        if crash:
            self._set_power(guest, power_state.CRASHED, "crashed")

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Shut a guest down; one with a `shutdown` fault does not react and is stopped after the timeout."""
        guest = self._known(uuid)
        await self._simulate("power_off", guest)
        if guest.power_state == power_state.SHUTDOWN:
            return
        if timeout > 0:
            fault = self._faults.draw("shutdown", self.host, guest.name, guest.metadata)
            wait = timeout if fault.kind else min(fault.delay, timeout)
            if wait:
                await self._clock.sleep(wait)
        self._set_power(guest, power_state.SHUTDOWN, "stopped")

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Boot a guest again."""
        guest = self._known(plan.instance.uuid)
        crash = await self._simulate("reboot", guest)
        if kind == "HARD":
            await plan.plugged()
        self._boot(guest)
        if crash:
            self._set_power(guest, power_state.CRASHED, "crashed")

    async def pause(self, uuid: str) -> None:
        """Pause a guest."""
        guest = self._known(uuid)
        await self._simulate("pause", guest)
        if guest.power_state != power_state.PAUSED:
            self._expect(guest, power_state.RUNNING, "paused")
            self._set_power(guest, power_state.PAUSED, "paused")

    async def unpause(self, uuid: str) -> None:
        """Let a paused guest run again."""
        guest = self._known(uuid)
        await self._simulate("unpause", guest)
        if guest.power_state != power_state.RUNNING:
            self._expect(guest, power_state.PAUSED, "unpaused")
            self._set_power(guest, power_state.RUNNING, "resumed")

    async def suspend(self, uuid: str) -> None:
        """Suspend a guest."""
        guest = self._known(uuid)
        await self._simulate("suspend", guest)
        if guest.power_state != power_state.SUSPENDED:
            self._expect(guest, power_state.RUNNING, "suspended")
            self._set_power(guest, power_state.SUSPENDED, "suspended")

    async def resume(self, plan: GuestPlan) -> None:
        """Resume a suspended guest."""
        guest = self._known(plan.instance.uuid)
        await self._simulate("resume", guest)
        if guest.power_state != power_state.RUNNING:
            self._expect(guest, power_state.SUSPENDED, "resumed")
            await plan.plugged()
            self._set_power(guest, power_state.RUNNING, "resumed")

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; unplug it if the network does not confirm it."""
        guest = self._known(plan.instance.uuid)
        await self._simulate("attach_interface", guest)
        self._plug(guest, vif.port_id, _interface(vif))
        try:
            await plan.plugged()
        except BaseException:
            self._plug(guest, vif.port_id, None)
            raise

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface."""
        guest = self._known(uuid)
        await self._simulate("detach_interface", guest)
        self._plug(guest, vif.port_id, None)

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Return invented statistics that grow with the guest's age."""
        guest = self._known(uuid)
        await self._simulate("diagnostics", guest)
        return diagnose(guest, self._clock.now())

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Return whether guests have begun to boot; those with a `boot` fault have not, or only after its delay."""
        now = self._clock.now()
        found = [guest for uuid in uuids if (guest := self._find(uuid)) is not None]
        return {guest.uuid: boot_sign(guest, now) for guest in found if guest.power_state == power_state.RUNNING}

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Return an invented console log."""
        guest = self._known(uuid)
        await self._simulate("console", guest)
        return last_lines(console_text(guest), length)

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where a picture that reacts to keys is shown."""
        return await self._console("vnc", uuid)

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Return where a small shell answers; there is one serial port."""
        if number:
            raise InstanceNotFound(f"The guest {uuid} has no serial port {number}.")
        return await self._console("serial", uuid)

    async def get_host_uptime(self) -> str:
        """Return the time since the driver was made."""
        minutes = int(self._clock.monotonic() - self._up_since) // 60
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        return f"up {days} days, {hours}:{minutes:02d}, 0 users, load average: 0.00, 0.00, 0.00"

    def fault_rules(self) -> list[dict[str, Any]]:
        """Return the rules, which all simulated hosts of the process share."""
        return self._faults.listed()

    def set_fault_rules(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules."""
        self._faults.replace(rules)

    def guest_stops(self, uuid: str, *, crashed: bool = False) -> None:
        """Stop a guest as if its owner had shut it down from inside."""
        self.guest_becomes(uuid, "crashed" if crashed else "stopped")

    def guest_becomes(self, uuid: str, event: Lifecycle) -> None:
        """Change a guest's power state without an order, as somebody at the hypervisor could."""
        self._set_power(self._known(uuid), POWER_AFTER[event], event)

    def _find(self, uuid: str) -> FakeGuest | None:
        guest = self._store.get(uuid)
        return guest if guest is not None and guest.cloud == self._cloud_id else None

    def _known(self, uuid: str) -> FakeGuest:
        guest = self._find(uuid)
        if guest is None:
            raise InstanceNotFound(f"There is no guest {uuid} on {self.host}.")
        return guest

    def _expect(self, guest: FakeGuest, state: int, what: str) -> None:
        if guest.power_state != state:
            raise Conflict(f"The guest {guest.uuid} cannot be {what} in its power state {guest.power_state}.")

    def _plug(self, guest: FakeGuest, port: str, interface: FakeInterface | None) -> None:
        others = tuple(each for each in guest.interfaces if each.port != port)
        guest.interfaces = others if interface is None else (*others, interface)
        self._store.put(guest)

    async def _console(self, protocol: ConsoleProtocol, uuid: str) -> ConsoleEndpoint:
        guest = self._known(uuid)
        await self._simulate("console", guest)
        if guest.power_state not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"Instance {uuid} does not run: its consoles are there again when it does.")
        return await self._consoles.open(protocol, guest)

    def _boot(self, guest: FakeGuest) -> None:
        fault = self._faults.draw("boot", self.host, guest.name, guest.metadata)
        guest.boots += 1
        guest.booted_at = self._clock.now()
        guest.silent_for = fault.delay
        if fault.kind:
            guest.hung = (*guest.hung, guest.boots)
        self._set_power(guest, power_state.RUNNING, "started")

    def _set_power(self, guest: FakeGuest, state: int, event: Lifecycle) -> None:
        guest.power_state = state
        self._store.put(guest)
        if state not in (power_state.RUNNING, power_state.PAUSED):
            self._consoles.end(guest.uuid)
        if self._events is not None:
            self._events.lifecycle(guest.uuid, event)

    async def _simulate(self, call: str, guest: FakeGuest) -> bool:
        """Apply the delays and faults of a call; return whether the guest crashes after it."""
        fault = self._faults.draw(call, self.host, guest.name, guest.metadata)
        if fault.delay:
            await self._clock.sleep(fault.delay)
        if fault.kind == "hang":
            await asyncio.get_running_loop().create_future()
        error = _ERRORS.get(fault.kind)
        if error is not None:
            raise error(fault.message or f"Simulated fault {fault.kind!r} at {call} on {self.host}.")
        return fault.kind == "crash"

    def _node(self) -> NodeResources:
        settings = self._settings
        guests = list(self._store)
        disk_used = sum(guest.local_gb for guest in guests)
        return NodeResources(
            node=self.host,
            node_uuid=str(uuid5(_NODES, f"{self._cloud_id}/{self.host}/{self.host}")),
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


def _interface(vif: VIF) -> FakeInterface:
    addresses = tuple(address.address for address in vif.fixed_ips)
    return FakeInterface(port=vif.port_id, mac=vif.mac_address, addresses=addresses)


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

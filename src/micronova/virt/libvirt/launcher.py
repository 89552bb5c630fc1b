"""Making guests run: admitting them to the host, defining them, starting them when the network says so."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from micronova.objects.errors import Conflict, MicronovaError
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt import domains
from micronova.virt.libvirt.compose import Workshop, compose
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.guest_xml import domain_xml
from micronova.virt.libvirt.guests import Guests
from micronova.virt.libvirt.layout import GuestRecord, GuestStore, PinRecord
from micronova.virt.libvirt.pool import Pool

log = logging.getLogger(__name__)

START_TIMEOUT: Final = 180.0
SAVE_SECONDS_PER_GB: Final = 60.0
"""How long moving memory to or from a slow disk may take, besides the time of any call."""


class Launcher:
    """Starts guests on one host."""

    def __init__(
        self, shop: Workshop, connection: Connection, guests: Guests, store: GuestStore, files: Pool, cloud: str
    ) -> None:
        self._shop = shop
        self._connection = connection
        self._guests = guests
        self._store = store
        self._files = files
        self._cloud = cloud
        self._placing = asyncio.Lock()

    async def admit(self, plan: GuestPlan, record: GuestRecord) -> GuestRecord:
        """See that the guest can be defined here, give it its CPUs, and write its record."""
        # One at a time: two guests must not be given the same CPU.
        async with self._placing:
            taken = await self._files.run(self._taken_cpus)
            cpus = compose(self._shop, plan.instance, record, plan.network_info, taken).cpus
            places = {cell.id: cell.host for cell in cpus.cells if cell.host is not None}
            pins = PinRecord(vcpus=cpus.pins, cells=places, emulator=cpus.emulator)
            record = msgspec.structs.replace(record, pins=pins)
            try:
                await self._files.run(self._store.create, record)
            except FileExistsError:
                raise Conflict(f"A guest {record.uuid} exists already on {record.host}.") from None
        return record

    async def launch(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Define a guest as it is to be now, and start it."""
        if record.resumed:
            await self._files.run(self._store.save, msgspec.structs.replace(record, resumed=False))
        xml = domain_xml(compose(self._shop, plan.instance, record, plan.network_info))
        await self._connection.work(record.uuid, lambda connection: domains.define(connection, xml), "define the guest")
        await self._start(plan, START_TIMEOUT, domains.switch_off)

    async def relaunch(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Cut a guest's power, if it has any, and launch it."""

        def off(connection: Any) -> None:
            domain = domains.find_ours(connection, record.uuid, self._cloud)
            if domain is not None:
                domains.switch_off(domain)

        await self._connection.work(record.uuid, off, "switch the guest off", timeout=START_TIMEOUT)
        await self.launch(plan, record)

    async def restore(self, plan: GuestPlan, record: GuestRecord) -> None:
        """Start a guest from its saved memory, with what was plugged when it was saved."""
        if not record.resumed:
            await self._files.run(self._store.save, msgspec.structs.replace(record, resumed=True))
        timeout = START_TIMEOUT + SAVE_SECONDS_PER_GB * (record.memory_mb / 1024)
        # What was put away is not thrown away because the network does not confirm.
        await self._start(plan, timeout, domains.save)

    async def _start(self, plan: GuestPlan, timeout: float, undo: Callable[[Any], None]) -> None:
        """Start a defined guest; with interfaces it stands still until the network has confirmed them."""
        uuid = plan.instance.uuid
        wait = bool(plan.network_info)
        if not wait:
            await plan.plugged()
        await self._guests.change(
            uuid, lambda domain: domains.start(domain, paused=wait), "start the guest", timeout=timeout
        )
        if not wait:
            return
        try:
            await plan.plugged()
            await self._guests.change(uuid, domains.resume, "let the guest run")
        except BaseException:
            try:
                await self._guests.change(uuid, undo, "switch the guest off", timeout=timeout)
            except MicronovaError as error:
                log.warning("guest %s could not be switched off: %s", uuid, error)
            raise

    def _taken_cpus(self) -> frozenset[int]:
        pins = [record.pins for record in self._store if record.pins is not None]
        return frozenset(cpu for pin in pins for cpu in (*pin.vcpus.values(), *pin.emulator))

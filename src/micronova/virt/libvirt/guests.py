"""The guests of this cloud on this host: what the records and libvirt together say of them, and reaching them.

A guest is ours by its record, which names cloud and host, and by what its definition carries. Whatever is not ours
is as good as not there: it is neither shown nor found.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from micronova.objects.errors import Conflict, InstanceNotFound
from micronova.objects.orders import Guest
from micronova.virt import power_state
from micronova.virt.libvirt import domains
from micronova.virt.libvirt.connection import Connection
from micronova.virt.libvirt.layout import GuestRecord, GuestStore
from micronova.virt.libvirt.pool import Pool

T = TypeVar("T")


class Guests:
    """Finds guests."""

    def __init__(self, connection: Connection, store: GuestStore, files: Pool, *, host: str, cloud: str) -> None:
        self._connection = connection
        self._store = store
        self._files = files
        self._host = host
        self._cloud = cloud

    async def all(self) -> list[Guest]:
        """List the guests that have a record or are known to libvirt."""
        every = await self._files.run(self._store.all)
        records = {record.uuid: record for record in every if self.owns(record)}
        seen = {guest.uuid: guest for guest in await self._connection.read(domains.look_at_all, "list its guests")}
        found = [self._view(uuid, records.get(uuid), seen.get(uuid)) for uuid in {**records, **seen}]
        return [guest for guest in found if guest is not None]

    async def one(self, uuid: str) -> Guest | None:
        """Describe a guest."""
        record = await self._files.run(self._store.load, uuid)
        seen = await self._connection.read(lambda connection: domains.look(connection, uuid), "find the guest")
        return self._view(uuid, record, seen)

    async def known(self, uuid: str) -> tuple[GuestRecord, int]:
        """Give a guest's record and power state."""
        record = await self._files.run(self._store.load, uuid)
        if record is None or not self.owns(record):
            raise InstanceNotFound(f"There is no guest {uuid} on {self._host}.")
        seen = await self._connection.read(lambda connection: domains.look(connection, uuid), "find the guest")
        return record, self._power(seen)

    async def expect_running(self, uuid: str) -> None:
        """Refuse what makes sense only while a guest runs."""
        _, power = await self.known(uuid)
        if power not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"The guest {uuid} does not run: it has no console.")

    async def change(self, uuid: str, function: Callable[[Any], T], what: str, *, timeout: float | None = None) -> T:
        """Do something to a guest that libvirt knows."""
        return await self._connection.work(
            uuid, lambda connection: function(self.find(connection, uuid)), what, timeout=timeout
        )

    async def ask(self, uuid: str, function: Callable[[Any], T], what: str) -> T:
        """Ask libvirt about a guest."""
        return await self._connection.read(lambda connection: function(self.find(connection, uuid)), what)

    def find(self, connection: Any, uuid: str) -> Any:
        """Find a guest that libvirt knows. Blocks."""
        domain = domains.find_ours(connection, uuid, self._cloud)
        if domain is None:
            raise InstanceNotFound(f"There is no guest {uuid} on {self._host}.")
        return domain

    def owns(self, record: GuestRecord) -> bool:
        """Say whether a record is of this cloud and this host."""
        return record.cloud == self._cloud and record.host == self._host

    def _power(self, seen: domains.Seen | None) -> int:
        if seen is None or seen.owner is None or seen.owner.cloud != self._cloud:
            return power_state.SHUTDOWN  # it has disks and no definition
        return seen.power

    def _view(self, uuid: str, record: GuestRecord | None, seen: domains.Seen | None) -> Guest | None:
        if record is not None:
            if not self.owns(record):
                return None
            return Guest(
                uuid=uuid,
                node=record.node,
                epoch=record.epoch,
                power_state=self._power(seen) if record.complete else power_state.NOSTATE,
                name=record.name,
                vcpus=record.vcpus,
                memory_mb=record.memory_mb,
                local_gb=record.local_gb,
            )
        if seen is None or seen.owner is None or seen.owner.cloud != self._cloud:
            return None
        return Guest(
            uuid=uuid,
            node=self._host,
            epoch=seen.owner.epoch,
            power_state=seen.power,
            name=seen.owner.name,
            vcpus=seen.vcpus,
            memory_mb=seen.memory_mb,
        )

"""Finding this cloud's guests on this host, from their records and from libvirt, and calling libvirt for them.

A guest is ours if its record, or else its definition, names this cloud. Other guests are neither listed nor found.
"""

from collections.abc import Callable
from typing import TypeVar

from micronova.objects import power_state
from micronova.objects.errors import Conflict
from micronova.objects.orders import Guest
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection, Lane
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.storage.records import GuestRecord, GuestRecords

T = TypeVar("T")


def exists_already(uuid: str) -> Conflict:
    """Return the error for a guest that cannot be made, because there is one with this uuid."""
    return Conflict(f"A guest {uuid} exists already on this host.")


class GuestAccess:
    """Finds guests and calls libvirt for them."""

    def __init__(
        self, connection: Connection, records: GuestRecords, files: ThreadPool, *, host: str, cloud: str
    ) -> None:
        self._connection = connection
        self._records = records
        self._files = files
        self.host = host
        self.cloud = cloud

    async def all(self) -> list[Guest]:
        """Return the guests that have a record or are known to libvirt."""
        every = await self._files.run(self._records.all)
        records = {record.uuid: record for record in every if self.owns(record)}
        defined = {info.uuid: info for info in await self._connection.read(domains.describe_all, "list its guests")}
        found = [self._guest(uuid, records.get(uuid), defined.get(uuid)) for uuid in {**records, **defined}]
        return [guest for guest in found if guest is not None]

    async def get(self, uuid: str) -> Guest | None:
        """Return a guest, or None."""
        record = await self._files.run(self._records.load, uuid)
        info = await self._connection.read(lambda connection: domains.describe(connection, uuid), "find the guest")
        return self._guest(uuid, record, info)

    async def require(self, uuid: str) -> tuple[GuestRecord, int]:
        """Return a guest's record and power state; raise InstanceNotFound if there is none."""
        record = await self._files.run(self._records.load, uuid)
        if record is None or not self.owns(record):
            raise domains.no_guest(uuid)
        info = await self._connection.read(lambda connection: domains.describe(connection, uuid), "find the guest")
        return record, self._power(info)

    async def require_complete(self, uuid: str) -> tuple[GuestRecord, int]:
        """Return a complete guest's record and power state; raise InstanceNotFound if there is none.

        Raise Conflict if the guest was only partly made, so that its disks may be damaged.
        """
        record, power = await self.require(uuid)
        if not record.complete:
            raise Conflict(f"The guest {uuid} was not made completely: rebuild or delete its server.")
        return record, power

    async def require_unknown(self, uuid: str) -> None:
        """Raise Conflict if libvirt knows a guest with this uuid, of any cloud."""
        if await self._connection.read(lambda connection: domains.find(connection, uuid), "find the guest"):
            raise exists_already(uuid)

    async def require_running(self, uuid: str) -> None:
        """Raise Conflict unless a guest runs or is paused."""
        _, power = await self.require(uuid)
        if power not in (power_state.RUNNING, power_state.PAUSED):
            raise Conflict(f"The guest {uuid} does not run: it has no console.")

    async def change(
        self,
        uuid: str,
        function: Callable[[Domain], T],
        what: str,
        *,
        timeout: float | None = None,
        lane: Lane = "work",
    ) -> T:
        """Call a function that changes a guest."""
        return await self._connection.change(
            uuid, lambda connection: function(self.find(connection, uuid)), what, timeout=timeout, lane=lane
        )

    async def change_if_there(
        self,
        uuid: str,
        function: Callable[[Domain], None],
        what: str,
        *,
        timeout: float | None = None,
        lane: Lane = "work",
    ) -> None:
        """Call a function that changes a guest, if libvirt knows it."""

        def call(connection: Connect) -> None:
            domain = domains.find_ours(connection, uuid, self.cloud)
            if domain is not None:
                function(domain)

        await self._connection.change(uuid, call, what, timeout=timeout, lane=lane)

    async def read(self, uuid: str, function: Callable[[Domain], T], what: str) -> T:
        """Call a function that reads something of a guest."""
        return await self._connection.read(lambda connection: function(self.find(connection, uuid)), what)

    def find(self, connection: Connect, uuid: str) -> Domain:
        """Return a guest that libvirt knows; raise InstanceNotFound if there is none. Blocks."""
        return domains.require_ours(connection, uuid, self.cloud)

    def owns(self, record: GuestRecord) -> bool:
        """Return whether a record is of this cloud and this host."""
        return record.cloud == self.cloud and record.host == self.host

    def _power(self, info: domains.DomainInfo | None) -> int:
        if info is None or info.owner is None or info.owner.cloud != self.cloud:
            return power_state.SHUTDOWN  # it has disks but no definition
        return info.power

    def _guest(self, uuid: str, record: GuestRecord | None, info: domains.DomainInfo | None) -> Guest | None:
        if record is not None:
            if not self.owns(record):
                return None
            return Guest(
                uuid=uuid,
                node=record.node,
                epoch=record.epoch,
                power_state=self._power(info) if record.complete else power_state.NOSTATE,
                name=record.name,
                vcpus=record.vcpus - record.pinned_vcpus,
                pcpus=record.pcpus,
                memory_mb=record.memory_mb,
                local_gb=record.local_gb,
                claimed=record.claimed,
                project_id=_project(info),
            )
        if info is None or info.owner is None or info.owner.cloud != self.cloud:
            return None
        return Guest(
            uuid=uuid,
            node=self.host,
            epoch=info.owner.epoch,
            power_state=info.power,
            name=info.owner.name,
            vcpus=info.vcpus,
            memory_mb=info.memory_mb,
            project_id=_project(info),
        )


def _project(info: domains.DomainInfo | None) -> str:
    """Return the project that a guest's definition names; empty if there is none."""
    return info.owner.project_id if info is not None and info.owner is not None else ""

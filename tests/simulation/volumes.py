"""The volume service of a simulated cloud: the embedded one, with its database and its files.

It is a role of the process, so that its transactions have faults, and its crashes are those of the process. What
compute asks it for has faults of its own: the request is not sent, its answer is lost, or both come late. Nothing
serves the volumes: guests are simulated.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.tables import block_devices, instances
from micronova.embedded.volume import tables
from micronova.objects import states
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Unavailable
from tests.simulation.faults import FaultPlan, ProcessRun

PATIENCE = 60.0  # seconds that a caller waits for an answer
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_TABLES = {
    "volume": tables.volumes, "snapshot": tables.snapshots, "backup": tables.backups, "transfer": tables.transfers
}  # fmt: skip

Rows = Callable[..., list[Any]]
"""Reads a database of the cloud: the query, and the name of the database."""


def with_volume_faults(
    send: Callable[..., Awaitable[Any]], process_run: ProcessRun, fault_plan: FaultPlan
) -> Callable[..., Awaitable[Any]]:
    """Return the function of the volume client that sends requests with a point at each of them."""

    async def run(method: str, path: str, body: Any = None, **more: Any) -> Any:
        await process_run.block_if_ended()
        action = next(iter(body)) if path.endswith("/action") else ""
        fault = fault_plan.at("volume", f"{method} {_ID.sub('ID', path.partition('?')[0])} {action}".strip())
        await process_run.before(fault)
        if fault == "unavailable":
            raise Unavailable("The volume service cannot be reached.")
        if fault == "late":
            await asyncio.sleep(PATIENCE / 2)
        answer = await send(method, path, body, **more)
        await process_run.after(fault)
        if fault == "answer lost":
            await asyncio.sleep(PATIENCE)
            raise Unavailable("The volume service does not answer.")
        return answer

    return run


class Volumes:
    """What the databases of compute and of the volume service say of volumes."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def status(self, id: str, noun: str = "volume") -> str:
        """Return the status of a volume, a snapshot or a backup, or "gone"."""
        table = _TABLES[noun]
        found = self._rows(sa.select(table.c.status).where(table.c.id == id), "volume")
        return str(found[0]["status"]) if found else "gone"

    def ids(self, noun: str, name: str | None = None) -> list[str]:
        """Return the volumes, snapshots, backups or transfers with a name."""
        table = _TABLES[noun]
        found = sa.select(table.c.id) if name is None else sa.select(table.c.id).where(table.c.name == name)
        return [row["id"] for row in self._rows(found, "volume")]

    def all(self) -> dict[str, str]:
        """Return the status of each volume."""
        return {row["id"]: row["status"] for row in self._rows(sa.select(tables.volumes), "volume")}

    def snapshots(self) -> dict[str, str]:
        """Return the status of each snapshot."""
        return {row["id"]: row["status"] for row in self._rows(sa.select(tables.snapshots), "volume")}

    def image_of(self, volume: str) -> str:
        """Return the image that a volume was made of."""
        [row] = self._rows(sa.select(tables.volumes).where(tables.volumes.c.id == volume), "volume")
        return str(row["image_metadata"]["image_id"])

    def of_server(self, server: str) -> list[BlockDevice]:
        """Return the devices of a server that are volumes, in the order of their names."""
        found = self._rows(sa.select(block_devices).where(block_devices.c.instance_uuid == server))
        devices = [msgspec.convert(row["device"], BlockDevice) for row in found]
        return sorted((each for each in devices if each.is_volume), key=lambda each: each.device_name or "")

    def has(self, server: str, volume: str) -> bool:
        """Return whether a server has a volume."""
        return any(each.volume_id == volume for each in self.of_server(server))

    def settled(self) -> bool:
        """Return whether the volume service has nothing left to do, and nothing to tell."""
        return not any(self._rows(sa.select(each), "volume") for each in (tables.operations, tables.events))

    def check(self, guests: dict[str, tuple[str, ...]], files: dict[str, list[str]]) -> None:
        """Assert that services, guests and files agree, that no volume is stuck, and that the quota is what is used.

        `guests` are the volumes of each guest, `files` the names of all files, by kind.
        """
        servers = {row["uuid"]: row for row in self._rows(sa.select(instances))}
        recorded = {
            each.attachment_id: (each.volume_id, server) for server in servers for each in self.of_server(server)
        }
        attachments = {row["id"]: row for row in self._rows(sa.select(tables.attachments), "volume")}
        assert {id: (row["volume_id"], row["instance_uuid"]) for id, row in attachments.items()} == recorded
        expected = dict.fromkeys(self.all(), "available")
        for row in attachments.values():
            server = servers[row["instance_uuid"]]
            waits = server["host"] is None or server["vm_state"] in states.WITHOUT_HOST
            assert (row["attach_status"], row["attached_host"] if not waits else None) == (
                "reserved" if waits else "attached",
                server["host"],
            )
            expected[row["volume_id"]] = "reserved" if waits else "in-use"
        assert self.all() == expected
        assert set(self.snapshots().values()) <= {"available"}
        for uuid, held in guests.items():
            assert sorted(held) == sorted(str(each.volume_id) for each in self.of_server(uuid))
        assert sorted(files["volumes"]) == sorted(self.all())
        assert sorted(files["snapshots"]) == sorted(self.snapshots())
        assert sorted(files["backups"]) == sorted(self.ids("backup"))
        assert self._used() == self._charged()

    def _used(self) -> dict[str, int]:
        used = Counter[str]()
        for row in self._rows(sa.select(tables.volumes), "volume"):
            used.update(volumes=1, gigabytes=row["size"])
        for row in self._rows(sa.select(tables.snapshots), "volume"):
            used.update(snapshots=1, gigabytes=row["size"])
        if backups := self.ids("backup"):
            used.update(backups=len(backups))
        return dict(used)

    def _charged(self) -> dict[str, int]:
        found = self._rows(sa.select(tables.usages), "volume")
        return {row["resource"]: row["used"] for row in found if row["used"] and "_" not in row["resource"]}

"""What is known of guests: read from the database, and remembered for some seconds because guests poll."""

from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.api.metadata.signed import Asker
from micronova.db import instances
from micronova.db.engine import Database
from micronova.db.specs import instance_spec, vifs
from micronova.metadata.facts import Facts, VendorData
from micronova.metadata.vendordata import VendorDataSource
from micronova.network.cache import Remembered
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import NotFound

NOBODY = "There is no such server."
# What is remembered at a time: user data has up to 64 KiB, and what a vendor's service answers up to 1 MiB.
MOST_FACTS = 1024
MOST_VENDOR_DATA = 128


class Guests:
    """Finds guests."""

    def __init__(self, database: Database, vendor_data: VendorDataSource, remember: float) -> None:
        """`remember`: seconds for which what was found stays good; 0: it is read each time."""
        self._database = database
        self._source = vendor_data
        self._facts = Remembered(remember, most=MOST_FACTS)
        self._vendor_data = Remembered(remember, most=MOST_VENDOR_DATA)

    @property
    def static_vendor_data(self) -> bool:
        """Whether there is a document that all guests get."""
        return self._source.static is not None

    async def facts(self, asker: Asker) -> Facts:
        """Return what the guest may know; a server of another project does not exist for it."""
        found = await self._facts.get(asker.instance_id, lambda: self._read(asker.instance_id))
        if asker.host not in (None, found.host):  # it may have been moved since
            found = await self._read(asker.instance_id)
            self._facts.put(asker.instance_id, found)
        # Asked each time: a port may say whose server it belongs to, and only its own project is to be trusted; and
        # a host is to be trusted about its own guests.
        if found.facts.instance.project_id != asker.project_id or asker.host not in (None, found.host):
            raise NotFound(NOBODY)
        return msgspec.structs.replace(found.facts, address=asker.address)

    async def vendor_data(self, facts: Facts) -> VendorData:
        """Return what the operator tells the guest."""
        return await self._vendor_data.get(facts.instance.uuid, lambda: self._source.about(facts.instance))

    async def close(self) -> None:
        """Let go of all connections."""
        await self._source.close()

    async def _read(self, uuid: str) -> "_Guest":
        found = await self._database.read(_load, uuid)
        if found is None:
            raise NotFound(NOBODY)
        return found


class _Guest(NamedTuple):
    facts: Facts
    host: str | None


def _load(conn: sa.Connection, uuid: str) -> _Guest | None:
    row = instances.get(conn, uuid)
    if row is None:
        return None
    devices = instances.devices(conn, [uuid]).get(uuid, ())
    facts = Facts(
        instance=instance_spec(row, row["epoch"]),
        vifs=vifs(row),
        block_devices=tuple(msgspec.convert(device, BlockDevice) for device in devices),
    )
    return _Guest(facts, row["host"])

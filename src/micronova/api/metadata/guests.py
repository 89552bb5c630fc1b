"""The facts about guests: read from the database, and cached for some seconds because guests poll."""

from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.api.metadata.signed import Asker
from micronova.clients.expiring_cache import ExpiringCache
from micronova.db import instances, server_migrations
from micronova.db.engine import Database
from micronova.db.specs import instance_spec, vifs
from micronova.metadata.facts import Facts, VendorData
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.errors import NotFound

NO_SERVER = "There is no such server."
# Most entries in the caches: user data has up to 64 KiB, a vendor data service's answer up to 1 MiB.
MOST_FACTS = 1024
MOST_VENDOR_DATA = 128


class Guests:
    """Reads and caches facts about guests."""

    def __init__(self, database: Database, vendor_data: VendorDataSource, cache_seconds: float) -> None:
        """`cache_seconds` is how long facts and vendor data are cached; 0 reads them each time."""
        self._database = database
        self._source = vendor_data
        self._facts = ExpiringCache[str, _Guest](cache_seconds, max_entries=MOST_FACTS)
        self._vendor_data = ExpiringCache[str, VendorData](cache_seconds, max_entries=MOST_VENDOR_DATA)

    @property
    def static_vendor_data(self) -> bool:
        """Whether there is static vendor data, which all guests get."""
        return self._source.static is not None

    async def facts(self, asker: Asker) -> Facts:
        """Return the facts about the guest that asks; raise NotFound if it is not of the signed project and host."""
        found = await self._facts.get(asker.instance_id, lambda: self._read(asker.instance_id))
        if asker.host is not None and asker.host not in found.hosts:  # it may have been moved since it was cached
            found = await self._read(asker.instance_id)
            self._facts.put(asker.instance_id, found)
        # Checked for each request: users can set a port's device id, so the port's project must be the server's; and a
        # host is trusted only about its own guests.
        foreign = asker.host is not None and asker.host not in found.hosts
        if foreign or found.facts.instance.project_id != asker.project_id:
            raise NotFound(NO_SERVER)
        return msgspec.structs.replace(found.facts, address=asker.address)

    async def vendor_data(self, facts: Facts) -> VendorData:
        """Return the vendor data of a guest."""
        return await self._vendor_data.get(facts.instance.uuid, lambda: self._source.about(facts.instance))

    async def close(self) -> None:
        """Close all connections."""
        await self._source.close()

    async def _read(self, uuid: str) -> "_Guest":
        found = await self._database.read(_load, uuid)
        if found is None:
            raise NotFound(NO_SERVER)
        return found


class _Guest(NamedTuple):
    facts: Facts
    hosts: frozenset[str | None]  # its own, and that which it moves to: the guest asks before its move has ended


def _load(conn: sa.Connection, uuid: str) -> _Guest | None:
    row = instances.get(conn, uuid)
    if row is None:
        return None
    facts = Facts(
        instance=instance_spec(row),
        vifs=vifs(row),
        block_devices=instances.devices_of(conn, uuid),
    )
    migration = server_migrations.open_of(conn, uuid)
    return _Guest(facts, frozenset({row["host"], None if migration is None else migration["dest_compute"]}))

"""Events that other services send about servers, such as that a port was plugged."""

import logging
from typing import Final, get_args

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.db import instances
from micronova.db.engine import Database
from micronova.objects import states
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.external_events import CHANGED, DELETED, PortEvent
from micronova.objects.instance import InstanceRow
from micronova.rpc.errors import BusUnavailable
from micronova.servers.interfaces import Interfaces
from micronova.servers.volumes import ServerVolumes

log = logging.getLogger(__name__)

EXTENDED: Final = "volume-extended"
REIMAGED: Final = "volume-reimaged"
_OF_PORTS = frozenset(get_args(PortEvent))


class ExternalEvents:
    """Applies events and passes them on to the hosts of the servers."""

    def __init__(
        self, *, database: Database, clock: Clock, compute: ComputeAPI, interfaces: Interfaces, volumes: ServerVolumes
    ) -> None:
        self._database = database
        self._clock = clock
        self._compute = compute
        self._interfaces = interfaces
        self._volumes = volumes

    async def handle(self, context: RequestContext, row: InstanceRow, event: InstanceEvent) -> bool:
        """Apply an event and pass it on to the server's host; return False if that is not possible now.

        A server that is being built has ports before it has a host. The build then reads them again before it makes
        the order, so that no event about them is lost: a network service may send an event only once.
        """
        if row["host"] is None and event.name in _OF_PORTS:
            found = await self._database.write(self._note_for_build, row["uuid"])
            if found is None or found["host"] is None:
                return found is not None and _is_being_built(found)
            row = found
        if row["host"] is None:
            return False
        if event.name == EXTENDED:
            return event.tag is not None and await self._volumes.extended(context, row, event.tag)
        if event.name == REIMAGED:
            # The conductor that waits for it asks the volume service itself, so that nothing depends on the event.
            return event.tag is not None and await self._volumes.has(row, event.tag)
        if not await self._apply(context, row, event):
            return False
        try:
            await self._compute.external_instance_event(context.for_bus(), row["host"], event)
        except BusUnavailable as error:
            log.warning("event %s for %s is lost: %s", event.name, event.instance_uuid, error)
            return False
        return True

    async def _apply(self, context: RequestContext, row: InstanceRow, event: InstanceEvent) -> bool:
        """Record what an event says of a server's interfaces; return False if that is not possible now."""
        if event.name == CHANGED:
            return await self._interfaces.refresh(row["uuid"])
        if event.name == DELETED and event.tag:
            return await self._interfaces.port_deleted(context, row, event.tag)
        return True

    def _note_for_build(self, conn: sa.Connection, uuid: str) -> InstanceRow | None:
        """Change `updated_at` of a server that is being built and has no host; return the server."""
        row = instances.lock(conn, uuid)
        if row is not None and row["host"] is None and _is_being_built(row):
            instances.update(conn, uuid, max(micros(self._clock.now()), row["updated_at"] + 1), {})
        return row


def _is_being_built(row: InstanceRow) -> bool:
    return row["vm_state"] == states.BUILDING and row["task_state"] != states.DELETING

"""Shelving servers: their disks become images (`servers/images.py`), they leave their hosts, and they come back."""

import dataclasses

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.db import aggregates, instances
from micronova.objects import states
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import ImagePayload, Payload, PowerPayload, UnshelvePayload
from micronova.servers.action_recorder import ActionRecorder
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.images import ServerImages
from micronova.servers.lookups import check_host, check_zone

UNSHELVE = "unshelve"


class ServerShelving:
    """Accepts requests to shelve servers, to take shelved ones from their hosts, and to unshelve them."""

    def __init__(self, dependencies: RequestDependencies, actions: ServerActions, images: ServerImages) -> None:
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._actions = actions
        self._images = images
        self._conductor = dependencies.conductor
        self._recorder = ActionRecorder(dependencies)
        self._default_zone = dependencies.default_zone

    async def shelve(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept the request to shelve a server: its disk becomes an image, or, if it is a volume, leaves the host."""
        check_lock(context, row)
        if not await self._images.is_volume_backed(row):
            await self._images.of_shelved(context, row)
            return
        # Nothing is copied: whether the driver can do that does not matter.
        action = dataclasses.replace(states.ACTIONS["shelve"], capability=None)
        payload = ImagePayload(without_image=True, answered=True)
        await self._actions.begin(context, row, action.name, action, payload)

    async def offload(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept the request to take a shelved server from its host."""
        action = states.ACTIONS["shelve_offload"]
        await self._actions.begin(context, row, action.name, action, Payload())

    async def unshelve(
        self,
        context: RequestContext,
        row: InstanceRow,
        *,
        zone: str | None | UnsetType = UNSET,
        host: str | None = None,
    ) -> None:
        """Accept the request to unshelve a server.

        A server without a host may be pinned to a zone, or with None to none any more, and sent to a host.
        """
        check_lock(context, row)
        action = states.ACTIONS[UNSHELVE]
        check_state(action, row)
        if row["vm_state"] in states.WITHOUT_HOST:
            operations = await self._database.write(self._record, context, row["uuid"], zone, host)
            await self._conductor.run_operations(context.for_bus(), operations)
            return
        if zone is not UNSET or host is not None:
            raise Conflict(
                f'Specifying an availability zone or a host when unshelving server "{row["uuid"]}" with status '
                f'"{row["vm_state"]}" is not supported. The server status must be SHELVED_OFFLOADED.'
            )
        await self._actions.begin(context, row, UNSHELVE, action, PowerPayload(action=UNSHELVE), _has_host)

    def _record(
        self, conn: sa.Connection, context: RequestContext, id: str, zone: str | None | UnsetType, host: str | None
    ) -> tuple[str, ...]:
        row = instances.lock_existing(conn, id)
        action = states.ACTIONS[UNSHELVE]
        check_state(action, row)
        if row["vm_state"] not in states.WITHOUT_HOST:
            raise Conflict(f"Cannot '{UNSHELVE}' instance {id}: another request has changed it meanwhile.")
        self._check_zone_and_host(
            conn, row["pinned_availability_zone"] if isinstance(zone, UnsetType) else zone, zone, host
        )
        if not isinstance(zone, UnsetType):
            instances.pin_to_zone(conn, id, micros(self._clock.now()), {}, zone=zone)
        changes: InstanceChanges = {"task_state": action.task_state}
        payload = UnshelvePayload(requested_host=host)
        return self._recorder.record(conn, context, row, "unshelve_offloaded", changes, payload, step="schedule")

    def _check_zone_and_host(
        self, conn: sa.Connection, pinned: str | None, asked: str | None | UnsetType, host: str | None
    ) -> None:
        """Raise Invalid for a zone or host that does not exist, Conflict for a host outside of the zone."""
        if isinstance(asked, str):
            check_zone(conn, asked, self._default_zone)
        if host is None:
            return
        check_host(conn, host)
        actual = aggregates.zones(conn, [host]).get(host, self._default_zone)
        if pinned not in (None, actual):
            raise Conflict(f'Host "{host}" is not in the availability zone "{pinned}".')


def _has_host(row: InstanceRow) -> None:
    """Raise Conflict if a server has left its host since the request was checked."""
    if row["vm_state"] in states.WITHOUT_HOST:
        raise Conflict(f"Cannot '{UNSHELVE}' instance {row['uuid']}: another request has changed it meanwhile.")

"""Freezing the file systems of guests while snapshots of their volumes are made.

The API asks the server's host for it, and to thaw the guest when all snapshots are complete. The host thaws a guest by
itself after a while (`compute/quiesced_guests.py`), so that no guest stays frozen if the API dies.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Final

from micronova.clients.volume.client import CREATING, VolumeClient
from micronova.compute.rpcapi import ComputeAPI
from micronova.objects import states
from micronova.objects.clock import Clock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, MicronovaError
from micronova.objects.guest_properties import TRUE_WORDS
from micronova.objects.instance import InstanceRow
from micronova.rpc.errors import RemoteError

log = logging.getLogger(__name__)

FREEZE_TIME: Final = 10.0
"""Seconds that a guest has to write what it holds in memory and to freeze."""
SNAPSHOT_TIME: Final = 15.0
"""Seconds that the snapshots have until all are complete; a guest that writes nothing for longer is disturbed."""
FIRST_POLL: Final = 0.1
LONGEST_POLL: Final = 1.0
"""Seconds between two looks at the snapshots; the pause grows."""


class Quiescing:
    """Lets snapshots of the volumes of a server be those of one moment, at which its file systems are whole."""

    def __init__(self, compute: ComputeAPI, clock: Clock) -> None:
        self._compute = compute
        self._clock = clock

    def check(self, row: InstanceRow) -> None:
        """Raise an error if the server's image requires that its guest is quiesced, and it cannot be."""
        if not _is_set(row, "os_require_quiesce"):
            return
        if not _is_set(row, "hw_qemu_guest_agent"):
            raise Invalid(
                "The image of the server requires that its file systems are quiesced (os_require_quiesce), but does "
                "not say that the guest has an agent (hw_qemu_guest_agent)."
            )
        if row["vm_state"] in (states.PAUSED, states.SUSPENDED):
            raise _required(f"the server is {row['vm_state']}")

    @contextlib.asynccontextmanager
    async def quiesced(self, context: RequestContext, row: InstanceRow) -> AsyncIterator[bool]:
        """Freeze the file systems of a server's guest if it runs and has an agent; yield whether they are frozen.

        Raise Conflict if they cannot be frozen, or are thawed too early, and the server's image requires it.
        """
        host, uuid = row["host"], row["uuid"]
        if host is None or row["vm_state"] != states.ACTIVE or not _is_set(row, "hw_qemu_guest_agent"):
            yield False
            return
        required, held = _is_set(row, "os_require_quiesce"), False
        try:
            yield await self._freeze(context, host, uuid, required=required)
        finally:
            held = await self._thaw(context, host, uuid)
        if required and not held:
            raise _required("they were thawed before the snapshots were complete")

    async def wait_for_snapshots(
        self, row: InstanceRow, client: VolumeClient, snapshots: Iterable[str], token: str
    ) -> None:
        """Wait until all snapshots are complete; raise Conflict if one fails, or is late and the image requires it."""
        until, pause = self._clock.monotonic() + SNAPSHOT_TIME, FIRST_POLL
        for id in snapshots:
            while (snapshot := await client.snapshot(id, token)).status in CREATING:
                if self._clock.monotonic() >= until:
                    reason = f"the snapshots of its volumes were not complete after {SNAPSHOT_TIME:g} s"
                    if _is_set(row, "os_require_quiesce"):
                        raise _required(reason)
                    log.warning("instance %s goes on before its image is complete: %s", row["uuid"], reason)
                    return
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL)
            if snapshot.status == "error":
                raise Conflict(f"The snapshot {id} of volume {snapshot.volume_id} could not be made.")

    async def _freeze(self, context: RequestContext, host: str, uuid: str, *, required: bool) -> bool:
        try:
            await self._compute.quiesce_guest(context.for_bus(), host, uuid, FREEZE_TIME)
        except (MicronovaError, RemoteError) as error:
            if required:
                raise _required(error.message) from error
            log.info("the volumes of instance %s are copied without freezing its file systems: %s", uuid, error)
            return False
        return True

    async def _thaw(self, context: RequestContext, host: str, uuid: str) -> bool:
        """Thaw a guest, which may have been frozen although the host did not answer."""
        try:
            return await self._compute.unquiesce_guest(context.for_bus(), host, uuid)
        except (MicronovaError, RemoteError) as error:
            log.warning("host %s could not be told to thaw instance %s, and does it by itself: %s", host, uuid, error)
            return False


def _required(reason: str) -> Conflict:
    return Conflict(
        "The file systems of the server cannot be frozen while the snapshots of its volumes are made, which its image "
        f"requires (os_require_quiesce): {reason}"
    )


def _is_set(row: InstanceRow, name: str) -> bool:
    properties = {} if row["image"] is None else row["image"]["properties"]
    return str(properties.get(name, "")).strip().lower() in TRUE_WORDS

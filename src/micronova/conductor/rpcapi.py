"""The messages that a conductor takes, and the client ends that send them."""

import msgspec

from micronova.objects.orders import Heartbeat, HeartbeatReply, Report
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context, Interface


class Operations(msgspec.Struct, frozen=True):
    """Operations that were just recorded: a hint to look now instead of at the next sweep."""

    ids: tuple[str, ...]


class ReportReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a host's report counts."""

    accepted: bool
    destroy: bool = False  # the instance left this host: the guest that was just built is to go


class GuestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A guest changed its power state by itself."""

    host: str
    instance_uuid: str
    epoch: int
    power_state: int


TASKS = Interface("conductor", namespace="compute_task", version="1.0")
BUILD_INSTANCES = TASKS.method("build_instances", Operations)
RUN_OPERATIONS = TASKS.method("run_operations", Operations)

HOST = Interface("conductor", namespace="host", version="1.0")
REPORT = HOST.method("report", Report, ReportReply)
HEARTBEAT = HOST.method("heartbeat", Heartbeat, HeartbeatReply)
GUEST_EVENT = HOST.method("guest_event", GuestEvent)


class ConductorAPI:
    """Sends work to the conductors."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def build_instances(self, context: Context, ids: tuple[str, ...]) -> None:
        """Have instances built whose operations are recorded."""
        await self._bus.cast(TASKS.target(), BUILD_INSTANCES, Operations(ids), context=context)

    async def run_operations(self, context: Context, ids: tuple[str, ...]) -> None:
        """Have recorded operations run."""
        await self._bus.cast(TASKS.target(), RUN_OPERATIONS, Operations(ids), context=context)

"""The messages that a compute host accepts, and the client that sends them."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.context import Context
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.host_limits import MOST_DEVICES, MOST_GUESTS, MOST_QUESTIONS, Name
from micronova.objects.image import ImageMeta
from micronova.objects.orders import Guest, WorkOrder
from micronova.objects.volume import VolumeStatistics
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Interface
from micronova.rpc.errors import BusUnavailable, CallTimeout

log = logging.getLogger(__name__)

CALL_TIMEOUT = 30.0
ORDER_LIFETIME = 60.0
"""Seconds that an order waits for its host. An older one may be withdrawn; heartbeats bring those that are not."""
LONGEST_CONSOLE_OUTPUT = 1 << 20  # drivers return a quarter of it


class InstanceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of another service about an instance, such as that a port was plugged."""

    instance_uuid: str
    name: str  # network-vif-plugged, network-changed…
    tag: str | None = None  # of a network event: the port
    status: str = "completed"


class ConsoleOutputRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The instance, and how many of the last lines of its console log; None: all."""

    instance_uuid: str
    length: int | None = None


class DiagnosticsRequest(msgspec.Struct, frozen=True):
    """The instance to measure."""

    instance_uuid: str


class LiveMigrationRequest(msgspec.Struct, frozen=True):
    """The instance whose live migration is meant."""

    instance_uuid: str


class ConsoleOutput(msgspec.Struct, frozen=True):
    """A console log."""

    output: Annotated[str, msgspec.Meta(max_length=LONGEST_CONSOLE_OUTPUT)]


class ConsoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The instance, and which of its consoles."""

    instance_uuid: str
    protocol: ConsoleProtocol


class QuiesceRequest(msgspec.Struct, frozen=True):
    """The instance whose file systems are frozen, or thawed."""

    instance_uuid: str


class UnquiesceReply(msgspec.Struct, frozen=True):
    """Whether the file systems were frozen until now."""

    held: bool


class Nothing(msgspec.Struct, frozen=True):
    """For messages that need no parameters."""


class StopGuestRequest(msgspec.Struct, frozen=True):
    """A guest to switch off, and the newest epoch that it may have."""

    instance_uuid: str
    epoch: int


class GuestList(msgspec.Struct, frozen=True):
    """The guests that a hypervisor has."""

    guests: Annotated[tuple[Guest, ...], msgspec.Meta(max_length=MOST_GUESTS)]


class HostUptimeText(msgspec.Struct, frozen=True):
    """The uptime of a host, in the form of uptime(1)."""

    uptime: Name


class FaultRules(msgspec.Struct, frozen=True):
    """Fault rules of a simulated host, as plain data; None in a request changes nothing."""

    rules: list[dict[str, Any]] | None = None


CacheStatus = Literal["cached", "existing", "caching", "unsupported", "skipped", "error"]
"""What became of an image on a host: it was fetched, was there already, or is being fetched. The last three are the
conductor's words: the host cannot, is down, or has failed."""


class CacheImageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An image, and where it can be downloaded for a short time."""

    image: ImageMeta
    url: str | None = None


class CacheImageReply(msgspec.Struct, frozen=True):
    """What became of the image."""

    status: CacheStatus


class VolumeStatisticsRequest(msgspec.Struct, frozen=True):
    """The instances whose use of volumes is measured."""

    instance_uuids: tuple[str, ...]


class VolumeStatisticsReply(msgspec.Struct, frozen=True):
    """What the guests have read and written of their volumes; those that cannot be measured are left out."""

    guests: Annotated[
        dict[Name, Annotated[tuple[VolumeStatistics, ...], msgspec.Meta(max_length=MOST_DEVICES)]],
        msgspec.Meta(max_length=MOST_QUESTIONS),
    ]


COMPUTE_INTERFACE = Interface("compute", version="2.5")

EXECUTE_ORDER = COMPUTE_INTERFACE.method("execute_order", WorkOrder, since="2.0", expires=ORDER_LIFETIME)
EXTERNAL_INSTANCE_EVENT = COMPUTE_INTERFACE.method("external_instance_event", InstanceEvent, since="2.0")
GET_CONSOLE_OUTPUT = COMPUTE_INTERFACE.method("get_console_output", ConsoleOutputRequest, ConsoleOutput, since="2.0")
GET_CONSOLE = COMPUTE_INTERFACE.method("get_console", ConsoleRequest, ConsoleEndpoint, since="2.0")
GET_DIAGNOSTICS = COMPUTE_INTERFACE.method("get_diagnostics", DiagnosticsRequest, GuestDiagnostics, since="2.0")
LIST_GUESTS = COMPUTE_INTERFACE.method("list_guests", Nothing, GuestList, since="2.0")
GET_HOST_UPTIME = COMPUTE_INTERFACE.method("get_host_uptime", Nothing, HostUptimeText, since="2.0")
FORCE_COMPLETE_LIVE_MIGRATION = COMPUTE_INTERFACE.method(
    "force_complete_live_migration", LiveMigrationRequest, Nothing, since="2.1"
)
CACHE_IMAGE = COMPUTE_INTERFACE.method("cache_image", CacheImageRequest, CacheImageReply, since="2.2")
STOP_GUEST = COMPUTE_INTERFACE.method("stop_guest", StopGuestRequest, Nothing, since="2.3")
GET_VOLUME_STATISTICS = COMPUTE_INTERFACE.method(
    "get_volume_statistics", VolumeStatisticsRequest, VolumeStatisticsReply, since="2.4"
)
QUIESCE_GUEST = COMPUTE_INTERFACE.method("quiesce_guest", QuiesceRequest, Nothing, since="2.5")
UNQUIESCE_GUEST = COMPUTE_INTERFACE.method("unquiesce_guest", QuiesceRequest, UnquiesceReply, since="2.5")
FAULT_RULES = COMPUTE_INTERFACE.method("fault_rules", FaultRules, FaultRules, since="2.0")


class ComputeAPI:
    """Sends messages to compute hosts."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def send_order(self, context: Context, order: WorkOrder) -> None:
        """Cast an order to its host; its kind says what the host does (`compute/handlers/table.py`)."""
        await self._bus.cast(COMPUTE_INTERFACE.target(order.host), EXECUTE_ORDER, order, context=context)

    async def delete_queue(self, host: str) -> None:
        """Delete the queue of a host that is gone, with the orders in it."""
        await self._bus.delete_queue(COMPUTE_INTERFACE, host)

    async def external_instance_event(self, context: Context, host: str, event: InstanceEvent) -> None:
        """Pass on an event of another service."""
        await self._bus.cast(COMPUTE_INTERFACE.target(host), EXTERNAL_INSTANCE_EVENT, event, context=context)

    async def get_console_output(self, context: Context, host: str, uuid: str, length: int | None = None) -> str:
        """Return the end of a guest's console log."""
        request = ConsoleOutputRequest(instance_uuid=uuid, length=length)
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), GET_CONSOLE_OUTPUT, request, context=context, timeout=CALL_TIMEOUT
        )
        return answer.output

    async def get_console(self, context: Context, host: str, uuid: str, protocol: ConsoleProtocol) -> ConsoleEndpoint:
        """Return the address of a guest's console."""
        request = ConsoleRequest(instance_uuid=uuid, protocol=protocol)
        return await self._bus.call(
            COMPUTE_INTERFACE.target(host), GET_CONSOLE, request, context=context, timeout=CALL_TIMEOUT
        )

    async def get_diagnostics(self, context: Context, host: str, uuid: str) -> GuestDiagnostics:
        """Return the diagnostics of a guest."""
        request = DiagnosticsRequest(uuid)
        return await self._bus.call(
            COMPUTE_INTERFACE.target(host), GET_DIAGNOSTICS, request, context=context, timeout=CALL_TIMEOUT
        )

    async def force_complete_live_migration(self, context: Context, host: str, uuid: str) -> None:
        """Let the live migration of a guest from this host end soon."""
        await self._bus.call(
            COMPUTE_INTERFACE.target(host),
            FORCE_COMPLETE_LIVE_MIGRATION,
            LiveMigrationRequest(uuid),
            context=context,
            timeout=CALL_TIMEOUT,
        )

    async def list_guests(self, context: Context, host: str) -> tuple[Guest, ...]:
        """List the guests of the host's hypervisor."""
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), LIST_GUESTS, Nothing(), context=context, timeout=CALL_TIMEOUT
        )
        return answer.guests

    async def stop_guest(self, context: Context, host: str, uuid: str, epoch: int) -> None:
        """Let a host switch off the guest of a server that is deleted, unless the guest is newer than this epoch."""
        request = StopGuestRequest(uuid, epoch)
        await self._bus.call(COMPUTE_INTERFACE.target(host), STOP_GUEST, request, context=context, timeout=CALL_TIMEOUT)

    async def quiesce_guest(self, context: Context, host: str, uuid: str, timeout: float) -> None:
        """Let a host freeze the file systems of a guest for a short time."""
        request = QuiesceRequest(uuid)
        await self._bus.call(COMPUTE_INTERFACE.target(host), QUIESCE_GUEST, request, context=context, timeout=timeout)

    async def unquiesce_guest(self, context: Context, host: str, uuid: str) -> bool:
        """Let a host thaw the file systems of a guest; return whether they were frozen until now."""
        request = QuiesceRequest(uuid)
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), UNQUIESCE_GUEST, request, context=context, timeout=CALL_TIMEOUT
        )
        return answer.held

    async def get_volume_statistics(
        self, context: Context, host: str, uuids: Sequence[str]
    ) -> dict[str, tuple[VolumeStatistics, ...]]:
        """Return what guests, at most MOST_QUESTIONS, have read and written of their volumes."""
        request = VolumeStatisticsRequest(tuple(uuids))
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), GET_VOLUME_STATISTICS, request, context=context, timeout=CALL_TIMEOUT
        )
        return answer.guests

    async def get_host_uptime(self, context: Context, host: str, timeout: float = CALL_TIMEOUT) -> str:
        """Return the uptime of a host."""
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), GET_HOST_UPTIME, Nothing(), context=context, timeout=timeout
        )
        return answer.uptime

    async def answers(self, host: str, timeout: float) -> bool:
        """Return whether a host answers now, whatever it says."""
        try:
            await self.get_host_uptime(Context(), host, timeout)
        except (BusUnavailable, CallTimeout) as error:
            log.info("host %s did not answer: %s", host, error)
            return False
        except Exception as error:
            log.info("host %s answered with an error: %s", host, error)
        return True

    async def cache_image(self, context: Context, host: str, image: ImageMeta, url: str | None) -> CacheStatus:
        """Let a host fetch an image to its cache; while it does, the answer is "caching"."""
        request = CacheImageRequest(image=image, url=url)
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), CACHE_IMAGE, request, context=context, timeout=CALL_TIMEOUT
        )
        return answer.status

    async def fault_rules(
        self, context: Context, host: str, rules: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Replace the fault rules of a simulated host's process, if given, and list those in force."""
        answer = await self._bus.call(
            COMPUTE_INTERFACE.target(host), FAULT_RULES, FaultRules(rules), context=context, timeout=CALL_TIMEOUT
        )
        return answer.rules or []

"""The messages to conductors, and the classes that send them."""

import logging
from random import Random
from typing import Annotated, TypeVar

import msgspec

from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleGrant
from micronova.objects.context import Context
from micronova.objects.host_keys import HostKeys
from micronova.objects.host_limits import MOST_QUESTIONS, Name
from micronova.objects.image import ImageMeta
from micronova.objects.orders import (
    GuestAtEpoch,
    GuestsOff,
    GuestsToStart,
    Heartbeat,
    HeartbeatReply,
    Progress,
    ProgressReply,
    Report,
    ReportReply,
)
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Interface, Method
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

M = TypeVar("M", Report, Progress)
R = TypeVar("R")


class RunOperations(msgspec.Struct, frozen=True):
    """Operations that were just recorded; a conductor runs them now instead of at its next sweep."""

    ids: tuple[str, ...]


class CacheImages(msgspec.Struct, frozen=True, kw_only=True):
    """Images that the hosts of an aggregate are to fetch."""

    aggregate: int  # its number
    images: tuple[ImageMeta, ...]


class Ping(msgspec.Struct, frozen=True):
    """A message that proves that the bus delivers messages to conductors."""


class Pong(msgspec.Struct, frozen=True):
    """The answer to a ping."""

    undisturbed: float = 0.0  # seconds for which the conductor has worked without an outage


class ConsoleAuthRequest(msgspec.Struct, frozen=True):
    """The digest of a console token whose console is wanted."""

    token_digest: str


class ConsoleCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A server whose console is open, and its host."""

    instance_uuid: str
    host: str


class ConsoleCheckReply(msgspec.Struct, frozen=True):
    """Whether the server is still on that host."""

    is_there: bool


class HostKeysRequest(msgspec.Struct, frozen=True):
    """The host that asks for its keys."""

    host: Name


class PluggedPortsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of an instance whose status the host of the instance wants to know."""

    host: Name
    instance_uuid: Name
    ports: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_QUESTIONS)]


class PluggedPorts(msgspec.Struct, frozen=True):
    """The ports that are plugged."""

    ports: tuple[str, ...]


TASKS = Interface("conductor", namespace="compute_task", version="1.1")
RUN_OPERATIONS = TASKS.method("run_operations", RunOperations)
CACHE_IMAGES = TASKS.method("cache_images", CacheImages, since="1.1")

HOSTS = Interface("conductor", namespace="host", version="2.2", from_hosts=True)
REPORT = HOSTS.method("report", Report, ReportReply, since="2.0")
HEARTBEAT = HOSTS.method("heartbeat", Heartbeat, HeartbeatReply, since="2.0")
PING = HOSTS.method("ping", Ping, Pong, since="2.0")
PLUGGED_PORTS = HOSTS.method("plugged_ports", PluggedPortsRequest, PluggedPorts, since="2.1")
START_GUESTS_AFTER_HOST_BOOT = HOSTS.method("start_guests_after_host_boot", GuestsOff, GuestsToStart, since="2.1")
PROGRESS = HOSTS.method("progress", Progress, ProgressReply, since="2.2")

CONSOLE = Interface("conductor", namespace="console", version="1.0")
AUTHORIZE_CONSOLE = CONSOLE.method("authorize_console", ConsoleAuthRequest, ConsoleGrant)
CHECK_CONSOLE = CONSOLE.method("check_console", ConsoleCheck, ConsoleCheckReply)

KEYS = Interface("conductor", namespace="keys", version="1.0", from_hosts=True)
HOST_KEYS = KEYS.method("host_keys", HostKeysRequest, HostKeys)

KEYS_TIMEOUT = 10.0
HOST_TIMEOUT = 10.0
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
LONGEST_WAIT_TO_ASK = 4.0  # seconds until a host asks again whether it may do what cannot be undone
CONSOLE_TIMEOUT = 35.0  # the conductor asks a host meanwhile


class ConsoleAuthAPI:
    """Sends the messages of console proxies to conductors."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def authorize(self, token_digest: str) -> ConsoleGrant:
        """Return the console that a token gives access to; raise NotFound if the token is not valid."""
        request = ConsoleAuthRequest(token_digest)
        return await self._bus.call(
            CONSOLE.target(), AUTHORIZE_CONSOLE, request, context=Context(), timeout=CONSOLE_TIMEOUT
        )

    async def is_there(self, instance_uuid: str, host: str) -> bool:
        """Ask whether a server is still on a host."""
        check = ConsoleCheck(instance_uuid=instance_uuid, host=host)
        answer = await self._bus.call(
            CONSOLE.target(), CHECK_CONSOLE, check, context=Context(), timeout=CONSOLE_TIMEOUT
        )
        return answer.is_there


class HostKeysAPI:
    """Gets the keys of a host from conductors."""

    def __init__(self, bus: Bus, host: str) -> None:
        self._bus = bus
        self._host = host

    async def fetch(self) -> HostKeys:
        """Return the host's keys; raise Forbidden if the broker does not know the sender as that host."""
        request = HostKeysRequest(self._host)
        return await self._bus.call(KEYS.target(), HOST_KEYS, request, context=Context(), timeout=KEYS_TIMEOUT)


class ConductorAPI:
    """Sends the API's messages to conductors."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def run_operations(self, context: Context, ids: tuple[str, ...]) -> None:
        """Start operations that are recorded; if the bus does not take the message, a sweep starts them."""
        try:
            await self._bus.cast(TASKS.target(), RUN_OPERATIONS, RunOperations(ids), context=context)
        except BusUnavailable as error:
            log.warning(
                "request %s: the bus did not take the message for operations %s, which a sweep starts: %s",
                context.request_id,
                ", ".join(ids),
                error,
            )

    async def cache_images(self, context: Context, aggregate: int, images: tuple[ImageMeta, ...]) -> None:
        """Let the hosts of an aggregate fetch images; raise BusUnavailable if the bus does not take the message."""
        await self._bus.cast(
            TASKS.target(), CACHE_IMAGES, CacheImages(aggregate=aggregate, images=images), context=context
        )


class ProbeAPI:
    """Sends pings through the queue of the heartbeats: an answer proves that heartbeats arrive."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ping(self, timeout: float) -> Pong:
        """Return the answer when the bus has delivered it; raise BusUnavailable or CallTimeout."""
        return await self._bus.call(HOSTS.target(), PING, Ping(), context=Context(), timeout=timeout)


class HostConductorAPI:
    """Sends the messages of the compute agents of a process to conductors."""

    def __init__(self, bus: Bus, clock: Clock, random: Random) -> None:
        self._bus = bus
        self._clock = clock
        self._random = random

    async def report(self, report: Report, context: Context) -> ReportReply:
        """Send the result of an order until a conductor has answered."""
        return await self._until_answered(REPORT, report, context)

    async def progress(self, progress: Progress, context: Context) -> ProgressReply:
        """Send the progress of an order until a conductor has answered; ask again if the answer is not known yet."""
        asked, pause = self._clock.monotonic(), FIRST_PAUSE
        while True:
            if progress.destroys:
                progress = msgspec.structs.replace(progress, waited=self._clock.monotonic() - asked)
            reply = await self._until_answered(PROGRESS, progress, context)
            if not reply.ask_again:
                return reply
            await self._clock.sleep(pause)
            pause = min(LONGEST_WAIT_TO_ASK, pause * 2)

    async def _until_answered(self, method: Method[M, R], message: M, context: Context) -> R:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._bus.call(HOSTS.target(), method, message, context=context, timeout=HOST_TIMEOUT)
            except Exception as error:  # it must not be lost, whatever the error
                log.warning(
                    "host %s: no conductor answered the %s on instance %s, which is repeated: %s",
                    message.host,
                    method.name,
                    message.instance_uuid,
                    error,
                )
            # Jitter, so that not all hosts report at once when the conductor is back.
            await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(LONGEST_PAUSE, pause * 2)

    async def plugged_ports(self, host: str, instance_uuid: str, ports: tuple[str, ...]) -> frozenset[str]:
        """Return those of an instance's ports that the network service has plugged on this host."""
        request = PluggedPortsRequest(host=host, instance_uuid=instance_uuid, ports=ports)
        answer = await self._bus.call(HOSTS.target(), PLUGGED_PORTS, request, context=Context(), timeout=HOST_TIMEOUT)
        return frozenset(answer.ports)

    async def start_guests_after_host_boot(self, host: str, guests: tuple[GuestAtEpoch, ...]) -> tuple[str, ...]:
        """Ask that guests which are off and should run are started; return their instances."""
        found = GuestsOff(host=host, guests=guests)
        answer = await self._bus.call(
            HOSTS.target(),
            START_GUESTS_AFTER_HOST_BOOT,
            found,
            context=Context(),
            timeout=HOST_TIMEOUT,
        )
        return answer.instance_uuids

    async def heartbeat(self, beat: Heartbeat, timeout: float = HOST_TIMEOUT) -> HeartbeatReply:
        """Send a heartbeat and return the reply."""
        return await self._bus.call(HOSTS.target(), HEARTBEAT, beat, context=Context(), timeout=timeout)

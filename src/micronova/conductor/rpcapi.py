"""The messages that a conductor takes, and the client ends that send them."""

import msgspec

from micronova.objects.console import ConsoleGrant
from micronova.objects.host_keys import HostKeys
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


class ConsoleQuestion(msgspec.Struct, frozen=True):
    """Somebody has a token with this digest: what may they see?"""

    token_digest: str


class ConsoleCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody looks at this server on this host."""

    instance_uuid: str
    host: str


class ConsoleStanding(msgspec.Struct, frozen=True):
    """Whether they may go on."""

    is_there: bool


class HostQuestion(msgspec.Struct, frozen=True):
    """A host asks for what it proves itself with to other services."""

    host: str


TASKS = Interface("conductor", namespace="compute_task", version="1.0")
BUILD_INSTANCES = TASKS.method("build_instances", Operations)
RUN_OPERATIONS = TASKS.method("run_operations", Operations)

HOST = Interface("conductor", namespace="host", version="1.0", from_hosts=True)
REPORT = HOST.method("report", Report, ReportReply)
HEARTBEAT = HOST.method("heartbeat", Heartbeat, HeartbeatReply)
GUEST_EVENT = HOST.method("guest_event", GuestEvent)

CONSOLE = Interface("conductor", namespace="console", version="1.0")
AUTHORIZE_CONSOLE = CONSOLE.method("authorize_console", ConsoleQuestion, ConsoleGrant)
CHECK_CONSOLE = CONSOLE.method("check_console", ConsoleCheck, ConsoleStanding)

KEYS = Interface("conductor", namespace="keys", version="1.0", from_hosts=True)
HOST_KEYS = KEYS.method("host_keys", HostQuestion, HostKeys)

KEYS_TIMEOUT = 10.0
CONSOLE_TIMEOUT = 35.0  # the conductor asks a host meanwhile


class ConsoleAuthAPI:
    """Asks a conductor on behalf of a console proxy."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def authorize(self, token_digest: str) -> ConsoleGrant:
        """Ask what a token stands for; NotFound if for nothing."""
        question = ConsoleQuestion(token_digest)
        return await self._bus.call(
            CONSOLE.target(), AUTHORIZE_CONSOLE, question, context=Context(), timeout=CONSOLE_TIMEOUT
        )

    async def is_there(self, instance_uuid: str, host: str) -> bool:
        """Ask whether a server is still on a host."""
        check = ConsoleCheck(instance_uuid=instance_uuid, host=host)
        answer = await self._bus.call(
            CONSOLE.target(), CHECK_CONSOLE, check, context=Context(), timeout=CONSOLE_TIMEOUT
        )
        return answer.is_there


class HostKeysAPI:
    """Asks a conductor on behalf of a compute host."""

    def __init__(self, bus: Bus, host: str) -> None:
        self._bus = bus
        self._host = host

    async def fetch(self) -> HostKeys:
        """Ask for the host's keys; Forbidden if the broker does not know us as that host."""
        question = HostQuestion(self._host)
        return await self._bus.call(KEYS.target(), HOST_KEYS, question, context=Context(), timeout=KEYS_TIMEOUT)


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

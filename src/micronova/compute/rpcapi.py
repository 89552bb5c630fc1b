"""The messages that a compute host takes, and the client end that sends them."""

from typing import Any

import msgspec

from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import MicronovaError
from micronova.objects.orders import Guest, WorkOrder
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context, Interface, Method
from micronova.rpc.errors import register

register(MicronovaError)  # what a host refuses arrives at the caller as the same error

CALL_TIMEOUT = 30.0


class InstanceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a neighbour tells of an instance, such as that a port was plugged."""

    instance_uuid: str
    name: str  # network-vif-plugged, network-changed…
    tag: str | None = None  # which port, of a network event
    status: str = "completed"


class ConsoleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Whose console log, and how many of its last lines."""

    instance_uuid: str
    length: int | None = None


class DiagnosticsRequest(msgspec.Struct, frozen=True):
    """Whose figures."""

    instance_uuid: str


class ConsoleOutput(msgspec.Struct, frozen=True):
    """A console log."""

    output: str


class ConsoleWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Whose console, and which."""

    instance_uuid: str
    protocol: ConsoleProtocol


class Nothing(msgspec.Struct, frozen=True):
    """For messages that need no parameters."""


class GuestList(msgspec.Struct, frozen=True):
    """Guests that a hypervisor really holds."""

    guests: tuple[Guest, ...]


class HostUptimeText(msgspec.Struct, frozen=True):
    """How long a host is up, in the form of uptime(1)."""

    uptime: str


class FaultRules(msgspec.Struct, frozen=True):
    """Fault rules of a simulated host, as plain data; as a request, None asks for those in force."""

    rules: list[dict[str, Any]] | None = None


COMPUTE = Interface("compute", version="1.0")

BUILD_AND_RUN_INSTANCE = COMPUTE.method("build_and_run_instance", WorkOrder)
TERMINATE_INSTANCE = COMPUTE.method("terminate_instance", WorkOrder)
STOP_INSTANCE = COMPUTE.method("stop_instance", WorkOrder)
START_INSTANCE = COMPUTE.method("start_instance", WorkOrder)
REBOOT_INSTANCE = COMPUTE.method("reboot_instance", WorkOrder)
PAUSE_INSTANCE = COMPUTE.method("pause_instance", WorkOrder)
UNPAUSE_INSTANCE = COMPUTE.method("unpause_instance", WorkOrder)
SUSPEND_INSTANCE = COMPUTE.method("suspend_instance", WorkOrder)
RESUME_INSTANCE = COMPUTE.method("resume_instance", WorkOrder)
ATTACH_INTERFACE = COMPUTE.method("attach_interface", WorkOrder)
DETACH_INTERFACE = COMPUTE.method("detach_interface", WorkOrder)
EXTERNAL_INSTANCE_EVENT = COMPUTE.method("external_instance_event", InstanceEvent)
GET_CONSOLE_OUTPUT = COMPUTE.method("get_console_output", ConsoleRequest, ConsoleOutput)
GET_CONSOLE = COMPUTE.method("get_console", ConsoleWanted, ConsoleEndpoint)
GET_DIAGNOSTICS = COMPUTE.method("get_diagnostics", DiagnosticsRequest, GuestDiagnostics)
LIST_GUESTS = COMPUTE.method("list_guests", Nothing, GuestList)
GET_HOST_UPTIME = COMPUTE.method("get_host_uptime", Nothing, HostUptimeText)
FAULT_RULES = COMPUTE.method("fault_rules", FaultRules, FaultRules)

ORDERS: dict[str, Method[WorkOrder, None]] = {
    "build": BUILD_AND_RUN_INSTANCE,
    "delete": TERMINATE_INSTANCE,
    "stop": STOP_INSTANCE,
    "start": START_INSTANCE,
    "reboot": REBOOT_INSTANCE,
    "pause": PAUSE_INSTANCE,
    "unpause": UNPAUSE_INSTANCE,
    "suspend": SUSPEND_INSTANCE,
    "resume": RESUME_INSTANCE,
    "attach_interface": ATTACH_INTERFACE,
    "detach_interface": DETACH_INTERFACE,
}
"""By the order's kind: which message carries it."""


class ComputeAPI:
    """Sends messages to compute hosts."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def send_order(self, context: Context, order: WorkOrder) -> None:
        """Cast an order to its host, as the message of its kind."""
        await self._bus.cast(COMPUTE.target(order.host), ORDERS[order.kind], order, context=context)

    async def external_instance_event(self, context: Context, host: str, event: InstanceEvent) -> None:
        """Pass on what a neighbour tells of an instance."""
        await self._bus.cast(COMPUTE.target(host), EXTERNAL_INSTANCE_EVENT, event, context=context)

    async def get_console_output(self, context: Context, host: str, uuid: str, length: int | None = None) -> str:
        """Read the end of a guest's console log."""
        request = ConsoleRequest(instance_uuid=uuid, length=length)
        answer = await self._bus.call(
            COMPUTE.target(host), GET_CONSOLE_OUTPUT, request, context=context, timeout=CALL_TIMEOUT
        )
        return answer.output

    async def get_console(self, context: Context, host: str, uuid: str, protocol: ConsoleProtocol) -> ConsoleEndpoint:
        """Ask where a guest's console is."""
        wanted = ConsoleWanted(instance_uuid=uuid, protocol=protocol)
        return await self._bus.call(
            COMPUTE.target(host), GET_CONSOLE, wanted, context=context, timeout=CALL_TIMEOUT
        )

    async def get_diagnostics(self, context: Context, host: str, uuid: str) -> GuestDiagnostics:
        """Measure a guest."""
        request = DiagnosticsRequest(uuid)
        return await self._bus.call(
            COMPUTE.target(host), GET_DIAGNOSTICS, request, context=context, timeout=CALL_TIMEOUT
        )

    async def list_guests(self, context: Context, host: str) -> tuple[Guest, ...]:
        """List what the host's hypervisor really holds."""
        answer = await self._bus.call(
            COMPUTE.target(host), LIST_GUESTS, Nothing(), context=context, timeout=CALL_TIMEOUT
        )
        return answer.guests

    async def get_host_uptime(self, context: Context, host: str) -> str:
        """Ask how long the host is up."""
        answer = await self._bus.call(
            COMPUTE.target(host), GET_HOST_UPTIME, Nothing(), context=context, timeout=CALL_TIMEOUT
        )
        return answer.uptime

    async def fault_rules(
        self, context: Context, host: str, rules: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Replace the fault rules of a simulated host's process, if given, and list those in force."""
        answer = await self._bus.call(
            COMPUTE.target(host), FAULT_RULES, FaultRules(rules), context=context, timeout=CALL_TIMEOUT
        )
        return answer.rules or []

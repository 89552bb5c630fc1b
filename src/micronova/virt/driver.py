"""The contract between a compute agent and a hypervisor.

A driver implements `Driver`, the core without which there is no cloud. What only some hypervisors can do is
a separate small protocol, named for the ability (`ConsoleLog`, `Pause`, `HotPlug`…)
and listed in `CAPABILITIES`; the agent asks `isinstance(driver, ConsoleLog)` and answers NotSupported
otherwise. A method that the class has, but that this host cannot carry out, raises NotSupported with the reason.

What every driver promises:
- Methods are coroutines and do not block the event loop; blocking calls run in a bounded pool of threads.
- A guest is found by the instance's uuid alone, carries the epoch it was built at and this cloud's id, and
  survives the agent. Guests without this cloud's id are neither listed nor touched.
- `destroy` and the power methods may be repeated: a guest that is already in the wanted state is not an error.
- `spawn` leaves clean-up to the agent, which calls `destroy` after any failure; `destroy` therefore also
  removes guests that were only partly made.
- The agent never runs two methods on the same guest at once, except `info`, `boot_signs` and the console.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from micronova.objects import power_state
from micronova.objects.block_device import BlockDevice
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import MicronovaError
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, InjectedFile, InstanceSpec, NodeResources

RebootType = Literal["SOFT", "HARD"]
Lifecycle = Literal["started", "stopped", "paused", "resumed", "suspended", "crashed"]

POWER_AFTER: Final[Mapping[Lifecycle, int]] = {
    "started": power_state.RUNNING,
    "resumed": power_state.RUNNING,
    "paused": power_state.PAUSED,
    "stopped": power_state.SHUTDOWN,
    "crashed": power_state.CRASHED,
    "suspended": power_state.SUSPENDED,
}
"""The power state of a guest after each event."""


class DriverFailed(MicronovaError):
    """The hypervisor failed. Another host may succeed."""

    code = "driver_failed"


@dataclass(slots=True, kw_only=True)
class GuestPlan:
    """Everything that a guest needs in order to run."""

    instance: InstanceSpec
    epoch: int  # stored with the guest
    plugged: Callable[[], Awaitable[None]]
    """Awaited between plugging the interfaces and running the guest; returns when the network has confirmed them."""
    network_info: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    image_ticket: str | None = None
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()


class DriverEvents(Protocol):
    """The callbacks of the agent, called in the event loop's thread.

    What a method causes is reported before it returns. The agent counts an event that comes later as a power change
    that no order caused.
    """

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        """Report that a guest changed its power state, whatever the cause."""


@runtime_checkable
class Driver(Protocol):
    """What every hypervisor driver does."""

    async def init_host(self, events: DriverEvents) -> None:
        """Get ready; raise a MicronovaError with one clear line if this host cannot work."""

    async def close(self) -> None:
        """Disconnect from the hypervisor; guests continue to run."""

    def capabilities(self) -> frozenset[str]:
        """Return the names, out of `CAPABILITIES`, of what this host can do."""

    async def get_available_resources(self) -> list[NodeResources]:
        """Return each node's resources and what guests of any cloud use of them. The first node is the default."""

    async def list_guests(self) -> list[Guest]:
        """Return every guest of this cloud, also those that were only partly made."""

    async def info(self, uuid: str) -> Guest | None:
        """Return one guest, or None."""

    async def spawn(self, plan: GuestPlan) -> None:
        """Make the guest and start it.

        Raise BuildAborted if no host can build it; InsufficientResources, or any other error, if another host may.
        """

    async def destroy(self, uuid: str) -> None:
        """Remove the guest and everything that was made for it on this host, but not shared disks."""

    async def power_on(self, plan: GuestPlan) -> None:
        """Start the guest."""

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Ask the guest to shut down, and stop it after the timeout; with timeout 0 stop it at once."""

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart the guest: by asking it (SOFT), or by stopping and starting it (HARD)."""


@runtime_checkable
class ConsoleLog(Protocol):
    """Keeps console logs."""

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Return the last lines of a guest's console log, or all of it."""


def last_lines(text: str, count: int | None) -> str:
    """Return the last lines of a console log, without the line end that would count as one more line."""
    if count is None or count < 0:
        return text
    return "\n".join(text.removesuffix("\n").split("\n")[-count:]) if count else ""


@runtime_checkable
class HostUptime(Protocol):
    """Knows the host's uptime."""

    async def get_host_uptime(self) -> str:
        """Return the uptime in the form of uptime(1)."""


@runtime_checkable
class Pause(Protocol):
    """Pauses guests; their memory stays in RAM."""

    async def pause(self, uuid: str) -> None:
        """Stop the guest's CPUs."""

    async def unpause(self, uuid: str) -> None:
        """Let the guest's CPUs run again."""


@runtime_checkable
class Suspend(Protocol):
    """Suspends guests to disk."""

    async def suspend(self, uuid: str) -> None:
        """Save the guest's memory to disk and stop it."""

    async def resume(self, plan: GuestPlan) -> None:
        """Restore the guest's memory and let it run."""


@runtime_checkable
class HotPlug(Protocol):
    """Plugs and unplugs interfaces of guests, running or not."""

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; it carries no traffic before the plan's `plugged` has returned."""

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface; a missing one is not an error."""


@runtime_checkable
class Diagnostics(Protocol):
    """Measures guests."""

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Return the statistics of one guest."""


class BootSign(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest has done since it was started."""

    booted: bool  # it did more than firmware does that finds nothing to boot
    seen: str  # what it did, as the rest of a sentence after "it": "read 512 bytes of its disks…"


@runtime_checkable
class BootSigns(Protocol):
    """Detects whether guests that were started have begun to boot."""

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Return the signs of many guests; those that do not run, or cannot be measured, are left out."""


@runtime_checkable
class VncConsole(Protocol):
    """Has VNC consoles."""

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where a guest's console is."""


@runtime_checkable
class SpiceConsole(Protocol):
    """Has SPICE consoles."""

    async def get_spice_console(self, uuid: str) -> ConsoleEndpoint:
        """Return where a guest's console is."""


@runtime_checkable
class SerialConsole(Protocol):
    """Has serial consoles."""

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Return where the console of a serial port is."""


@runtime_checkable
class FaultInjection(Protocol):
    """Simulates faults by rules; for simulators only."""

    def fault_rules(self) -> list[dict[str, Any]]:
        """Return the rules in force, each with the number of times that it applied."""

    def set_fault_rules(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules; raise Invalid, and change nothing, if one of them is wrong."""


CAPABILITIES: Final[dict[str, type]] = {
    "console_log": ConsoleLog,
    "host_uptime": HostUptime,
    "pause": Pause,
    "suspend": Suspend,
    "hot_plug": HotPlug,
    "diagnostics": Diagnostics,
    "boot_signs": BootSigns,
    "vnc_console": VncConsole,
    "spice_console": SpiceConsole,
    "serial_console": SerialConsole,
    "fault_injection": FaultInjection,
}


def implemented(driver: Driver) -> frozenset[str]:
    """Return the names of the capabilities that a driver's class has methods for."""
    return frozenset(name for name, protocol in CAPABILITIES.items() if isinstance(driver, protocol))

"""The contract between the compute manager and a hypervisor.

A driver implements `Driver`, the core without which there is no cloud. What only some hypervisors can do is
a small protocol of its own, named for the ability (`ConsoleLog`, later `Pause`, `Snapshot`, `LiveMigrate`…)
and listed in `CAPABILITIES`; the manager asks `isinstance(driver, ConsoleLog)` and answers NotSupported
otherwise. A method whose class can do it while this very host cannot raises NotSupported with the reason.

What every driver promises:
- Methods are coroutines and do not block the loop; what blocks runs in a bounded pool of the driver's own.
- A guest is found by the instance's uuid alone, carries the epoch it was built at and this cloud's id, and
  survives the agent. Guests without this cloud's id are neither listed nor touched.
- `destroy` and the power methods may be repeated: what is so already is not an error.
- `spawn` leaves clean-up to the manager, which calls `destroy` after any failure; `destroy` therefore also
  removes the half-made.
- The manager never runs two methods on the same guest at once, except `info`, `boot_signs` and the console.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from micronova.objects.block_device import BlockDevice
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import MicronovaError
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, InjectedFile, InstanceSpec, NodeResources

RebootType = Literal["SOFT", "HARD"]
Lifecycle = Literal["started", "stopped", "paused", "resumed", "suspended", "crashed"]


class DriverFailed(MicronovaError):
    """The hypervisor could not do what was asked, for a reason of its own."""

    code = "driver_failed"


@dataclass(slots=True, kw_only=True)
class GuestPlan:
    """Everything that a guest needs in order to run."""

    instance: InstanceSpec
    epoch: int  # to be kept with the guest
    plugged: Callable[[], Awaitable[None]]
    """To be awaited once the interfaces are plugged and before the guest runs: the network confirms them."""
    network_info: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    image_ticket: str | None = None
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()


class DriverEvents(Protocol):
    """What a driver may tell its manager, always from the event loop's thread.

    What an order causes is told before its method returns: later it would pass for the guest's own doing.
    """

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        """A guest changed its power state, whoever caused it."""

    def progress(self, uuid: str, percent: int) -> None:
        """The work on a guest has come so far."""


@runtime_checkable
class Driver(Protocol):
    """What every hypervisor driver does."""

    async def init_host(self, events: DriverEvents) -> None:
        """Get ready; raise a MicronovaError with one clear line if this host cannot work."""

    async def close(self) -> None:
        """Let go of the hypervisor; guests run on."""

    def capabilities(self) -> frozenset[str]:
        """Name the capabilities that this host has, out of `CAPABILITIES`."""

    async def get_available_resources(self) -> list[NodeResources]:
        """Describe each node: what it has, and what guests of any cloud take. The first is the default."""

    async def list_guests(self) -> list[Guest]:
        """List every guest of this cloud, also half-made ones."""

    async def info(self, uuid: str) -> Guest | None:
        """Describe one guest, or say that there is none."""

    async def spawn(self, plan: GuestPlan) -> None:
        """Make the guest and let it run.

        BuildAborted: it cannot be built anywhere. InsufficientResources, or any other error: maybe elsewhere.
        """

    async def destroy(self, uuid: str) -> None:
        """Remove the guest and all that was made for it on this host, never shared disks."""

    async def power_on(self, plan: GuestPlan) -> None:
        """Let the guest run."""

    async def power_off(self, uuid: str, timeout: float) -> None:
        """Ask the guest to shut down, and switch it off after the time-out; with 0 at once."""

    async def reboot(self, plan: GuestPlan, kind: RebootType) -> None:
        """Restart the guest: by asking it (SOFT), or by switching it off and on (HARD)."""


@runtime_checkable
class ConsoleLog(Protocol):
    """Keeps what guests write to their console."""

    async def get_console_output(self, uuid: str, length: int | None) -> str:
        """Give the last lines, or all of them."""


def last_lines(text: str, count: int | None) -> str:
    """Cut the end off a console log: so many lines, without a line end that would pass for one more."""
    if count is None or count < 0:
        return text
    return "\n".join(text.removesuffix("\n").split("\n")[-count:]) if count else ""


@runtime_checkable
class HostUptime(Protocol):
    """Knows how long the host is up."""

    async def get_host_uptime(self) -> str:
        """Give it in the form of uptime(1)."""


@runtime_checkable
class Pause(Protocol):
    """Stops a guest where it is, in memory."""

    async def pause(self, uuid: str) -> None:
        """Let the guest run no further."""

    async def unpause(self, uuid: str) -> None:
        """Let it go on."""


@runtime_checkable
class Suspend(Protocol):
    """Puts a guest's memory away on disk."""

    async def suspend(self, uuid: str) -> None:
        """Save the guest's memory and free it."""

    async def resume(self, plan: GuestPlan) -> None:
        """Go on where it was suspended."""


@runtime_checkable
class HotPlug(Protocol):
    """Plugs interfaces while a guest runs; into one that does not run too, for its next start."""

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug one more interface; the plan's `plugged` is awaited before it carries anything."""

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface; one that is not there is not an error."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest's screen shows."""

    mime_type: str
    data: bytes


@runtime_checkable
class Screenshot(Protocol):
    """Sees what guests show on their screens."""

    async def get_screenshot(self, uuid: str) -> Picture:
        """Take a picture."""


@runtime_checkable
class Diagnostics(Protocol):
    """Measures guests."""

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Give the figures of one guest."""


class BootSign(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest has shown of itself since it was started."""

    booted: bool  # more than firmware does that finds nothing to start
    seen: str  # what it did, to be read after "it": "read 512 bytes of its disks…"


@runtime_checkable
class BootSigns(Protocol):
    """Sees whether guests that were started have begun to boot."""

    async def boot_signs(self, uuids: Collection[str]) -> dict[str, BootSign]:
        """Look at many guests at once; who does not run, or of whom nothing can be told, is left out."""


@runtime_checkable
class VncConsole(Protocol):
    """Shows guests' screens by VNC."""

    async def get_vnc_console(self, uuid: str) -> ConsoleEndpoint:
        """Say where."""


@runtime_checkable
class SpiceConsole(Protocol):
    """Shows guests' screens by SPICE."""

    async def get_spice_console(self, uuid: str) -> ConsoleEndpoint:
        """Say where."""


@runtime_checkable
class SerialConsole(Protocol):
    """Lets one talk to guests by their serial ports."""

    async def get_serial_console(self, uuid: str, number: int = 0) -> ConsoleEndpoint:
        """Say where the port with this number is."""


@runtime_checkable
class FaultInjection(Protocol):
    """Fails on request; only a simulator should."""

    def fault_rules(self) -> list[dict[str, Any]]:
        """List the rules in force, with how often each was applied."""

    def set_fault_rules(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules; raise Invalid, and change nothing, if one of them makes no sense."""


CAPABILITIES: Final[dict[str, type]] = {
    "console_log": ConsoleLog,
    "host_uptime": HostUptime,
    "pause": Pause,
    "suspend": Suspend,
    "hot_plug": HotPlug,
    "screenshot": Screenshot,
    "diagnostics": Diagnostics,
    "boot_signs": BootSigns,
    "vnc_console": VncConsole,
    "spice_console": SpiceConsole,
    "serial_console": SerialConsole,
    "fault_injection": FaultInjection,
}


def implemented(driver: Driver) -> frozenset[str]:
    """Name the capabilities that a driver's class has methods for."""
    return frozenset(name for name, protocol in CAPABILITIES.items() if isinstance(driver, protocol))

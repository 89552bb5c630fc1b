"""The contract between a compute agent and a hypervisor.

A driver implements `Driver`, the core without which there is no cloud. What only some hypervisors can do is
a separate small protocol, named for the ability (`ConsoleLog`, `Pause`, `HotPlug`…)
and listed in `CAPABILITIES`. A driver has a capability if its class has the methods and its `capabilities()` has
the name: the agent asks `capable_driver(driver, ConsoleLog, …)`, which raises NotSupported otherwise. A method that
cannot do what it is asked for on this host raises NotSupported with the reason.

What every driver promises:
- Methods are coroutines and do not block the event loop; blocking calls run in a bounded pool of threads.
- A guest is found by the instance's uuid alone, carries the epoch it was built at and this cloud's id, and
  survives the agent. Guests without this cloud's id are neither listed nor touched.
- `destroy` and the power methods may be repeated: a guest that is already in the wanted state is not an error.
- `spawn` leaves clean-up to the agent, which calls `destroy` after any failure; `destroy` therefore also
  removes guests that were only partly made.
- The agent never runs two methods on the same guest at once, except `info`, `boot_signs`, `get_diagnostics`,
  `force_complete_live_migration` and the console.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from micronova.objects import power_state
from micronova.objects.block_device import BlockDevice
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.diagnostics import GuestDiagnostics
from micronova.objects.errors import MicronovaError, NotSupported
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF
from micronova.objects.orders import Guest, InjectedFile, InstanceSpec, NodeResources
from micronova.objects.topology import NodeTopology
from micronova.objects.volume import AttachedVolume

T = TypeVar("T")
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
    volumes: tuple[AttachedVolume, ...] = ()
    """The volumes among the block devices. The guest has exactly these when a method that starts it returns. One with
    boot index 0 takes the place of the root disk, and the instance may have no image then."""
    image_url: str | None = None  # to download the instance's image; in a rescue the rescue image
    kernel_url: str | None = None  # likewise the kernel and the ramdisk of that image
    ramdisk_url: str | None = None
    rescue_image: ImageMeta | None = None
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()


class DriverEvents(Protocol):
    """The callbacks of the agent, called in the event loop's thread.

    What a method causes is reported before it returns. The agent counts an event that comes later as a power change
    that no order caused.
    """

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        """Report that a guest changed its power state, whatever the cause."""

    def connection_failed(self, message: str) -> None:
        """Report that the hypervisor was lost and cannot be reached; again only after it was there again."""


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
        """Return every guest of this cloud, including those that were only partly made."""

    async def info(self, uuid: str) -> Guest | None:
        """Return one guest, or None."""

    async def spawn(self, plan: GuestPlan) -> None:
        """Make the guest and start it.

        Raise BuildAborted if no host can build it; InsufficientResources, or any other error, if another host may.
        """

    async def destroy(self, uuid: str) -> None:
        """Remove the guest and all that was made for it on this host, and disconnect its volumes, which stay."""

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


class CPUTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the processors of a host have done since it was started, in nanoseconds; their frequency in MHz."""

    user: int
    kernel: int
    idle: int
    iowait: int
    frequency: int


@runtime_checkable
class HostCPUStats(Protocol):
    """Measures the processors of the host."""

    async def get_host_cpu_stats(self) -> CPUTimes:
        """Return the times of all processors together."""


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


class DiskCopy(Protocol):
    """A complete copy of a guest's root disk (no backing file) on the guest's host, ready to be uploaded."""

    @property
    def disk_format(self) -> str:
        """The format of the file: qcow2, raw…"""

    @property
    def size(self) -> int:
        """The bytes of the file."""

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the file from its start."""

    async def close(self) -> None:
        """Remove the copy."""


@runtime_checkable
class Snapshot(Protocol):
    """Copies the root disks of guests, running or not. A running guest continues to run."""

    async def snapshot(self, plan: GuestPlan) -> DiskCopy:
        """Copy the root disk as it is at one moment.

        A host that was interrupted may be asked again: what is left of an earlier copy is removed first. The file
        systems of a running guest are quiesced if the image says that the guest has an agent (hw_qemu_guest_agent).
        Raise Conflict if that fails and the image requires it (os_require_quiesce).
        """


@runtime_checkable
class Quiesce(Protocol):
    """Freezes the file systems of guests that run and have an agent.

    `init_host` thaws the guests that an earlier agent of the host has left frozen, or lets them be thawed soon.
    """

    async def quiesce(self, uuid: str) -> None:
        """Freeze the guest's file systems; raise Conflict if it does not run or its agent does not do it."""

    async def unquiesce(self, uuid: str) -> None:
        """Thaw the guest's file systems; do nothing if none are frozen."""


def do_nothing() -> None:
    """Do nothing."""


@runtime_checkable
class Rescue(Protocol):
    """Boots guests from another image, so that their own disks can be repaired.

    `power_on` and `reboot` boot a guest from its own disks, as `unrescue` does: no such order comes for a server that
    is rescued, so the rescue has failed or an administrator has reset the server's state.
    """

    async def rescue(self, plan: GuestPlan, timeout: float, *, stopping: Callable[[], None] = do_nothing) -> None:
        """Boot the guest from the plan's rescue image, with its own root disk attached.

        The guest has `timeout` seconds to shut down, and `stopping` is called before it is asked to. A rescue that is
        repeated at the same epoch leaves a guest that runs from the rescue image alone.
        """

    async def unrescue(self, plan: GuestPlan) -> None:
        """Boot the guest from its own disks and remove what the rescue made."""


@runtime_checkable
class RescueLun(Protocol):
    """Can give a guest that is rescued its rescue disk as a LUN, which takes commands of SCSI."""

    @property
    def rescues_from_lun(self) -> bool:
        """True."""


@runtime_checkable
class AdminPassword(Protocol):
    """Changes passwords in guests that run."""

    async def set_admin_password(self, plan: GuestPlan, password: str) -> None:
        """Set the password of the guest's administrator.

        Raise Conflict if the guest does not run, has no agent that can do it, or refuses; raise NotSupported if its
        agent does not answer. No message and no log line has the password.
        """


@runtime_checkable
class Rebuild(Protocol):
    """Rebuilds guests: one with new disks takes the place of the old one."""

    async def rebuild(
        self,
        plan: GuestPlan,
        *,
        start: bool,
        timeout: float,
        stopping: Callable[[], Awaitable[None]],
        removed: Callable[[], Awaitable[None]],
    ) -> None:
        """Make the guest anew by the plan, and perhaps start it; what exists of it is removed first.

        The CPUs, devices and user id that are reserved for it stay reserved.

        An old guest that runs is asked to shut down, and stopped after the timeout. This may be repeated, whatever
        exists: the old guest, a part of the new one, or nothing. As long as the guest has its old epoch, its disks are
        as they were; from then on until the new guest is complete, it has no power state. `removed` is awaited in
        between: when the old disks are gone, and before new ones are made. `stopping` is awaited before the old guest
        is touched, also one that does not run; if it raises an error, the guest stays as it is.
        """


@runtime_checkable
class CrashDump(Protocol):
    """Makes guests that hang dump their memory, if their operating system is set up for it."""

    async def trigger_crash_dump(self, uuid: str) -> None:
        """Send the guest a non-maskable interrupt."""


@runtime_checkable
class HotPlug(Protocol):
    """Plugs and unplugs interfaces of guests, running or not."""

    async def attach_interface(self, plan: GuestPlan, vif: VIF) -> None:
        """Plug an interface; it carries no traffic before the plan's `plugged` has returned."""

    async def detach_interface(self, uuid: str, vif: VIF) -> None:
        """Unplug an interface; a missing one is not an error."""


@runtime_checkable
class Volumes(Protocol):
    """Gives guests volumes: those of a plan when they are started, and others later, whether they run or not.

    A driver without this capability gets no plan with volumes. A volume has the serial number `AttachedVolume.serial`.
    """

    async def attach_volume(self, plan: GuestPlan, volume: AttachedVolume) -> None:
        """Give the guest a volume, which is in the plan, too; one that it has already is not an error."""

    async def detach_volume(self, uuid: str, volume: AttachedVolume) -> None:
        """Take a volume from the guest, and return when its host does not use it any more.

        A volume that the guest does not have is not an error. Raise an error, and leave the volume with the guest, if
        the guest does not release it.
        """

    async def swap_volume(self, plan: GuestPlan, old: AttachedVolume, new: AttachedVolume) -> None:
        """Copy a volume to another one while the guest uses it, and let the guest use the other one from then on.

        If this fails or is cancelled, the guest uses the old one. A guest that has the new one already is not an error.
        The plan has the new one.
        """

    async def extend_volume(self, uuid: str, volume: AttachedVolume, size: int) -> None:
        """Let the guest see that a volume has this many bytes now; it may be repeated."""


@runtime_checkable
class Resize(Protocol):
    """Changes the size of guests on this host, and can make them again what they were before.

    The guest is off when `resize` is called. The others are also called while it runs, and `revert_resize` stops it
    first. What was before is kept until the resize is confirmed or reverted.
    """

    async def resize(self, plan: GuestPlan) -> None:
        """Give the guest the flavor and the epoch of the plan; its disks grow, and their content stays."""

    async def confirm_resize(self, uuid: str) -> None:
        """Remove what was kept of the guest as it was before."""

    async def revert_resize(self, plan: GuestPlan) -> None:
        """Make the guest what it was before, at the plan's epoch; a guest that was not resized stays as it is."""


@runtime_checkable
class Migrate(Protocol):
    """Sends guests that are off to other hosts, and receives them."""

    async def export_disks(self, uuid: str) -> bytes:
        """Return what the destination needs to get the guest's disks: at most 64 KiB. The guest stays."""

    async def import_guest(self, plan: GuestPlan, disks: bytes) -> None:
        """Make a guest, which is off, with the disks of a guest elsewhere; they grow to the flavor of the plan."""


@runtime_checkable
class LiveMigrate(Protocol):
    """Sends guests that run, or are paused, to other hosts, and receives them."""

    async def check_live_migration(self, plan: GuestPlan) -> None:
        """Raise an error if this host cannot receive the guest."""

    async def live_migrate(self, uuid: str) -> bytes:
        """Send a guest while it runs; return what the destination needs to continue it: at most 64 KiB.

        Then it does not run here any more. If this is cancelled or fails, `rollback_live_migration` follows. It may be
        repeated.
        """

    async def force_complete_live_migration(self, uuid: str) -> None:
        """Let a `live_migrate` that runs end soon, at the cost of a pause of the guest."""

    async def rollback_live_migration(self, uuid: str) -> int:
        """Let a guest that was sent continue here; return its power state. One that was not sent stays as it is."""

    async def receive_live_guest(self, plan: GuestPlan, state: bytes) -> int:
        """Make the guest that was sent, and let it continue here; return its power state."""


@runtime_checkable
class Diagnostics(Protocol):
    """Measures guests."""

    async def get_diagnostics(self, uuid: str) -> GuestDiagnostics:
        """Return the statistics of one guest."""


@runtime_checkable
class ImageCaching(Protocol):
    """Keeps images that guests were made from, so that the next guest does not wait for a download."""

    async def cache_image(self, image: ImageMeta, url: str | None) -> bool:
        """Fetch an image before a guest needs it; return False if it is there already.

        It stays for as long as an image that guests do not use any more.
        """


@runtime_checkable
class KernelBoot(Protocol):
    """Boots the disks of images that have an `ImageMeta.kernel` with this kernel, and not with firmware."""

    @property
    def boots_kernels(self) -> bool:
        """True."""


@runtime_checkable
class TrustedCerts(Protocol):
    """Verifies the data of each image that has an `ImageMeta.signature`, before it does anything else with it.

    If the data is not what was signed, BuildAborted is raised. Data that was cached without being verified is not used.
    """

    @property
    def verifies_signatures(self) -> bool:
        """True."""


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
    "host_cpu_stats": HostCPUStats,
    "pause": Pause,
    "suspend": Suspend,
    "snapshot": Snapshot,
    "quiesce": Quiesce,
    "rebuild": Rebuild,
    "hot_plug": HotPlug,
    "volumes": Volumes,
    "rescue": Rescue,
    "rescue_lun": RescueLun,
    "admin_password": AdminPassword,
    "crash_dump": CrashDump,
    "resize": Resize,
    "migrate": Migrate,
    "live_migrate": LiveMigrate,
    "diagnostics": Diagnostics,
    "image_cache": ImageCaching,
    "kernel_boot": KernelBoot,
    "trusted_certs": TrustedCerts,
    "boot_signs": BootSigns,
    "vnc_console": VncConsole,
    "spice_console": SpiceConsole,
    "serial_console": SerialConsole,
    "fault_injection": FaultInjection,
}


def if_capable(driver: Driver, capability: type[T]) -> T | None:
    """Return the driver if it has a capability on this host, else None."""
    [name] = [name for name, protocol in CAPABILITIES.items() if protocol is capability]
    return driver if isinstance(driver, capability) and name in driver.capabilities() else None


def capable_driver(driver: Driver, capability: type[T], error: str) -> T:
    """Return the driver if it has a capability on this host; else raise NotSupported with the error."""
    found = if_capable(driver, capability)
    if found is None:
        raise NotSupported(error)
    return found


_TRAITS: Final[dict[str, tuple[str, ...]]] = {
    "hot_plug": ("COMPUTE_NET_ATTACH_INTERFACE", "COMPUTE_NET_ATTACH_INTERFACE_WITH_TAG"),
    "volumes": ("COMPUTE_VOLUME_ATTACH_WITH_TAG", "COMPUTE_VOLUME_EXTEND", "COMPUTE_VOLUME_MULTI_ATTACH"),
    "trusted_certs": ("COMPUTE_TRUSTED_CERTS",),
    "rescue": ("COMPUTE_RESCUE_BFV",),
}
_OF_EVERY_DRIVER: Final = ("COMPUTE_DEVICE_TAGGING", "COMPUTE_SOCKET_PCI_NUMA_AFFINITY")


def capability_traits(capabilities: Collection[str]) -> tuple[str, ...]:
    """Return the traits that Nova's nodes have for what a host with these capabilities, out of `CAPABILITIES`, can do.

    Tags of devices are shown to guests by the metadata service, and PCI devices are assigned by the claim: with every
    driver.
    """
    named = (trait for name, traits in _TRAITS.items() if name in capabilities for trait in traits)
    return (*_OF_EVERY_DRIVER, *named)


def topology_traits(topology: NodeTopology | None) -> tuple[str, ...]:
    """Return the trait that Nova's nodes have if a core of theirs has several threads."""
    cells = () if topology is None else topology.cells
    return ("HW_CPU_HYPERTHREADING",) if any(len(core) > 1 for cell in cells for core in cell.siblings) else ()


def verifies(driver: Driver, image: ImageMeta) -> bool:
    """Return False if the signature of an image has to be verified and the driver would not do it."""
    return image.signature is None or if_capable(driver, TrustedCerts) is not None


def implemented(driver: Driver) -> frozenset[str]:
    """Return the names of the capabilities that a driver's class has methods for."""
    return frozenset(name for name, protocol in CAPABILITIES.items() if isinstance(driver, protocol))

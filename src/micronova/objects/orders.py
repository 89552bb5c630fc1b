"""Work orders: what a conductor sends to a compute host, and what the host reports back.

An order is complete: to carry it out, a host needs neither the database nor other OpenStack services. Orders and
reports carry the instance's epoch; one with an old epoch is refused.
"""

from typing import Literal

import msgspec

from micronova.objects.block_device import ROOT_DEVICE, BlockDevice
from micronova.objects.errors import Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host knows of an instance."""

    uuid: str
    project_id: str
    user_id: str
    name: str
    hostname: str
    flavor: Flavor
    node: str | None = None
    availability_zone: str | None = None
    image: ImageMeta | None = None
    metadata: dict[str, str] = {}
    tags: tuple[str, ...] = ()
    key_name: str | None = None
    key_data: str | None = None
    user_data: str | None = None
    config_drive: bool = False
    reservation_id: str = ""
    launch_index: int = 0
    root_device_name: str = ROOT_DEVICE
    security_groups: tuple[str, ...] = ()  # their names


class InjectedFile(msgspec.Struct, frozen=True):
    """A file to write into the guest (microversions before 2.57)."""

    path: str
    contents: bytes


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work for a host: build, delete, stop, start, reboot…"""

    operation_id: str
    kind: str
    epoch: int
    host: str
    instance: InstanceSpec
    issued_at: float = 0.0  # when it was read from the database, by the conductor's clock
    # The request that caused the order, and its trace. The order has its own, because it may come in the reply to a
    # heartbeat, whose context belongs to no request.
    request_id: str = ""
    traceparent: str = ""
    network_info: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    image_ticket: str | None = None  # a signed, short-lived address of the image
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()
    wait_for_plugs: tuple[str, ...] = ()  # port ids whose network-vif-plugged is awaited before the guest runs
    parameters: dict[str, str] = {}  # of the kind, e.g. {"type": "HARD"} of a reboot


OrderOutcome = Literal["done", "reschedule", "abort", "error"]
"""reschedule: another host may build the server. abort: no host can. error: the order failed. The error code of a
report says if the host only lacks something for the moment: see `Report.temporary`."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How an order ended."""

    operation_id: str
    epoch: int
    instance_uuid: str
    host: str
    outcome: OrderOutcome
    power_state: int | None = None
    error_code: str | None = None  # of a build only that of Unavailable: see `Report.temporary`
    message: str | None = None
    details: str | None = None
    left_behind: bool = False  # the host could not undo its work: the conductor records a departure
    config_drive: bool = False  # the guest that was built has a config drive
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def temporary(self) -> bool:
        """Whether the host lacks something for the moment, so that the order is given out again later.

        The error code says so and not an outcome of its own: a conductor of an older version would refuse the report.
        """
        return self.outcome in ("reschedule", "error") and self.error_code == Unavailable.code


class ReportReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a report."""

    accepted: bool  # False: the operation is no longer this host's
    destroy: bool = False  # the instance left this host: the host removes the guest that it just built


def capability_key(capability: str) -> str:
    """Return the key in `NodeResources.capabilities` of a driver's capability; the value is "true" or "false"."""
    return f"supports_{capability}"


class NodeResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a node, in total and in use."""

    node: str
    node_uuid: str
    hypervisor_type: str
    hypervisor_version: int
    vcpus: int
    memory_mb: int
    local_gb: int
    vcpus_used: int = 0
    memory_mb_used: int = 0
    local_gb_used: int = 0
    disk_available_gb: int | None = None
    running_vms: int = 0
    current_workload: int = 0
    host_ip: str = "127.0.0.1"
    cpu_info: dict[str, object] = {}
    supported: tuple[tuple[str, str, str], ...] = ()
    capabilities: dict[str, str] = {}
    reserved: dict[str, int] = {}  # resource class -> what is reserved for the host itself
    allocation_ratios: dict[str, float] = {}  # resource class -> the host's setting; absent: the conductor's setting


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A guest on a hypervisor; `epoch` is the one it was built at."""

    uuid: str
    node: str
    epoch: int
    power_state: int  # 0 until its spawn is complete
    name: str = ""
    vcpus: int = 0
    memory_mb: int = 0
    local_gb: int = 0


class RunningOrder(msgspec.Struct, frozen=True):
    """An order that a host is carrying out."""

    operation_id: str
    epoch: int


class Departure(msgspec.Struct, frozen=True):
    """An instance left a host: the host removes its guest up to this epoch."""

    instance_uuid: str
    epoch: int


class RemovedGuest(msgspec.Struct, frozen=True):
    """The guest of an instance that left the host is removed."""

    instance_uuid: str
    epoch: int  # of the departure


class PowerChange(msgspec.Struct, frozen=True):
    """A power state that no order caused: the guest stopped, crashed, or was switched by an operator on the host."""

    instance_uuid: str
    epoch: int  # at which the guest was built
    power_state: int


class GuestAtEpoch(msgspec.Struct, frozen=True):
    """A guest, and the epoch at which it was built."""

    instance_uuid: str
    epoch: int


class GuestsOff(msgspec.Struct, frozen=True, kw_only=True):
    """The guests that an agent found switched off when it started."""

    host: str
    guests: tuple[GuestAtEpoch, ...]


class GuestsToStart(msgspec.Struct, frozen=True, kw_only=True):
    """Those of these guests that should run: the host gets orders to start them."""

    instance_uuids: tuple[str, ...]


class BootVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a host found out about a guest that was started: that it does not boot, or that it does after all."""

    instance_uuid: str
    epoch: int  # the newest epoch of the instance that the host has seen
    fault: str = ""  # why it counts as not booted, for the server's owner; empty: it has booted
    found: bool = False  # the agent found the guest when it started: the instance may be at a newer epoch


class HostBeat(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of a heartbeat."""

    host: str
    running_orders: tuple[RunningOrder, ...] = ()
    removed_guests: tuple[RemovedGuest, ...] = ()  # since the last reply
    nodes: tuple[NodeResources, ...] = ()  # at the start, and afterwards those that changed
    power_changes: tuple[
        PowerChange, ...
    ] = ()  # all guests in the first heartbeat, afterwards changes that no order caused
    stopping: bool = False  # the last heartbeat: the host releases its leases
    boots: tuple[BootVerdict, ...] = ()  # guests that do not boot, or do after all; a normal boot is not reported


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent process sends every few seconds for all its hosts, and at once for one with a power change."""

    hosts: tuple[HostBeat, ...]
    # It grows with each message of a host, also if the agent is restarted: of two that arrive in another order than
    # they were sent, the older one is refused.
    number: int = 0


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of the reply to a heartbeat."""

    host: str
    orders: tuple[WorkOrder, ...] = ()  # orders that the host should carry out and does not
    drop: tuple[str, ...] = ()  # operations that are no longer this host's: it stops and undoes them
    departures: tuple[Departure, ...] = ()  # guests to remove
    resend_nodes: bool = False  # the database has no nodes of this host
    repeat_verdicts: tuple[str, ...] = ()  # instances whose verdict came during an operation: report it again


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a heartbeat."""

    hosts: tuple[HostReply, ...] = ()
    now: float = 0.0  # by the conductor's clock, before it read the database: later orders are not in this reply
    interval: float = 0.0  # seconds until the next heartbeat; it grows with the number of hosts; 0: as the agent is set

"""Work orders: what a conductor sends to a compute host, and what the host reports back.

An order has all data that a host needs, so a host never reads the database. It calls only the image service, by a
signed URL. Orders and reports carry the instance's epoch; one with an old epoch is refused.
"""

from typing import Annotated, Final, Literal

import msgspec

from micronova.objects.block_device import ROOT_DEVICE, BlockDevice
from micronova.objects.errors import Unavailable
from micronova.objects.flavor import Flavor
from micronova.objects.host_limits import (
    LARGEST_MIGRATE_DATA,
    LONGEST_DESCRIPTION,
    LONGEST_DETAILS,
    LONGEST_MESSAGE,
    MOST_HOSTS,
    MOST_MDEV_PARENTS,
    MOST_MDEV_TYPES,
    MOST_NODES,
    MOST_PROPERTIES,
    MOST_QUESTIONS,
    MOST_REPORTED,
    MOST_TRAITS,
    Count,
    LargeNumber,
    Moment,
    Name,
    Ratio,
    Seconds,
    Whole,
    check_data,
    check_size,
    cut_texts,
)
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF
from micronova.objects.topology import LONGEST_TOPOLOGY, Assignment, NodeTopology
from micronova.objects.volume import AttachedVolume, VolumeStatistics

ASKS_BEFORE_DESTRUCTION: Final = "asks_before_destruction"
"""The capability, in the reports of nodes, of agents that ask a conductor before they do what cannot be undone. Of an
agent of an earlier version it is not known whether it has begun."""

DECRYPTS_VOLUMES: Final = "decrypts_volumes"
"""The capability, in the reports of nodes, of agents that decrypt volumes. A guest of an agent of an earlier version
would get the encrypted data, and destroy it by writing to it."""


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
    assignment: Assignment | None = None  # the NUMA cells, CPUs and devices of the host that are claimed for it


class InjectedFile(msgspec.Struct, frozen=True):
    """A file to write into the guest (microversions before 2.57)."""

    path: str
    contents: bytes


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an order of a move says besides the instance, whose flavor is the one that the host gives it."""

    source: str  # hosts; a resize may keep the server on its own
    destination: str
    old_flavor: Flavor  # that the guest has on the source
    power_on: bool = True  # whether the guest runs afterwards
    # Of an order to the source: the destination may have made the guest. Older versions know it as `arrived`.
    sent: bool = msgspec.field(default=True, name="arrived")
    migrate_data: bytes = b""  # of the source, for the destination; only drivers read it
    mdev_types: tuple[str, ...] = ()  # of the mediated devices that the guest has on the source

    @property
    def stays(self) -> bool:
        """Whether source and destination are the same host."""
        return self.source == self.destination


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
    # Those of the block devices that are volumes, and how the host reaches them.
    volumes: tuple[AttachedVolume, ...] = ()
    # From which the image, or the rescue image, can be downloaded for a short time. On the bus it is `image_ticket`,
    # which older versions read.
    image_url: str | None = msgspec.field(default=None, name="image_ticket")
    kernel_url: str | None = None  # likewise of the kernel and the ramdisk of that image
    ramdisk_url: str | None = None
    rescue_image: ImageMeta | None = None  # of the kind rescue
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()
    wait_for_plugs: tuple[str, ...] = ()  # port ids whose network-vif-plugged is awaited before the guest runs
    parameters: dict[str, str] = {}  # of the kind, e.g. {"type": "HARD"} of a reboot
    move: MoveOrder | None = None


OrderOutcome = Literal["done", "reschedule", "abort", "error"]
"""reschedule: another host may build the server. abort: no host can. error: the order failed. The error code of a
report says if the host only lacks something for the moment: see `Report.temporary`."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How an order ended."""

    operation_id: Name
    epoch: Count
    instance_uuid: Name
    host: Name
    outcome: OrderOutcome
    power_state: Whole | None = None
    error_code: Name | None = None  # of a build only that of Unavailable: see `Report.temporary`
    message: str | None = None
    details: str | None = None
    left_behind: bool = False  # the host could not undo its work: the conductor records a departure
    config_drive: bool = False  # the guest that was built has a config drive
    unchanged: bool = False  # a rebuild failed before it changed the guest
    # Of a guest that moves: what the destination needs to make it.
    migrate_data: Annotated[bytes, msgspec.Meta(max_length=LARGEST_MIGRATE_DATA)] = b""
    volume_statistics: VolumeStatistics | None = None  # of a volume that was detached
    started_at: Moment = 0.0
    finished_at: Moment = 0.0

    def __post_init__(self) -> None:
        cut_texts(self, message=LONGEST_MESSAGE, details=LONGEST_DETAILS, with_lines="details")

    @property
    def temporary(self) -> bool:
        """Whether the host lacks something for the moment, so that the order is given out again later.

        The error code says so and not an outcome of its own: a conductor of an older version would refuse the report.
        """
        return self.outcome in ("reschedule", "error") and self.error_code == Unavailable.code


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A host that carries out an order has reached a further task state; the next part of its work has not begun.

    With `destroys` the next part cannot be undone: the host asks whether the order still stands. It asks again
    if the answer says so.
    """

    operation_id: Name
    epoch: Count
    instance_uuid: Name
    host: Name
    task_state: Name  # empty: it has not changed
    destroys: bool = False
    waited: Seconds | None = None  # since it asked first; None: an older host, which cannot be told to ask again


class ProgressReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a progress."""

    accepted: bool  # False: the operation is no longer this host's, which drops the order
    # To which an image can be uploaded, if that follows, for a short time. On the bus it is `image_ticket`, which older
    # versions read.
    upload_url: str | None = msgspec.field(default=None, name="image_ticket")
    ask_again: bool = False  # the answer is not known yet: the host must not go on before it has asked again


class ReportReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a report."""

    accepted: bool  # False: the operation is no longer this host's
    destroy: bool = False  # the instance left this host: the host removes the guest that it just built


def capability_key(capability: str) -> str:
    """Return the key in `NodeResources.capabilities` of a driver's capability; the value is "true" or "false"."""
    return f"supports_{capability}"


_PROPERTIES = msgspec.Meta(max_length=MOST_PROPERTIES)


class NodeResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a node, in total and in use."""

    node: Name
    node_uuid: Name
    hypervisor_type: Name
    hypervisor_version: Count
    vcpus: Count  # that instances share
    memory_mb: Count
    local_gb: Count
    pcpus: Count | None = None  # dedicated CPUs; None: an agent of an older version does not count them
    topology: NodeTopology | None = None
    vcpus_used: Count = 0
    pcpus_used: Count = 0
    memory_mb_used: Count = 0
    local_gb_used: Count = 0
    disk_available_gb: Whole | None = None
    running_vms: Count = 0  # all guests on the node, including those that are off
    current_workload: Count = 0
    host_ip: Name = "127.0.0.1"
    cpu_info: dict[str, object] = {}
    supported: Annotated[tuple[tuple[Name, Name, Name], ...], _PROPERTIES] = ()
    capabilities: Annotated[dict[Name, Name], _PROPERTIES] = {}
    # By the names of os-traits, or custom ones.
    traits: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_TRAITS)] = ()
    reserved: Annotated[dict[Name, Count], _PROPERTIES] = {}  # resource class -> what is reserved for the host itself
    # Resource class -> the host's setting; absent: what the inventory has, which begins with the initial one.
    allocation_ratios: Annotated[dict[Name, Ratio], _PROPERTIES] = {}
    initial_allocation_ratios: Annotated[dict[Name, Ratio], _PROPERTIES] = {}  # absent: the conductor's setting

    def __post_init__(self) -> None:
        check_data("The description of the CPU", self.cpu_info)
        check_size("The description of the CPU", self.cpu_info, LONGEST_DESCRIPTION)
        check_size("The list of capabilities", self.capabilities, LONGEST_DESCRIPTION)
        check_size("The list of guests that are supported", self.supported, LONGEST_DESCRIPTION)
        check_size("The topology", self.topology, LONGEST_TOPOLOGY)


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A guest on a hypervisor; `epoch` is the one it was built at."""

    uuid: Name
    node: Name
    epoch: Count
    power_state: Whole  # 0 until its spawn is complete
    name: Name = ""
    vcpus: Count = 0  # without those on dedicated CPUs
    pcpus: Count = 0  # dedicated CPUs
    memory_mb: Count = 0
    local_gb: Count = 0
    # Of its node, by resource class; None: what the guest uses, because its driver does not know.
    claimed: Annotated[dict[Name, Whole], _PROPERTIES] | None = None
    volumes: Annotated[tuple[Name, ...], _PROPERTIES] | None = None  # their ids; None: its driver does not tell
    project_id: Name = ""  # of its server; empty: its driver does not know


class RunningOrder(msgspec.Struct, frozen=True):
    """An order that a host is carrying out."""

    operation_id: Name
    epoch: Count


class Departure(msgspec.Struct, frozen=True, omit_defaults=True):
    """An instance left a host: the host removes its guest up to this epoch."""

    instance_uuid: str
    epoch: int
    deleted: bool = False  # the server is deleted: the host removes its guest whatever the guest's epoch is


class RemovedGuest(msgspec.Struct, frozen=True):
    """The guest of an instance that left the host is removed."""

    instance_uuid: Name
    epoch: Count  # of the departure


class PowerChange(msgspec.Struct, frozen=True):
    """A power state that no order caused: the guest stopped, crashed, or was switched by an operator on the host."""

    instance_uuid: Name
    epoch: Count  # at which the guest was built
    power_state: Whole


class GuestAtEpoch(msgspec.Struct, frozen=True):
    """A guest, and the epoch at which it was built."""

    instance_uuid: Name
    epoch: Count


class GuestsOff(msgspec.Struct, frozen=True, kw_only=True):
    """The guests that an agent found switched off when it started."""

    host: Name
    guests: Annotated[tuple[GuestAtEpoch, ...], msgspec.Meta(max_length=MOST_QUESTIONS)]


class GuestsToStart(msgspec.Struct, frozen=True, kw_only=True):
    """Those of these guests that should run: the host gets orders to start them."""

    instance_uuids: tuple[str, ...]


class BootResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a host found out about a guest that was started: that it does not boot, or that it does after all."""

    instance_uuid: Name
    epoch: Count  # the newest epoch of the instance that the host has seen
    fault: str = ""  # why it counts as not booted, for the server's owner; empty: it has booted
    found: bool = False  # the agent found the guest when it started: the instance may be at a newer epoch

    def __post_init__(self) -> None:
        cut_texts(self, fault=LONGEST_MESSAGE)


class HostMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitors of a host have measured, by Nova's names of metrics."""

    node: Name
    host_ip: Name
    source: Name
    taken_at: LargeNumber  # microseconds since 1970
    values: Annotated[dict[Name, LargeNumber], _PROPERTIES]


class HostBeat(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of a heartbeat."""

    host: Name
    running_orders: Annotated[tuple[RunningOrder, ...], msgspec.Meta(max_length=MOST_REPORTED)] = ()
    # Since the last reply.
    removed_guests: Annotated[tuple[RemovedGuest, ...], msgspec.Meta(max_length=MOST_REPORTED)] = ()
    # At the start all, and afterwards those that changed.
    nodes: Annotated[tuple[NodeResources, ...], msgspec.Meta(max_length=MOST_NODES)] = ()
    # All guests in the first heartbeats, afterwards changes that no order caused.
    power_changes: Annotated[tuple[PowerChange, ...], msgspec.Meta(max_length=MOST_REPORTED)] = ()
    stopping: bool = False  # the last heartbeat: the host releases its leases
    # Guests that do not boot, or do after all; a normal boot is not reported.
    boots: Annotated[tuple[BootResult, ...], msgspec.Meta(max_length=MOST_REPORTED)] = ()
    metrics: HostMetrics | None = None  # if monitors are enabled and have measured since the last heartbeat
    connect_error: str = ""  # why the hypervisor was lost since the last heartbeat, if it was

    def __post_init__(self) -> None:
        cut_texts(self, connect_error=LONGEST_MESSAGE)
        devices = [each for node in self.nodes if node.topology is not None for each in node.topology.mdevs]
        if len(devices) > MOST_MDEV_PARENTS:
            raise ValueError(f"A host reports at most {MOST_MDEV_PARENTS} devices with mediated devices at once")
        for names in ({each.mdev_type for each in devices}, {each.resource_class for each in devices}):
            if len(names) > MOST_MDEV_TYPES:
                raise ValueError(f"The mediated devices of a host have at most {MOST_MDEV_TYPES} types and classes")

    @property
    def entries(self) -> int:
        """How many guests, orders, nodes and devices it names: what it costs to apply grows with them."""
        lists = (self.running_orders, self.removed_guests, self.nodes, self.power_changes, self.boots)
        mdevs = sum(len(node.topology.mdevs) for node in self.nodes if node.topology is not None)
        return sum(map(len, lists)) + mdevs


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent process sends every few seconds for all its hosts, and at once for one with a power change."""

    hosts: Annotated[tuple[HostBeat, ...], msgspec.Meta(max_length=MOST_HOSTS)]
    # It grows with each message of a host, even if the agent is restarted: of two that arrive in another order than
    # they were sent, the older one is refused.
    number: LargeNumber = 0
    # `HeartbeatReply.now` of the last reply that the agent has got: it was alive then. The message itself may be late.
    # 0 before the first reply; None: an agent of an earlier version.
    answered_at: Moment | None = None
    service_version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 1  # of the agent's release: see SERVICE_VERSION


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of the reply to a heartbeat."""

    host: str
    orders: tuple[WorkOrder, ...] = ()  # orders that the host should carry out and does not
    drop: tuple[str, ...] = ()  # operations that are no longer this host's: it stops and undoes them
    departures: tuple[Departure, ...] = ()  # guests to remove
    resend_nodes: bool = False  # the database has no nodes of this host
    # Instances whose boot result came during an operation: report it again. Messages have the name of earlier releases.
    repeat_boots: tuple[str, ...] = msgspec.field(name="repeat_verdicts", default=())
    repeat_power: tuple[str, ...] = ()  # instances whose power change came during an operation: report it again
    # Of the nodes in the heartbeat, by name: the allocation ratios that count, by resource class.
    allocation_ratios: dict[str, dict[str, float]] = {}


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a heartbeat."""

    hosts: tuple[HostReply, ...] = ()
    now: float = 0.0  # by the conductor's clock, before it read the database: later orders are not in this reply
    interval: float = 0.0  # seconds until the next heartbeat; it grows with the number of hosts; 0: as the agent is set

"""Work orders: what a conductor sends to a compute host, and what the host reports back.

An order is complete: a host that has it needs neither the database nor the neighbours. Orders and reports carry
the instance's epoch; whoever is behind is refused.
"""

import msgspec

from micronova.objects.block_device import BlockDevice
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The instance as its host sees it."""

    uuid: str
    epoch: int
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
    power_state: int = 0
    root_device_name: str = "/dev/vda"
    security_groups: tuple[str, ...] = ()  # their names


class InjectedFile(msgspec.Struct, frozen=True):
    """A file that the user wants in the guest (old microversions)."""

    path: str
    contents: bytes


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work for a host: build, delete, stop, start, reboot…"""

    operation_id: str
    kind: str
    epoch: int
    host: str
    instance: InstanceSpec
    deadline: float = 0.0
    issued_at: float = 0.0  # when it was read from the database, by the conductor's clock
    request_id: str = ""  # whose work it is, and its trace: an order may also come with the answer to a heartbeat
    traceparent: str = ""
    attempt: int = 1
    network_info: tuple[VIF, ...] = ()
    block_devices: tuple[BlockDevice, ...] = ()
    image_ticket: str | None = None  # where the image can be fetched from, signed and short-lived
    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()
    wait_for_plugs: tuple[str, ...] = ()  # port ids whose network-vif-plugged is awaited before the guest runs
    limits: dict[str, int] = {}  # resource class -> the node's capacity as the claim saw it; absent: the host's own
    parameters: dict[str, str] = {}  # what the kind needs besides, e.g. {"type": "HARD"} of a reboot


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How an order ended."""

    operation_id: str
    epoch: int
    instance_uuid: str
    host: str
    outcome: str  # "done" | "reschedule" | "abort" | "error"
    power_state: int | None = None
    error_code: str | None = None
    message: str | None = None
    details: str | None = None
    left_behind: bool = False  # the host could not undo its work: a departure has to be recorded
    started_at: float = 0.0
    finished_at: float = 0.0


def ability(capability: str) -> str:
    """Return the key under which a node's capabilities say whether its driver has one: "true" or "false"."""
    return f"supports_{capability}"


class NodeResources(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has and holds, as its driver sees it."""

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
    reserved: dict[str, int] = {}  # resource class -> what is kept for the host itself
    allocation_ratios: dict[str, float] = {}  # resource class -> the host's setting; absent: the deployment's


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A guest that a hypervisor really holds; `epoch` is the one it was built at."""

    uuid: str
    node: str
    epoch: int
    power_state: int  # 0 while its spawn has not been completed
    name: str = ""
    vcpus: int = 0
    memory_mb: int = 0
    local_gb: int = 0


class InHand(msgspec.Struct, frozen=True):
    """An operation that a host is working on."""

    operation_id: str
    epoch: int
    progress: int = 0  # percent, of work whose driver tells


class Departed(msgspec.Struct, frozen=True):
    """The instance left the host: its guest there, up to this epoch, is to go (or is gone, in a host's answer)."""

    instance_uuid: str
    epoch: int


class PowerChange(msgspec.Struct, frozen=True):
    """A guest's power state that no order brought about: it stopped itself, crashed, or was switched by hand."""

    instance_uuid: str
    epoch: int  # the one the guest was built at
    power_state: int


class BootVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of a guest that was started: that it has not begun to boot, or that it has after all."""

    instance_uuid: str
    epoch: int  # the newest that the host has seen of the instance
    fault: str = ""  # why it does not count as booted, for the server's owner; empty: it has booted
    found: bool = False  # by an agent that has started since: the instance may be at a newer epoch


class HostBeat(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of a heartbeat."""

    host: str
    in_hand: tuple[InHand, ...] = ()
    departed: tuple[Departed, ...] = ()  # guests destroyed since the last reply, on record
    nodes: tuple[NodeResources, ...] = ()  # sent at start and when something changed
    version: int = 1
    power_changes: tuple[PowerChange, ...] = ()  # all guests in the first beat, afterwards what changed by itself
    stopping: bool = False  # the last beat: leases are given back now
    boots: tuple[BootVerdict, ...] = ()  # guests that do not boot, or do after all; those that simply do are not told


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent process sends every few seconds, for all the hosts that it runs."""

    hosts: tuple[HostBeat, ...]


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the conductor knows of one host."""

    host: str
    orders: tuple[WorkOrder, ...] = ()  # orders that the host should have in hand and does not
    drop: tuple[str, ...] = ()  # operations in hand that are no longer this host's: stop and undo
    departures: tuple[Departed, ...] = ()
    resend_nodes: bool = False  # the database does not know this host's nodes
    boots_again: tuple[str, ...] = ()  # instances whose verdict came amid an operation: tell it again after that


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a heartbeat."""

    hosts: tuple[HostReply, ...] = ()
    now: float = 0.0  # by the conductor's clock, before it looked: later orders are not in this answer

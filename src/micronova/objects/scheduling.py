"""Requests to the scheduler and its replies."""

from typing import Final, TypeAlias

import msgspec

from micronova.objects.explanation import Explanation
from micronova.objects.flavor import Flavor
from micronova.objects.fleet import Fleet
from micronova.objects.image import ImageMeta
from micronova.objects.port_resources import PortResources

SERVER_HINTS: Final = ("same_host", "different_host")
"""Scheduler hints whose values are uuids of servers."""

GROUP_HINT: Final = "group"
"""The scheduler hint whose value is the uuid of a server group."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The server group of a request, with the hosts of its members."""

    id: str
    policy: str
    max_server_per_host: int = 1
    hosts: dict[str, int] = {}  # host name -> members on it


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance needs; kept as long as the instance, because a reschedule needs it."""

    project_id: str
    user_id: str
    flavor: Flavor
    image: ImageMeta | None = None
    availability_zone: str | None = None
    force_host: str | None = None  # of zone:host, admins only: see `forced`
    force_node: str | None = None
    requested_host: str | None = None  # 2.74: this host, if it passes the filters
    requested_node: str | None = None
    hints: dict[str, list[str]] = {}
    server_group: GroupSpec | None = msgspec.field(default=None, name="group")
    ports: tuple[PortResources, ...] = ()  # those that ask for resources; of a server that moves, its present ones
    hinted_hosts: dict[str, tuple[str, ...]] = {}  # by hint that names servers: where these are; the scheduler reads it
    # By host: how much the images of its servers have in common with the requested one; the scheduler reads it.
    alike_images: dict[str, float] = {}
    # Whether an aggregate, also one without hosts, names the project; the scheduler reads it.
    has_aggregates: bool = False
    ignore_hosts: tuple[str, ...] = ()
    ignore_status: bool = False  # the host may be disabled: an admin forces a move to it

    @property
    def forced(self) -> bool:
        """Whether an admin named the host or node: no other host is tried.

        Only capacity, prefilters, request groups and the filters that are `always` in effect are asked.
        """
        return self.force_host is not None or self.force_node is not None

    @property
    def names_host(self) -> bool:
        """Whether the request is about one host or node, forced or not."""
        return self.forced or self.requested_host is not None or self.requested_node is not None


class SelectDestinations(msgspec.Struct, frozen=True, kw_only=True):
    """A request for hosts for one or more instances."""

    spec: RequestSpec
    instance_uuids: tuple[str, ...]
    epochs: dict[str, int] = {}
    """By instance. A claim for an instance that is deleted or at another epoch is refused (Stale)."""
    moving: dict[str, str] = {}
    """By instance, the migration that holds what the instance has on the host that it leaves."""


class CheckImage(msgspec.Struct, frozen=True, kw_only=True):
    """The question whether the node of a server can run the image of a request, which is not the server's own."""

    spec: RequestSpec
    node_uuid: str


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A host that was selected for an instance."""

    host: str
    node: str
    node_uuid: str
    zone: str


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts for one instance: resources are claimed on the selected one, and not on the alternates."""

    instance_uuid: str
    selected: Selection
    alternates: tuple[Selection, ...] = ()


class SchedulerDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of a scheduler about a request: the destinations of all instances, and how they were chosen."""

    # Earlier versions send and expect this name.
    destinations: tuple[Destination, ...] = msgspec.field(name="placements")
    explanation: Explanation


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The question where servers would go; nothing is claimed."""

    spec: RequestSpec
    count: int = 1
    with_hosts: bool = False  # the answer also says of every host which filter removed it


class DryRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Where the servers of a request would go, or why there is no host for all of them."""

    selections: tuple[Selection, ...]  # in the order placed; empty if there is no host for one of them
    explanation: Explanation
    fit: int  # for how many of them there is room
    message: str = ""  # the fault that users would read
    fleet: Fleet | None = None
    remarks: tuple[str, ...] = ()  # what of the request has no effect


NodeAmount: TypeAlias = tuple[str, str, int, int, int, int, int, float]
"""Node uuid, resource class, total, reserved, capacity, used, max unit, allocation ratio."""
ServiceState: TypeAlias = tuple[str, bool, bool, float]
"""Host, whether it is enabled, whether it is forced down, when it sent its last heartbeat (seconds)."""


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """One compute node as the scheduler reads it from the database."""

    host: str
    node: str
    node_uuid: str
    zone: str = "nova"
    enabled: bool = True
    last_seen: float = 0.0  # wall-clock seconds of the last heartbeat
    forced_down: bool = False
    total: dict[str, int] = {}  # resource class -> total
    reserved: dict[str, int] = {}  # of the total, for the host itself
    used: dict[str, int] = {}
    capacity: dict[str, int] = {}  # (total - reserved) * allocation ratio
    max_unit: dict[str, int] = {}  # the most that one instance may have; absent: any amount
    allocation_ratio: dict[str, float] = {}  # absent: 1.0
    hypervisor_type: str = ""
    hypervisor_version: int = 0
    cpu_info: dict[str, object] = {}
    supported: tuple[tuple[str, str, str], ...] = ()  # (architecture, hypervisor type, vm mode)
    capabilities: dict[str, str] = {}
    traits: tuple[str, ...] = ()  # of the node itself, as a resource provider
    disk_available_gb: int | None = None
    num_instances: int = 0
    num_io_ops: int = 0
    failed_builds: int = 0
    aggregates: tuple[tuple[str, dict[str, str]], ...] = ()  # (name, metadata)
    host_ip: str = ""
    metrics: dict[str, float] = {}  # what the host's monitors measured last
    changed_at: int = 0
    topology: str = ""  # NUMA cells and PCI devices, as they are stored; empty: the host reports none
    held: str = ""  # what instances hold of them

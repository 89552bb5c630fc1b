"""What is asked of the scheduler, and what it answers."""

import msgspec

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The server group of a request, with where its members are now."""

    id: str
    policy: str
    max_server_per_host: int = 1
    hosts: dict[str, int] = {}  # host name -> members on it


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance needs, kept for its whole life: moves ask the same question again."""

    project_id: str
    user_id: str
    flavor: Flavor
    image: ImageMeta | None = None
    availability_zone: str | None = None
    force_host: str | None = None  # zone:host, admins only: no filter is asked
    force_node: str | None = None
    requested_host: str | None = None  # 2.74: this host, if the filters agree
    requested_node: str | None = None
    hints: dict[str, list[str]] = {}
    group: GroupSpec | None = None
    ignore_hosts: tuple[str, ...] = ()


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A host that an instance may be built on."""

    host: str
    node: str
    node_uuid: str
    zone: str


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one instance goes: the host on which resources are claimed, and alternates on which none are."""

    instance_uuid: str
    selected: Selection
    alternates: tuple[Selection, ...] = ()


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """One compute node as the scheduler reads it from the database."""

    host: str
    node: str
    node_uuid: str
    zone: str = "nova"
    enabled: bool = True
    last_seen: float = 0.0  # wall-clock seconds of the last heartbeat
    forced_down: bool = False
    cell: str = ""
    total: dict[str, int] = {}  # resource class -> total
    used: dict[str, int] = {}
    capacity: dict[str, int] = {}  # (total - reserved) * allocation ratio
    hypervisor_type: str = ""
    hypervisor_version: int = 0
    cpu_info: dict[str, object] = {}
    supported: tuple[tuple[str, str, str], ...] = ()  # (architecture, hypervisor type, vm mode)
    capabilities: dict[str, str] = {}
    disk_available_gb: int | None = None
    num_instances: int = 0
    num_io_ops: int = 0
    failed_builds: int = 0
    aggregates: tuple[tuple[str, dict[str, str]], ...] = ()  # (name, metadata)
    changed_at: int = 0

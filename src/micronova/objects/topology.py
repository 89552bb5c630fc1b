"""NUMA nodes, PCI and mediated devices: what a host has, what instances hold of it, and what an instance asks for.

A host reports a `NodeTopology`. `TopologyUse` adds up what instances hold. `TopologyRequest` is what flavor and image
of an instance ask for (`topology_request.py`), and an `Assignment` names the host's cells, CPUs, pages and devices that
an instance holds. `fitting.py` finds an assignment; claims record it (`db/topologies.py`); the order names it to the
host.
"""

from typing import Annotated, Final, Literal

import msgspec

from micronova.objects.host_limits import Count, Name, Ratio, Whole
from micronova.objects.port_resources import ServedPort
from micronova.objects.sized_cache import SizedCache

AffinityPolicy = Literal["legacy", "preferred", "required", "socket"]
DeviceType = Literal["type-PCI", "type-PF", "type-VF"]

LIVE_MIGRATABLE: Final = "live_migratable"
"""The key of aliases, of device specs and of the specs of a DeviceRequest; its value there is true or false."""

MOST_CELLS: Final = 64
MOST_CPUS: Final = 4096
MOST_DEVICES: Final = 2048
MOST_MDEVS: Final = 65_536  # of one device
MOST_MDEV_PARENTS: Final = 512  # devices of a node; each is a resource provider
LONGEST_MDEV_PARENT: Final = 64  # characters of the name of a device
LONGEST_TOPOLOGY: Final = 1 << 19
"""Bytes of what a host reports: a thousand CPUs and two thousand devices take less."""

MOST_PAGE_SIZES: Final = 8  # of a node
PAGE_SIZES: Final = frozenset(4 << exponent for exponent in range(23))
"""In KiB, from 4 KiB to 16 GiB: processors have no others. The scheduler has a column for each that a host reports."""
LARGEST_MEMORY: Final = 1 << 41
"""KiB of pages of one size: as much as the memory of a cell, in MiB, can be."""

_CPUS = msgspec.Meta(max_length=MOST_CPUS)
Cpus = Annotated[tuple[Count, ...], _CPUS]


class MemoryPages(msgspec.Struct, frozen=True, kw_only=True):
    """Memory pages of one size in a host's cell."""

    size_kib: Annotated[int, msgspec.Meta(ge=min(PAGE_SIZES), le=max(PAGE_SIZES))]
    total: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_MEMORY)]
    reserved: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_MEMORY)] = 0  # that the host keeps for itself

    def __post_init__(self) -> None:
        if self.size_kib not in PAGE_SIZES:
            raise ValueError(f"A memory page has a power of two of KiB, and not {self.size_kib}")
        if self.total * self.size_kib > LARGEST_MEMORY:
            raise ValueError(f"Memory pages of one size have more than {LARGEST_MEMORY} KiB together")


class HostCell(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node of a host, as far as instances may use it."""

    id: Count
    memory_mb: Count
    shared: Cpus = ()  # CPUs that vCPUs without a CPU of their own share
    dedicated: Cpus = ()  # CPUs of which each belongs to one vCPU
    siblings: Annotated[tuple[Cpus, ...], _CPUS] = ()  # CPUs by core, sorted; empty: each CPU is a core
    pages: Annotated[tuple[MemoryPages, ...], msgspec.Meta(max_length=MOST_PAGE_SIZES)] = ()
    socket: Whole | None = None


class PciDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A PCI device of a host that instances may have."""

    address: Name  # domain:bus:slot.function
    vendor_id: Name
    product_id: Name
    dev_type: DeviceType = "type-PCI"
    numa_node: Whole | None = None
    parent: Name | None = None  # address of the physical function, of a virtual one
    live_migratable: bool | None = None  # its state can be sent to a similar device; None: the host does not say


class MdevParent(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a host that offers mediated devices of one type. It is a resource provider below its node."""

    name: Annotated[
        str, msgspec.Meta(max_length=LONGEST_MDEV_PARENT, pattern=r"^[A-Za-z0-9_.-]+\Z")
    ]  # as libvirt names it
    mdev_type: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z0-9_.+-]+\Z")]
    total: Annotated[int, msgspec.Meta(ge=0, le=MOST_MDEVS)]  # those that exist, and those that can be made
    resource_class: Annotated[str, msgspec.Meta(max_length=247, pattern=r"^(VGPU|CUSTOM_[A-Z0-9_]+)\Z")] = "VGPU"


class NodeTopology(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has."""

    cells: Annotated[tuple[HostCell, ...], msgspec.Meta(max_length=MOST_CELLS)] = ()
    devices: Annotated[tuple[PciDevice, ...], msgspec.Meta(max_length=MOST_DEVICES)] = ()
    mdevs: Annotated[tuple[MdevParent, ...], msgspec.Meta(max_length=MOST_MDEV_PARENTS)] = ()
    # How often shared CPUs and memory of a cell may be given out. The conductor sets them as in the inventories.
    cpu_allocation_ratio: Ratio = 1.0
    ram_allocation_ratio: Ratio = 1.0

    def __post_init__(self) -> None:
        if len({each.size_kib for cell in self.cells for each in cell.pages}) > MOST_PAGE_SIZES:
            raise ValueError(f"The memory pages of a node have more than {MOST_PAGE_SIZES} sizes")


class CellUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What instances hold of a cell."""

    cpus: int = 0  # vCPUs on shared CPUs
    memory_mb: int = 0
    pinned: tuple[int, ...] = ()  # dedicated CPUs, sorted
    pages: dict[int, int] = {}  # size in KiB -> pages


class TopologyUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What instances hold of a host."""

    cells: dict[int, CellUse] = {}
    devices: tuple[str, ...] = ()  # addresses, sorted
    parents: dict[str, str] = {}  # of these, virtual functions with the addresses of their physical functions
    mdevs: dict[str, dict[str, int]] = {}  # device -> type -> mediated devices


NOTHING_USED: Final = TopologyUse()


class CellRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node of a guest."""

    id: int
    memory_mb: int
    shared: tuple[int, ...] = ()  # vCPUs on shared CPUs
    pinned: tuple[int, ...] = ()  # vCPUs that have a host CPU for themselves

    @property
    def vcpus(self) -> tuple[int, ...]:
        """All vCPUs of the node."""
        return tuple(sorted((*self.shared, *self.pinned)))


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """PCI devices of one alias. A device suits if it has all values of one of `specs`."""

    alias: str
    count: int
    specs: tuple[dict[str, str], ...]
    policy: AffinityPolicy = "legacy"

    @property
    def live_migratable(self) -> bool:
        """Whether it gets only devices with which a guest can be moved while it runs."""
        return all(spec.get(LIVE_MIGRATABLE) == "true" for spec in self.specs)


class TopologyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance asks for. Without `cells` it may be anywhere on its host."""

    cells: tuple[CellRequest, ...] = ()
    is_pinned: bool = False  # CPU policy dedicated or mixed: its memory is not given out twice
    has_shared: bool = True  # CPU policy shared or mixed
    thread_policy: str = "prefer"
    isolates_emulator: bool = False
    page_size: int | str | None = None  # KiB, or small, large, any; None: ordinary memory
    devices: tuple[DeviceRequest, ...] = ()


class CellAssignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a NUMA node of a guest is."""

    id: int  # of the guest's node
    host: int  # of the host's cell
    memory_mb: int
    shared: tuple[int, ...] = ()  # vCPUs
    pins: dict[int, int] = {}  # vCPU -> host CPU
    page_kib: int | None = None  # None: none was asked for


class AssignedDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A PCI device that an instance holds."""

    alias: str
    address: str
    parent: str | None = None  # its physical function, even when the host no longer lists the device
    live_migratable: bool = False  # it was chosen as such


class AssignedMdev(msgspec.Struct, frozen=True, kw_only=True):
    """A mediated device that an instance holds. Its host chooses one that exists, or makes one."""

    parent: str  # the device, as libvirt names it
    mdev_type: str


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance holds of a host, by the host's own names."""

    cells: tuple[CellAssignment, ...] = ()
    emulator: tuple[int, ...] = ()  # host CPUs of QEMU's own threads, in the host cell of the first guest cell
    devices: tuple[AssignedDevice, ...] = ()
    mdevs: tuple[AssignedMdev, ...] = ()
    ports: tuple[ServedPort, ...] = ()  # what other providers of its tree serve for them; the host is not told

    @property
    def pinned(self) -> int:
        """How many dedicated CPUs it has."""
        return sum(len(cell.pins) for cell in self.cells) + len(self.emulator)


def encode(what: NodeTopology | TopologyUse | Assignment) -> str:
    """Return it as it is stored: equal things have equal texts, because `fitting.py` sorts what they have."""
    return msgspec.json.encode(what).decode()


# Decoded, a text takes about fifteen times as much memory.
_MOST_KEPT: Final = 4 << 20
_LONGEST_KEPT: Final = 1 << 16


def _decode_topology(text: str) -> NodeTopology:
    return msgspec.json.decode(text, type=NodeTopology)


def _decode_use(text: str) -> TopologyUse:
    return msgspec.json.decode(text, type=TopologyUse) if text else NOTHING_USED


decode_topology: Final = SizedCache(_decode_topology, most=_MOST_KEPT, longest=_LONGEST_KEPT)
"""Returns a stored topology; many hosts have the same. Raises msgspec.ValidationError if it breaks a limit."""

decode_use: Final = SizedCache(_decode_use, most=_MOST_KEPT, longest=_LONGEST_KEPT)
"""Returns a stored use; an empty text is that of a host without a topology."""


def usable_topology(text: str) -> NodeTopology:
    """Return a stored topology, or that of a node without any parts if it breaks a limit, which earlier versions lack.

    So what instances hold of it can be given back.
    """
    try:
        return decode_topology(text)
    except msgspec.ValidationError:
        return NodeTopology()

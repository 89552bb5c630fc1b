"""Where on this host a guest's CPUs, NUMA nodes and huge pages are.

Pure functions of the request, the host's NUMA nodes and the CPUs that other guests have.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from micronova.objects.errors import BuildAborted, InsufficientResources
from micronova.objects.guest_cpus import SMALL_PAGE, CpuRequest, GuestCell
from micronova.virt.libvirt.host import Cell
from micronova.virt.libvirt.storage.records import PinRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """What the definition says about a guest's CPUs and memory."""

    vcpus: int
    sockets: int
    cores: int = 1
    threads: int = 1
    shared: tuple[int, ...] = ()  # host CPUs of vCPUs that are not pinned; empty: all
    pins: dict[int, int] = field(default_factory=dict)  # vCPU -> host CPU
    emulator: tuple[int, ...] = ()  # host CPUs of QEMU's own threads
    cells: tuple[GuestCell, ...] = ()
    page_kib: int | None = None  # size of huge pages; None: ordinary memory


def plan_cpus(
    request: CpuRequest,
    *,
    vcpus: int,
    cells: tuple[Cell, ...],
    shared: tuple[int, ...] = (),
    dedicated: tuple[int, ...] = (),
    taken: Collection[int] = (),
    kept: PinRecord | None = None,
) -> CpuPlan:
    """Return the plan for a guest; `kept` is its placement from its first start."""
    page = page_size(request.page_size, cells)
    if kept is not None:
        places, pins, emulator = kept.cells, kept.vcpus, kept.emulator
    else:
        free = [cpu for cpu in dedicated if cpu not in taken]
        places, pins = _place(request, cells, free)
        emulator = _emulator(request, [cpu for cpu in free if cpu not in pins.values()])
    if page is not None:
        _enough_pages(request.cells, places, cells, page)
    return CpuPlan(
        vcpus=vcpus,
        sockets=request.sockets,
        cores=request.cores,
        threads=request.threads,
        shared=shared,
        pins=pins,
        emulator=emulator,
        cells=tuple(
            GuestCell(id=cell.id, vcpus=cell.vcpus, memory_mb=cell.memory_mb, host=places.get(cell.id))
            for cell in request.cells
        ),
        page_kib=page,
    )


def page_size(wanted: int | str | None, cells: Iterable[Cell]) -> int | None:
    """Return the size of huge pages of this host in KiB, or None for ordinary memory."""
    if wanted is None:
        return None
    large = sorted({size for cell in cells for size, count in cell.pages.items() if size > SMALL_PAGE and count})
    if isinstance(wanted, str):
        if not large:
            raise InsufficientResources("This host has no huge pages.")
        return large[-1]
    if wanted not in large:
        raise InsufficientResources(f"This host has no memory pages of {wanted} KiB.")
    return wanted


def _place(request: CpuRequest, cells: tuple[Cell, ...], free: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return a host node for each of the guest's nodes, and a host CPU for each vCPU that is pinned."""
    places: dict[int, int] = {}
    pins: dict[int, int] = {}
    for cell in request.cells:
        wanted = [vcpu for vcpu in cell.vcpus if vcpu in request.pinned]
        for host in cells:
            if (host.id in places.values() and request.chose_cells) or (
                cell.memory_mb > host.memory_mb and len(cells) > 1
            ):
                continue
            chosen = _choose(request.thread_policy, host, [cpu for cpu in free if cpu in host.cpus], len(wanted))
            if chosen is not None:
                places[cell.id] = host.id
                pins.update(zip(wanted, chosen, strict=True))
                free = [cpu for cpu in free if cpu not in chosen]
                break
        else:
            raise InsufficientResources(
                f"No NUMA node of this host has {len(wanted)} dedicated CPUs and {cell.memory_mb} MB left."
                if wanted
                else f"No NUMA node of this host has {cell.memory_mb} MB."
            )
    return places, pins


def _choose(policy: str, host: Cell, free: list[int], count: int) -> list[int] | None:
    """Return free CPUs of one node, core by core, or None if there are too few."""
    cores = [[cpu for cpu in core if cpu in free] for core in host.siblings or tuple((cpu,) for cpu in host.cpus)]
    if policy == "isolate":
        # A core is isolated only if none of its threads is in use.
        whole = [core for core, all_ in zip(cores, host.siblings or cores, strict=False) if len(core) == len(all_)]
        cores = [core[:1] for core in whole]
    elif policy == "require":
        cores = [core for core in cores if len(core) > 1]
    found = [cpu for core in cores for cpu in core]
    return found[:count] if len(found) >= count else None


def _emulator(request: CpuRequest, free: list[int]) -> tuple[int, ...]:
    if not request.isolates_emulator:
        return ()
    if not free:
        raise InsufficientResources("This host has no dedicated CPU left for the guest's emulator threads.")
    return (free[0],)


def _enough_pages(guest: tuple[GuestCell, ...], places: dict[int, int], cells: tuple[Cell, ...], page: int) -> None:
    for cell in guest:
        if cell.memory_mb * 1024 % page:
            raise BuildAborted(f"{cell.memory_mb} MB is not a whole number of memory pages of {page} KiB.")
        host = next((host for host in cells if host.id == places.get(cell.id)), None)
        if host is not None and host.pages.get(page, 0) * page < cell.memory_mb * 1024:
            raise InsufficientResources(f"This host has fewer than {cell.memory_mb} MB in pages of {page} KiB.")

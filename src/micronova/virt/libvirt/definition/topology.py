"""A guest's CPU topology, CPU pinning, NUMA nodes and huge pages.

Pure functions of flavor, image, the host's NUMA nodes and the CPUs that other guests have.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from micronova.objects.cpu_sets import dedicated_vcpus, parse_cpus
from micronova.objects.errors import BuildAborted, InsufficientResources
from micronova.virt.libvirt.definition.properties import GuestProperties
from micronova.virt.libvirt.host import Cell
from micronova.virt.libvirt.storage.records import PinRecord

_UNITS = {"kb": 1, "kib": 1, "": 1, "mb": 1024, "mib": 1024, "gb": 1024 * 1024, "gib": 1024 * 1024}
SMALL_PAGE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestCell:
    """A NUMA node of the guest, and the host's node that it is on."""

    id: int
    vcpus: tuple[int, ...]
    memory_mb: int
    host: int | None = None


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
    properties: GuestProperties,
    *,
    vcpus: int,
    memory_mb: int,
    cells: tuple[Cell, ...],
    shared: tuple[int, ...] = (),
    dedicated: tuple[int, ...] = (),
    taken: Collection[int] = (),
    kept: PinRecord | None = None,
) -> CpuPlan:
    """Return the plan for a guest; `kept` is its placement from its first start."""
    sockets, cores, threads = cpu_topology(properties, vcpus)
    policy = properties.choice(
        properties.hardware("cpu_policy"), "hw:cpu_policy", ("shared", "dedicated", "mixed"), "shared"
    )
    page = page_size(properties, cells)
    guest_cells = guest_numa(properties, vcpus, memory_mb, needed=policy != "shared" or page is not None)
    pinned = _pinned_vcpus(properties, policy, vcpus)
    if kept is not None:
        places, pins, emulator = kept.cells, kept.vcpus, kept.emulator
    else:
        free = [cpu for cpu in dedicated if cpu not in taken]
        places, pins = _place(properties, guest_cells, pinned, cells, free)
        emulator = _emulator(properties, pinned, [cpu for cpu in free if cpu not in pins.values()])
    if page is not None:
        _enough_pages(guest_cells, places, cells, page)
    return CpuPlan(
        vcpus=vcpus,
        sockets=sockets,
        cores=cores,
        threads=threads,
        shared=shared,
        pins=pins,
        emulator=emulator,
        cells=tuple(
            GuestCell(id=cell.id, vcpus=cell.vcpus, memory_mb=cell.memory_mb, host=places.get(cell.id))
            for cell in guest_cells
        ),
        page_kib=page,
    )


def cpu_topology(properties: GuestProperties, vcpus: int) -> tuple[int, int, int]:
    """Return sockets, cores and threads within what is asked for, with as many sockets as possible."""

    def read(name: str) -> tuple[int | None, int]:
        wanted = properties.number(properties.hardware(name), f"hw:{name}", least=1)
        part = name.removeprefix("cpu_")
        most = properties.number(properties.hardware(f"cpu_max_{part}"), f"hw:cpu_max_{part}", least=1)
        return wanted, most or vcpus

    (sockets, max_sockets), (cores, max_cores), (threads, max_threads) = map(
        read, ("cpu_sockets", "cpu_cores", "cpu_threads")
    )
    best: tuple[int, int, int] | None = None
    for some_threads in _divisors(vcpus):
        for some_cores in _divisors(vcpus // some_threads):
            some_sockets = vcpus // some_threads // some_cores
            fits = some_sockets <= max_sockets and some_cores <= max_cores and some_threads <= max_threads
            asked = sockets in (None, some_sockets) and cores in (None, some_cores) and threads in (None, some_threads)
            if fits and asked and (best is None or (some_sockets, some_cores) > best[:2]):
                best = (some_sockets, some_cores, some_threads)
    if best is None:
        raise BuildAborted(f"No CPU topology with these sockets, cores and threads has {vcpus} CPUs.")
    return best


def page_size(properties: GuestProperties, cells: Iterable[Cell]) -> int | None:
    """Return the size of huge pages in KiB, or None for ordinary memory."""
    wanted = properties.hardware("mem_page_size")
    if wanted is None or wanted in ("small", "any"):
        return None
    large = sorted({size for cell in cells for size, count in cell.pages.items() if size > SMALL_PAGE and count})
    if wanted == "large":
        if not large:
            raise InsufficientResources("This host has no huge pages.")
        return large[-1]
    digits = wanted.rstrip("KMGBikmgb")
    unit = _UNITS.get(wanted[len(digits) :].lower())
    if not digits.isdigit() or unit is None:
        raise BuildAborted(f"hw:mem_page_size is {wanted!r}: it should be small, large, any, or a size such as 2MB.")
    size = int(digits) * unit
    if size <= SMALL_PAGE:
        return None
    if size not in large:
        raise InsufficientResources(f"This host has no memory pages of {size} KiB.")
    return size


def guest_numa(properties: GuestProperties, vcpus: int, memory_mb: int, *, needed: bool) -> tuple[GuestCell, ...]:
    """Divide the guest into NUMA nodes; without hw:numa_nodes there is one if it is `needed`, else none."""
    count = properties.number(properties.hardware("numa_nodes"), "hw:numa_nodes", least=1)
    if count is None:
        return (GuestCell(id=0, vcpus=tuple(range(vcpus)), memory_mb=memory_mb),) if needed else ()
    cpus, memory = properties.numbered("hw:numa_cpus"), properties.numbered("hw:numa_mem")
    if not cpus and not memory:
        if vcpus % count or memory_mb % count:
            raise BuildAborted(f"{vcpus} CPUs and {memory_mb} MB cannot be divided by {count} NUMA nodes evenly.")
        share = vcpus // count
        return tuple(
            GuestCell(id=cell, vcpus=tuple(range(cell * share, (cell + 1) * share)), memory_mb=memory_mb // count)
            for cell in range(count)
        )
    if set(cpus) != set(range(count)) or set(memory) != set(range(count)):
        raise BuildAborted(f"hw:numa_cpus.N and hw:numa_mem.N have to be given for all {count} NUMA nodes.")
    try:
        cells = tuple(
            GuestCell(id=cell, vcpus=parse_cpus(cpus[cell]), memory_mb=int(memory[cell])) for cell in range(count)
        )
    except ValueError as error:
        raise BuildAborted(f"The NUMA nodes that were asked for are wrong: {error}.") from None
    if sorted(cpu for cell in cells for cpu in cell.vcpus) != list(range(vcpus)):
        raise BuildAborted(f"hw:numa_cpus.N should name each of the {vcpus} CPUs once.")
    if sum(cell.memory_mb for cell in cells) != memory_mb:
        raise BuildAborted(f"hw:numa_mem.N should add up to {memory_mb} MB.")
    return cells


def _pinned_vcpus(properties: GuestProperties, policy: str, vcpus: int) -> tuple[int, ...]:
    try:
        chosen = dedicated_vcpus(policy, properties.hardware("cpu_dedicated_mask") or "", vcpus)
    except ValueError:
        chosen = ()
    if policy == "mixed" and (not chosen or len(chosen) >= vcpus or max(chosen) >= vcpus):
        raise BuildAborted("With hw:cpu_policy mixed, hw:cpu_dedicated_mask names some of the guest's CPUs, not all.")
    return chosen


def _place(
    properties: GuestProperties,
    guest: tuple[GuestCell, ...],
    pinned: tuple[int, ...],
    cells: tuple[Cell, ...],
    free: list[int],
) -> tuple[dict[int, int], dict[int, int]]:
    """Return a host node for each of the guest's nodes, and a host CPU for each vCPU that is pinned."""
    places: dict[int, int] = {}
    pins: dict[int, int] = {}
    if not guest:
        return places, pins
    asked = properties.hardware("numa_nodes") is not None
    for cell in guest:
        wanted = [vcpu for vcpu in cell.vcpus if vcpu in pinned]
        for host in cells:
            if (host.id in places.values() and asked) or (cell.memory_mb > host.memory_mb and len(cells) > 1):
                continue
            chosen = _choose(properties, host, [cpu for cpu in free if cpu in host.cpus], len(wanted))
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


def _choose(properties: GuestProperties, host: Cell, free: list[int], count: int) -> list[int] | None:
    """Return free CPUs of one node, core by core, or None if there are too few."""
    policy = properties.choice(
        properties.hardware("cpu_thread_policy"), "hw:cpu_thread_policy", ("prefer", "isolate", "require"), "prefer"
    )
    cores = [[cpu for cpu in core if cpu in free] for core in host.siblings or tuple((cpu,) for cpu in host.cpus)]
    if policy == "isolate":
        # A core is isolated only if none of its threads is in use.
        whole = [core for core, all_ in zip(cores, host.siblings or cores, strict=False) if len(core) == len(all_)]
        cores = [core[:1] for core in whole]
    elif policy == "require":
        cores = [core for core in cores if len(core) > 1]
    found = [cpu for core in cores for cpu in core]
    return found[:count] if len(found) >= count else None


def _emulator(properties: GuestProperties, pinned: tuple[int, ...], free: list[int]) -> tuple[int, ...]:
    wanted = properties.choice(
        properties.hardware("emulator_threads_policy"), "hw:emulator_threads_policy", ("share", "isolate"), "share"
    )
    if wanted == "share" or not pinned:
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


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

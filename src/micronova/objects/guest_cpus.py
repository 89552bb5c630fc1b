"""What flavor and image together ask for: CPU topology, pinning, NUMA nodes and the size of memory pages.

The API checks it when a server is created; the host that builds the guest reads it. So both agree.
"""

import math
from dataclasses import dataclass
from typing import Final

from micronova.objects.cpu_sets import LIMIT, parse_cpus
from micronova.objects.errors import Invalid
from micronova.objects.guest_properties import GuestProperties, choices, whole_number

_POLICIES: Final = choices("hw_cpu_policy")
_THREAD_POLICIES: Final = choices("hw_cpu_thread_policy")
AMOUNT: Final = "resources:PCPU"
"""The extra spec by which a flavor asks for dedicated CPUs in another way than by hw:cpu_policy."""
THREADS: Final = "trait:HW_CPU_HYPERTHREADING"
"""The extra spec, or property, that is another form of a thread policy."""
_PARTS: Final = ("sockets", "cores", "threads")
_UNITS: Final = {"kb": 1, "kib": 1, "": 1, "mb": 1024, "mib": 1024, "gb": 1024 * 1024, "gib": 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestCell:
    """A NUMA node of the guest."""

    id: int
    vcpus: tuple[int, ...]
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRequest:
    """What a guest's CPUs and memory should be."""

    sockets: int
    cores: int
    threads: int
    pinned: tuple[int, ...] = ()  # vCPUs that have a host CPU for themselves
    thread_policy: str = "prefer"
    isolates_emulator: bool = False  # QEMU's own threads get a host CPU for themselves
    shares_emulator: bool = False  # QEMU's own threads use the host's shared CPUs, if it names some
    page_size: int | str | None = None  # in KiB, or small, large or any; None: ordinary memory
    cells: tuple[GuestCell, ...] = ()
    policy: str = "shared"  # shared, dedicated or mixed

    @property
    def dedicated(self) -> int:
        """How many host CPUs the guest has for itself."""
        return len(self.pinned) + self.isolates_emulator


def cpu_request(properties: GuestProperties, vcpus: int, memory_mb: int) -> CpuRequest:
    """Return what flavor and image ask for; raise Invalid if that is impossible or they contradict each other."""
    sockets, cores, threads = cpu_topology(properties, vcpus)
    thread_policy = _thread_policy(properties)
    emulator = properties.choice(
        properties.flavor("hw:emulator_threads_policy"), "hw:emulator_threads_policy", ("share", "isolate"), ""
    )
    policy = _policy(properties)
    if _has_amount(properties, vcpus + (emulator == "isolate")):
        policy = "dedicated"
    mask = properties.flavor("hw:cpu_dedicated_mask")
    if policy == "shared":
        if thread_policy is not None:
            raise Invalid("A cpu_thread_policy needs hw:cpu_policy dedicated or mixed.")
        if emulator == "isolate":
            raise Invalid("hw:emulator_threads_policy isolate needs hw:cpu_policy dedicated or mixed.")
    if mask and policy != "mixed":
        raise Invalid("hw:cpu_dedicated_mask needs hw:cpu_policy mixed.")
    nodes = _numa_nodes(properties)
    page = page_size(properties)
    needs_cells = nodes is not None or page is not None or policy != "shared"
    if needs_cells and vcpus > LIMIT:
        raise Invalid(f"A guest with pinned CPUs, NUMA nodes or huge pages has at most {LIMIT} CPUs.")
    return CpuRequest(
        sockets=sockets,
        cores=cores,
        threads=threads,
        pinned=_pinned(policy, mask or "", vcpus),
        thread_policy=thread_policy or (_of_trait(properties) if policy != "shared" else None) or "prefer",
        isolates_emulator=emulator == "isolate",
        shares_emulator=emulator == "share",
        page_size=page,
        cells=_cells(properties, nodes or 1, vcpus, memory_mb) if needs_cells else (),
        policy=policy,
    )


def cpu_topology(properties: GuestProperties, vcpus: int) -> tuple[int, int, int]:
    """Return sockets, cores and threads: within the limits, and as near as possible to what is preferred."""

    def read(name: str) -> tuple[list[int], list[int]]:
        pairs = [properties.both(f"{name}{part}") for part in _PARTS]
        return (
            [
                properties.number(flavor, f"hw:{name}{part}") or 0
                for part, (flavor, _) in zip(_PARTS, pairs, strict=True)
            ],
            [properties.number(image, f"hw_{name}{part}") or 0 for part, (_, image) in zip(_PARTS, pairs, strict=True)],
        )

    flavor_most, image_most = read("cpu_max_")
    flavor_requested, image_requested = read("cpu_")
    for part, flavor, image in zip(_PARTS, flavor_most, image_most, strict=True):
        if flavor and image > flavor:
            raise Invalid(f"The image's hw_cpu_max_{part} is {image}; the flavor allows {flavor}.")
    most = [image or flavor or vcpus for flavor, image in zip(flavor_most, image_most, strict=True)]
    limited = [image or flavor for flavor, image in zip(flavor_most, image_most, strict=True)]
    for part, image, limit in zip(_PARTS, image_requested, limited, strict=True):
        if limit and image > limit:
            raise Invalid(f"The image's hw_cpu_{part} is {image}; at most {limit} are allowed.")
    requested = image_requested
    if not any(image_requested):
        # A flavor whose own limits or the image's exclude its preference has none.
        exceeds = any(limit and wanted > limit for wanted, limit in zip(flavor_requested, limited, strict=True))
        requested = [0, 0, 0] if exceeds else flavor_requested

    def rank(found: tuple[int, int, int]) -> tuple[int, int, int]:
        matches = sum(wanted == given for wanted, given in zip(requested, found, strict=True))
        return matches, found[0] * found[1], found[0]

    possible = [
        (vcpus // threads // cores, cores, threads)
        for threads in _divisors(vcpus)
        if threads <= most[2]
        for cores in _divisors(vcpus // threads)
        if cores <= most[1] and vcpus // threads // cores <= most[0]
    ]
    if not possible:
        limits = ", ".join(f"{limit} {part}" for limit, part in zip(limited, _PARTS, strict=True) if limit)
        raise Invalid(f"No CPU topology of {vcpus} CPUs has at most {limits}.")
    return max(possible, key=rank)


def page_size(properties: GuestProperties) -> int | str | None:
    """Return the size of memory pages in KiB, or small, large or any; None if none is asked for.

    An image may choose among what its flavor allows, and has none if the flavor has none: huge pages are scarce.
    """
    flavor, image = properties.both("mem_page_size")
    allowed = _parse_page_size(flavor, "hw:mem_page_size") if flavor else None
    if not image:
        chosen = allowed
    elif allowed in ("any", "large"):
        chosen = _parse_page_size(image, "hw_mem_page_size")
    else:
        raise Invalid(f"The image's hw_mem_page_size {image} is not allowed: the flavor has {flavor or 'none'}.")
    return chosen


def _parse_page_size(text: str, name: str) -> int | str:
    if text in ("small", "large", "any"):
        return text
    digits = text.rstrip("KMGBikmgb")
    unit = _UNITS.get(text[len(digits) :].lower())
    size = (whole_number(digits) or 0) * (unit or 0)
    if size < 1:
        raise Invalid(f"{name} is {text[:64]!r}: it should be small, large, any, or a size such as 2MB.")
    return size


def _policy(properties: GuestProperties) -> str:
    flavor, image = properties.both("cpu_policy")
    asked = properties.choice(image, "hw_cpu_policy", _POLICIES, "shared")
    if flavor is None:
        return asked
    policy = properties.choice(flavor, "hw:cpu_policy", _POLICIES, "shared")
    if (policy == "shared" and asked != "shared") or (policy == "mixed" and asked == "dedicated"):
        raise Invalid(f"The image's hw_cpu_policy {asked} is not allowed: the flavor has {policy}.")
    return policy


def _has_amount(properties: GuestProperties, needed: int) -> bool:
    """Return whether the flavor asks for dedicated CPUs by their amount; raise Invalid if it is not the one needed."""
    amount = properties.number(properties.flavor(AMOUNT), AMOUNT)
    if amount and amount != needed:
        raise Invalid(
            f"{AMOUNT} is {amount}: it should be {needed}, the number of the flavor's CPUs, and one more with "
            "hw:emulator_threads_policy isolate."
        )
    return bool(amount)


def _thread_policy(properties: GuestProperties) -> str | None:
    flavor, image = properties.both("cpu_thread_policy")
    for value, name in ((flavor, "hw:cpu_thread_policy"), (image, "hw_cpu_thread_policy")):
        properties.choice(value, name, _THREAD_POLICIES, "prefer")
    if flavor in (None, "prefer"):
        return flavor or image
    if image and image != flavor:
        raise Invalid(f"The image's hw_cpu_thread_policy {image} is not allowed: the flavor has {flavor}.")
    return flavor


def _of_trait(properties: GuestProperties) -> str | None:
    trait = properties.flavor(THREADS) or properties.image(THREADS)
    return {"required": "require", "forbidden": "isolate"}.get((trait or "").strip())


def _pinned(policy: str, mask: str, vcpus: int) -> tuple[int, ...]:
    if policy == "shared":
        return ()
    if policy == "dedicated":
        return tuple(range(vcpus))
    try:
        # A mask that begins with an exclusion ("^0") excludes from all vCPUs.
        chosen = parse_cpus(f"0-{vcpus - 1},{mask}" if mask.strip().startswith("^") else mask)
    except ValueError:
        chosen = ()
    if not chosen or len(chosen) >= vcpus or max(chosen) >= vcpus:
        raise Invalid("With hw:cpu_policy mixed, hw:cpu_dedicated_mask names some of the guest's CPUs, not all.")
    return chosen


def _numa_nodes(properties: GuestProperties) -> int | None:
    flavor, image = properties.both("numa_nodes")
    if flavor and image:
        raise Invalid("The image has hw_numa_nodes, which the flavor sets already.")
    return properties.number(flavor or image, "hw:numa_nodes", least=1)


def _cells(properties: GuestProperties, count: int, vcpus: int, memory_mb: int) -> tuple[GuestCell, ...]:
    """Divide the guest into NUMA nodes."""
    cpus, memory = properties.numbered("numa_cpus"), properties.numbered("numa_mem")
    if not cpus and not memory:
        if vcpus % count or memory_mb % count:
            raise Invalid(f"{vcpus} CPUs and {memory_mb} MB cannot be divided by {count} NUMA nodes evenly.")
        share = vcpus // count
        return tuple(
            GuestCell(id=cell, vcpus=tuple(range(cell * share, (cell + 1) * share)), memory_mb=memory_mb // count)
            for cell in range(count)
        )
    if sorted(cpus) != sorted(memory) or len(cpus) != count or max(cpus) >= count:
        raise Invalid(f"hw:numa_cpus.N and hw:numa_mem.N have to be given for all {count} NUMA nodes.")
    try:
        cells = tuple(
            GuestCell(
                id=cell,
                vcpus=parse_cpus(cpus[cell]),
                memory_mb=properties.number(memory[cell], f"hw:numa_mem.{cell}", least=1) or 0,
            )
            for cell in range(count)
        )
    except ValueError as error:
        raise Invalid(f"The NUMA nodes that were asked for are wrong: {error}.") from None
    for each in cells:
        if not each.vcpus:
            raise Invalid(f"hw:numa_cpus.{each.id} should name at least one CPU.")
    if sorted(cpu for cell in cells for cpu in cell.vcpus) != list(range(vcpus)):
        raise Invalid(f"hw:numa_cpus.N should name each of the {vcpus} CPUs once.")
    if sum(cell.memory_mb for cell in cells) != memory_mb:
        raise Invalid(f"hw:numa_mem.N should add up to {memory_mb} MB.")
    return cells


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in low if divisor * divisor != number]

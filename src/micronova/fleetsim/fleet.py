"""A synthetic fleet: how many hosts of which kinds, and what they look like to the scheduler.

A kind has the options of a simulated host (section `fake`), so that it can have NUMA nodes, dedicated CPUs, huge pages,
PCI devices and traits.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta

from micronova.conf.default import DefaultSettings
from micronova.conf.hosts import FakeSettings
from micronova.objects.errors import Invalid
from micronova.objects.scheduling import HostState
from micronova.objects.topology import encode
from micronova.objects.wrong_values import wrong_value
from micronova.placement.model import capacity, whole
from micronova.virt.fake.topology import topology_of

_NOT_OF_A_KIND: Final = frozenset({"hosts", "host_pattern", "rules"})
_HARDWARE: Final = tuple(name for name in FakeSettings.__struct_fields__ if name not in _NOT_OF_A_KIND)
ZONE: Final = "availability_zone"
_EXAMPLE: Final = '[[kinds]] with name = "general", share = 1, vcpus = 64, memory_mb = 262144, local_gb = 4096'


S = TypeVar("S", bound=msgspec.Struct)


class HostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that are alike: a kind of the fleet."""

    name: str
    share: float = 1.0  # of the fleet, relative to the shares of the other kinds
    hardware: FakeSettings = FakeSettings()
    aggregates: dict[str, dict[str, str]] = {}  # name -> metadata


class FleetModel(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of hosts, and the availability zones that they are spread over."""

    kinds: tuple[HostModel, ...]
    zones: tuple[str, ...] = ("az1", "az2", "az3")


def _general(name: str, share: float, vcpus: int) -> HostModel:
    hardware = FakeSettings(vcpus=vcpus, memory_mb=vcpus * 4096, local_gb=vcpus * 50, numa_nodes=2)
    return HostModel(name=name, share=share, hardware=hardware)


DEFAULT_FLEET: Final = FleetModel(
    kinds=(_general("small", 50, 16), _general("medium", 35, 32), _general("large", 15, 64))
)
"""Half of the hosts are small: a fleet grows over years, and newer hosts are larger."""


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a kind in a file that are not of `FakeSettings`."""

    name: Annotated[str, Meta(min_length=1)]
    share: Annotated[float, Meta(gt=0)] = 1.0
    aggregates: dict[str, dict[str, str]] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kinds: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)]
    zones: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] = ("nova",)


def read_fleet(path: Path) -> FleetModel:
    """Read the kinds of hosts from a TOML file; raise Invalid with what would be right."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise Invalid(f"Cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is not valid TOML: {error}.") from None
    try:
        file = _convert(document, _File, "the file")
        kinds = tuple(_kind(given) for given in file.kinds)
        for kind in kinds:
            topology_of(kind.hardware)
    except Invalid as error:
        raise Invalid(f"{path}: {error.message.rstrip('.')}. A kind of hosts is {_EXAMPLE}.") from None
    return FleetModel(kinds=kinds, zones=file.zones)


def _kind(given: Mapping[str, Any]) -> HostModel:
    fields = {name: given[name] for name in _Kind.__struct_fields__ if name in given}
    own = _convert(fields, _Kind, "a kind")
    options = {name: value for name, value in given.items() if name not in _Kind.__struct_fields__}
    if unknown := sorted(options.keys() - set(_HARDWARE)):
        raise Invalid(f"The kind {own.name} has the unknown option {unknown[0]}: it may have {', '.join(_HARDWARE)}")
    for name, metadata in own.aggregates.items():
        if ZONE in metadata:
            raise Invalid(
                f"The aggregate {name} of the kind {own.name} has the metadata {ZONE}: name the zones in `zones`, "
                "over which the hosts of each kind are spread"
            )
    hardware = _convert(options, FakeSettings, f"the kind {own.name}")
    return HostModel(name=own.name, share=own.share, hardware=hardware, aggregates=own.aggregates)


def _convert(found: Any, kind: type[S], whole: str) -> S:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise Invalid(wrong_value(error, kind).named(whole)) from None


def make_hosts(fleet: FleetModel, count: int, settings: DefaultSettings) -> list[HostState]:
    """Return empty hosts; their capacity follows from the allocation ratios and reserves of the settings."""
    total = sum(kind.share for kind in fleet.kinds)
    made = [0] * len(fleet.kinds)
    patterns = [_pattern(kind, settings) for kind in fleet.kinds]
    states = []
    for number in range(1, count + 1):
        lacking = [kind.share / total * number - made[index] for index, kind in enumerate(fleet.kinds)]
        chosen = lacking.index(max(lacking))
        zone = fleet.zones[made[chosen] % len(fleet.zones)]
        made[chosen] += 1
        name = f"host-{number:05}"
        states.append(
            msgspec.structs.replace(
                patterns[chosen],
                host=name,
                node=name,
                node_uuid=str(UUID(int=number)),
                zone=zone,
                host_ip=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            )
        )
    return states


def _pattern(kind: HostModel, settings: DefaultSettings) -> HostState:
    """Return a host of a kind, as conductors record one that reports this hardware."""
    ratios = settings.initial_allocation_ratios()
    topology = msgspec.structs.replace(
        topology_of(kind.hardware), cpu_allocation_ratio=ratios["VCPU"], ram_allocation_ratio=ratios["MEMORY_MB"]
    )
    dedicated = sum(len(cell.dedicated) for cell in topology.cells)
    amounts = {  # total, reserved, allocation ratio
        "VCPU": (kind.hardware.vcpus - dedicated, settings.reserved_host_cpus, ratios["VCPU"]),
        "MEMORY_MB": (kind.hardware.memory_mb, settings.reserved_host_memory_mb, ratios["MEMORY_MB"]),
        "DISK_GB": (kind.hardware.local_gb, -(-settings.reserved_host_disk_mb // 1024), ratios["DISK_GB"]),
        **({"PCPU": (dedicated, 0, 1.0)} if dedicated else {}),
    }
    reserved = {name: min(kept, total) for name, (total, kept, _) in amounts.items()}
    return HostState(
        host="",
        node="",
        node_uuid="",
        total={name: total for name, (total, _, _) in amounts.items()},
        reserved=reserved,
        capacity={name: capacity(total, reserved[name], ratio) for name, (total, _, ratio) in amounts.items()},
        max_unit={name: whole(total) for name, (total, _, _) in amounts.items()},
        allocation_ratio={name: ratio for name, (_, _, ratio) in amounts.items()},
        hypervisor_type="QEMU",
        hypervisor_version=10_000_000,
        cpu_info={"arch": "x86_64"},
        supported=(("x86_64", "kvm", "hvm"), ("x86_64", "qemu", "hvm")),
        traits=kind.hardware.traits,
        aggregates=tuple(sorted(kind.aggregates.items())),
        topology=encode(topology),
    )

"""Loading the compute driver that the settings name."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from random import Random
from typing import Any, Final

from micronova.http.image_downloads import ImageDownloads
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.clock import Clock
from micronova.objects.errors import Invalid, MicronovaError
from micronova.virt.driver import Driver

GROUP: Final = "micronova.drivers"
BUILT_IN: Final = {
    "fake": "micronova.virt.fake.setup:create",
    "libvirt": "micronova.virt.libvirt.setup:create",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSetup:
    """What a driver gets from the process that runs it."""

    host: str
    cloud_id: str
    clock: Clock
    random: Random
    state_dir: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the driver's own section of the settings
    device_spec: tuple[dict[str, Any], ...] = ()  # PCI devices that guests may have
    cpu_shared_set: str = ""  # CPUs of the host for guests that are not pinned; empty: all
    cpu_dedicated_set: str = ""  # CPUs of the host for pinned guests
    reserved_huge_pages: tuple[dict[str, Any], ...] = ()  # that the host keeps for itself: node, size in KiB, count
    mdev_types: tuple[str, ...] = ()  # types of mediated devices that guests may have…
    mdev_sections: Mapping[str, Any] = field(default_factory=dict)  # …and what the settings say of each
    image_service: str = ""  # URL that the driver may fetch images from by a Unix socket
    image_ca_file: str = ""  # PEM file of the authorities that verify the image service; empty: the system's
    volume_access: Path | None = None  # socket of the exporter, which lets guests of this host use volumes
    images: ImageDownloads = field(default_factory=ImageDownloads)  # for simulated hosts: also without a network
    vendor_data: VendorDataSource = field(default_factory=lambda: VendorDataSource(static={}))  # for config drives


DriverFactory = Callable[[DriverSetup], Mapping[str, Driver]]
"""Returns the drivers of a process by host name: one, unless the hosts are simulated."""


def load_compute_driver(name: str) -> DriverFactory:
    """Return the factory of a driver: a built-in one, or one that a package offers as an entry point."""
    target = BUILT_IN.get(name)
    offered: dict[str, EntryPoint] = {}
    if target is None:
        offered = {point.name: point for point in entry_points(group=GROUP)}
        if name not in offered:
            known = ", ".join(sorted({*BUILT_IN, *offered}))
            raise Invalid(f"There is no compute driver {name!r}: choose one of {known}.")
    try:
        factory = _import(target) if target else offered[name].load()
    except Exception as error:
        raise Invalid(f"The compute driver {name!r} cannot be loaded: {_line(error)}") from error
    if not callable(factory):
        raise Invalid(f"The compute driver {name!r} is wrong: its entry point is not a function that makes drivers.")
    found: DriverFactory = factory
    return found


def create_drivers(name: str, setup: DriverSetup) -> dict[str, Driver]:
    """Return the drivers of this process by host name."""
    factory = load_compute_driver(name)
    try:
        drivers = dict(factory(setup))
    except MicronovaError:
        raise
    except Exception as error:
        raise Invalid(f"The compute driver {name!r} cannot be started: {_line(error)}") from error
    for driver in drivers.values():
        if not isinstance(driver, Driver):
            raise Invalid(f"The compute driver {name!r} is wrong: {type(driver).__name__} lacks methods of a driver.")
    if not drivers:
        raise Invalid(f"The compute driver {name!r} is wrong: it made no host.")
    return drivers


def _import(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

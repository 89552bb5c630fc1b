"""Making a driver from settings, and checking whether this machine can have one."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import msgspec

from micronova.conf.libvirt import LibvirtSectionSettings, LibvirtSettings
from micronova.objects.cpu_sets import parse_cpus
from micronova.objects.errors import Invalid
from micronova.objects.mediated_devices import parse_mdev_types
from micronova.objects.pci_devices import parse_device_specs
from micronova.objects.wrong_values import wrong_value
from micronova.virt.libvirt.client.library import LibvirtMissing, load
from micronova.virt.libvirt.daemon.private import (
    PROGRAMS,
    SEEN_AS,
    PrivateLibvirtd,
    missing_directories,
)
from micronova.virt.libvirt.daemon.qemu_user import find_qemu_user
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.host import DEFAULT_URIS, HARDWARE_FLAGS, cpu_flags
from micronova.virt.libvirt.storage import sandbox, tools
from micronova.virt.libvirt.storage.guest_users import guest_ids
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.topology import reserved_pages
from micronova.virt.loader import DriverSetup

_HOSTS = UUID("8d0f2f5c-41f4-4f4b-9d2c-6d6963726f6e")
"""Namespace of the host uuids of private libvirtds."""

NEEDED_TOOLS = ("qemu-img", "genisoimage", "prlimit", "setpriv")
"""Of `tools.PACKAGES`, those that every guest needs; others format ephemeral and swap disks."""
EMULATORS = {"qemu-system-x86_64": "qemu-system-x86"}
NEEDS_ROOT = "A private libvirtd is started by root: run as root, or set libvirt.connection_uri."


def create(setup: DriverSetup) -> dict[str, LibvirtDriver]:
    """Return the driver of this host."""
    of_host = {name: getattr(setup, name) for name in ("cpu_shared_set", "cpu_dedicated_set", "reserved_huge_pages")}
    settings = _settings({**setup.options, **{name: value for name, value in of_host.items() if value}})
    host = setup.host or os.uname().nodename
    if setup.state_dir is None:
        raise Invalid("The libvirt driver needs a directory for its guests.")
    uri = settings.connection_uri or DEFAULT_URIS.get(settings.virt_type, "")
    root = state_root(setup.state_dir, settings)
    if uri:
        layout, daemon = Layout(root), None
    else:
        if settings.instances_path:
            raise Invalid("libvirt.instances_path is for an existing libvirt: set libvirt.connection_uri too.")
        daemon = private_libvirtd(setup.state_dir, setup.cloud_id, host, settings)
        layout = Layout(root, seen_as=SEEN_AS)
        uri = daemon.uri
    driver = LibvirtDriver(
        host,
        settings=settings,
        layout=layout,
        uri=uri,
        daemon=daemon,
        cloud_id=setup.cloud_id,
        clock=setup.clock,
        vendor_data=setup.vendor_data,
        image_service=setup.image_service,
        image_ca_file=setup.image_ca_file,
        device_specs=parse_device_specs(setup.device_spec),
        mdev_types=parse_mdev_types(setup.mdev_types, setup.mdev_sections),
        volume_access=setup.volume_access,
    )
    return {host: driver}


def state_root(state_dir: Path, settings: LibvirtSectionSettings) -> Path:
    """Return the directory of this host's guests."""
    return Path(settings.instances_path) if settings.instances_path else state_dir / "libvirt"


def private_libvirtd(
    state_dir: Path,
    cloud_id: str,
    host: str,
    settings: LibvirtSectionSettings,
    client: tuple[int, int] | None = None,
) -> PrivateLibvirtd:
    """Return the private libvirtd of a cloud's host; nothing is started.

    For an agent that is not root, root starts it first, with the agent's user and group as the client.
    """
    return PrivateLibvirtd(
        state_root(state_dir, settings).absolute(),
        host_uuid=str(uuid5(_HOSTS, f"{cloud_id}/{host}")),
        namespace=settings.network_namespace,
        user=find_qemu_user(settings.qemu_user, settings.qemu_group),
        client=client or (os.geteuid(), os.getegid()),
        security_driver=settings.security_driver,
        kvm=settings.virt_type == "kvm" or (settings.virt_type == "auto" and bool(cpu_flags() & HARDWARE_FLAGS)),
    )


def teardown(state_dir: Path, options: Mapping[str, Any] | None = None) -> bool:
    """Stop the private libvirtd of a directory and its guests, as switching the machine off would.

    Return whether there was one. Disks stay. Blocks.
    """
    directory = state_root(state_dir, _settings(options or {})).absolute()
    if not directory.is_dir() or directory.is_symlink():
        return False
    if os.geteuid() == 0 and directory.lstat().st_uid != 0:
        return False  # the agent's own: it uses an existing libvirt
    daemon = PrivateLibvirtd(directory, host_uuid=str(UUID(int=0)), user=find_qemu_user())
    found = daemon.running() or daemon.has_guests()
    daemon.stop()
    return found


def probe(options: Mapping[str, Any] | None = None) -> str | None:
    """Return why this machine cannot run guests, and what to install; None if it can."""
    settings = _settings(options or {})
    packages = [tools.PACKAGES[program] for program in NEEDED_TOOLS if shutil.which(program) is None]
    packages += [package for program, package in EMULATORS.items() if shutil.which(program) is None]
    private = not settings.connection_uri and settings.virt_type not in DEFAULT_URIS
    if private:
        packages += [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
        if missing_directories():
            packages.append("libvirt-daemon-system")
        try:
            find_qemu_user(settings.qemu_user, settings.qemu_group)
        except LibvirtMissing as error:
            if settings.qemu_user or settings.qemu_group:
                return str(error)
            packages.append("libvirt-daemon-system")
    binding = None
    try:
        load()
    except LibvirtMissing as error:
        binding = str(error)
    if packages:
        wanted = " ".join(sorted({*packages, *(("libvirt-dev", "pkg-config", "gcc") if binding else ())}))
        return f"Packages are missing: apt-get install --no-install-recommends {wanted}"
    if binding:
        return binding
    missing = sandbox.obstacle()
    if missing is not None:
        return f"Guests' disks cannot be made safely: {missing}."
    if private and os.geteuid() != 0:
        return NEEDS_ROOT
    return None


def _settings(options: Mapping[str, Any]) -> LibvirtSettings:
    try:
        settings = msgspec.convert(dict(options), LibvirtSettings)
        both = set(parse_cpus(settings.cpu_shared_set)) & set(parse_cpus(settings.cpu_dedicated_set))
        if both:
            raise ValueError(f"CPU {min(both)} is in cpu_shared_set and in cpu_dedicated_set: it can be in one only")
        reserved_pages(settings.reserved_huge_pages)
        guest_ids(settings.guest_uids, "")
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, LibvirtSettings).named("the section libvirt")
        raise Invalid(f"The settings of the libvirt driver are wrong: {wrong}.") from error
    except ValueError as error:
        raise Invalid(f"The settings of the libvirt driver are wrong: {error}") from error
    return settings

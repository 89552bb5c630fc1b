"""Hosts, orders and records for tests of the libvirt driver."""

from pathlib import Path
from typing import Any

import msgspec

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF, FixedIP
from micronova.objects.orders import InstanceSpec
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.definition.compose import HostProfile, compose
from micronova.virt.libvirt.definition.types import Definition
from micronova.virt.libvirt.host import Cell, HostFacts
from micronova.virt.libvirt.storage.disks import plan_disks
from micronova.virt.libvirt.storage.layout import Layout
from micronova.virt.libvirt.storage.records import GuestRecord

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
OTHER_UUID = "7c0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
IMAGE = ImageMeta(id="0f6c3a8e-0000-4000-8000-000000000001", disk_format="qcow2", size=100, checksum="ab" * 16)
MACHINES = frozenset({"pc", "q35", "pc-i440fx-7.2", "pc-q35-7.2"})
CELLS = (
    Cell(id=0, memory_mb=8192, cpus=(0, 1, 2, 3), siblings=((0, 2), (1, 3)), pages={4: 2_000_000, 2048: 512}),
    Cell(id=1, memory_mb=8192, cpus=(4, 5, 6, 7), siblings=((4, 6), (5, 7)), pages={4: 2_000_000, 2048: 1024}),
)


def facts(**changes: Any) -> HostFacts:
    known: dict[str, Any] = {
        "virt_type": "qemu",
        "hypervisor": "QEMU",
        "version": 7_002_000,
        "arch": "x86_64",
        "emulator": "/usr/bin/qemu-system-x86_64",
        "machines": MACHINES,
        "usable_models": frozenset({"Nehalem", "qemu64", "Haswell"}),
        "cpu_modes": frozenset({"host-model", "maximum", "custom"}),
        "disk_buses": frozenset({"ide", "scsi", "virtio", "usb", "sata"}),
        "video_models": frozenset({"vga", "virtio", "cirrus", "none"}),
        "cells": CELLS,
    }
    return HostFacts(**{**known, **changes})


def vif(number: int = 1, **changes: Any) -> VIF:
    known: dict[str, Any] = {
        "port_id": f"{number:08x}-1111-4222-8333-444444444444",
        "network_id": "net-1",
        "network_label": "private",
        "mac_address": f"fa:16:3e:00:00:{number:02x}",
        "fixed_ips": (FixedIP(address=f"10.0.0.{number}", subnet_id="sub-1"),),
        "vif_type": "bridge",
        "mtu": 1450,
        "details": {"bridge_name": "brq12345678-ab"},
        "subnets": (
            {
                "id": "sub-1",
                "cidr": "10.0.0.0/24",
                "ip_version": 4,
                "gateway_ip": "10.0.0.254",
                "dns_nameservers": ["10.0.0.2"],
                "host_routes": [],
                "enable_dhcp": True,
            },
        ),
    }
    return VIF(**{**known, **changes})


def flavor(**changes: Any) -> Flavor:
    known: dict[str, Any] = {"id": "1", "name": "tiny", "ram": 256, "vcpus": 1, "disk": 1}
    return Flavor(**{**known, **changes})


def instance(**changes: Any) -> InstanceSpec:
    known: dict[str, Any] = {
        "uuid": UUID,
        "project_id": "project-1",
        "user_id": "user-1",
        "name": "server-1",
        "hostname": "server-1",
        "flavor": flavor(),
        "image": IMAGE,
    }
    return InstanceSpec(**{**known, **changes})


async def _plugged() -> None: ...


def plan(
    *, vifs: tuple[VIF, ...] = (), devices: tuple[BlockDevice, ...] = (), ticket: str | None = None, **changes: Any
) -> GuestPlan:
    return GuestPlan(
        instance=instance(**changes),
        epoch=3,
        plugged=_plugged,
        network_info=vifs,
        block_devices=devices,
        image_url=ticket,
    )


def composed(
    *,
    host: HostFacts | None = None,
    settings: LibvirtSettings | None = None,
    properties: dict[str, Any] | None = None,
    specs: dict[str, str] | None = None,
    size: dict[str, Any] | None = None,
    vifs: tuple[VIF, ...] = (),
    devices: tuple[BlockDevice, ...] = (),
    vnc_on_socket: bool = True,
    profile: dict[str, Any] | None = None,
    layout: Layout | None = None,
    record: dict[str, Any] | None = None,
    **changes: Any,
) -> Definition:
    """Return the definition of a guest as the driver composes it."""
    settings = settings or LibvirtSettings()
    image = ImageMeta(id=IMAGE.id, disk_format="qcow2", size=100, checksum=IMAGE.checksum, properties=properties or {})
    a_plan = plan(
        vifs=vifs, devices=devices, flavor=flavor(extra_specs=specs or {}, **(size or {})), image=image, **changes
    )
    known: dict[str, Any] = {
        "uuid": UUID,
        "cloud": "cloud-1",
        "host": "host-1",
        "node": "host-1",
        "epoch": 3,
        "disks": plan_disks(a_plan, settings),
    }
    layout = layout or Layout(Path("/state/libvirt"), seen_as=Path("/var/lib/libvirt"))
    about = HostProfile(
        facts=host or facts(), settings=settings, layout=layout, vnc_on_socket=vnc_on_socket, **(profile or {})
    )
    return compose(about, a_plan.instance, GuestRecord(**{**known, **(record or {})}), vifs)


def guest_record(uuid: str = UUID, **changes: object) -> GuestRecord:
    made = GuestRecord(
        uuid=uuid, cloud="cloud-1", host="host-1", node="host-1", epoch=3, vcpus=2, memory_mb=512, local_gb=4
    )
    return msgspec.structs.replace(made, **changes)

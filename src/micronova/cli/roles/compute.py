"""The compute agent of this host, or of many simulated ones."""

from pathlib import Path
from typing import Any

import msgspec

from micronova.cli.vendor_data import vendor_data_source
from micronova.cli.wiring import Process, Role
from micronova.compute.manager import ComputeManager
from micronova.compute.settings import ComputeAgentSettings
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.virt.loader import DriverSetup, create_drivers


async def make(process: Process) -> Role:
    """Make the compute agent of this host, or of many simulated ones."""
    assert process.bus is not None
    default, compute, devices = process.settings.default, process.settings.compute, process.settings.devices
    section = {"fake": process.settings.fake, "libvirt": process.settings.libvirt}.get(compute.compute_driver)
    options: dict[str, Any] = {} if section is None else msgspec.to_builtins(section)
    drivers = create_drivers(
        compute.compute_driver,
        DriverSetup(
            host=default.host,
            cloud_id=process.cloud_id,
            clock=process.clock,
            random=process.random,
            state_dir=Path(process.directory.path),
            options=options,
            device_spec=process.settings.pci.device_spec,
            cpu_shared_set=compute.cpu_shared_set,
            cpu_dedicated_set=compute.cpu_dedicated_set,
            reserved_huge_pages=default.reserved_huge_pages,
            mdev_types=devices.enabled_mdev_types,
            mdev_sections=msgspec.to_builtins(devices.mdev),
            vendor_data=vendor_data_source(process.settings.api),
            image_service=process.settings.glance.endpoint_override,
            image_ca_file=process.settings.ssl.ca_file,
            volume_access=process.volume_access,
            images=process.clients.image_downloads(),
        ),
    )
    settings = ComputeAgentSettings(
        max_concurrent_builds=default.max_concurrent_builds,
        max_concurrent_live_migrations=default.max_concurrent_live_migrations,
        max_concurrent_snapshots=default.max_concurrent_snapshots,
        report_interval=default.report_interval,
        resource_interval=compute.resource_interval,
        boot_timeout=compute.boot_timeout,
        vif_plugging_timeout=default.vif_plugging_timeout,
        vif_plugging_is_fatal=default.vif_plugging_is_fatal,
        shutdown_timeout=default.shutdown_timeout,
        resume_guests_state_on_host_boot=bool(default.resume_guests_state_on_host_boot),
        force_config_drive=process.settings.libvirt.force_config_drive,
        shutdown_grace=compute.shutdown_grace,
        reserved_host_cpus=default.reserved_host_cpus,
        reserved_host_memory_mb=default.reserved_host_memory_mb,
        reserved_host_disk_mb=default.reserved_host_disk_mb,
        fixed_allocation_ratios=default.fixed_allocation_ratios(),
        initial_allocation_ratios=default.initial_allocation_ratios(),
        compute_monitors=default.compute_monitors,
        console_relay_listen=process.settings.console.relay_listen,
    )
    manager = ComputeManager(
        settings,
        drivers,
        process.bus,
        HostConductorAPI(process.bus, process.clock, process.random),
        process.clock,
        process.random,
        process.relay_socket,
        process.clients.image_uploads(),
    )
    process.telemetry.metrics.gauge(
        "micronova_builds_in_flight", "Builds that run on the hosts of this process.", manager.builds_in_flight
    )
    return manager

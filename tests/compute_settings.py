"""Settings of a compute agent for tests."""

from typing import Any

from micronova.compute.settings import ComputeAgentSettings


def compute_settings(**changes: Any) -> ComputeAgentSettings:
    """Return settings of a host that reserves nothing and offers four times its CPUs."""
    values: dict[str, Any] = {
        "max_concurrent_builds": 10,
        "max_concurrent_live_migrations": 1,
        "max_concurrent_snapshots": 5,
        "report_interval": 5.0,
        "resource_interval": 60.0,
        "boot_timeout": 300.0,
        "vif_plugging_timeout": 300.0,
        "vif_plugging_is_fatal": True,
        "shutdown_timeout": 60.0,
        "shutdown_grace": 10.0,
        "reserved_host_cpus": 0,
        "reserved_host_memory_mb": 0,
        "reserved_host_disk_mb": 0,
        "fixed_allocation_ratios": {},
        "initial_allocation_ratios": {"VCPU": 4.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0},
        "resume_guests_state_on_host_boot": False,
        "force_config_drive": False,
        "compute_monitors": (),
        "console_relay_listen": "",
    }
    return ComputeAgentSettings(**(values | changes))

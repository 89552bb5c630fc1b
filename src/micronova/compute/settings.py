"""The settings of the compute agent."""

import msgspec


class ComputeAgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's settings, the same for all hosts of a process; times are in seconds. `conf/` has the defaults."""

    max_concurrent_builds: int  # per host; 0: no limit
    max_concurrent_live_migrations: int  # per host, of those that it sends; 0: no limit
    max_concurrent_snapshots: int  # per host; 0: no limit
    report_interval: float
    resource_interval: float
    boot_timeout: float  # 0: boots are not watched
    vif_plugging_timeout: float  # 0: do not wait
    vif_plugging_is_fatal: bool
    shutdown_timeout: float
    resume_guests_state_on_host_boot: bool
    force_config_drive: bool  # of guests that are built
    shutdown_grace: float  # how long running orders may continue when the agent is stopped
    reserved_host_cpus: int
    reserved_host_memory_mb: int
    reserved_host_disk_mb: int
    fixed_allocation_ratios: dict[str, float]  # by resource class; others are those of the inventories
    initial_allocation_ratios: dict[str, float]  # with which the inventories of a new host begin
    compute_monitors: tuple[str, ...]
    console_relay_listen: str  # ADDRESS:PORT for console proxies on other machines

    def reserved(self) -> dict[str, int]:
        """Return what is reserved for the host itself, by resource class."""
        return {
            "VCPU": self.reserved_host_cpus,
            "MEMORY_MB": self.reserved_host_memory_mb,
            "DISK_GB": -(-self.reserved_host_disk_mb // 1024),
        }

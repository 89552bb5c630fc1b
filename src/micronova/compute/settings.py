"""What an operator can decide about the compute agent."""

import msgspec


class ComputeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's settings, alike for all hosts of a process; times are seconds."""

    max_concurrent_builds: int = 10  # of each host; 0: no limit
    report_interval: float = 5.0
    resource_interval: float = 60.0
    boot_timeout: float = 300.0  # 0: guests are not watched
    vif_plugging_timeout: float = 300.0  # 0: do not wait
    vif_plugging_is_fatal: bool = True
    shutdown_timeout: float = 60.0
    shutdown_grace: float = 10.0  # how long running work may go on when the agent is stopped
    reserved_host_cpus: int = 0
    reserved_host_memory_mb: int = 0
    reserved_host_disk_mb: int = 0
    cpu_allocation_ratio: float = 4.0
    ram_allocation_ratio: float = 1.0
    disk_allocation_ratio: float = 1.0
    console_relay_listen: str = ""  # ADDRESS:PORT for console proxies on other machines

    def reserved(self) -> dict[str, int]:
        """What is kept for the host itself, by resource class."""
        return {
            "VCPU": self.reserved_host_cpus,
            "MEMORY_MB": self.reserved_host_memory_mb,
            "DISK_GB": -(-self.reserved_host_disk_mb // 1024),
        }

    def allocation_ratios(self) -> dict[str, float]:
        """How far each resource class may be overcommitted."""
        return {
            "VCPU": self.cpu_allocation_ratio,
            "MEMORY_MB": self.ram_allocation_ratio,
            "DISK_GB": self.disk_allocation_ratio,
        }

"""The settings of simulated hosts."""

import msgspec

from micronova.virt.fake.faults import FaultRule


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fake driver's section of the settings."""

    hosts: int = 1
    first_host: int = 1  # so that several processes can share one series of names
    host_pattern: str = "fake-{}"
    nodes_per_host: int = 1
    vcpus: int = 64  # of each node
    memory_mb: int = 262_144
    local_gb: int = 4_096
    rules: tuple[FaultRule, ...] = ()  # also for latencies, by rules of the kind "delay"

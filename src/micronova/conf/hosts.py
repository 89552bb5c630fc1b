"""Settings of the agents of a host and of the fake driver."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class ComputeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent on a host."""

    compute_driver: Annotated[
        str, Meta(description="Hypervisor driver: fake, libvirt, or the entry point of another.")
    ] = "fake"
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds that running work has to end when the agent is told to stop.")
    ] = 10.0
    resource_interval: Annotated[float, Meta(gt=0, description="Seconds between reports of a host's resources.")] = 60.0
    boot_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds after which a guest that shows no sign of booting is in ERROR; 0: never."),
    ] = 300.0
    cpu_shared_set: Annotated[
        str, Meta(description='CPUs of a libvirt host for guests that are not pinned, e.g. "2-7,^5"; empty: all.')
    ] = ""
    cpu_dedicated_set: Annotated[
        str,
        Meta(
            description="CPUs of a libvirt host for pinned guests, each for one guest only; empty: none. Simulated "
            "hosts have fake.cpu_dedicated_set."
        ),
    ] = ""


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated hypervisor."""

    hosts: Annotated[int, Meta(ge=1, description="Simulated hosts in one process.")] = 1
    host_pattern: Annotated[str, Meta(description="Names of the simulated hosts; {} stands for the number.")] = (
        "fake-{}"
    )
    vcpus: Annotated[int, Meta(ge=1, description="CPUs of each simulated host.")] = 64
    memory_mb: Annotated[int, Meta(ge=1, description="MiB of memory of each simulated host.")] = 262144
    local_gb: Annotated[int, Meta(ge=1, description="GiB of disk of each simulated host.")] = 4096
    numa_nodes: Annotated[
        int, Meta(ge=1, le=64, description="NUMA nodes of each simulated host; its CPUs and memory are divided evenly.")
    ] = 1
    threads_per_core: Annotated[int, Meta(ge=1, description="Hardware threads of each core of a simulated host.")] = 1
    cpu_dedicated_set: Annotated[
        str, Meta(description='CPUs of each simulated host for pinned guests, e.g. "8-63"; the others are shared.')
    ] = ""
    pages_2mb: Annotated[
        int, Meta(ge=0, description="Memory pages of 2 MiB in each NUMA node of a simulated host.")
    ] = 0
    pages_1gb: Annotated[
        int, Meta(ge=0, description="Memory pages of 1 GiB in each NUMA node of a simulated host.")
    ] = 0
    pci_devices: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="PCI devices of each simulated host that guests may have: tables with address, vendor_id, "
            "product_id, dev_type, numa_node, parent (the address of a virtual function's physical function) and "
            "live_migratable (true or false)."
        ),
    ] = ()
    mdev_devices: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Devices of each simulated host that offer mediated devices: tables with address and types, "
            "which says how many of each type there can be. devices.enabled_mdev_types says which of them guests may "
            "have."
        ),
    ] = ()
    traits: Annotated[
        tuple[str, ...],
        Meta(
            description="Traits of each simulated host: names of os-traits that begin with COMPUTE_, HW_ or STORAGE_, "
            "and names that begin with CUSTOM_HOST_."
        ),
    ] = ()
    rules: Annotated[
        tuple[dict[str, Any], ...], Meta(description="Fault and latency rules; see docs/fake-driver.md.")
    ] = ()


class NetworkAgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network agent of a host."""

    connections_per_port: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="Connections that the kernel tracks for one port at once; further ones are dropped, so that "
            "one guest cannot fill the kernel's table (net.netfilter.nf_conntrack_max). Raise it for guests with more "
            "connections, and that table with it. 0 is no limit.",
        ),
    ] = 10_000
    metadata_connections_per_guest: Annotated[
        int, Meta(ge=1, description="Connections of one guest to its metadata proxy at once; further ones get a 503.")
    ] = 16
    metadata_connections_per_network: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of one network on the host to its metadata proxy at once; further "
            "ones get a 503.",
        ),
    ] = 256
    metadata_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of the host to metadata proxies at once; further ones get a 503. "
            "Each takes two file descriptors of the network agent.",
        ),
    ] = 1024
    metadata_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds within which a guest has to send its metadata request, and again to receive the "
            "answer; then the connection is closed.",
        ),
    ] = 10.0

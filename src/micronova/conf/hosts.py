"""Settings of the agents of a host and of the fake driver."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class ComputeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent on a host."""

    compute_driver: Annotated[
        str,
        Meta(
            description="Hypervisor driver: fake, libvirt, or the entry point of another. Set it to libvirt on "
            "hosts that run real guests."
        ),
    ] = "fake"
    shutdown_grace: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that running work has to end when the agent is told to stop. Raise it if builds "
            "take long and should end before the agent stops.",
        ),
    ] = 10.0
    resource_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between reports of a host's resources. Raise it if the reports of many hosts "
            "burden the database.",
        ),
    ] = 60.0
    boot_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a guest that shows no sign of booting is in ERROR; 0: never. Raise it "
            "if guests boot slowly, such as without KVM.",
        ),
    ] = 300.0
    cpu_shared_set: Annotated[
        str,
        Meta(
            description='CPUs of a libvirt host for guests that are not pinned, e.g. "2-7,^5"; empty: all. Set it '
            "if the host needs CPUs for itself.",
            examples=["2-7,^5"],
        ),
    ] = ""
    cpu_dedicated_set: Annotated[
        str,
        Meta(
            description="CPUs of a libvirt host for pinned guests, each for one guest only; empty: none. Simulated "
            "hosts have fake.cpu_dedicated_set. Set it if flavors have hw:cpu_policy=dedicated.",
            examples=["8-63"],
        ),
    ] = ""


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated hypervisor."""

    hosts: Annotated[int, Meta(ge=1, description="Simulated hosts in one process. Raise it to try a larger cloud.")] = 1
    host_pattern: Annotated[
        str,
        Meta(
            description="Names of the simulated hosts; {} stands for the number. Change it if several processes "
            "simulate hosts, whose names must differ."
        ),
    ] = "fake-{}"
    vcpus: Annotated[
        int, Meta(ge=1, description="CPUs of each simulated host. Change it to try hosts of another size.")
    ] = 64
    memory_mb: Annotated[
        int, Meta(ge=1, description="MiB of memory of each simulated host. Change it to try hosts of another size.")
    ] = 262144
    local_gb: Annotated[
        int, Meta(ge=1, description="GiB of disk of each simulated host. Change it to try hosts of another size.")
    ] = 4096
    numa_nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="NUMA nodes of each simulated host, among which CPUs and memory of the host are divided "
            "evenly. Raise it to try servers with a NUMA topology.",
        ),
    ] = 1
    threads_per_core: Annotated[
        int,
        Meta(
            ge=1,
            description="Hardware threads of each core of a simulated host. Raise it to try policies of hardware "
            "threads.",
        ),
    ] = 1
    cpu_dedicated_set: Annotated[
        str,
        Meta(
            description='CPUs of each simulated host for pinned guests, e.g. "8-63"; the others are shared. Set it '
            "to try pinned guests.",
            examples=["8-63"],
        ),
    ] = ""
    pages_2mb: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory pages of 2 MiB in each NUMA node of a simulated host. Raise it to try guests with "
            "huge pages.",
        ),
    ] = 0
    pages_1gb: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory pages of 1 GiB in each NUMA node of a simulated host. Raise it to try guests with "
            "huge pages.",
        ),
    ] = 0
    pci_devices: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="PCI devices of each simulated host that guests may have: tables with address, vendor_id, "
            "product_id, dev_type, numa_node, parent (the address of a virtual function's physical "
            "function) and live_migratable (true or false). Set it to try PCI passthrough.",
            examples=[[{"address": "0000:81:00.0", "vendor_id": "10de", "product_id": "1eb8"}]],
        ),
    ] = ()
    mdev_devices: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Devices of each simulated host that offer mediated devices: tables with address and "
            "types, which says how many of each type there can be. devices.enabled_mdev_types says "
            "which types guests may have. Set it to try virtual GPUs.",
            examples=[[{"address": "0000:84:00.0", "types": {"nvidia-35": 16}}]],
        ),
    ] = ()
    traits: Annotated[
        tuple[str, ...],
        Meta(
            description="Traits of each simulated host: names of os-traits that begin with COMPUTE_, HW_ or "
            "STORAGE_, and names that begin with CUSTOM_HOST_. Set it to try flavors and images that "
            "require traits.",
            examples=[["HW_CPU_X86_AVX2"]],
        ),
    ] = ()
    rules: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Fault and latency rules; see docs/fake-driver.md. Set it to try what happens when a host "
            "is slow or fails.",
            examples=[[{"operation": "spawn", "kind": "error", "probability": 0.1}]],
        ),
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
        int,
        Meta(
            ge=1,
            description="Connections of one guest to the metadata proxy at once; further ones get a 503. Raise it "
            "if guests ask for metadata with many connections.",
        ),
    ] = 16
    metadata_connections_per_network: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of one network on the host to the metadata proxy at once; "
            "further ones get a 503. Raise it if a network has many guests on one host.",
        ),
    ] = 256
    metadata_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of the host to metadata proxies at once; further ones get a "
            "503. Each takes two file descriptors of the network agent. Raise it if a host has many "
            "guests.",
        ),
    ] = 1024
    metadata_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds within which a guest has to send a metadata request, and again to receive the "
            "answer; then the connection is closed. Raise it if guests are slow.",
        ),
    ] = 10.0

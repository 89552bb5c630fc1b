"""Synthetic hosts and requests, with the settings, from a seed: for our scheduler and, as plain data, for Nova's."""

import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec
from micronova.objects.topology import NOTHING_USED, NodeTopology, TopologyUse, encode
from micronova.scheduler.image_counts import pairs
from tests.nova_numa.cases import PRODUCTS, a_host, plain_host

NOW = 1_790_000_000.0
HOSTS = 25
OPERATORS = ("=", "==", "!=", ">=", "<=", "s==", "s!=", "s>", "s>=", "s<", "s<=", "<in>", "<all-in>", "<or>", "")
ALIASES = {f"device-{product}": {"vendor_id": "8086", "product_id": product} for product in PRODUCTS}
METRICS = ("cpu.percent", "cpu.frequency")  # names that Nova's objects accept


@dataclass(frozen=True)
class Case:
    """One request to a few hosts."""

    settings: FilterSchedulerSettings
    metrics: MetricsSettings
    hosts: list[HostState]
    spec: RequestSpec
    for_nova: dict[str, Any]


class Maker:
    """Makes cases. Whatever a filter may look at takes few values, so that it matters often."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _some(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def case(self) -> Case:
        """Make a case."""
        image = self._image("image-1") if self._chance(0.8) else None
        settings = FilterSchedulerSettings(
            max_io_ops_per_host=self._some(1, 2, 8),
            max_instances_per_host=self._some(1, 3, 50),
            isolated_images=self._some((), (), ("image-1",), ("image-2",)),
            isolated_hosts=self._some((), ("host-1", "host-2", "host-3")),
            restrict_isolated_hosts_to_isolated_images=self._some(True, False),
            aggregate_image_properties_isolation_namespace=self._some("", "", "os"),
            aggregate_image_properties_isolation_separator=self._some(".", "_"),
            image_properties_default_architecture=self._some("", "", "x86_64", "aarch64"),
            image_props_weight_multiplier=self._some(0.0, 1.0, -2.0),
            image_props_weight_setting=self._some((), ("os_distro=2.0", "hw_vm_mode=0.5", "hw_boot_menu=0.25")),
            **{name: self._some(0.0, 1.0, -1.5) for name in _MULTIPLIERS},
        )
        metrics = MetricsSettings(
            weight_setting=self._some((), ("cpu.percent=-1.0",), ("cpu.percent=-1.0", "cpu.frequency=0.5")),
            required=self._some(True, False, False),
            weight_multiplier=self._some(1.0, -2.0),
        )
        aggregates = {name: self._metadata() for name in ("a", "b", "c", "d")}
        members = [f"00000000-0000-4000-8000-0000000000{number:02}" for number in range(6)]
        homes = {member: self._random.randrange(HOSTS) for member in members if self._chance(0.8)}
        made = [
            self._host(number, aggregates, [member for member, home in homes.items() if home == number])
            for number in range(HOSTS)
        ]
        group = self._group()
        spec = RequestSpec(
            project_id=self._some("project-1", "project-2"),
            user_id="user",
            flavor=Flavor(
                id="1",
                name=self._some("m1.small", "m1.large"),
                ram=1024,
                vcpus=2,
                disk=10,
                extra_specs=self._specs() | self._asked_hardware(),
            ),
            image=image,
            hints=self._hints(members),
            server_group=group,
        )
        return _complete(settings, metrics, made, spec, members if group else [])

    def _group(self) -> GroupSpec | None:
        if self._chance(0.4):
            return None
        policy = self._some("affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity")
        most = self._some(1, 2) if policy == "anti-affinity" else 1
        return GroupSpec(id="group", policy=policy, max_server_per_host=most)

    def _image(self, id: str) -> ImageMeta:
        """An image; its properties have newer and older names, and values in several spellings."""
        properties = {}
        for names, values in (
            ("hw_architecture architecture", ("x86_64", "aarch64", "amd64", "AARCH64")),
            ("img_hv_type hypervisor_type", ("kvm", "qemu", "QEMU", "xapi")),
            ("hw_vm_mode vm_mode", ("hvm", "xen", "HVM", "hv")),
            ("os_distro vmware_ostype", ("debian", "fedora")),
            ("img_hv_requested_version hypervisor_version_requires", (">=6.0", "<6.2, >5.0", "!=7.2")),
            ("own_colour", ("red", "blue")),
            ("os_type", ("linux", "Linux", "windows")),
            ("hw_disk_bus", ("scsi", "virtio")),
            ("vmware_adaptertype", ("ide", "lsiLogic", "paraVirtual")),
            ("hw_vif_model", ("e1000", "VirtualE1000", "virtio")),
            ("hw_boot_menu", ("yes", "true", "false", "True")),
            ("os_require_quiesce", ("1", "no")),
            ("hw_video_ram", ("8", "08", "0")),
            ("trait:HW_CPU_X86_AVX2", ("required",)),
        ):
            for name in names.split():
                if self._chance(0.12):
                    properties[name] = self._some(*values)
        return ImageMeta(id=id, properties=properties)

    def _metadata(self) -> dict[str, str]:
        choices = {
            "filter_tenant_id": ("project-1", "project-3", "project-1, project-3"),
            "filter_tenant_id_more": ("project-2",),
            "instance_type": ("m1.small", "m1.large,m1.small", "m1.tiny"),
            "ssd": ("true", "false", "true, false", "3", "12"),
            "os_distro": ("debian", "debian,fedora"),
            "hw_vm_mode": ("hvm", "xen"),
            "own_colour": ("red", "blue"),
            "architecture": ("x86_64",),
            "hw_architecture": ("x86_64", "aarch64", "amd64"),
            "img_hv_type": ("qemu", "xen"),
            "os_type": ("linux", "windows"),
            "hw_disk_bus": ("ide", "virtio", "scsi"),
            "hw_scsi_model": ("lsilogic", "vmpvscsi"),
            "hw_vif_model": ("e1000", "virtio"),
            "hw_boot_menu": ("True", "true", "False"),
            "os_require_quiesce": ("True", "False"),
            "hw_video_ram": ("8", "08", "0"),
            "trait:HW_CPU_X86_AVX2": ("required", "wanted"),
            "max_io_ops_per_host": ("1", "4", "many"),
            "max_instances_per_host": ("2", "5", "2.5"),
            **dict.fromkeys((*_MULTIPLIERS, "metrics_weight_multiplier"), ("0.5", "2", "-1", "none")),
        }
        return {name: self._some(*values) for name, values in choices.items() if self._chance(0.15)}

    def _host(self, number: int, aggregates: dict[str, dict[str, str]], members: list[str]) -> dict[str, Any]:
        vcpus = self._some(4, 8)
        ratio = self._some(1.0, 4.0, 16.0)
        total = {"VCPU": vcpus, "MEMORY_MB": vcpus * 1024, "DISK_GB": vcpus * 10}
        most = {"VCPU": int(vcpus * ratio), "MEMORY_MB": total["MEMORY_MB"], "DISK_GB": total["DISK_GB"]}
        topology, use = self._hardware(ratio) if self._chance(0.8) else (NodeTopology(), NOTHING_USED)
        dedicated = sum(len(cell.dedicated) for cell in topology.cells)
        instances: dict[str, Any] = {
            f"00000000-0000-4000-8000-00000001{number:04}": self._image("image-3") if self._chance(0.7) else None
            for _ in range(self._some(0, 1))
        }
        for member in members:
            instances[member] = self._image("image-2")
        return {
            "host": f"host-{number}",
            "node": f"node-{number}",
            "node_uuid": f"00000000-0000-4000-8000-00000002{number:04}",
            "enabled": self._chance(0.9),
            "forced_down": self._chance(0.1),
            "last_seen": NOW - self._some(0, 5, 59, 60, 61, 3600),
            "total": total | {"PCPU": dedicated},
            "capacity": most | {"PCPU": dedicated},
            "used": {
                **{name: self._random.randrange(amount + 1) for name, amount in most.items()},
                "PCPU": sum(len(cell.pinned) for cell in use.cells.values()),
            },
            "topology": encode(topology) if topology.cells else "",
            "held": encode(use) if topology.cells else "",
            "hardware": plain_host(topology, use) if topology.cells else None,
            "cpu_allocation_ratio": ratio,
            "allocation_ratio": {"VCPU": ratio, "MEMORY_MB": 1.0, "DISK_GB": 1.0},
            "hypervisor_type": self._some("QEMU", "ironic"),
            "hypervisor_version": self._some(5_002_000, 6_001_000, 7_002_000),
            "cpu_info": {"arch": "x86_64", "topology": {"cores": self._some(4, 16)}, "features": ["aes", "avx2"]},
            "supported": [self._some(("x86_64", "kvm", "hvm"), ("aarch64", "qemu", "hvm"), ("x86_64", "qemu", "xen"))],
            "capabilities": self._some({}, {"gpu": "A100"}, {"gpu": "3"}),
            "num_instances": self._random.randrange(6),
            "num_io_ops": self._random.randrange(4),
            "failed_builds": self._some(0, 0, 1, 3),
            "host_ip": self._some("10.0.0.5", "10.0.1.7", "10.9.0.1", "fd00::5"),
            "metrics": {name: self._random.randrange(100) for name in METRICS if self._chance(0.8)},
            "aggregates": [(name, aggregates[name]) for name in aggregates if self._chance(0.3)],
            "instances": instances,
        }

    def _hardware(self, ratio: float) -> tuple[NodeTopology, TopologyUse]:
        """Cells and devices, without virtual and physical functions: `make nova-numa` compares these."""
        topology, use = a_host(self._random, devices=self._chance(0.6), cpu_ratio=ratio, ram_ratio=1.0)
        plain = tuple(each for each in topology.devices if each.dev_type == "type-PCI")
        held = tuple(each.address for each in plain if each.address in use.devices)
        return msgspec.structs.replace(topology, devices=plain), msgspec.structs.replace(use, devices=held)

    def _asked_hardware(self) -> dict[str, str]:
        """Extra specs for NUMA nodes, dedicated CPUs, memory pages and PCI devices of a guest with two CPUs."""
        found: dict[str, str] = {}
        if self._chance(0.4):
            return found
        if self._chance(0.3):
            found["hw:numa_nodes"] = self._some("1", "2")
        if self._chance(0.5):
            found["hw:cpu_policy"] = self._some("dedicated", "dedicated", "mixed", "shared")
            if found["hw:cpu_policy"] == "mixed":
                found["hw:cpu_dedicated_mask"] = self._some("0", "1")
            if found["hw:cpu_policy"] == "dedicated" and self._chance(0.4):
                found["hw:cpu_thread_policy"] = self._some("prefer", "isolate", "require")
            if found["hw:cpu_policy"] == "dedicated" and self._chance(0.2):
                found["hw:emulator_threads_policy"] = "isolate"
        if self._chance(0.3):
            found["hw:mem_page_size"] = self._some("small", "large", "any", "2048")
        if self._chance(0.5):
            found["pci_passthrough:alias"] = f"{self._some(*ALIASES)}:{self._some(1, 1, 2)}"
            if self._chance(0.6):
                found["hw:pci_numa_affinity_policy"] = self._some("legacy", "preferred", "required", "socket")
        return found

    def _specs(self) -> dict[str, str]:
        names = (
            "aggregate_instance_extra_specs:ssd",
            "ssd",
            "hw:watchdog_action",
            "capabilities:gpu",
            "capabilities:free_ram_mb",
            "capabilities:hypervisor_type",
            "capabilities:cpu_info:topology:cores",
            "capabilities:cpu_info:features",
            "capabilities:num_instances",
            "capabilities:cpu_allocation_ratio",
            "capabilities:ram_allocation_ratio",
            "capabilities:nodename",
            "hypervisor_version",
            "gpu",
            "capabilities:nothing",
        )
        found = {}
        for name in self._random.sample(names, self._some(0, 1, 1, 2)):
            operator, value = (
                self._some(*OPERATORS),
                self._some("true", "3", "12", "A100", "QEMU", "aes", "avx", "2048"),
            )
            glue = "" if self._chance(0.05) else " "
            text = f"{operator}{glue}{value}" if operator else value
            if operator == "<or>":
                text += f" <or> {self._some('true', '16', 'ironic')}"
            elif operator == "<all-in>" and self._chance(0.5):
                text += " avx2"
            found[name] = text
        return found

    def _hints(self, members: list[str]) -> dict[str, list[str]]:
        hints: dict[str, list[str]] = {}
        for name in ("same_host", "different_host"):
            if self._chance(0.3):
                hints[name] = self._random.sample(members, self._some(1, 2))
        if self._chance(0.5):
            hints["query"] = [msgspec.json.encode(self._query(2)).decode()]
        if self._chance(0.5):
            hints["build_near_host_ip"] = [self._some("10.0.0.1", "10.0.1.1", "fd00::1")]
            if self._chance(0.6):
                hints["cidr"] = [self._some("/8", "/16", "/23", "/32", "/0")]
        return hints

    def _query(self, depth: int) -> list[Any]:
        if depth and self._chance(0.5):
            inner = [self._query(depth - 1) for _ in range(self._some(1, 2, 3))]
            return [self._some("and", "or", "not"), *inner]
        if self._chance(0.5):
            numbers = (
                "free_ram_mb",
                "free_disk_mb",
                "vcpus_used",
                "num_instances",
                "num_io_ops",
                "cpu_allocation_ratio",
            )
            variable = f"${self._some(*numbers)}"
            return [self._some("=", "<", ">", "<=", ">="), variable, self._some(0, 2, 4, 2048, 40960.5)]
        operands = self._random.sample(("host-1", "QEMU", "node-2", "A100"), self._some(1, 2))
        variable = self._some("$host", "$nodename", "$hypervisor_type", "$stats.gpu")
        return [self._some("=", "in", "in"), variable, *operands]


_MULTIPLIERS = (
    "ram_weight_multiplier",
    "cpu_weight_multiplier",
    "disk_weight_multiplier",
    "io_ops_weight_multiplier",
    "num_instances_weight_multiplier",
    "hypervisor_version_weight_multiplier",
    "build_failure_weight_multiplier",
)


def _complete(
    settings: FilterSchedulerSettings,
    metrics: MetricsSettings,
    made: list[dict[str, Any]],
    spec: RequestSpec,
    members: list[str],
) -> Case:
    """Return the case with what our scheduler reads from its database, and the same as plain data."""
    fields = set(HostState.__struct_fields__)
    hosts = [
        HostState(
            **{name: value for name, value in each.items() if name in fields - {"supported", "aggregates"}},
            supported=tuple(each["supported"]),
            aggregates=tuple(each["aggregates"]),
        )
        for each in made
    ]
    placed = {uuid: each["host"] for each in made for uuid in each["instances"]}
    hinted = {
        hint: tuple(sorted({placed[uuid] for uuid in spec.hints[hint] if uuid in placed}))
        for hint in ("same_host", "different_host")
        if hint in spec.hints
    }
    group = spec.server_group
    if group is not None:
        counts = {each["host"]: sum(member in each["instances"] for member in members) for each in made}
        group = msgspec.structs.replace(group, hosts={host: count for host, count in counts.items() if count})
    alike = {each["host"]: _alike(settings, spec.image, each["instances"].values()) for each in made}
    spec = msgspec.structs.replace(spec, server_group=group, hinted_hosts=hinted, alike_images=alike)
    flavor = {"name": spec.flavor.name, "extra_specs": spec.flavor.extra_specs, "memory_mb": 1024, "vcpus": 2}
    request = {
        "project_id": spec.project_id,
        "flavor": flavor,
        "image": msgspec.to_builtins(spec.image),
        "hints": spec.hints,
        "group": None
        if group is None
        else {
            "policy": group.policy,
            "max_server_per_host": group.max_server_per_host,
            "members": members,
            "hosts": sorted(group.hosts),
        },
    }
    given = msgspec.to_builtins(settings)
    ours_alone = ("enabled_filters", "host_subset_size")
    options = {name: None if value == "" else value for name, value in given.items() if name not in ours_alone}
    return Case(
        settings=settings,
        metrics=metrics,
        hosts=hosts,
        spec=spec,
        for_nova={
            "now": NOW,
            "settings": {
                "filter_scheduler": options,
                "metrics": msgspec.to_builtins(metrics),
                "pci": {"alias": [json.dumps({"name": name, **spec}) for name, spec in ALIASES.items()]},
            },
            "hosts": msgspec.to_builtins(made),
            "request": request,
        },
    )


def _alike(settings: FilterSchedulerSettings, image: ImageMeta | None, others: Any) -> float:
    ratios = {name: float(number) for name, number in (each.split("=") for each in settings.image_props_weight_setting)}
    own = frozenset() if image is None else pairs(image)
    return sum(
        ratios.get(name, 0.0) if ratios else 1.0
        for other in others
        if other is not None
        for name, _ in own & pairs(other)
    )

"""Extra specs that have a meaning must have a value that has one."""

import pytest

from micronova.objects.errors import Invalid
from micronova.servers import extra_spec_rules


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hw:cpu_policy", "dedicated"),
        ("hw:cpu_realtime", "yes"),
        ("hw:numa_nodes", "2"),
        ("hw:numa_cpus.0", "0-3,^2"),
        ("hw:numa_mem.1", "1024"),
        ("hw:mem_page_size", "2MB"),
        ("hw:mem_page_size", "large"),
        ("hw_rng:allowed", "True"),
        ("quota:disk_read_iops_sec", "100"),
        ("quota:cpu_quota", "-1"),
        ("quota:vif_inbound_average", "5"),
        ("resources:VCPU", "2"),
        ("resources1:CUSTOM_GOLD", "1"),
        ("resources_NET:NET_BW_EGR_KILOBIT_PER_SEC", "1"),
        ("trait:HW_CPU_X86_AVX", "required"),
        ("trait_group:CUSTOM_X", "forbidden"),
        ("capabilities:cpu_info:features", "<in> aes"),
        ("capabilities:vcpus", ">= 4"),
        ("aggregate_instance_extra_specs:ssd", "true"),
        ("pci_passthrough:alias", "gpu:1, nic:2"),
        ("os:secure_boot", "required"),
        ("somebody:else", "anything"),
        ("plain", "anything"),
    ],
)
def test_good_ones(name: str, value: str) -> None:
    extra_spec_rules.check(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hw:cpu_policy", "round"),
        ("hw:cpu_realtime", "perhaps"),
        ("hw:numa_nodes", "0"),
        ("hw:numa_nodes", "many"),
        ("hw:numa_cpus.x", "1"),
        ("hw:redirected_usb_ports", "16"),
        ("hw:nonsense", "1"),
        ("quota:nonsense", "1"),
        ("resources:VCPU", "two"),
        ("resources:vcpu", "2"),
        ("resources:NO_SUCH", "1"),
        ("resources1:CUSTOM_", "1"),
        ("trait:HW_NO_SUCH", "required"),
        ("trait_group:CUSTOM", "required"),
        ("trait:HW_CPU_X86_AVX", "wanted"),
        ("capabilities:nonsense", "1"),
        ("pci_passthrough:alias", "gpu"),
        ("os:secure_boot", "on"),
        ("group_policy", "any"),
    ],
)
def test_bad_ones(name: str, value: str) -> None:
    with pytest.raises(Invalid, match=name.replace(".", r"\.")):
        extra_spec_rules.check(name, value)


def test_a_hostile_value_is_refused_quickly() -> None:
    for name in ("hw:cpu_dedicated_mask", "hw:pmem", "hw:cpu_realtime_mask", "hw:numa_cpus.0"):
        with pytest.raises(Invalid):
            extra_spec_rules.check(name, "1" * 120 + "-" + "1," * 60 + "!")

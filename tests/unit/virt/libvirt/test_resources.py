"""The resources of a host, and what its guests use."""

from pathlib import Path

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.topology import NodeTopology
from micronova.virt.libvirt import resources
from micronova.virt.libvirt.host import HostFacts
from micronova.virt.libvirt.resources import FileSystem, file_system, memory_mb, node_resources, traits_of, uptime
from micronova.virt.libvirt.storage.layout import Layout
from tests.unit.virt.libvirt.world import OTHER_UUID, UUID, facts, guest_record


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root", seen_as=Path("/var/lib/libvirt"))
    made.prepare()
    return made


def test_resources(layout: Layout) -> None:
    ours = [guest_record(), guest_record(OTHER_UUID, cloud="another")]
    running = {UUID: (2, 512), OTHER_UUID: (4, 1024), "by-hand": (1, 64)}
    node = node_resources(
        "host-1", "cloud-1", facts(), LibvirtSettings(), layout, records=ours, running=running, topology=NodeTopology()
    )
    assert (node.node, node.hypervisor_type, node.hypervisor_version) == ("host-1", "QEMU", 7_002_000)
    assert (node.vcpus_used, node.memory_mb_used) == (7, 1600)
    assert node.memory_mb == memory_mb() > 0 and node.vcpus > 0
    assert node.local_gb == file_system(layout.root).total // 1024**3
    assert node.local_gb_used >= 4 and node.running_vms == 3
    assert node.cpu_info["arch"] == "x86_64"
    again = node_resources(
        "host-1",
        "cloud-1",
        facts(),
        LibvirtSettings(cpu_shared_set="0"),
        layout,
        records=[],
        running={},
        topology=NodeTopology(),
    )
    assert again.node_uuid == node.node_uuid and again.vcpus == 1


def test_a_cached_image_does_not_count_as_a_guests(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the directories of all guests that use it, and on the disk once."""
    gigabyte = 1024**3

    def used(disk_used: int) -> int:
        monkeypatch.setattr(resources, "file_system", lambda _: FileSystem(100 * gigabyte, disk_used, 0))
        records = [guest_record(local_gb=0)]
        return node_resources(
            "host-1",
            "cloud-1",
            facts(),
            LibvirtSettings(),
            layout,
            records=records,
            running={},
            topology=NodeTopology(),
        ).local_gb_used

    layout.guest(UUID).mkdir()
    (layout.base / "image").write_bytes(bytes(1 << 20))
    layout.link_base(UUID, "image")
    assert used(gigabyte) == used(gigabyte - (1 << 19)) == 1
    (layout.guest(UUID) / "disk").write_bytes(bytes(1 << 20))
    assert used(gigabyte + (1 << 20)) == 1 and used(gigabyte + (2 << 20)) == 2


def test_uptime() -> None:
    assert uptime().startswith("up ") and "load average:" in uptime()


def test_traits_have_the_names_of_os_traits() -> None:
    host = HostFacts(
        virt_type="kvm",
        hypervisor="QEMU",
        version=1,
        arch="x86_64",
        cpu_features=("avx512f",),
        guest_features=frozenset({"avx2", "sse4.1", "vmx", "no-such-flag"}),
        uefi=True,
        secure_boot=True,
        disk_buses=frozenset({"virtio", "sata", "no-such-bus"}),
        video_models=frozenset({"qxl"}),
    )
    assert traits_of(host) == (
        "COMPUTE_GRAPHICS_MODEL_QXL",
        "COMPUTE_IMAGE_TYPE_AMI",
        "COMPUTE_IMAGE_TYPE_ISO",
        "COMPUTE_IMAGE_TYPE_QCOW2",
        "COMPUTE_IMAGE_TYPE_RAW",
        "COMPUTE_IMAGE_TYPE_VDI",
        "COMPUTE_IMAGE_TYPE_VHD",
        "COMPUTE_IMAGE_TYPE_VHDX",
        "COMPUTE_IMAGE_TYPE_VMDK",
        "COMPUTE_NET_VIF_MODEL_E1000",
        "COMPUTE_NET_VIF_MODEL_E1000E",
        "COMPUTE_NET_VIF_MODEL_NE2K_PCI",
        "COMPUTE_NET_VIF_MODEL_PCNET",
        "COMPUTE_NET_VIF_MODEL_RTL8139",
        "COMPUTE_NET_VIF_MODEL_VIRTIO",
        "COMPUTE_NET_VIF_MODEL_VMXNET3",
        "COMPUTE_SECURITY_UEFI_SECURE_BOOT",
        "COMPUTE_STORAGE_BUS_SATA",
        "COMPUTE_STORAGE_BUS_VIRTIO",
        "HW_ARCH_X86_64",
        "HW_CPU_X86_AVX2",
        "HW_CPU_X86_INTEL_VMX",
        "HW_CPU_X86_SSE41",
        "HW_CPU_X86_VMX",
    )


# The names of os-traits 3.9.0 by the features for which Nova 34 reports them.
@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("3dnow abm avx avx2 bmi2 f16c fma4 mmx mpx", "3DNOW ABM AVX AVX2 BMI2 F16C FMA4 MMX MPX"),
        ("sse sse2 sse4.1 sse4.2 sse4a ssse3 tbm xop", "SSE SSE2 SSE41 SSE42 SSE4A SSSE3 TBM XOP"),
        ("aes bmi1 fma pclmuldq sha-ni", "AESNI BMI FMA3 CLMUL SHA"),
        ("amx-bf16 amx-int8 amx-tile", "AMXBF16 AMXINT8 AMXTILE"),
        ("avx512f avx512bw avx512cd avx512dq avx512er", "AVX512F AVX512BW AVX512CD AVX512DQ AVX512ER"),
        ("avx512pf avx512vl avx512vnni avx512vbmi", "AVX512PF AVX512VL AVX512VNNI AVX512VBMI"),
        ("avx512ifma avx512vbmi2 avx512bitalg", "AVX512IFMA AVX512VBMI2 AVX512BITALG"),
        ("vaes gfni vpclmulqdq", "AVX512VAES AVX512GFNI AVX512VPCLMULQDQ"),
        ("avx512-vpopcntdq", "AVX512VPOPCNTDQ"),
        ("svm", "SVM AMD_SVM"),
        ("vmx", "VMX INTEL_VMX"),
        # Nova has no feature for these; SSE3 it looks for by another name than libvirt's.
        ("pni pdpe1gb stibp rtm", "SSE3 PDPE1GB STIBP TSX"),
        ("pcid spec-ctrl ssbd md-clear", "INTEL_PCID INTEL_SPEC_CTRL INTEL_SSBD INTEL_MD_CLEAR"),
        ("ibpb amd-ssbd amd-no-ssb virt-ssbd", "AMD_IBPB AMD_SSBD AMD_NO_SSB AMD_VIRT_SSBD"),
    ],
)
def test_features_of_cpus_have_the_names_of_os_traits(features: str, names: str) -> None:
    found = traits_of(facts(guest_features=frozenset(features.split())))
    start = "HW_CPU_X86_"
    assert {name.removeprefix(start) for name in found if name.startswith(start)} == set(names.split())


def test_features_of_other_cpus_have_names_of_their_own() -> None:
    found = traits_of(facts(arch="aarch64", guest_features=frozenset({"aes", "asimd", "sve"})))
    assert {name for name in found if name.startswith("HW_CPU")} == {
        "HW_CPU_AARCH64_AES",
        "HW_CPU_AARCH64_ASIMD",
        "HW_CPU_AARCH64_SVE",
    }

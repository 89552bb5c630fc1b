"""The CPU of guests: which it is, and which features and traits follow from it."""

from typing import Any, cast

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.definition.guest_cpu import with_all_features
from micronova.virt.libvirt.host import HostFacts, parse_facts
from micronova.virt.libvirt.resources import cpu_info, traits_of

# What libvirt says of models, shortened; the host's own has features besides.
MODELS = {
    "Skylake-Server-IBRS": ("aes", "avx", "avx2", "avx512f", "fma", "pclmuldq", "pni", "sse4.2"),
    "EPYC": ("aes", "avx", "avx2", "fma", "pni", "sha-ni", "svm"),
    "Nehalem": ("pni", "sse4.1", "sse4.2"),
    "qemu64": ("pni",),
}
CAPABILITIES = """
<capabilities><host><cpu>
  <arch>x86_64</arch><model>Skylake-Server-IBRS</model><vendor>Intel</vendor>
  <feature name='ds'/><feature name='vmx'/><feature name='pdcm'/>
</cpu></host></capabilities>
"""
EMULATED = """
<domainCapabilities><cpu>
  <mode name='maximum' supported='yes'/>
  <mode name='host-model' supported='yes'>
    <model>EPYC</model><vendor>AMD</vendor>
    <feature policy='require' name='3dnow'/><feature policy='disable' name='sha-ni'/>
  </mode>
  <mode name='custom' supported='yes'><model usable='yes'>Nehalem</model><model usable='yes'>EPYC</model></mode>
</cpu></domainCapabilities>
"""
WITH_KVM = """
<domainCapabilities><cpu>
  <mode name='host-passthrough' supported='yes'/>
  <mode name='host-model' supported='yes'>
    <model>Skylake-Server-IBRS</model><feature policy='require' name='vmx'/><feature policy='disable' name='avx512f'/>
  </mode>
  <mode name='custom' supported='yes'><model usable='yes'>Nehalem</model></mode>
</cpu></domainCapabilities>
"""
NEHALEM = {"SSE3", "SSE41", "SSE42"}
SKYLAKE = {"AESNI", "AVX", "AVX2", "CLMUL", "FMA3", "SSE3", "SSE42", "VMX", "INTEL_VMX"}
EPYC = {"AESNI", "AVX", "AVX2", "FMA3", "SSE3", "SVM", "AMD_SVM", "3DNOW"}


class Library:
    """Answers as libvirt does."""

    def __init__(self, fails_with: Exception | None = None, *, alive: bool = True) -> None:
        self._fails_with = fails_with
        self._alive = alive

    def isAlive(self) -> int:
        return int(self._alive)

    def baselineCPU(self, cpus: list[str], flags: int = 0) -> str:
        assert flags == 1
        return self._answer(cpus)

    def baselineHypervisorCPU(
        self, emulator: str | None, arch: str, machine: str | None, virt_type: str, cpus: list[str], flags: int = 0
    ) -> str:
        assert flags == 1 and virt_type in ("qemu", "kvm") and arch == "x86_64"
        # An emulator does not have all of a model: libvirt then lists the rest as disabled.
        disabled = "<feature policy='disable' name='xsavec'/>" if virt_type == "qemu" else ""
        return self._answer(cpus, disabled)

    def _answer(self, cpus: list[str], more: str = "") -> str:
        if self._fails_with is not None:
            raise self._fails_with
        [cpu] = cpus
        asked = parse(cpu)
        assert asked.findtext("arch") == "x86_64"
        features = MODELS[asked.findtext("model") or ""]
        return f"<cpu>{''.join(f'''<feature policy='require' name='{name}'/>''' for name in features)}{more}</cpu>"


def _facts(virt_type: str, library: Library | None = None, **settings: Any) -> HostFacts:
    domain = parse(WITH_KVM if virt_type == "kvm" else EMULATED)
    found = parse_facts(
        parse(CAPABILITIES), domain, domain, arch="x86_64", virt_type=virt_type, hypervisor="QEMU", version=9_000_000
    )
    return with_all_features(cast(Connect, library or Library()), found, LibvirtSettings(**settings))


def _cpu_traits(facts: HostFacts) -> set[str]:
    start = "HW_CPU_X86_"
    return {name.removeprefix(start) for name in traits_of(facts) if name.startswith(start)}


def test_a_host_has_the_features_of_its_model() -> None:
    """libvirt lists only what the host has besides."""
    features = cpu_info(_facts("kvm"))["features"]
    assert features == sorted({*MODELS["Skylake-Server-IBRS"], "ds", "vmx", "pdcm"})


@pytest.mark.parametrize(
    ("virt_type", "settings", "traits"),
    [
        ("kvm", {}, SKYLAKE),
        ("kvm", {"cpu_mode": "host-passthrough"}, SKYLAKE),
        ("kvm", {"cpu_mode": "host-model", "cpu_model_extra_flags": ("-vmx",)}, SKYLAKE - {"VMX", "INTEL_VMX"}),
        ("kvm", {"cpu_mode": "custom", "cpu_models": ("Nehalem",)}, NEHALEM),
        ("kvm", {"cpu_mode": "custom", "cpu_models": ("Nehalem",), "cpu_model_extra_flags": ("pcid", "+aes", "-pni")},
         (NEHALEM | {"AESNI", "INTEL_PCID"}) - {"SSE3"}),
        ("kvm", {"cpu_mode": "custom", "cpu_models": ("Haswell",)}, set()),  # no guest starts
        ("kvm", {"cpu_mode": "none", "cpu_model_extra_flags": ("aes",)}, {"SSE3"}),  # which has no flags
        ("qemu", {}, NEHALEM),
        ("qemu", {"cpu_mode": "none"}, {"SSE3"}),
        ("qemu", {"cpu_mode": "custom", "cpu_models": ("Haswell", "EPYC")}, (EPYC | {"SHA"}) - {"3DNOW"}),
        ("qemu", {"cpu_mode": "maximum"}, EPYC),
        ("xen", {}, SKYLAKE | {"AVX512F"}),
    ],
)  # fmt: skip
def test_the_traits_are_those_of_the_guests_cpu(virt_type: str, settings: dict[str, Any], traits: set[str]) -> None:
    assert _cpu_traits(_facts(virt_type, **settings)) == traits


@pytest.mark.parametrize("code", ["VIR_ERR_NO_SUPPORT", "VIR_ERR_CONFIG_UNSUPPORTED", "VIR_ERR_OPERATION_FAILED"])
def test_a_libvirt_that_cannot_tell_the_features_of_models(code: str, caplog: pytest.LogCaptureFixture) -> None:
    """A host starts without these traits, and says so: of which error libvirt cannot tell does not matter."""
    caplog.set_level("INFO")
    libvirt = pytest.importorskip("libvirt")
    error = libvirt.libvirtError("it failed")
    error.err = (getattr(libvirt, code), 0, "it failed", 2, None, None, None, 0, -1)
    library = Library(error)
    assert _cpu_traits(_facts("kvm", library)) == {"VMX", "INTEL_VMX"}  # what it lists
    assert _cpu_traits(_facts("kvm", library, cpu_mode="custom", cpu_models=("Nehalem",))) == set()
    assert _cpu_traits(_facts("qemu", library, cpu_mode="maximum")) == {"3DNOW"}
    assert "does not tell the features of the CPU model Nehalem" in caplog.text


@pytest.mark.parametrize(("code", "alive"), [("VIR_ERR_NO_CONNECT", True), ("VIR_ERR_SYSTEM_ERROR", False)])
def test_a_lost_connection_is_no_answer(code: str, alive: bool) -> None:
    libvirt = pytest.importorskip("libvirt")
    error = libvirt.libvirtError("it broke")
    error.err = (getattr(libvirt, code), 0, "it broke", 2, None, None, None, 0, -1)
    with pytest.raises(libvirt.libvirtError):
        _facts("kvm", Library(error, alive=alive))


def test_other_errors_of_libvirt_are_no_answer() -> None:
    with pytest.raises(ConnectionError):
        _facts("kvm", Library(ConnectionError("gone")))

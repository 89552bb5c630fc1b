"""Reading the host's facts from libvirt, and deciding by them."""

from pathlib import Path

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.host import (
    can_bypass_cache,
    check_screens,
    choose_virt_type,
    cpu_flags,
    kvm_group,
    parse_facts,
)

CAPABILITIES = """
<capabilities>
  <host>
    <cpu>
      <arch>x86_64</arch><model>EPYC</model><vendor>AMD</vendor>
      <topology sockets='1' dies='1' cores='4' threads='2'/>
      <feature name='aes'/><feature name='avx2'/>
    </cpu>
    <topology><cells num='2'>
      <cell id='0'><memory unit='KiB'>4194304</memory><pages unit='KiB' size='2048'>16</pages>
        <cpus num='2'><cpu id='0' siblings='0-1'/><cpu id='1' siblings='0-1'/></cpus></cell>
      <cell id='1'><memory unit='KiB'>2097152</memory><cpus num='1'><cpu id='2' siblings='2'/></cpus></cell>
    </cells></topology>
  </host>
  <guest><os_type>hvm</os_type>
    <arch name='x86_64'><emulator>/usr/bin/qemu-system-x86_64</emulator>
      <machine>pc-i440fx-7.2</machine><machine canonical='pc-i440fx-7.2'>pc</machine>
      <domain type='qemu'/><domain type='kvm'/></arch>
  </guest>
</capabilities>
"""
DOMAIN = """
<domainCapabilities>
  <path>/usr/bin/qemu-system-x86_64</path>
  <os supported='yes'>
    <enum name='firmware'><value>efi</value></enum>
    <loader supported='yes'><enum name='secure'><value>no</value><value>yes</value></enum></loader>
  </os>
  <cpu>
    <mode name='host-model' supported='yes'/><mode name='host-passthrough' supported='no'/>
    <mode name='custom' supported='yes'>
      <model usable='yes'>qemu64</model><model usable='no'>Cooperlake</model>
    </mode>
  </cpu>
  <devices>
    <disk supported='yes'><enum name='bus'><value>virtio</value><value>ide</value></enum></disk>
    <video supported='yes'><enum name='modelType'><value>vga</value></enum></video>
    <graphics supported='yes'><enum name='type'><value>vnc</value><value>spice</value></enum></graphics>
    <rng supported='yes'/>
  </devices>
</domainCapabilities>
"""


def test_parse_facts() -> None:
    found = parse_facts(
        parse(CAPABILITIES),
        parse(DOMAIN),
        parse(DOMAIN),
        arch="x86_64",
        virt_type="qemu",
        hypervisor="QEMU",
        version=7_002_022,
    )
    assert found.arch == "x86_64" and found.cpu_model == "EPYC" and found.cpu_features == ("aes", "avx2")
    assert found.cpu_topology == {"sockets": 1, "dies": 1, "cores": 4, "threads": 2}
    assert found.machines == {"pc", "pc-i440fx-7.2"}
    assert found.usable_models == {"qemu64"}
    assert found.cpu_modes == {"host-model", "custom"}
    assert found.disk_buses == {"virtio", "ide"}
    assert found.uefi and found.secure_boot and found.rng and found.is_qemu
    assert found.supported == (("x86_64", "qemu", "hvm"), ("x86_64", "kvm", "hvm"))
    first, second = found.cells
    assert (first.memory_mb, first.cpus, first.siblings, first.pages) == (4096, (0, 1), ((0, 1),), {2048: 16})
    assert second.siblings == ((2,),)
    assert found.graphics == {"vnc", "spice"}


def test_spice_is_wanted_only_of_hosts_that_have_it() -> None:
    old = DOMAIN.replace("<value>spice</value>", "")
    for domain, able in ((DOMAIN, True), (old, False)):
        found = parse_facts(
            parse(CAPABILITIES),
            parse(domain),
            parse(domain),
            arch="x86_64",
            virt_type="qemu",
            hypervisor="QEMU",
            version=7_002_022,
        )
        check_screens(found, LibvirtSettings())
        if able:
            check_screens(found, LibvirtSettings(spice_enabled=True))
        else:
            with pytest.raises(LibvirtMissing, match="QEMU has no SPICE"):
                check_screens(found, LibvirtSettings(spice_enabled=True))


@pytest.mark.parametrize(
    ("wanted", "flags", "offered", "chosen"),
    [
        ("auto", {"svm", "sse"}, {"kvm", "qemu"}, "kvm"),
        ("auto", {"vmx"}, {"kvm", "qemu"}, "kvm"),
        ("auto", {"sse"}, {"kvm", "qemu"}, "qemu"),  # /dev/kvm may be there: without the instructions it is no use
        ("auto", {"vmx"}, {"qemu"}, "qemu"),
        ("auto", {"vmx"}, {"xen"}, "xen"),
        ("qemu", {"vmx"}, {"kvm", "qemu"}, "qemu"),
        ("kvm", set(), {"kvm", "qemu"}, "kvm"),  # whoever says so knows better
    ],
)
def test_the_cpu_decides_about_kvm(wanted: str, flags: set[str], offered: set[str], chosen: str) -> None:
    assert choose_virt_type(wanted, frozenset(flags), frozenset(offered)) == chosen


def test_what_libvirt_does_not_offer_is_refused() -> None:
    with pytest.raises(LibvirtMissing, match=r"kvm guests, only qemu.*install"):
        choose_virt_type("kvm", frozenset(), frozenset({"qemu"}))


def test_cpu_flags(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu vme svm\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(file) == {"fpu", "vme", "svm"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_direct_io_leaves_nothing(tmp_path: Path) -> None:
    can_bypass_cache(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_group_that_guests_need_for_kvm(tmp_path: Path) -> None:
    """A guest's user has no name, and so no groups but the one that its definition says."""
    device = tmp_path / "kvm"
    assert kvm_group("kvm", device) is None
    device.touch()
    for mode, needed in ((0o660, True), (0o666, False), (0o600, False)):
        device.chmod(mode)
        assert kvm_group("kvm", device) == (device.stat().st_gid if needed else None)
        assert kvm_group("qemu", device) is None

"""Guest definitions, and their XML."""

from typing import Any

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import BuildAborted, BuildFailed, MicronovaError, NotSupported
from micronova.virt.libvirt.client.xmltree import Element, child, element, parse, unparse
from micronova.virt.libvirt.definition.guest_xml import domain, domain_xml, metadata, owner_of
from micronova.virt.libvirt.storage.records import BootRecord, MdevRecord, PinRecord
from tests.unit.virt.libvirt.world import UUID, composed, facts, vif

FOLDER = f"/var/lib/libvirt/instances/{UUID}"


def made(**changes: Any) -> Element:
    return domain(composed(**changes))


def one(root: Element, path: str) -> Element:
    found = root.findall(path)
    assert len(found) == 1, (path, [unparse(each) for each in found])
    return found[0]


def attributes(root: Element, path: str) -> list[dict[str, str]]:
    return [dict(each.items()) for each in root.findall(path)]


def test_a_plain_guest() -> None:
    root = made(config_drive=True)
    assert root.get("type") == "qemu"
    assert root.findtext("uuid") == UUID
    assert root.findtext("name") == f"instance-{UUID}"
    assert (root.findtext("memory"), one(root, "memory").get("unit")) == ("256", "MiB")
    assert root.findtext("vcpu") == "1"
    kind = one(root, "./os/type")
    assert (kind.text, kind.get("arch"), kind.get("machine")) == ("hvm", "x86_64", "pc")
    assert root.find("./features/acpi") is not None
    assert attributes(root, "./cpu/topology") == [{"sockets": "1", "cores": "1", "threads": "1"}]
    assert root.findtext("on_poweroff") == "destroy" and root.findtext("on_reboot") == "restart"
    assert root.findtext("./devices/emulator") == "/usr/bin/qemu-system-x86_64"
    assert attributes(root, "./devices/memballoon") == [{"model": "virtio"}]
    assert root.findtext("./devices/rng/backend") == "/dev/urandom"
    assert root.find("./devices/interface") is None
    assert root.find("./devices/watchdog") is None
    assert {entry.get("name"): entry.text for entry in root.findall("./sysinfo/system/entry")} == {
        "manufacturer": "Micronova",
        "product": "OpenStack Compute",
        "serial": UUID,
        "uuid": UUID,
        "family": "Virtual Machine",
    }


def test_a_kernel_and_a_ramdisk() -> None:
    assert made().find("./os/kernel") is None
    files = BootRecord(kernel="kernel", ramdisk="ramdisk")
    root = made(record={"boot": files})
    assert [(each.tag, each.text) for each in one(root, "./os")][1:4] == [
        ("kernel", f"{FOLDER}/kernel"),
        ("initrd", f"{FOLDER}/ramdisk"),
        ("cmdline", "root=/dev/vda console=tty0 console=ttyS0 console=hvc0 no_timer_check"),
    ]
    root = made(record={"boot": BootRecord(kernel="kernel")}, properties={"hw_disk_bus": "scsi"})
    assert root.find("./os/initrd") is None
    assert str(root.findtext("./os/cmdline")).startswith("root=/dev/sda console=tty0")
    own = made(record={"boot": files}, properties={"os_command_line": "root=LABEL=x <quiet>"})
    assert own.findtext("./os/cmdline") == "root=LABEL=x <quiet>"
    assert "<cmdline>root=LABEL=x &lt;quiet&gt;</cmdline>" in unparse(own)


def test_disks() -> None:
    devices = (
        BlockDevice(uuid="d0", boot_index=0),
        BlockDevice(uuid="d1", source_type="blank", size_gb=1, boot_index=-1),
        BlockDevice(uuid="d2", source_type="blank", size_gb=1, boot_index=-1, guest_format="swap"),
    )
    root = made(devices=devices, config_drive=True, size={"ephemeral": 1, "swap": 512})
    disks = root.findall("./devices/disk")
    assert [(one(disk, "target").get("dev"), one(disk, "target").get("bus")) for disk in disks] == [
        ("vda", "virtio"),
        ("vdb", "virtio"),
        ("vdc", "virtio"),
        ("hda", "ide"),
    ]
    assert [one(disk, "source").get("file") for disk in disks] == [
        f"{FOLDER}/{name}" for name in ("disk", "disk.eph0", "disk.swap", "disk.config")
    ]
    root_disk, config = disks[0], disks[3]
    driver = one(root_disk, "driver")
    assert (driver.get("type"), driver.get("cache"), driver.get("io")) == ("qcow2", "none", "native")
    assert one(root_disk, "./backingStore/format").get("type") == "raw"
    assert str(one(root_disk, "./backingStore/source").get("file")).startswith(
        f"/var/lib/libvirt/instances/{UUID}/disk.base"
    )
    # The chain ends there: libvirt must not look into the file for more.
    assert list(one(root_disk, "./backingStore/backingStore")) == []
    assert one(root_disk, "boot").get("order") == "1"
    assert config.get("device") == "cdrom" and config.find("readonly") is not None
    assert all(len(disk.findall("backingStore")) == 1 for disk in disks)


def test_copies_instead_of_overlays() -> None:
    root = made(settings=LibvirtSettings(images_type="raw"))
    disk = one(root, "./devices/disk")
    assert one(disk, "driver").get("type") == "raw"
    assert list(one(disk, "backingStore")) == []


def test_cache_modes() -> None:
    assert one(made(host=facts(direct_io=False)), "./devices/disk/driver").get("cache") == "writeback"
    root = made(settings=LibvirtSettings(disk_cachemode="unsafe"))
    assert one(root, "./devices/disk/driver").get("cache") == "unsafe"
    assert one(root, "./devices/disk/driver").get("io") is None


def test_buses() -> None:
    root = made(properties={"hw_disk_bus": "scsi", "hw_scsi_model": "virtio-scsi"})
    assert attributes(root, "./devices/disk/target") == [{"dev": "sda", "bus": "scsi"}]
    assert attributes(root, "./devices/controller[@type='scsi']") == [
        {"type": "scsi", "index": "0", "model": "virtio-scsi"}
    ]
    with pytest.raises(BuildAborted, match="hw_disk_bus is 'floppy'"):
        made(properties={"hw_disk_bus": "floppy"})
    with pytest.raises(NotSupported, match="no xen disks"):
        made(properties={"hw_disk_bus": "xen"})


def test_q35_has_its_cd_on_scsi_and_room_for_more() -> None:
    root = made(properties={"hw_machine_type": "q35"}, config_drive=True)
    assert attributes(root, "./devices/disk[@device='cdrom']/target") == [{"dev": "sda", "bus": "scsi"}]
    assert [each.get("model") for each in root.findall("./devices/controller[@type='pci']")][:2] == [
        "pcie-root",
        "pcie-root-port",
    ]
    with pytest.raises(NotSupported, match="no IDE"):
        made(properties={"hw_machine_type": "q35", "hw_disk_bus": "ide"})
    with pytest.raises(NotSupported, match="no machine type virt"):
        made(properties={"hw_machine_type": "virt"})


def test_properties_in_other_letters_and_by_older_names() -> None:
    root = made(vifs=(vif(),), properties={"hw_vif_model": "VirtualE1000", "vmware_adaptertype": "lsiLogicsas"})
    assert one(root, "./devices/interface/model").get("type") == "e1000"
    assert one(root, "./devices/disk/target").get("bus") == "scsi"
    assert one(root, "./devices/controller[@type='scsi']").get("model") == "lsisas1068"
    windows = made(properties={"os_type": "Windows"})
    assert one(windows, "./clock").get("offset") == "localtime"


def test_interfaces_are_taps_that_the_network_joins() -> None:
    root = made(vifs=(vif(1), vif(2, mtu=None)))
    first, second = root.findall("./devices/interface")
    assert first.get("type") == "ethernet"
    assert one(first, "target").get("dev") == "tap00000001-11"
    assert one(first, "mac").get("address") == "fa:16:3e:00:00:01"
    assert one(first, "model").get("type") == "virtio"
    assert one(first, "mtu").get("size") == "1450" and second.find("mtu") is None
    root = made(vifs=(vif(),), properties={"hw_vif_model": "e1000"})
    assert one(root, "./devices/interface/model").get("type") == "e1000"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"vif_type": "ovs"}, NotSupported, "Linux bridges only"),
        ({"vif_type": "binding_failed"}, BuildFailed, "did not bind"),
        ({"vif_type": "unbound"}, BuildFailed, "did not bind"),
        ({"vnic_type": "direct"}, NotSupported, "no such devices"),
        ({"details": {}}, BuildFailed, "no usable bridge"),
        ({"details": {"bridge_name": "x y"}}, BuildFailed, "no usable bridge"),
        ({"mac_address": "none"}, BuildFailed, "MAC"),
    ],
)
def test_ports_that_cannot_be_plugged(changes: dict[str, Any], error: type[MicronovaError], words: str) -> None:
    with pytest.raises(error, match=words):
        made(vifs=(vif(**changes),))


def test_consoles() -> None:
    root = made()
    serial = one(root, "./devices/serial")
    assert serial.get("type") == "unix"
    assert one(serial, "source").get("path") == f"/var/lib/libvirt/sockets/{UUID}/serial0"
    assert dict(one(serial, "log").items()) == {"file": f"/var/lib/libvirt/console/{UUID}.log", "append": "on"}
    screen = one(root, "./devices/graphics")
    assert screen.get("type") == "vnc" and screen.get("listen") is None
    assert one(screen, "listen").get("socket") == f"/var/lib/libvirt/sockets/{UUID}/vnc"
    assert one(made(vnc_on_socket=False), "./devices/graphics").get("listen") == "127.0.0.1"
    root = made(settings=LibvirtSettings(vnc_enabled=False))
    assert root.find("./devices/graphics") is None and root.find("./devices/video") is None
    root = made(specs={"hw:serial_port_count": "2"})
    assert [one(port, "target").get("port") for port in root.findall("./devices/serial")] == ["0", "1"]
    assert len(root.findall("./devices/serial/log")) == 1


def test_spice_is_beside_vnc_or_instead_of_it() -> None:
    assert made().find("./devices/graphics[@type='spice']") is None
    root = made(settings=LibvirtSettings(spice_enabled=True))
    assert [screen.get("type") for screen in root.findall("./devices/graphics")] == ["vnc", "spice"]
    screen = one(root, "./devices/graphics[@type='spice']")
    assert dict(screen.items()) == {"type": "spice"}  # no port
    assert attributes(screen, "listen") == [{"type": "socket", "socket": f"/var/lib/libvirt/sockets/{UUID}/spice"}]
    assert one(screen, "image").get("compression") == "auto_lz" and one(screen, "streaming").get("mode") == "off"
    assert attributes(root, "./devices/audio") == [{"id": "1", "type": "none"}]
    root = made(settings=LibvirtSettings(vnc_enabled=False, spice_enabled=True))
    assert one(root, "./devices/graphics").get("type") == "spice" and root.find("./devices/video") is not None


def test_cpu_models() -> None:
    plain = one(made(), "cpu")
    assert (plain.get("mode"), plain.findtext("model")) == ("custom", "Nehalem")
    kvm = facts(virt_type="kvm")
    assert one(made(host=kvm), "cpu").get("mode") == "host-model"
    settings = LibvirtSettings(
        cpu_mode="custom", cpu_models=("Icelake", "Haswell"), cpu_model_extra_flags=("aes", "-x")
    )
    cpu = one(made(host=kvm, settings=settings), "cpu")
    assert cpu.findtext("model") == "Haswell"  # the first that the host can be
    assert attributes(cpu, "feature") == [{"policy": "require", "name": "aes"}, {"policy": "disable", "name": "x"}]
    assert one(made(settings=LibvirtSettings(cpu_mode="maximum")), "cpu").get("mode") == "maximum"
    assert one(made(settings=LibvirtSettings(cpu_mode="none")), "cpu").get("mode") is None
    with pytest.raises(NotSupported, match="none of the cpu_models: Icelake"):
        made(settings=LibvirtSettings(cpu_mode="custom", cpu_models=("Icelake",)))


def test_uefi_and_secure_boot() -> None:
    with pytest.raises(NotSupported, match="install ovmf"):
        made(properties={"hw_firmware_type": "uefi"})
    able = facts(uefi=True, secure_boot=True)
    system = one(made(host=able, properties={"hw_firmware_type": "uefi"}), "os")
    assert system.get("firmware") == "efi"
    assert {"enabled": "no", "name": "secure-boot"} in attributes(system, "./firmware/feature")
    root = made(host=able, properties={"hw_firmware_type": "uefi", "os_secure_boot": "required"})
    assert one(root, "./os/type").get("machine") == "q35"
    assert one(root, "./os/loader").get("secure") == "yes"
    assert one(root, "./features/smm").get("state") == "on"


def test_watchdog_rng_agent_and_others() -> None:
    root = made(properties={"hw_watchdog_action": "reset", "hw_qemu_guest_agent": "yes", "hw_boot_menu": "true"})
    assert attributes(root, "./devices/watchdog") == [{"model": "i6300esb", "action": "reset"}]
    assert one(root, "./devices/channel/target").get("name") == "org.qemu.guest_agent.0"
    assert one(root, "./os/bootmenu").get("enable") == "yes"
    root = made(specs={"hw:watchdog_action": "poweroff"}, properties={"hw_watchdog_action": "reset"})
    assert one(root, "./devices/watchdog").get("action") == "reset"
    root = made(specs={"hw:boot_menu": "yes"}, properties={"hw_boot_menu": "no"})
    assert root.find("./os/bootmenu") is None
    root = made(specs={"hw:serial_port_count": "3"}, properties={"hw_serial_port_count": "2"})
    assert len(root.findall("./devices/serial")) == 2
    with pytest.raises(BuildAborted, match="hw:watchdog_action is 'explode'"):
        made(properties={"hw_watchdog_action": "explode"})
    root = made(specs={"hw_rng:rate_bytes": "2048", "hw_rng:rate_period": "1000"})
    assert attributes(root, "./devices/rng/rate") == [{"bytes": "2048", "period": "1000"}]
    assert made(specs={"hw_rng:allowed": "false"}).find("./devices/rng") is None


def test_video() -> None:
    assert one(made(), "./devices/video/model").get("type") == "vga"
    root = made(properties={"hw_video_model": "virtio", "hw_video_ram": "16"}, specs={"hw_video:ram_max_mb": "64"})
    assert dict(one(root, "./devices/video/model").items()) == {"type": "virtio", "vram": "16384", "heads": "1"}
    with pytest.raises(NotSupported, match="flavor allows 0 MB"):
        made(properties={"hw_video_ram": "16"})


def test_limits() -> None:
    root = made(
        specs={"quota:disk_read_bytes_sec": "1000000", "quota:disk_total_iops_sec": "10", "quota:cpu_shares": "2"}
    )
    assert root.findtext("./devices/disk/iotune/read_bytes_sec") == "1000000"
    assert root.findtext("./devices/disk/iotune/total_iops_sec") == "10"
    assert root.findtext("./cputune/shares") == "2"
    with pytest.raises(NotSupported, match="no control groups"):
        made(specs={"quota:cpu_shares": "2"}, host=facts(cgroups=False))
    # These values mean that there is no limit, so they need no control groups.
    root = made(specs={"quota:cpu_quota": "-1", "quota:disk_read_bytes_sec": "0"}, host=facts(cgroups=False))
    assert root.find("./cputune/quota") is None and root.find("./devices/disk/iotune") is None


def test_pinning_numa_and_huge_pages() -> None:
    settings = LibvirtSettings(cpu_dedicated_set="1-7", cpu_shared_set="0")
    place = PinRecord(vcpus={1: 1, 2: 4, 3: 6}, cells={0: 0, 1: 1}, page_kib=2048)
    root = made(
        settings=settings,
        size={"vcpus": 4, "ram": 1024},
        specs={
            "hw:cpu_policy": "mixed",
            "hw:cpu_dedicated_mask": "^0",
            "hw:numa_nodes": "2",
            "hw:mem_page_size": "2MB",
        },
        record={"pins": place},
    )
    pins = {pin["vcpu"]: pin["cpuset"] for pin in attributes(root, "./cputune/vcpupin")}
    assert pins == {"0": "0", "1": "1", "2": "4", "3": "6"}
    assert one(root, "./cputune/emulatorpin").get("cpuset") == "1,4,6"
    assert attributes(root, "./numatune/memnode") == [
        {"cellid": "0", "mode": "strict", "nodeset": "0"},
        {"cellid": "1", "mode": "strict", "nodeset": "1"},
    ]
    cells = attributes(root, "./cpu/numa/cell")
    assert [(cell["id"], cell["cpus"], cell["memory"]) for cell in cells] == [("0", "0,1", "512"), ("1", "2,3", "512")]
    assert attributes(root, "./memoryBacking/hugepages/page") == [{"size": "2048", "unit": "KiB", "nodeset": "0,1"}]
    assert one(root, "vcpu").get("cpuset") == "0"


@pytest.mark.parametrize(
    ("shared", "policy", "cpus"),
    [
        ("0,2", "share", "0,2"),
        ("0,2,99", "share", "0,2"),  # the host has no CPU 99
        ("0,2", None, "4,5"),  # those of the guest
        ("", "share", "4,5"),
    ],
)
def test_the_threads_of_the_emulator_use_shared_cpus_on_request(shared: str, policy: str | None, cpus: str) -> None:
    root = made(
        settings=LibvirtSettings(cpu_dedicated_set="4-5", cpu_shared_set=shared),
        size={"vcpus": 2, "ram": 512},
        specs={"hw:cpu_policy": "dedicated"} | ({} if policy is None else {"hw:emulator_threads_policy": policy}),
        record={"pins": PinRecord(vcpus={0: 4, 1: 5}, cells={0: 1})},
    )
    assert one(root, "./cputune/emulatorpin").get("cpuset") == cpus


def test_shared_cpus_for_the_emulator_that_the_host_does_not_have() -> None:
    with pytest.raises(NotSupported, match="none of those in cpu_shared_set"):
        made(
            settings=LibvirtSettings(cpu_dedicated_set="4-5", cpu_shared_set="99"),
            specs={"hw:cpu_policy": "dedicated", "hw:emulator_threads_policy": "share"},
            record={"pins": PinRecord(vcpus={0: 4}, cells={0: 1})},
        )


def test_pci_devices_of_the_host() -> None:
    root = made(record={"pins": PinRecord(devices=("0000:5e:02.1", "0001:0a:00.0"))})
    found = root.findall("./devices/hostdev")
    assert [(each.get("mode"), each.get("type"), each.get("managed")) for each in found] == [
        ("subsystem", "pci", "yes")
    ] * 2
    assert attributes(root, "./devices/hostdev/source/address") == [
        {"domain": "0x0000", "bus": "0x5e", "slot": "0x02", "function": "0x1"},
        {"domain": "0x0001", "bus": "0x0a", "slot": "0x00", "function": "0x0"},
    ]
    assert made().find("./devices/hostdev") is None


def test_mediated_devices_of_the_host() -> None:
    mdevs = tuple(MdevRecord(uuid=uuid, parent="pci_0000_84_00_0", mdev_type="nvidia-35") for uuid in ("a", "b"))
    record = {"pins": PinRecord(mdevs=mdevs)}
    root = made(record=record, specs={"resources:VGPU": "2"})
    wanted = {"mode": "subsystem", "type": "mdev", "managed": "no", "model": "vfio-pci"}
    assert attributes(root, "./devices/hostdev") == [wanted, wanted]
    assert attributes(root, "./devices/hostdev/source/address") == [{"uuid": "a"}, {"uuid": "b"}]
    with pytest.raises(NotSupported, match=r"3 virtual GPUs.*no device of this host"):
        made(record=record, specs={"resources:VGPU": "2", "resources1:VGPU": "1"})


def test_windows() -> None:
    root = made(host=facts(virt_type="kvm"), properties={"os_type": "windows", "img_hide_hypervisor_id": "true"})
    assert one(root, "clock").get("offset") == "localtime"
    assert one(root, "./features/hyperv/relaxed").get("state") == "on"
    assert one(root, "./features/kvm/hidden").get("state") == "on"
    assert root.find("./clock/timer[@name='hypervclock']") is not None


@pytest.mark.parametrize("name", ["hw:hide_hypervisor_id", "hide_hypervisor_id"])
def test_a_flavor_hides_the_hypervisor(name: str) -> None:
    image: dict[str, object] = {"img_hide_hypervisor_id": "false"}
    root = made(host=facts(virt_type="kvm"), specs={name: "true"}, properties=image)
    assert one(root, "./features/kvm/hidden").get("state") == "on"


def test_xen() -> None:
    host = facts(virt_type="xen", os_type="linux", hypervisor="Xen", emulator="", disk_buses=frozenset())
    root = made(host=host, vifs=(vif(),))
    assert root.get("type") == "xen" and one(root, "./os/type").text == "linux"
    assert attributes(root, "./devices/disk/target") == [{"dev": "xvda", "bus": "xen"}]
    plug = one(root, "./devices/interface")
    assert plug.get("type") == "bridge" and one(plug, "source").get("bridge") == "brq12345678-ab"
    assert one(plug, "script").get("path") == "vif-bridge"
    for absent in ("cpu", "./devices/rng", "./devices/watchdog", "./devices/memballoon", "sysinfo", "features"):
        assert root.find(absent) is None


def test_parallels() -> None:
    root = made(host=facts(virt_type="parallels", hypervisor="Parallels", disk_buses=frozenset()))
    assert root.get("type") == "parallels"
    assert attributes(root, "./devices/disk/target") == [{"dev": "hda", "bus": "ide"}]


@pytest.mark.parametrize(
    ("specs", "properties"),
    [
        ({"hw:mem_encryption": "true"}, {}),
        ({"resources:VGPU": "1"}, {}),
        ({"resources_GPU:VGPU": "1"}, {}),
        ({}, {"hw_tpm_version": "2.0"}),
        ({}, {"hw_architecture": "aarch64"}),
    ],
)
def test_what_is_not_given_is_refused(specs: dict[str, str], properties: dict[str, str]) -> None:
    with pytest.raises(NotSupported):
        made(specs=specs, properties=properties)


def test_volumes_and_other_images_are_refused() -> None:
    for device in (
        BlockDevice(uuid="d", source_type="volume", destination_type="volume", volume_id="v"),
        BlockDevice(uuid="d", image_id="another"),
    ):
        with pytest.raises(NotSupported):
            made(devices=(device,))


def test_the_guest_names_its_owner() -> None:
    text = domain_xml(composed(name='a <server> & "more"\x00\x1b'))
    owner = owner_of(text)
    assert owner is not None
    assert (owner.uuid, owner.epoch, owner.cloud) == (UUID, 3, "cloud-1")
    assert owner.name == 'a <server> & "more"'
    assert (owner.project_id, owner.flavor) == ("project-1", "tiny")
    assert owner_of(unparse(metadata(owner))) == owner
    # As some libvirts give the element out.
    assert owner_of(f"<instance uuid='{UUID}' epoch='3'><cloud>cloud-1</cloud></instance>") is not None


def test_strangers_have_no_owner() -> None:
    for text in (
        "<domain><name>by hand</name></domain>",
        "<domain><metadata><instance xmlns='urn:another' uuid='x' epoch='1'/></metadata></domain>",
        "<domain><metadata><m:instance xmlns:m='urn:micronova:instance:1' uuid='x'/></metadata></domain>",
        "not xml",
    ):
        assert owner_of(text) is None


def test_elements() -> None:
    root = element("a", "text", x=1, y=None)
    child(root, "b", z="ü")
    assert unparse(root) == '<a x="1">text<b z="ü" /></a>'
    assert one(parse(unparse(root)), "b").get("z") == "ü"


def test_a_guest_has_a_user_of_its_own_and_its_files_stay_the_agents() -> None:
    root = made(config_drive=True, record={"uid": 2_013_265_921})
    label = one(root, "seclabel")
    assert label.attrib == {"type": "static", "model": "dac", "relabel": "yes"}
    assert label.findtext("label") == "+2013265921:+2013265921"
    kept = [{"model": "dac", "relabel": "no"}]
    assert [attributes(disk, "./source/seclabel") for disk in root.findall("./devices/disk")] == [kept, kept]
    assert attributes(root, "./devices/disk/backingStore/source/seclabel") == kept
    # Its only group is the one that may use /dev/kvm.
    root = made(record={"uid": 2_013_265_921}, profile={"kvm_group": 104})
    assert root.findtext("./seclabel/label") == "+2013265921:+104"
    assert made().find("./seclabel") is None, "a guest of another hypervisor"


def test_guests_have_a_weight_by_their_size_where_all_are_ours() -> None:
    assert made().find("cputune") is None
    for vcpus, shares in ((1, 100), (4, 400), (200, 10_000)):
        root = made(profile={"weighs_cpus": True}, size={"vcpus": vcpus})
        assert root.findtext("./cputune/shares") == str(shares)
    root = made(profile={"weighs_cpus": True}, specs={"quota:cpu_shares": "7"})
    assert root.findtext("./cputune/shares") == "7"


def test_interfaces_have_no_link_where_nobody_wires_them() -> None:
    root = made(vifs=(vif(),), settings=LibvirtSettings(interfaces_linked=False))
    assert attributes(root, "./devices/interface/link") == [{"state": "down"}]
    assert made(vifs=(vif(),)).find("./devices/interface/link") is None

"""What a request, a flavor or an image asks for is done or refused: nothing is accepted and then ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.servers.honoured import Honoured
from micronova.servers.unsupported import Unsupported
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image

CLOUD = CloudOptions(hosts=2, roles=("image",), settings={"fake": {"traits": ["HW_CPU_X86_AVX2"]}})
SERVER = "00000000-0000-4000-8000-000000000001"


async def _flavor(user: Caller, extra_specs: dict[str, str], minor: int = 1, vcpus: int = 1) -> str:
    wanted = {"name": user.project, "ram": 64, "vcpus": vcpus, "disk": 1}
    id = str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])
    await user.admin.at(minor).post(f"/flavors/{id}/os-extra_specs", {"extra_specs": extra_specs}, 200)
    return id


async def _plain_flavor(user: Caller) -> str:
    wanted = {"name": f"plain-{user.project}", "ram": 64, "vcpus": 2, "disk": 1}
    return str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


async def _refused(user: Caller, picture: str, hints: dict[str, Any] | None = None, **fields: Any) -> str:
    body = user.body(imageRef=picture, **fields)
    if hints is not None:
        body["os:scheduler_hints"] = hints
    return await user.refused(400, "POST", "/servers", body)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        ("query", '[">=", "$free_ram_mb", 1024]'),
        ("build_near_host_ip", "192.0.2.1"),
        ("different_cell", "c1"),
        ("target_cell", "c1"),
    ],
)
async def test_hints_without_a_filter(cloud: Cloud, user: Caller, hint: str, value: Any) -> None:
    message = await _refused(user, await image(user), {hint: value})
    assert f"scheduler hint {hint} is not supported" in message
    assert (await user.get("/servers"))["servers"] == []
    await cloud.assert_clean()


@only_in_one_process("reads the log of the API")
async def test_a_hint_that_nova_does_not_know_is_accepted_and_reported(
    user: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    body = user.body(imageRef=await image(user))
    body["os:scheduler_hints"] = {"rack": "r7"}
    id = (await user.post("/servers", body))["server"]["id"]
    await user.wait_for(id, "ACTIVE")
    told = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert told == ["The scheduler hint rack has no effect: no enabled filter honours it."]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aggregate_instance_extra_specs:ssd", "true"),
        ("accel:device_profile", "fpga"),
        ("hw:cpu_realtime", "yes"),
        ("hw:mem_encryption", "true"),
        ("hw:pmem", "4GB"),
        ("hw:tpm_version", "2.0"),
        ("hw:viommu_model", "intel"),
        ("hw:locked_memory", "true"),
        ("quota:vif_inbound_average", "1000"),
        ("quota:cpu_reservation", "100"),
        ("vmware:storage_policy", "gold"),
    ],
)
async def test_extra_specs_that_nothing_honours(user: Caller, name: str, value: str) -> None:
    message = await _refused(user, await image(user), flavorRef=await _flavor(user, {name: value}))
    assert f"The extra spec {name} of flavor" in message and "is not supported" in message
    assert (await user.get("/servers"))["servers"] == []


@pytest.mark.parametrize(
    "extra_specs",
    [
        {"hw:mem_encryption": "false", "hw:cpu_realtime": "no"},  # they ask for nothing
        {"hw:cpu_policy": "shared", "hw:numa_nodes": "1", "quota:cpu_shares": "512"},  # drivers do these
        {"capabilities:hypervisor_type": "fake"},  # a filter does
        {"colour": "blue", "vendor:note": "x"},  # of the operator's own programs
    ],
)
async def test_extra_specs_that_are_done_or_concern_others(user: Caller, extra_specs: dict[str, str]) -> None:
    await user.boot(imageRef=await image(user), flavorRef=await _flavor(user, extra_specs))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hw_tpm_version", "2.0"),
        ("hw_mem_encryption", "true"),
        ("hw_sound_model", "ich9"),
        ("hw_emulation_architecture", "aarch64"),
        ("mappings", '[{"virtual": "swap", "device": "sdb"}]'),
    ],
)
async def test_image_properties_that_nothing_honours(user: Caller, name: str, value: str) -> None:
    given: dict[str, Any] = {name: value}
    message = await _refused(user, await image(user, **given))
    assert f"The property {name} of image" in message and "is not supported" in message


@only_in_one_process("reads the log of the API")
async def test_names_that_nobody_reads_are_reported_once(user: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Nova accepts them; so somebody who has misspelt one has to find out."""
    known = {"hw:cpu_policy": "shared", "resources:CUSTOM_GOLD": "0", "trait:CUSTOM_OLD": "forbidden"}
    flavor = await _flavor(user, {"hw:cpu_polcy": "dedicated", "quota:disk_iops": "5", "vendor:note": "x", **known})
    described: dict[str, Any] = {"hw_disk_bus": "virtio", "os_distro": "debian", "note": "x"}
    ref = await image(user, hw_vif_modell="e1000", **described)
    for _ in range(2):
        await user.boot(imageRef=ref, flavorRef=flavor)
    told = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert [each.split(" of ")[0] for each in told] == [
        "The extra spec hw:cpu_polcy",
        "The extra spec quota:disk_iops",
        "The extra spec vendor:note",
        "The property hw_vif_modell",
    ]
    assert all(each.endswith("has no effect: nothing on this cloud honours it.") for each in told)


async def test_image_properties_that_are_done(user: Caller) -> None:
    given: dict[str, Any] = {"hw_disk_bus": "virtio", "hw_tpm_version": "", "os_distro": "debian", "kernel_id": None}
    await user.boot(imageRef=await image(user, **given))


@pytest.mark.parametrize(
    "given",
    [
        {"img_hv_type": "Fake", "hw_vm_mode": "HVM", "img_hv_requested_version": ">=0.1, <99"},
        {"hypervisor_type": "fake", "vm_mode": "hv", "hypervisor_version_requires": "!= 99.0"},
        {"mappings": "[]", "hw_pci_numa_affinity_policy": "socket"},
        {"os_type": "Linux", "hw_vif_model": "VirtualE1000", "hw_scsi_model": "lsiLogic"},
        {"os_type": "WINDOWS", "hw_vif_model": "VIRTIO", "hw_scsi_model": "ParaVirtual"},
        {"img_hv_requested_version": ">= 0.1.0rc1", "vmware_adaptertype": "lsiLogicsas"},
        {"img_hv_requested_version": ">0a1, !=1.dev2, <99.post1", "vmware_adaptertype": "ide"},
    ],
)
async def test_image_properties_in_other_forms(user: Caller, given: dict[str, Any]) -> None:
    await user.boot(imageRef=await image(user, **given))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("/dev/xvda", "/dev/xvda"),
        ("sda", "/dev/sda"),
        ("/dev/my disk!", "/dev/my disk!"),
        ("", "/dev/vda"),
        ("x" * 250, "/dev/" + "x" * 250),
    ],
)
async def test_the_name_of_the_root_disk_is_the_image_s(user: Caller, given: str, name: str) -> None:
    id = (await user.boot(imageRef=await image(user, root_device_name=given)))["id"]
    assert (await user.admin.show(id))["OS-EXT-SRV-ATTR:root_device_name"] == name


@pytest.mark.parametrize(
    ("extra_specs", "properties", "message"),
    [
        # Values that the properties of an image cannot have.
        ({}, {"hw_disk_bus": "banana"}, "Invalid image metadata. Error: hw_disk_bus is 'banana'"),
        ({}, {"hw_vif_model": "banana"}, "Invalid image metadata"),
        ({}, {"hw_watchdog_action": "banana"}, "Invalid image metadata"),
        ({}, {"hw_numa_nodes": "x"}, "Invalid image metadata"),
        ({}, {"hw_cpu_cores": "two"}, "Invalid image metadata"),
        ({}, {"hw_video_model": "zz"}, "Invalid image metadata"),
        ({}, {"hw_firmware_type": "zz"}, "Invalid image metadata"),
        ({}, {"hw_architecture": "banana"}, "Invalid image metadata"),
        ({}, {"os_secure_boot": "zz"}, "Invalid image metadata"),
        ({}, {"hw_boot_menu": "perhaps"}, "Invalid image metadata"),
        ({}, {"img_config_drive": "banana"}, "Invalid image metadata"),
        ({}, {"img_hv_type": "banana"}, "img_hv_type is 'banana': it should be one of baremetal, bhyve,"),
        ({}, {"hypervisor_type": "banana"}, "Invalid image metadata"),
        ({}, {"hw_vm_mode": "banana"}, "hw_vm_mode is 'banana': it should be one of"),
        ({}, {"vm_mode": "banana"}, "Invalid image metadata"),
        ({}, {"img_hv_requested_version": "banana"}, "it should be versions such as '>=6.0, <8'"),
        ({}, {"img_hv_requested_version": "6.0"}, "Invalid image metadata"),
        ({}, {"hypervisor_version_requires": ">=6,"}, "Invalid image metadata"),
        ({}, {"hw_pci_numa_affinity_policy": "banana"}, "hw_pci_numa_affinity_policy is 'banana'"),
        ({}, {"hw_numa_cpus.0": "a"}, "hw_numa_cpus.0 is 'a': it should be a set of CPUs such as"),
        ({}, {"hw_numa_mem.0": "1.5"}, "hw_numa_mem.0 is '1.5': it should be a number"),
        ({}, {"img_hv_requested_version": ">=6.0 beta"}, "Invalid image metadata"),
        ({}, {"img_hv_requested_version": ">=6.x"}, "Invalid image metadata"),
        ({}, {"vmware_adaptertype": "banana"}, "hw_scsi_model is 'banana'"),
        ({}, {"os_type": "Plan9"}, "os_type is 'Plan9': it should be one of linux, windows"),
        ({}, {"root_device_name": "x" * 251}, "it should be the name of a disk such as /dev/vda"),
        # Properties that the flavor does not allow.
        ({}, {"hw_mem_page_size": "large"}, "hw_mem_page_size large is not allowed: the flavor has none"),
        ({"hw:mem_page_size": "small"}, {"hw_mem_page_size": "large"}, "hw_mem_page_size"),
        ({"hw:cpu_policy": "shared"}, {"hw_cpu_policy": "dedicated"}, "hw_cpu_policy dedicated is not allowed"),
        ({"hw:numa_nodes": "1"}, {"hw_numa_nodes": "2"}, "hw_numa_nodes"),
        ({"hw:serial_port_count": "1"}, {"hw_serial_port_count": "2"}, "hw_serial_port_count is 2"),
        ({"hw:cpu_max_sockets": "1"}, {"hw_cpu_max_sockets": "2"}, "hw_cpu_max_sockets is 2"),
        ({"hw:pmu": "false"}, {"hw_pmu": "true"}, "hw_pmu"),
        ({"hw:vif_multiqueue_enabled": "false"}, {"hw_vif_multiqueue_enabled": "true"}, "hw_vif_multiqueue_enabled"),
        ({"os:secure_boot": "disabled"}, {"os_secure_boot": "required"}, "os_secure_boot"),
        # Extra specs that contradict each other.
        ({"hw:cpu_dedicated_mask": "0"}, {}, "needs hw:cpu_policy mixed"),
        ({"hw:cpu_policy": "mixed"}, {}, "hw:cpu_dedicated_mask"),
        ({"hw:cpu_thread_policy": "isolate"}, {}, "needs hw:cpu_policy dedicated"),
        ({"hw:emulator_threads_policy": "isolate"}, {}, "needs hw:cpu_policy dedicated"),
        ({"hw:numa_nodes": "3"}, {}, "cannot be divided"),
        (
            {},
            {
                "hw_numa_nodes": "2",
                "hw_numa_cpus.0": "0",
                "hw_numa_cpus.1": "1",
                "hw_numa_mem.0": "-64",
                "hw_numa_mem.1": "128",
            },
            "hw:numa_mem.0 is '-64': it should be a number of at least 1",
        ),
        ({"hw:numa_nodes": "1", "hw:numa_cpus.0": "0-5", "hw:numa_mem.0": "64"}, {}, "each of the 2 CPUs once"),
    ],
)
async def test_hardware_that_flavor_and_image_do_not_agree_on(
    user: Caller, extra_specs: dict[str, str], properties: dict[str, Any], message: str
) -> None:
    flavor = await _flavor(user, extra_specs, vcpus=2)
    assert message in await _refused(user, await image(user, **properties), flavorRef=flavor)


@pytest.mark.parametrize(
    ("extra_specs", "properties"),
    [
        ({}, {"hw_cpu_cores": "8"}),  # a preference
        ({"hw:mem_page_size": "any"}, {"hw_mem_page_size": "small"}),
        ({"hw:serial_port_count": "2"}, {"hw_serial_port_count": "1"}),
        ({"hw:cpu_policy": "shared"}, {"hw_cpu_policy": "shared"}),
        ({}, {"hw_architecture": "amd64"}),
    ],
)
async def test_hardware_that_flavor_and_image_agree_on(
    user: Caller, extra_specs: dict[str, str], properties: dict[str, Any]
) -> None:
    await user.boot(imageRef=await image(user, **properties), flavorRef=await _flavor(user, extra_specs, vcpus=2))


async def test_a_filter_that_honours_them_is_enough() -> None:
    flavor = Flavor(id="1", name="f", ram=1, vcpus=1, disk=1, extra_specs={"aggregate_instance_extra_specs:x": "y"})
    honouring = Unsupported(
        lambda: Honoured(hints=frozenset({"same_host"}), extra_specs=frozenset({"aggregate_instance_extra_specs"}))
    )
    honouring.check_hints({"same_host": [SERVER]})
    honouring.check_flavor(flavor)
    with pytest.raises(Invalid, match="aggregate_instance_extra_specs:x"):
        Unsupported(Honoured).check_flavor(flavor)


async def test_a_filter_checks_hints_and_extra_specs_that_nova_does_not_have() -> None:
    def check(hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        if hints.get("rack") == ["none"] or extra_specs.get("racks:row") == "none":
            raise Invalid("There is no such rack.")

    plugin = Unsupported(lambda: Honoured(checks=(check,)))
    flavor = Flavor(id="1", name="f", ram=1, vcpus=1, disk=1, extra_specs={"racks:row": "7"})
    plugin.check_hints({"rack": ["rack-7"]})
    plugin.check_flavor(flavor)
    with pytest.raises(Invalid, match="no such rack"):
        plugin.check_hints({"rack": ["none"]})
    with pytest.raises(Invalid, match="no such rack"):
        plugin.check_flavor(msgspec.structs.replace(flavor, extra_specs={"racks:row": "none"}))


@pytest.mark.parametrize(
    ("extra_specs", "properties", "message"),
    [
        (
            {"trait:HW_CPU_X86_AVX2": "forbidden"},
            {"trait:HW_CPU_X86_AVX2": "required"},
            "HW_CPU_X86_AVX2 is both required and forbidden",
        ),
        ({"resources:VCPU": "1"}, {"hw_cpu_policy": "shared"}, "contradicts the CPU policy shared"),
        ({"hw:pmu": "false"}, {"hw_pmu": "true"}, "hw_pmu"),
    ],
)
@only_in_one_process("the hosts of the shared cloud have no traits")
async def test_a_resize_compares_the_flavor_with_the_image(
    user: Caller, extra_specs: dict[str, str], properties: dict[str, Any], message: str
) -> None:
    """As create and rebuild do: a server gets nothing by a resize that it could not be created with."""
    picture = await image(user, **properties)
    small, large = await _plain_flavor(user), await _flavor(user, extra_specs, vcpus=2)
    id = (await user.boot(imageRef=picture, flavorRef=small))["id"]
    assert message in await _refused(user, picture, flavorRef=large)
    refused = await user.refused(400, "POST", f"/servers/{id}/action", {"resize": {"flavorRef": large}})
    assert message in refused
    assert (await user.show(id))["status"] == "ACTIVE"

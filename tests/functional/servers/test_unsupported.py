"""What a request, a flavor or an image asks for is done or refused: nothing is accepted and then ignored."""

from typing import Any

import pytest

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.servers.unsupported import Honoured, Unsupported
from tests.functional.cloud import Caller, Cloud, CloudOptions
from tests.functional.servers.embedded_services import image

CLOUD = CloudOptions(hosts=2, roles=("image",))
SERVER = "00000000-0000-4000-8000-000000000001"


async def _flavor(user: Caller, extra_specs: dict[str, str], minor: int = 1, vcpus: int = 1) -> str:
    wanted = {"name": user.project, "ram": 64, "vcpus": vcpus, "disk": 1}
    id = str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])
    await user.admin.at(minor).post(f"/flavors/{id}/os-extra_specs", {"extra_specs": extra_specs}, 200)
    return id


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


async def test_a_hint_that_nova_does_not_know_is_for_a_filter_of_the_operator(user: Caller) -> None:
    body = user.body(imageRef=await image(user))
    body["os:scheduler_hints"] = {"rack": "r7"}
    id = (await user.post("/servers", body))["server"]["id"]
    await user.wait_for(id, "ACTIVE")


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
    ],
)
async def test_image_properties_that_nothing_honours(user: Caller, name: str, value: str) -> None:
    given: dict[str, Any] = {name: value}
    message = await _refused(user, await image(user, **given))
    assert f"The property {name} of image" in message and "is not supported" in message


async def test_image_properties_that_are_done(user: Caller) -> None:
    given: dict[str, Any] = {"hw_disk_bus": "virtio", "hw_tpm_version": "", "os_distro": "debian", "kernel_id": None}
    await user.boot(imageRef=await image(user, **given))


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

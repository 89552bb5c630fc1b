"""Mediated devices (virtual GPUs) of servers, on simulated hosts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from micronova.cli.audit import run_audit
from micronova.compute.manager import ComputeManager
from micronova.virt.fake.guests import FakeMdev
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import call, image, ok

GPU_A, GPU_B, ENCODER = "0000:84:00.0", "0000:85:00.0", "0000:86:00.0"
CODEC = "i915-GVTg_V5_4"
# Two hosts. Each has two GPUs, which are divided into two each by different types, and a device of another class.
CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    settings={
        "fake": {
            "vcpus": 16,
            "memory_mb": 8192,
            "mdev_devices": [
                {"address": GPU_A, "types": {"nvidia-35": 2, "nvidia-36": 4}},
                {"address": GPU_B, "types": {"nvidia-35": 2, "nvidia-36": 2}},
                {"address": ENCODER, "types": {CODEC: 1}},
            ],
        },
        "devices": {
            "enabled_mdev_types": ["nvidia-35", "nvidia-36", CODEC],
            "mdev": {
                "nvidia-36": {"device_addresses": [GPU_B]},
                CODEC: {"device_addresses": [ENCODER], "mdev_class": "CUSTOM_ENCODER"},
            },
        },
        "default": {"allow_resize_to_same_host": True},
        "compute": {"resource_interval": 0.2},
    },
)
pytestmark = only_in_one_process("the shared cloud has hosts without mediated devices")


async def _placement(user: Caller, method: str, path: str, body: Any = None) -> Any:
    headers = {"openstack-api-version": "placement 1.39"}
    answer = await call(user.admin, method, f"/placement{path}", body, headers)
    assert answer.status < 300, answer
    return answer.json() if answer.body else None


async def _flavor(user: Caller, specs: Mapping[str, str], ram: int = 256) -> str:
    known = (await user.admin.get("/flavors"))["flavors"]
    flavor = {"name": f"f{len(known)}-{user.project}", "ram": ram, "vcpus": 1, "disk": 1}
    id: str = (await user.admin.post("/flavors", {"flavor": flavor}, 200))["flavor"]["id"]
    await user.admin.post(f"/flavors/{id}/os-extra_specs", {"extra_specs": dict(specs)}, 200)
    return id


async def _image(user: Caller) -> str:
    known = (await ok(user, "GET", "/image/v2/images?visibility=private"))["images"]
    return str(known[0]["id"]) if known else await image(user)


async def _boot(user: Caller, flavor: str, **fields: Any) -> str:
    return str((await user.boot(flavorRef=flavor, imageRef=await _image(user), **fields))["id"])


async def _not_placed(user: Caller, flavor: str, **fields: Any) -> str:
    id = await user.create(flavorRef=flavor, imageRef=await _image(user), **fields)
    message: str = (await user.wait_for(id, "ERROR"))["fault"]["message"]
    assert "No valid host was found" in message
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    return message


def _simulated(cloud: Cloud, host: str) -> Any:
    [manager] = [role for role in cloud.process.started if isinstance(role, ComputeManager)]
    return manager._agents[host].host.driver._simulated  # type: ignore[attr-defined]


async def _devices(cloud: Cloud, user: Caller, id: str) -> tuple[FakeMdev, ...]:
    """Return the mediated devices that the host of a server has made for it."""
    found: tuple[FakeMdev, ...] = _simulated(cloud, await user.host_of(id)).require(id).mdevs
    return found


def _types(devices: tuple[FakeMdev, ...]) -> list[tuple[str, str]]:
    return sorted((each.parent, each.mdev_type) for each in devices)


async def _providers(user: Caller) -> dict[str, dict[str, Any]]:
    """Return the resource providers by name."""
    listed = (await _placement(user, "GET", "/resource_providers"))["resource_providers"]
    return {each["name"]: each for each in listed}


async def test_each_device_is_a_provider_below_its_node(cloud: Cloud, user: Caller) -> None:
    found = await _providers(user)
    shown = {}
    for name, provider in found.items():
        path = f"/resource_providers/{provider['uuid']}"
        stock = (await _placement(user, "GET", f"{path}/inventories"))["inventories"]
        traits = (await _placement(user, "GET", f"{path}/traits"))["traits"]
        if provider["parent_provider_uuid"] is not None:
            assert provider["parent_provider_uuid"] == found[name.split("_")[0]]["uuid"]
            shown[name] = ({kind: (each["total"], each["allocation_ratio"]) for kind, each in stock.items()}, traits)
    assert shown == {
        f"fake-{number}_{device}": expected
        for number in (1, 2)
        for device, expected in {
            "pci_0000_84_00_0": ({"VGPU": (2, 1.0)}, ["CUSTOM_NVIDIA_35"]),
            "pci_0000_85_00_0": ({"VGPU": (2, 1.0)}, ["CUSTOM_NVIDIA_36"]),
            "pci_0000_86_00_0": ({"CUSTOM_ENCODER": (1, 1.0)}, ["CUSTOM_I915_GVTG_V5_4"]),
        }.items()
    }


async def test_servers_get_exactly_what_there_is(cloud: Cloud, user: Caller) -> None:
    flavor = await _flavor(user, {"resources:VGPU": "1"})
    servers = [await _boot(user, flavor) for _ in range(8)]
    made: Counter[tuple[str, str, str]] = Counter()
    for id in servers:
        [device] = await _devices(cloud, user, id)
        made[await user.host_of(id), device.parent, device.mdev_type] += 1
    assert made == {
        (host, parent, mdev_type): 2
        for host in ("fake-1", "fake-2")
        for parent, mdev_type in (("pci_0000_84_00_0", "nvidia-35"), ("pci_0000_85_00_0", "nvidia-36"))
    }
    assert "further resources" in await _not_placed(user, flavor)
    held = (await _placement(user, "GET", f"/allocations/{servers[0]}"))["allocations"]
    assert sorted(str(each["resources"]) for each in held.values()) == [
        "{'DISK_GB': 1, 'MEMORY_MB': 256, 'VCPU': 1}", "{'VGPU': 1}",
    ]  # fmt: skip
    await cloud.assert_clean()
    topology = await user.admin.get(f"/servers/{servers[0]}/topology")
    assert topology == {"nodes": [], "pagesize_kb": None}
    await user.delete(f"/servers/{servers[0]}")
    await user.gone(servers[0])
    await _boot(user, flavor)
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


@pytest.mark.parametrize(
    ("specs", "expected", "room"),
    [
        ({"resources:VGPU": "1", "trait:CUSTOM_NVIDIA_36": "required"}, [("pci_0000_85_00_0", "nvidia-36")], 4),
        ({"resources:VGPU": "1", "trait:CUSTOM_NVIDIA_36": "forbidden"}, [("pci_0000_84_00_0", "nvidia-35")], 4),
        ({"resources:VGPU": "2", "trait:CUSTOM_NVIDIA_35": "required"}, [("pci_0000_84_00_0", "nvidia-35")] * 2, 2),
        ({"resources1:VGPU": "2", "trait1:CUSTOM_NVIDIA_36": "required"}, [("pci_0000_85_00_0", "nvidia-36")] * 2, 2),
        (
            {"resources1:VGPU": "1", "resources2:VGPU": "1", "group_policy": "isolate"},
            [("pci_0000_84_00_0", "nvidia-35"), ("pci_0000_85_00_0", "nvidia-36")],
            4,
        ),
        (
            {"resources:CUSTOM_ENCODER": "1", "resources1:VGPU": "1", "trait1:CUSTOM_NVIDIA_35": "required"},
            [("pci_0000_84_00_0", "nvidia-35"), ("pci_0000_86_00_0", CODEC)],
            2,
        ),
    ],
)
async def test_flavors_choose_types_by_traits_and_classes(
    cloud: Cloud, user: Caller, specs: dict[str, str], expected: list[tuple[str, str]], room: int
) -> None:
    flavor = await _flavor(user, specs)
    body = user.body(flavorRef=flavor, imageRef=await _image(user), min_count=room, max_count=room)
    await user.post("/servers", body)
    for each in (await user.get("/servers"))["servers"]:
        await user.wait_for(each["id"], "ACTIVE")
        assert _types(await _devices(cloud, user, each["id"])) == expected
    await _not_placed(user, flavor)
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_a_server_keeps_its_device(cloud: Cloud, user: Caller) -> None:
    id = await _boot(user, await _flavor(user, {"resources:VGPU": "1"}))
    first = await _devices(cloud, user, id)
    for action, body, status in (
        ("reboot", {"type": "HARD"}, "ACTIVE"),
        ("os-stop", None, "SHUTOFF"),
        ("os-start", None, "ACTIVE"),
        ("rebuild", {"imageRef": await _image(user)}, "ACTIVE"),
    ):
        await user.act(id, action, body)
        await user.wait_for(id, status)
        assert await _devices(cloud, user, id) == first
    await cloud.assert_clean()
    await cloud.delete_all()


async def test_an_image_may_require_traits_of_the_device(cloud: Cloud, user: Caller) -> None:
    """A rebuild compares them with what the server has; create looks for a device that has them."""
    flavor = await _flavor(user, {"resources:VGPU": "1"})
    wanting = {}
    for name in ("35", "36"):
        properties: dict[str, Any] = {f"trait:CUSTOM_NVIDIA_{name}": "required"}
        wanting[name] = await image(user, **properties)
    id = str((await user.boot(flavorRef=flavor, imageRef=wanting["36"]))["id"])
    first = await _devices(cloud, user, id)
    assert _types(first) == [("pci_0000_85_00_0", "nvidia-36")]
    await user.act(id, "rebuild", {"imageRef": wanting["35"]})
    refused = await user.wait_for(id, "ERROR")
    assert "No valid host was found" in refused["fault"]["message"]
    await user.act(id, "rebuild", {"imageRef": wanting["36"]})
    await user.wait_for(id, "ACTIVE")
    assert await _devices(cloud, user, id) == first
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_a_resize_holds_both_places_until_it_is_confirmed_or_reverted(cloud: Cloud, user: Caller) -> None:
    small = await _flavor(user, {"resources:VGPU": "1", "trait:CUSTOM_NVIDIA_35": "required"})
    large = await _flavor(user, {"resources:VGPU": "2", "trait:CUSTOM_NVIDIA_36": "required"})
    id = await _boot(user, small)
    before, source = await _devices(cloud, user, id), await user.host_of(id)
    await user.act(id, "resize", {"flavorRef": large})
    await user.wait_for(id, "VERIFY_RESIZE")
    assert _types(await _devices(cloud, user, id)) == [("pci_0000_85_00_0", "nvidia-36")] * 2
    await cloud.assert_clean()
    await user.act(id, "revertResize")
    await user.wait_for(id, "ACTIVE")
    assert (await _devices(cloud, user, id), await user.host_of(id)) == (before, source)
    await cloud.assert_clean()
    await user.act(id, "resize", {"flavorRef": large})
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    assert _types(await _devices(cloud, user, id)) == [("pci_0000_85_00_0", "nvidia-36")] * 2
    for _ in range(4):  # what the server had before is free again
        await _boot(user, small)
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_moves_get_devices_of_the_destination(cloud: Cloud, user: Caller) -> None:
    id = await _boot(user, await _flavor(user, {"resources:VGPU": "1", "trait:CUSTOM_NVIDIA_35": "required"}))
    expected = [("pci_0000_84_00_0", "nvidia-35")]
    source = await user.host_of(id)
    await user.admin.act(id, "migrate", None)
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) != source and _types(await _devices(cloud, user, id)) == expected
    await cloud.assert_clean()
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source and _types(await _devices(cloud, user, id)) == expected
    await cloud.assert_clean()
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await cloud.assert_clean()
    await user.act(id, "unshelve")
    await user.wait_for(id, "ACTIVE")
    assert _types(await _devices(cloud, user, id)) == expected
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_a_live_migration_needs_the_same_type(cloud: Cloud, user: Caller) -> None:
    """The other host has only a GPU of another type left: the server stays where it is."""
    of_type = {name: await _flavor(user, {"resources:VGPU": "1", f"trait:CUSTOM_NVIDIA_{name}": "required"})
               for name in ("35", "36")}  # fmt: skip
    for _ in range(4):
        await _boot(user, of_type["36"])
    id = await _boot(user, await _flavor(user, {"resources:VGPU": "1"}))
    source = await user.host_of(id)
    others = [await _boot(user, of_type["35"]) for _ in range(3)]
    # Only a GPU of the type nvidia-36 is free on the other host from now on.
    for each in (await user.get("/servers"))["servers"]:
        server = each["id"]
        if server not in (id, *others) and await user.host_of(server) != source:
            await user.delete(f"/servers/{server}")
            await user.gone(server)
            break
    before = await _devices(cloud, user, id)
    await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})

    async def ended() -> str | None:
        [last, *_] = (await user.admin.at(80).get(f"/os-migrations?instance_uuid={id}"))["migrations"]
        return last["status"] if last["status"] in ("error", "completed", "failed") else None

    assert await cloud.until(ended, "the migration to end") in ("error", "failed")
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == source and await _devices(cloud, user, id) == before
    await cloud.assert_clean()
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_further_traits_stay_and_are_obeyed(cloud: Cloud, user: Caller) -> None:
    provider = (await _providers(user))["fake-2_pci_0000_84_00_0"]
    path = f"/resource_providers/{provider['uuid']}/traits"
    await _placement(user, "PUT", "/traits/CUSTOM_FAST")
    shown = await _placement(user, "GET", path)
    await _placement(user, "PUT", path, {**shown, "traits": [*shown["traits"], "CUSTOM_FAST"]})
    flavor = await _flavor(user, {"resources:VGPU": "1", "trait:CUSTOM_FAST": "required"})
    for _ in range(2):
        id = await _boot(user, flavor)
        assert await user.host_of(id) == "fake-2"
        assert _types(await _devices(cloud, user, id)) == [("pci_0000_84_00_0", "nvidia-35")]
    await _not_placed(user, flavor)
    shown = await _placement(user, "GET", path)
    assert sorted(shown["traits"]) == ["CUSTOM_FAST", "CUSTOM_NVIDIA_35"]
    await _placement(user, "PUT", path, {**shown, "traits": ["CUSTOM_NVIDIA_35"]})
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_the_audit_names_devices_that_are_gone(cloud: Cloud, user: Caller) -> None:
    """A GPU that is taken out leaves its provider until no server holds a part of it."""
    id = await _boot(user, await _flavor(user, {"resources:VGPU": "1", "trait:CUSTOM_NVIDIA_35": "required"}))
    host = await user.host_of(id)
    simulated = _simulated(cloud, host)
    whole = simulated._topology
    left = tuple(each for each in whole.mdevs if each.mdev_type != "nvidia-35")
    simulated._topology = msgspec.structs.replace(whole, mdevs=left)
    expected = (
        "The host lacks what its servers hold: The device pci_0000_84_00_0 has 0 mediated devices of the type "
        "nvidia-35; instances hold 1."
    )

    async def found() -> bool | None:
        findings = [each for each in await run_audit(cloud.process) if each["kind"] == "topology"]
        return [(each["subject"], each["message"]) for each in findings] == [(host, expected)] or None

    await cloud.until(found, "the audit to name the device")
    name = f"{host}_pci_0000_84_00_0"
    assert name in await _providers(user)
    await user.delete(f"/servers/{id}")
    await user.gone(id)

    async def removed() -> bool | None:
        return name not in await _providers(user) or None

    await cloud.until(removed, "the provider to be removed")
    simulated._topology = whole

    async def back() -> bool | None:
        return name in await _providers(user) or None

    await cloud.until(back, "the provider to be there again")
    await cloud.assert_clean()

"""What users do in a simulation, and the states in which their servers must end."""

import asyncio

import msgspec

from micronova.objects import power_state
from tests.simulation.simulated_cloud import IMAGE, SimulatedCloud

OTHER_IMAGE = "22222222-2222-4222-8222-222222222222"


async def server_lifecycle(cloud: SimulatedCloud, name: str = "lifecycle") -> None:
    """Build, stop, start, reboot and delete a server. A fault may delay this but not change it."""
    cloud.fault_plan.armed = True
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    await act(cloud, id, {"os-stop": None}, "stopped")
    await act(cloud, id, {"os-start": None}, "active")
    await act(cloud, id, {"reboot": {"type": "HARD"}}, "active")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def pause_and_suspend(cloud: SimulatedCloud, name: str = "pause") -> None:
    """Pause, unpause, suspend and resume a server that is active."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await act(cloud, id, {"pause": None}, "paused")
    await act(cloud, id, {"unpause": None}, "active")
    await act(cloud, id, {"suspend": None}, "suspended")
    await act(cloud, id, {"resume": None}, "active")


async def rescue_and_passwords(cloud: SimulatedCloud, name: str = "rescue") -> None:
    """Rescue a server, let it dump its memory, unrescue it, and change its password."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await cloud.insist("POST", f"/servers/{id}/action", {"rescue": {"adminPass": "first"}}, 200, 409)
    await cloud.becomes(id, "rescued")
    await cloud.insist("POST", f"/servers/{id}/action", {"trigger_crash_dump": None}, 202, 409)
    await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    await act(cloud, id, {"unrescue": None}, "active")
    # If the answer is lost, the user asks again after the operation has ended: the same password may be set twice.
    await cloud.insist("POST", f"/servers/{id}/action", {"changePassword": {"adminPass": "second"}}, 202)
    await settled(cloud, id)


async def look_and_administer(cloud: SimulatedCloud, name: str = "watched") -> None:
    """Read a server's console, ask for links to it, lock and unlock it, reboot it, and set its state by hand."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    path = f"/servers/{id}/action"
    await cloud.insist("POST", path, {"os-getConsoleOutput": {}}, 200)
    await cloud.insist("POST", path, {"os-getVNCConsole": {"type": "novnc"}}, 200)
    await cloud.insist("POST", path, {"os-getSerialConsole": {"type": "serial"}}, 200)
    await cloud.insist("POST", path, {"os-getSPICEConsole": {"type": "spice-html5"}}, 200)
    await cloud.insist("POST", path, {"lock": None}, 202)
    await cloud.insist("POST", path, {"unlock": None}, 202)
    await act(cloud, id, {"reboot": {"type": "SOFT"}}, "active")
    for state in ("error", "active"):
        await cloud.insist("POST", path, {"os-resetState": {"state": state}}, 202)
        assert cloud.row(id)["vm_state"] == state
    await settled(cloud, id)


async def rebuild(cloud: SimulatedCloud, name: str = "rebuilt") -> None:
    """Rebuild a server with another image, stop it, and rebuild it with the first one; it has one guest throughout."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await act(cloud, id, {"rebuild": {"imageRef": OTHER_IMAGE}}, "active")
    await has_image(cloud, id, OTHER_IMAGE)
    await act(cloud, id, {"os-stop": None}, "stopped")
    await act(cloud, id, {"rebuild": {"imageRef": IMAGE}}, "stopped")
    await has_image(cloud, id, IMAGE)
    await act(cloud, id, {"os-start": None}, "active")


async def has_image(cloud: SimulatedCloud, id: str, image: str) -> None:
    """Assert that the server and its only guest have this image; a crash may have to be over first."""
    await cloud.until(lambda: cloud.guest_images(id) == [image], f"the guest of {id} to have the image {image}")
    assert cloud.row(id)["image_ref"] == image


async def soft_delete(cloud: SimulatedCloud, name: str = "kept") -> None:
    """Delete a server where deletion is deferred, restore it, delete it again, and then for good."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await cloud.insist("DELETE", f"/servers/{id}", None, 204)
    await cloud.becomes(id, "soft-delete")
    await act(cloud, id, {"restore": None}, "active")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204)
    await cloud.becomes(id, "soft-delete")
    await cloud.insist("POST", f"/servers/{id}/action", {"forceDelete": None}, 202, 404)
    await cloud.gone(id)


async def reclaim(cloud: SimulatedCloud, name: str = "reclaimed") -> None:
    """Delete a server where deletion is deferred for a short time, and wait until it is reclaimed."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def network_named(cloud: SimulatedCloud, name: str) -> str:
    """Return the id of a network."""
    answer = await cloud.request("GET", f"/networks?name={name}", service="/network/v2.0")
    assert answer is not None
    return str(msgspec.json.decode(answer.body)["networks"][0]["id"])


async def change_addresses(cloud: SimulatedCloud, name: str = "addressed") -> None:
    """Give a server a security group, an address and a floating IP and take each back, and refresh its interfaces."""
    private, public = await network_named(cloud, "private"), await network_named(cloud, "public")
    made = await cloud.request(
        "POST", "/floatingips", {"floatingip": {"floating_network_id": public}}, service="/network/v2.0"
    )
    assert made is not None
    floating = msgspec.json.decode(made.body)["floatingip"]["floating_ip_address"]
    await cloud.request("POST", "/security-groups", {"security_group": {"name": "web"}}, service="/network/v2.0")
    [id] = await cloud.create(name, networks=[{"uuid": private}])
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    path, [first] = f"/servers/{id}/action", cloud.addresses()
    await cloud.insist("POST", path, {"addSecurityGroup": {"name": "web"}}, 202)
    # If an answer is lost, what the user takes back may be gone already.
    await cloud.insist("POST", path, {"removeSecurityGroup": {"name": "web"}}, 202, 400, 404)
    while len(cloud.addresses()) < 2:
        answer = await cloud.request("POST", path, {"addFixedIp": {"networkId": private}})
        assert answer is None or answer.status in (202, 503), answer
        await settled(cloud, id)
    for second in cloud.addresses() - {first}:
        await cloud.insist("POST", path, {"removeFixedIp": {"address": second}}, 202, 400, 404)
    assert cloud.addresses() == {first}
    await cloud.insist("POST", path, {"addFloatingIp": {"address": floating}}, 202)
    await cloud.insist("POST", path, {"removeFloatingIp": {"address": floating}}, 202, 409)
    await cloud.insist("POST", path, {"injectNetworkInfo": None}, 202)
    await settled(cloud, id)


async def attach_and_detach(cloud: SimulatedCloud, name: str = "attach") -> None:
    """Attach a second interface to a server, detach it, and delete the server."""
    network = await network_named(cloud, "private")
    cloud.fault_plan.armed = True
    [id] = await cloud.create(name, networks=[{"uuid": network}])
    await cloud.becomes(id, "active")
    [first] = cloud.ports()
    body = {"interfaceAttachment": {"net_id": network}}
    # If the answer is lost, the user checks for the port after the operation has ended before asking again.
    while len(cloud.ports()) < 2:
        await cloud.request("POST", f"/servers/{id}/os-interface", body)
        await settled(cloud, id)
    for second in cloud.ports().keys() - {first}:
        await cloud.insist("DELETE", f"/servers/{id}/os-interface/{second}", None, 202, 404)
    await cloud.until(lambda: list(cloud.ports()) == [first], "the interface to be gone")
    await settled(cloud, id)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def make_base_image(cloud: SimulatedCloud) -> None:
    """Make the image that servers are booted from."""
    document = {"id": IMAGE, "name": "base", "disk_format": "raw", "container_format": "bare"}
    await cloud.request("POST", "/images", document, service="/image/v2")
    await cloud.request("PUT", f"/images/{IMAGE}/file", bytes(512), service="/image/v2")


async def make_images(cloud: SimulatedCloud, name: str = "imaged") -> None:
    """Make an image of a server, two backups of which one is kept, and an image while the server is deleted."""
    await make_base_image(cloud)
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    path, snapshot = f"/servers/{id}/action", {"createImage": {"name": "snapshot"}}
    backup = {"createBackup": {"name": "backup", "backup_type": "daily", "rotation": 1}}
    # If the answer is lost, the user looks for the image after the operation has ended before asking again.
    while not cloud.images_of(id, "snapshot"):
        await cloud.request("POST", path, snapshot)
        await settled(cloud, id)
    before: set[str] = set()
    for _ in range(2):
        while set(cloud.images_of(id, "backup")) <= before:
            await cloud.request("POST", path, backup)
            await settled(cloud, id)
        before |= set(cloud.images_of(id, "backup"))
        assert len(cloud.images_of(id, "backup")) == 1
    await cloud.request("POST", path, snapshot)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def shelve_and_back(cloud: SimulatedCloud, name: str = "shelved") -> None:
    """Shelve a server, unshelve it and delete it; its image goes."""
    await make_base_image(cloud)
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await shelved(cloud, id, "shelved_offloaded")
    await unshelved(cloud, id, "shelved_offloaded")
    await cloud.until(lambda: not cloud.images_of(id, "snapshot"), "the image to be gone")
    cloud.fault_plan.armed = False  # other scenarios have faults in a delete
    await cloud.all_up()
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def shelve_and_offload(cloud: SimulatedCloud, name: str = "offloaded") -> None:
    """Shelve a server that stays on its host, unshelve it, shelve it again and offload it, and delete it."""
    await make_base_image(cloud)
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await shelved(cloud, id, "shelved")
    await unshelved(cloud, id, "shelved")
    await shelved(cloud, id, "shelved")
    await act(cloud, id, {"shelveOffload": None}, "shelved_offloaded")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def shelved(cloud: SimulatedCloud, id: str, state: str) -> None:
    """Shelve a server until it is in this state: a failure leaves it as it was, perhaps switched off."""
    while await act(cloud, id, {"shelve": None}, state, "active", "stopped") != state:
        await cloud.until(lambda: not cloud.open_operations(), "all operations to end")


async def unshelved(cloud: SimulatedCloud, id: str, state: str) -> None:
    """Unshelve a server: a host that is lost leaves it in this state."""
    while await act(cloud, id, {"unshelve": None}, "active", state) != "active":
        await cloud.until(lambda: not cloud.open_operations(), "all operations to end")


async def resize_and_back(cloud: SimulatedCloud, name: str = "resized") -> None:
    """Resize a server, revert that, resize it again, confirm that, and delete it."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await resized(cloud, id)
    await act(cloud, id, {"revertResize": None}, "active")
    assert cloud.row(id)["flavor"]["id"] == "1"
    await resized(cloud, id)
    await cloud.insist("POST", f"/servers/{id}/action", {"confirmResize": None}, 204, 409)
    await cloud.becomes(id, "active")
    assert cloud.row(id)["flavor"]["id"] == "2"
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def resize_pinned(cloud: SimulatedCloud, name: str = "pinned") -> None:
    """Do the same with a server that has dedicated CPUs: it holds those of one flavor, or of both."""
    for flavor, vcpus in (("small", 2), ("large", 4)):
        body = {"flavor": {"id": flavor, "name": flavor, "ram": 64, "vcpus": vcpus, "disk": 1}}
        await cloud.insist("POST", "/flavors", body, 200)
        specs = {"extra_specs": {"hw:cpu_policy": "dedicated", "hw:numa_nodes": "2"}}
        await cloud.insist("POST", f"/flavors/{flavor}/os-extra_specs", specs, 200)
    [id] = await cloud.create(name, flavor="small")
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    await resized(cloud, id, "large")
    await act(cloud, id, {"revertResize": None}, "active")
    assert len(cloud.dedicated_cpus(id)) == 2
    await resized(cloud, id, "large")
    await cloud.insist("POST", f"/servers/{id}/action", {"confirmResize": None}, 204, 409)
    await cloud.becomes(id, "active")
    assert len(cloud.dedicated_cpus(id)) == 4
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def migrate_and_back(cloud: SimulatedCloud, name: str = "migrated") -> None:
    """Migrate a server, revert that, migrate it again and confirm that."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    before = cloud.row(id)["host"]
    await migrated(cloud, id)
    await act(cloud, id, {"revertResize": None}, "active")
    assert cloud.row(id)["host"] == before
    await migrated(cloud, id)
    await cloud.insist("POST", f"/servers/{id}/action", {"confirmResize": None}, 204, 409)
    await cloud.becomes(id, "active")
    assert cloud.row(id)["host"] != before


async def migrated(cloud: SimulatedCloud, id: str) -> None:
    """Migrate a server until it has moved: a destination that is lost leaves it where it was."""
    while await act(cloud, id, {"migrate": None}, "resized", "active") == "active":
        pass


async def evacuate(cloud: SimulatedCloud, name: str = "evacuated") -> None:
    """Evacuate a server of a host that is lost, start it, and let the host return."""
    lost = cloud.drivers()[-1].host
    [id] = await cloud.create(name, host=lost)
    await cloud.becomes(id, "active")
    await cloud.lose_last_host()
    cloud.fault_plan.armed = True
    # If the answer is lost, the server may be on another host already, which is up: 400.
    await cloud.insist("POST", f"/servers/{id}/action", {"evacuate": {}}, 200, 400, 409)
    await cloud.becomes(id, "stopped")
    assert cloud.row(id)["host"] != lost
    await act(cloud, id, {"os-start": None}, "active")
    await cloud.return_last_host()


async def live_migrate(cloud: SimulatedCloud, name: str = "live") -> None:
    """Migrate a server live until it is on another host: a destination that is lost leaves it where it was."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    before = cloud.row(id)["host"]
    while cloud.row(id)["host"] == before:
        await act(cloud, id, {"os-migrateLive": {"host": None, "block_migration": "auto"}}, "active")
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def end_moves(cloud: SimulatedCloud, name: str = "ended") -> None:
    """Set the state of a server while it is migrated live, migrated and resized; its guest runs each time."""
    [id] = await cloud.create(name)
    await cloud.becomes(id, "active")
    cloud.fault_plan.armed = True
    path, live = f"/servers/{id}/action", {"host": None, "block_migration": "auto"}
    for move in ({"os-migrateLive": live}, {"migrate": None}, {"resize": {"flavorRef": "2"}}):
        await cloud.insist("POST", path, move, 202, 409)
        await cloud.until(lambda: cloud.migration_status(id) != "under way", "the guest to be sent")
        while True:  # it is refused while only the destination has the guest
            await cloud.insist("POST", path, {"os-resetState": {"state": "active"}}, 202, 409)
            await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
            if cloud.row(id)["vm_state"] == "active":
                break
        await cloud.until(lambda: cloud.guest_powers(id) == [power_state.RUNNING], f"the guest of {id} to run")


async def resized(cloud: SimulatedCloud, id: str, flavor: str = "2") -> None:
    """Resize a server until it is resized: a destination that is lost leaves it as it was."""
    before = cloud.row(id)["flavor"]["id"]
    while await act(cloud, id, {"resize": {"flavorRef": flavor}}, "resized", "active") == "active":
        assert cloud.row(id)["flavor"]["id"] == before


async def delete_during_move(cloud: SimulatedCloud, name: str = "moved", after: float = 0.0) -> None:
    """Delete a server while it moves."""
    [id] = await cloud.create(name)
    if await cloud.becomes(id, "active", "error") == "active":
        await cloud.insist("POST", f"/servers/{id}/action", {"resize": {"flavorRef": "2"}}, 202, 409)
        await asyncio.sleep(after)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def settled(cloud: SimulatedCloud, id: str, state: str = "active") -> None:
    """Wait until all operations have ended and the server is active, or in another state."""
    await cloud.until(lambda: not cloud.open_operations(), "all operations to end")
    await cloud.becomes(id, state)


async def act(cloud: SimulatedCloud, id: str, action: dict[str, object], *states: str) -> str:
    """Send an action until it is accepted; return its state then. A 409 means that its answer was lost."""
    await cloud.insist("POST", f"/servers/{id}/action", action, 202, 409)
    return await cloud.becomes(id, *states)


async def several_in_one_request(cloud: SimulatedCloud, name: str = "several") -> None:
    """Create three servers in one request, and delete them."""
    ids = await cloud.create(name, count=3)
    for id in ids:
        await cloud.becomes(id, "active", "error")
    for id in ids:
        await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    for id in ids:
        await cloud.gone(id)


async def keep_servers(cloud: SimulatedCloud, name: str = "kept") -> None:
    """Create two servers and keep them."""
    for id in await cloud.create(name, count=2):
        await cloud.becomes(id, "active", "error")


async def stays_active(cloud: SimulatedCloud, name: str, after: float) -> None:
    """Create a server after some time; it must become active, whatever happens meanwhile."""
    await asyncio.sleep(after)
    for id in await cloud.create(name):
        await cloud.becomes(id, "active")


async def delete_during_build(cloud: SimulatedCloud, name: str = "deleted", after: float = 0.0) -> None:
    """Delete a server while it is being built."""
    [id] = await cloud.create(name)
    await asyncio.sleep(after)
    await cloud.insist("DELETE", f"/servers/{id}", None, 204, 404)
    await cloud.gone(id)


async def exceed_capacity(cloud: SimulatedCloud, name: str = "large") -> None:
    """Create more large servers than the hosts can hold: some become active, the others go to ERROR."""
    ids = [id for number in range(14) for id in await cloud.create(f"{name}-{number:02}", flavor="3")]
    states = [await cloud.becomes(id, "active", "error") for id in ids]
    assert states.count("active") <= 12

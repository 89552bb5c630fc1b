"""The life of a real guest: it boots, reads its config drive, is talked to, stopped, started, saved, and removed."""

import asyncio
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.block_device import BlockDevice
from micronova.objects.errors import Conflict, Invalid, NotSupported, Unavailable
from micronova.objects.fitting import fit
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.topology import NOTHING_USED, AssignedMdev, Assignment
from micronova.objects.topology_request import topology_request
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.driver import LibvirtDriver
from tests.e2e.host import FLAVOR, MARK, TIMEOUT, USER_DATA, Host, console

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

READY = "MICRONOVA-GUEST-READY"
SPICE_HELLO = b"REDQ" + struct.pack("<IIIIBBIIII", 2, 2, 22, 0, 1, 0, 1, 0, 18, 0b1001)
"""SPICE 2.2, a new session, the main channel, one word of capabilities."""


async def test_the_life_of_a_guest(host: Host) -> None:
    plan = host.plan(epoch=7, config_drive=True, user_data=USER_DATA, hostname="hubert")
    uuid = plan.instance.uuid
    async with host.agent() as (driver, events):
        await driver.spawn(plan)
        (guest,) = await driver.list_guests()
        assert (guest.uuid, guest.epoch, guest.power_state) == (uuid, 7, power_state.RUNNING)
        log = await console(driver, uuid, READY)
        assert f"hostname=hubert ip= ip6= source=config-drive uuid={uuid}" in log
        await console(driver, uuid, f"{MARK} hubert")
        await _look(driver, uuid)
        assert (await driver.boot_signs([uuid]))[uuid].booted

        await driver.pause(uuid)
        await driver.pause(uuid)
        assert await _power(driver, uuid) == power_state.PAUSED
        await driver.unpause(uuid)
        assert await _power(driver, uuid) == power_state.RUNNING

        await driver.suspend(uuid)
        assert await _power(driver, uuid) == power_state.SUSPENDED
        assert host.qemus() == []
        await driver.resume(plan)
        assert await _power(driver, uuid) == power_state.RUNNING
        # This run's figures begin with nothing; that it has booted in the one before is known nevertheless.
        assert (await driver.boot_signs([uuid, str(uuid4())]))[uuid].booted

        await driver.reboot(plan, "SOFT")
        await console(driver, uuid, READY, 2)
        await driver.power_off(uuid, TIMEOUT)
        await driver.power_off(uuid, TIMEOUT)
        assert await _power(driver, uuid) == power_state.SHUTDOWN
        await console(driver, uuid, "reboot: Power down")  # by itself: it was not cut off
        told = events.of(uuid)
        assert told == ["started", "paused", "resumed", "suspended", "resumed", "stopped"]

    # Another agent finds it as it was left.
    async with host.agent() as (driver, events):
        assert [(each.uuid, each.epoch) for each in await driver.list_guests()] == [(uuid, 7)]
        await driver.power_on(plan)
        await driver.power_on(plan)
        await console(driver, uuid, READY, 3)
        # Its owner shuts it down from inside: the agent hears of it unasked.
        await _type(driver, uuid, "poweroff", expect="Power down")
        await events.wait(uuid, "stopped")
        assert await _power(driver, uuid) == power_state.SHUTDOWN
        await driver.reboot(plan, "HARD")
        assert await _power(driver, uuid) == power_state.RUNNING
        await driver.power_off(uuid, 0)
        assert await _power(driver, uuid) == power_state.SHUTDOWN
        await driver.destroy(uuid)
        await driver.destroy(uuid)
        assert await driver.info(uuid) is None
    assert host.leftovers() == []


async def _look(driver: LibvirtDriver, uuid: str) -> None:
    figures = await driver.get_diagnostics(uuid)
    assert figures.state == "running" and figures.num_cpus == 1
    assert figures.cpu_details[0].time and figures.disk_details[0].read_bytes
    assert figures.memory_details.maximum == 128
    vnc = await driver.get_vnc_console(uuid)
    reader, writer = await asyncio.open_unix_connection(vnc.path)
    assert re.fullmatch(rb"RFB \d{3}\.\d{3}\n", await asyncio.wait_for(reader.readexactly(12), TIMEOUT))
    writer.close()
    await _type(driver, uuid, "echo $((6*7))-is-the-answer", expect="42-is-the-answer")


async def _type(driver: LibvirtDriver, uuid: str, command: str, expect: str) -> str:
    """Type into the serial console until the guest answers: a shell that is just starting forgets what came before."""
    serial = await driver.get_serial_console(uuid)
    reader, writer = await asyncio.open_unix_connection(serial.path)
    seen = ""
    try:
        async with asyncio.timeout(TIMEOUT):
            while expect not in seen:
                writer.write(f"\n{command}\n".encode())
                await writer.drain()
                try:
                    async with asyncio.timeout(3.0):
                        while expect not in seen:
                            seen += (await reader.read(1024)).decode(errors="replace")
                except TimeoutError:
                    continue
    finally:
        writer.close()
    return seen


async def _power(driver: LibvirtDriver, uuid: str) -> int:
    guest = await driver.info(uuid)
    assert guest is not None
    return guest.power_state


async def test_spice_comes_with_the_next_start(host: Host) -> None:
    plan = host.plan()
    uuid = plan.instance.uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        with pytest.raises(Invalid, match="spice_enabled of this host is off"):
            await driver.get_spice_console(uuid)
    async with host.agent(spice_enabled=True) as (driver, _):
        with pytest.raises(Invalid, match="started without it"):
            await driver.get_spice_console(uuid)
        await driver.reboot(plan, "HARD")
        spice = await driver.get_spice_console(uuid)
        reader, writer = await asyncio.open_unix_connection(spice.path)
        writer.write(SPICE_HELLO)
        assert await asyncio.wait_for(reader.readexactly(4), TIMEOUT) == b"REDQ"
        writer.close()
        await driver.power_off(uuid, 0)
        with pytest.raises(Conflict, match="does not run"):
            await driver.get_spice_console(uuid)
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_guest_that_exists_is_not_made_twice(host: Host) -> None:
    async with host.agent() as (driver, _):
        plan = host.plan()
        await driver.spawn(plan)
        with pytest.raises(Conflict):
            await driver.spawn(plan)
        await driver.destroy(plan.instance.uuid)
    assert host.leftovers() == []


async def _place(driver: LibvirtDriver, flavor: Flavor, image: ImageMeta) -> Assignment | None:
    """Return what a claim would give a guest of what the host reports."""
    request = topology_request(flavor, image, {})
    if request is None:
        return None
    [node] = await driver.get_available_resources()
    assert node.topology is not None
    place = fit(node.topology, NOTHING_USED, request)
    assert place is not None
    return place


def _affinities(pid: int) -> dict[str, str]:
    """Return the host CPUs that each vCPU of a QEMU and its main thread ("main") may use."""
    found = {}
    for task in Path("/proc", str(pid), "task").iterdir():
        match = re.match(r"CPU (\d+)/", (task / "comm").read_text().strip())
        if match or task.name == str(pid):
            allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())
            assert allowed is not None
            found[match[1] if match else "main"] = allowed[1]
    return found


async def test_a_pinned_guest_with_numa_nodes(host: Host) -> None:
    """The vCPUs of a real guest run on the host CPUs that its order names, and its QEMU has the NUMA node."""
    specs = {"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "1", "hw:numa_nodes": "1", "hw:mem_page_size": "small"}
    specs["hw:emulator_threads_policy"] = "share"
    flavor = msgspec.structs.replace(FLAVOR, vcpus=2, extra_specs=specs)
    async with host.agent(cpu_shared_set="0", cpu_dedicated_set="1") as (driver, _):
        [node] = await driver.get_available_resources()
        assert (node.vcpus, node.pcpus) == (1, 1)
        assert node.topology is not None and [cell.dedicated for cell in node.topology.cells if cell.dedicated] == [
            (1,)
        ]
        place = await _place(driver, flavor, host.images.image)
        assert place is not None and place.cells[0].pins == {1: 1}
        plan = host.plan(flavor=flavor, assignment=place)
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        assert await _power(driver, uuid) == power_state.RUNNING
        [pid] = host.qemus(uuid)
        assert _affinities(pid) == {"0": "0", "1": "1", "main": "0"}
        assert "node,nodeid=0,cpus=0-1" in Path(f"/proc/{pid}/cmdline").read_text()
        [guest] = await driver.list_guests()
        assert (guest.vcpus, guest.pcpus) == (1, 1)
        # The CPU belongs to this guest: an order that names it for another one is refused.
        other = host.plan(flavor=flavor, assignment=place)
        with pytest.raises(Unavailable, match="CPUs of the server belong to another guest"):
            await driver.spawn(other)
        await driver.destroy(uuid)
    assert host.leftovers() == []


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Give the machine 2 MiB pages for a guest, and as many for others that start meanwhile, such as PostgreSQL."""
    pages = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    before = int(pages.read_text())
    wanted = before + 2 * FLAVOR.ram // 2
    pages.write_text(str(wanted))
    try:
        if int(pages.read_text()) < wanted:
            pytest.skip("the kernel has no memory in pieces that are large enough")
        yield
    finally:
        pages.write_text(str(before))


@pytest.mark.usefixtures("huge_pages")
async def test_a_guest_with_huge_pages(host: Host) -> None:
    """The memory of a real guest is in huge pages of its host, also after it was stopped and started."""
    flavor = msgspec.structs.replace(FLAVOR, extra_specs={"hw:mem_page_size": "2048"})
    async with host.agent() as (driver, events):
        [node] = await driver.get_available_resources()
        assert node.topology is not None
        assert sum(pages.total for cell in node.topology.cells for pages in cell.pages if pages.size_kib == 2048)
        place = await _place(driver, flavor, host.images.image)
        assert place is not None and place.cells[0].page_kib == 2048
        plan = host.plan(flavor=flavor, assignment=place)
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        [pid] = host.qemus(uuid)
        assert _huge_kib(pid) == FLAVOR.ram * 1024
        await driver.power_off(uuid, TIMEOUT)
        await events.wait(uuid, "stopped")
        await driver.power_on(plan)
        [pid] = host.qemus(uuid)
        assert _huge_kib(pid) == FLAVOR.ram * 1024
        await driver.destroy(uuid)
    assert host.leftovers() == []


def _huge_kib(pid: int) -> int:
    """Return how much of the memory of a process is in huge pages."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"^(?:Private|Shared)_Hugetlb: +(\d+) kB$", rollup, re.MULTILINE))


async def test_a_mediated_device_that_a_real_host_cannot_have(host: Host) -> None:
    """The machine has no device that can be divided: libvirt is asked, offers none, and makes none."""
    flavor = msgspec.structs.replace(FLAVOR, extra_specs={"resources:VGPU": "1"})
    async with host.agent(mdev_types=("nvidia-35",)) as (driver, _):
        [node] = await driver.get_available_resources()
        assert node.topology is not None and node.topology.mdevs == ()
        with pytest.raises(NotSupported, match="1 virtual GPUs"):
            await driver.spawn(host.plan(flavor=flavor))
        wanted = Assignment(mdevs=(AssignedMdev(parent="pci_0000_84_00_0", mdev_type="nvidia-35"),))
        plan = host.plan(flavor=flavor, assignment=wanted)
        with pytest.raises(DriverFailed, match="could not make a mediated device"):
            await driver.spawn(plan)
        await driver.destroy(plan.instance.uuid)
        assert await driver.list_guests() == []
    assert host.leftovers() == []


@pytest.mark.parametrize(
    ("properties", "specs"),
    [
        ({"hw_machine_type": "q35", "hw_video_model": "virtio", "hw_input_bus": "usb"}, {}),
        ({"hw_disk_bus": "scsi", "hw_watchdog_action": "reset", "hw_qemu_guest_agent": "yes"}, {}),
        ({"hw_disk_bus": "ide", "hw_input_bus": "virtio"}, {"quota:disk_read_bytes_sec": "10000000"}),
        ({"hw_firmware_type": "uefi", "os_secure_boot": "required"}, {}),
        ({"hw_cpu_cores": "2"}, {"hw:cpu_policy": "dedicated", "hw:serial_port_count": "2", "hw:boot_menu": "yes"}),
    ],
)
async def test_hardware(host: Host, properties: dict[str, str], specs: dict[str, str]) -> None:
    """What libvirt and QEMU take; whether a guest likes it is the guest's affair."""
    image = msgspec.structs.replace(host.images.image, properties=properties)
    flavor = msgspec.structs.replace(FLAVOR, vcpus=2, ephemeral=1, swap=16, extra_specs=specs)
    devices = (
        BlockDevice(uuid=str(uuid4()), image_id=image.id, boot_index=0),
        BlockDevice(uuid=str(uuid4()), source_type="blank", size_gb=1, boot_index=-1),
        BlockDevice(uuid=str(uuid4()), source_type="blank", size_gb=1, boot_index=-1, guest_format="swap"),
    )
    async with host.agent(cpu_dedicated_set="0-1") as (driver, _):
        if properties.get("hw_firmware_type") == "uefi" and not driver._facts.secure_boot:
            pytest.skip("UEFI firmware is missing: apt-get install ovmf")
        place = await _place(driver, flavor, image)
        plan = host.plan(image=image, flavor=flavor, config_drive=True, epoch=2, assignment=place)
        plan.block_devices = devices
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        assert await _power(driver, uuid) == power_state.RUNNING
        figures = await driver.get_diagnostics(uuid)
        assert figures.num_cpus == 2 and len(figures.disk_details) == 4
        await driver.destroy(uuid)
    assert host.leftovers() == []

"""What can be missing or wrong on a host: the server says what happened, so does the log, and the next server works."""

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud
from tests.e2e.fault_machine import FaultMachine
from tests.e2e.guests import IDLE_DISK, Guest, Tenant, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tenant(faulty_cloud: RealCloud) -> AsyncIterator[Tenant]:
    made = await faulty_cloud.tenant("10.80.0.0/24", router=False)
    yield made
    await made.clear()


async def _fails(tenant: Tenant, name: str, **fields: Any) -> str:
    """Boot a server that must fail; return its fault. Nothing of it is left."""
    guest = await tenant.boot(name, **fields)
    fault = (await guest.wait("ERROR"))["fault"]
    assert "Traceback" not in fault["message"] and "/tmp/" not in fault["message"], fault
    await guest.delete()
    return str(fault["message"])


async def _works(tenant: Tenant, name: str) -> None:
    """Boot the next server, which must run."""
    guest = await tenant.boot(name)
    await guest.wait("ACTIVE")
    await guest.delete()


async def test_a_missing_tool(tenant: Tenant, faulty_cloud: RealCloud, fault_machine: FaultMachine) -> None:
    with fault_machine.without("qemu-img"):
        assert "qemu-img is missing on this host: install qemu-utils" in await _fails(tenant, "no-tool")
    assert "qemu-img is missing on this host" in faulty_cloud.log
    await _works(tenant, "tool")


async def test_a_full_disk(tenant: Tenant, faulty_cloud: RealCloud, fault_machine: FaultMachine) -> None:
    """A server waits for room on the only host, and is built when there is some."""
    # An image that the host has not cached yet.
    image = await tenant.person.make_image("large", "raw", IDLE_DISK + b"\1" * (16 << 20))
    with fault_machine.full_disk(left=8 << 20):
        guest = await tenant.boot("no-room", imageRef=image)

        async def told() -> bool:
            log = faulty_cloud.log
            return f"build of instance {guest.id} is tried again" in log and "run out of disk space" in log

        await until(told, lambda: "the log to say that the build is tried again")
        assert (await guest.show())["status"] == "BUILD"
    await guest.wait("ACTIVE")
    await guest.delete()
    await _works(tenant, "room")


async def test_a_wrong_image_format(tenant: Tenant, faulty_cloud: RealCloud) -> None:
    image = await tenant.person.make_image("liar", "qcow2", b"\1" * 4096)
    message = await _fails(tenant, "liar", imageRef=image)
    assert f"The image {image} is refused" in message and "declared as 'qcow2'" in message
    assert f"The image {image} is refused" in faulty_cloud.log
    await _works(tenant, "honest")


async def test_a_disk_that_cannot_be_booted(tenant: Tenant, faulty_cloud: RealCloud) -> None:
    image = await tenant.person.make_image("zeros", "raw", bytes(1 << 20))
    message = await _fails(tenant, "never", imageRef=image)
    assert f"The image {image} cannot be booted: it has no boot sector" in message
    assert f"The image {image} cannot be booted" in faulty_cloud.log
    await _works(tenant, "next")


async def test_a_guest_that_never_comes_up(tenant: Tenant, faulty_cloud: RealCloud) -> None:
    image = await tenant.person.make_image("idle", "raw", IDLE_DISK)
    guest = await tenant.boot("never", imageRef=image)
    await guest.wait("ACTIVE")  # as far as a cloud can tell yet
    await _works(tenant, "next")
    shown = await guest.wait("ERROR")
    assert "has not begun to boot: within 10 s it read 512 bytes of its disks" in shown["fault"]["message"]
    assert shown["OS-EXT-STS:power_state"] == 1 and await guest.console("vnc", "novnc"), "it can be looked at"
    assert f"instance {guest.id} has not begun to boot" in faulty_cloud.log
    # It does not hear that it is to stop, and is stopped nevertheless.
    await guest.act("os-stop", status="SHUTOFF")
    await guest.delete()


async def test_a_host_whose_libvirt_is_gone(
    tenant: Tenant, faulty_cloud: RealCloud, fault_machine: FaultMachine
) -> None:
    survivor = await tenant.boot("survivor")
    await survivor.ready()
    with fault_machine.without("libvirtd"):
        os.kill(int((faulty_cloud.libvirt / "run" / "libvirtd.pid").read_text()), signal.SIGKILL)
        assert "libvirt" in await _fails(tenant, "no-libvirt")
        assert "libvirtd is missing" in await _log(faulty_cloud, "libvirtd is missing")
    await _comes_back(tenant)
    assert "libvirtd of this cloud ended and is started again" in faulty_cloud.log
    assert (await survivor.wait("ACTIVE"))["OS-EXT-STS:power_state"] == 1
    assert (await survivor.ready())["uuid"] == survivor.id, "it did not even notice"
    await survivor.delete()


async def _log(cloud: RealCloud, text: str) -> str:
    async def there() -> bool:
        return text in cloud.log

    await until(there, lambda: f"{text!r} in the log: {cloud.log[-2000:]}")
    return cloud.log


async def _comes_back(tenant: Tenant) -> None:
    """Wait until a server can be built again."""

    async def built() -> bool:
        guest: Guest = await tenant.boot("again")
        seen: dict[str, Any] = {}

        async def ended() -> bool:
            seen.update(await guest.show())
            return seen["status"] in ("ACTIVE", "ERROR")

        await until(ended, lambda: f"an end of the build: {seen}")
        await guest.delete()
        return bool(seen["status"] == "ACTIVE")

    await until(built, "the host to come back")

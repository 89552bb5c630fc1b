"""Real guests that are booted by a kernel and a ramdisk, which are images of their own."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from micronova.objects import power_state
from micronova.objects.errors import BuildFailed
from micronova.objects.image import ImageMeta
from micronova.virt.driver import GuestPlan
from tests.e2e.boot_files import boot_files
from tests.e2e.host import Host, ImageServer, console

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

READY = "MICRONOVA-GUEST-READY"
COMMAND_LINE = "console=ttyS0,115200 no_timer_check mitigations=off nokaslr booted-by=image"


class Parts:
    """A disk that no firmware can boot, a kernel and a ramdisk, at an image service."""

    def __init__(self, test_image: Path, work: Path) -> None:
        files = boot_files(test_image, work)
        self.servers = {}
        for name, content in (
            ("disk", bytes(4 << 20)), ("kernel", files["vmlinuz"]), ("ramdisk", files["initrd"]),
        ):  # fmt: skip
            (work / name).mkdir()
            (work / name / name).write_bytes(content)
            self.servers[name] = ImageServer(work / name / name)

    def _image(self, name: str, format: str) -> ImageMeta:
        return msgspec.structs.replace(self.servers[name].image, disk_format=format, container_format=format)

    def image(self, **properties: str) -> ImageMeta:
        """Return the image of the disk, which names the others."""
        return msgspec.structs.replace(
            self._image("disk", "ami"),
            properties=properties,
            kernel=self._image("kernel", "aki"),
            ramdisk=self._image("ramdisk", "ari"),
        )

    def plan(self, plan: GuestPlan) -> GuestPlan:
        """Return a plan with the places of the images."""
        plan.image_url = self.servers["disk"].ticket
        plan.kernel_url, plan.ramdisk_url = (self.servers[name].ticket for name in ("kernel", "ramdisk"))
        return plan


@pytest.fixture
def parts(test_image: Path, tmp_path: Path) -> Iterator[Parts]:
    made = Parts(test_image, tmp_path)
    yield made
    for server in made.servers.values():
        server.stop()


async def test_a_kernel_boots_a_disk_that_firmware_cannot(host: Host, parts: Parts) -> None:
    plan = parts.plan(host.plan(image=parts.image(os_command_line=COMMAND_LINE), hostname="direct"))
    uuid = plan.instance.uuid
    folder = host.root / "instances" / uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        assert "hostname=" in await console(driver, uuid, READY)
        assert "booted-by=image" in await console(driver, uuid, "Command line:")
        files = ["disk", "disk.base", "guest.json", "kernel", "ramdisk"]
        assert sorted(file.name for file in folder.iterdir()) == files
        assert (folder / "kernel").stat().st_nlink == 1, "libvirt gives it to the guest: it is no cached image"
        # It is booted by them again, and after an agent that knows of them only by the record.
        await driver.reboot(plan, "HARD")
        await console(driver, uuid, READY, 2)
        await driver.power_off(uuid, 0)
    async with host.agent() as (driver, _):
        await driver.power_on(plan)
        await console(driver, uuid, READY, 3)
        # An image without them is booted by firmware.
        plain = host.plan(uuid=uuid, epoch=2)

        async def nothing() -> None: ...

        await driver.rebuild(plain, start=True, timeout=0, stopping=nothing, removed=nothing)
        assert "booted-by" not in await console(driver, uuid, READY)
        assert not (folder / "kernel").exists()
        again = parts.plan(host.plan(uuid=uuid, epoch=3, image=parts.image()))
        await driver.rebuild(again, start=False, timeout=0, stopping=nothing, removed=nothing)
        assert (folder / "kernel").exists()
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_rescue_by_a_kernel(host: Host, parts: Parts) -> None:
    plan = host.plan()
    uuid = plan.instance.uuid
    folder = host.root / "instances" / uuid
    async with host.agent() as (driver, _):
        await driver.spawn(plan)
        await console(driver, uuid, READY)
        rescue = parts.plan(host.plan(uuid=uuid, epoch=2))
        rescue.rescue_image = parts.image()
        await driver.rescue(rescue, 0)
        assert "root=/dev/vda console=tty0" in await console(driver, uuid, "Command line:")
        await console(driver, uuid, READY, 2)
        assert {"kernel.rescue", "ramdisk.rescue"} <= {file.name for file in folder.iterdir()}
        await driver.unrescue(plan)
        await console(driver, uuid, READY, 3)
        assert not [file.name for file in folder.iterdir() if "rescue" in file.name]
        # One that cannot be had leaves the guest as it is.
        rescue.epoch, rescue.kernel_url = 4, f"{plan.image_url}.no"
        rescue.rescue_image = msgspec.structs.replace(
            parts.image(), kernel=msgspec.structs.replace(parts.image(), id="other", kernel=None, disk_format="raw")
        )
        with pytest.raises(BuildFailed, match="404"):
            await driver.rescue(rescue, 0)
        (guest,) = await driver.list_guests()
        assert guest.power_state == power_state.RUNNING
        await driver.destroy(uuid)
    assert host.leftovers() == []

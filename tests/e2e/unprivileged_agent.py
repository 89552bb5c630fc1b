"""An agent that is not root, on a libvirtd that root started; see test_libvirt_unprivileged."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp  # noqa: F401  imported while we can still read it
import libvirt  # noqa: F401
import msgspec

from micronova.cli.service_user import ServiceUser, become
from micronova.objects import power_state
from micronova.objects.image import ImageMeta
from tests.e2e.host import Host, console
from tests.e2e.killed_agent import Images


async def main(host: Host) -> None:
    async with host.agent() as (driver, _):
        plan = host.plan(config_drive=True)
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        for endpoint in (await driver.get_vnc_console(uuid), await driver.get_serial_console(uuid)):
            _, writer = await asyncio.open_unix_connection(endpoint.path)
            writer.close()
        await console(driver, uuid, "MICRONOVA-GUEST-BOOT")
        last = await driver.get_console_output(uuid, 1)
        assert len(last.splitlines()) == 1 and last.strip() in await driver.get_console_output(uuid, None)
        await driver.suspend(uuid)
        await driver.resume(plan)
        await driver.reboot(plan, "HARD")
        guest = await driver.info(uuid)
        assert guest is not None and guest.power_state == power_state.RUNNING
        await driver.destroy(uuid)
        assert await driver.list_guests() == []
    print("done")


async def on_an_existing_libvirt(host: Host, uri: str) -> None:
    """Use an existing libvirt as a user who has access to it, and to nothing of its guests but what is that user's."""
    instances = host.state_dir / "guests"
    async with host.agent(connection_uri=uri, instances_path=str(instances), network_namespace="") as (driver, _):
        for _ in range(2):  # the second one finds the image in the cache, as it was
            plan = host.plan(config_drive=True)
            uuid = plan.instance.uuid
            await driver.spawn(plan)
            [base] = (instances / "base").iterdir()
            assert base.stat().st_uid == os.geteuid()
            assert (instances / "instances" / uuid / "disk").stat().st_uid == os.geteuid()
            for endpoint in (await driver.get_vnc_console(uuid), await driver.get_serial_console(uuid)):
                _, writer = await asyncio.open_unix_connection(endpoint.path)
                writer.close()
            await driver.get_console_output(uuid, None)
            await driver.reboot(plan, "HARD")
            await driver.destroy(uuid)
        assert await driver.list_guests() == []
    print("done")


if __name__ == "__main__":
    user, group, other_group, directory, namespace, ticket, image, *uri = sys.argv[1:]
    images = Images(ticket, msgspec.json.decode(image, type=ImageMeta))
    # As the command does it: the programs that it starts have to reach our code, too.
    become(ServiceUser("nobody", int(user), int(group)), Path(directory), [int(other_group)])
    host = Host(Path(directory), namespace, images)  # type: ignore[arg-type]
    asyncio.run(on_an_existing_libvirt(host, uri[0]) if uri else main(host))

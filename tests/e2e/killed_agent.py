"""An agent that builds and removes guests until it is killed; see test_libvirt_recovery."""

import asyncio
import itertools
import sys
from pathlib import Path

import msgspec

from micronova.objects.image import ImageMeta
from tests.e2e.host import Events, Host


class Images:
    """The image server's ticket and image, for another process."""

    def __init__(self, ticket: str, image: ImageMeta) -> None:
        self.ticket, self.image = ticket, image


async def main() -> None:
    directory, namespace, ticket, image = sys.argv[1:]
    images = Images(ticket, msgspec.json.decode(image, type=ImageMeta))
    host = Host(Path(directory), namespace, images)  # type: ignore[arg-type]
    async with host.agent() as (driver, _):
        assert isinstance(_, Events)
        print("ready", flush=True)
        for epoch in itertools.count(1):
            plan = host.plan(epoch=epoch, config_drive=True)
            await driver.spawn(plan)
            await driver.destroy(plan.instance.uuid)


if __name__ == "__main__":
    asyncio.run(main())

"""The images of servers on hosts, as the scheduler counts them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import server_hosts
from micronova.db.engine import Database
from micronova.db.tables import instances
from micronova.objects.errors import Unavailable
from micronova.objects.image import ImageMeta
from micronova.scheduler.image_counts import MAX_AGE, ImageCounts
from tests.clocks import SetClock
from tests.plans import recorded
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


def _boot(conn: sa.Connection, /, server: str, image: str, **properties: str) -> None:
    add_instances(conn, server)
    known = {"id": image, "name": image, "properties": properties}
    values = {"host": f"host-of-{server}", "image_ref": image, "image": known}
    conn.execute(instances.update().where(instances.c.uuid == server).values(values))


def _asked(**properties: str) -> ImageMeta:
    return ImageMeta(id="asked", name="asked", properties=properties)


async def test_all_new_images_are_read_together(database: Database) -> None:
    """Servers have no index by image: each statement reads all of them."""

    def boot(conn: sa.Connection) -> None:
        for number in range(40):
            _boot(conn, f"s-{number:02}", f"image-{number % 20:02}", os_type=f"os-{number % 20}")

    await database.write(boot)

    def statements(conn: sa.Connection, images: list[str]) -> tuple[int, set[str]]:
        with recorded(conn) as found:
            known = server_hosts.images_of_servers(conn, images)
        return len(found), {image.properties["os_type"] for image in known.values()}

    assert await database.read(statements, ["image-00", "none"]) == (1, {"os-0"})
    wanted = [f"image-{number:02}" for number in range(20)]
    assert await database.read(statements, wanted) == (1, {f"os-{number}" for number in range(20)})


async def test_a_read_that_failed_or_has_not_ended_is_none(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """For seconds no host had any image, and the weigher weighed nothing."""
    counts = ImageCounts(database, SetClock(), {})
    await database.write(_boot, "one", "image", os_type="linux")

    def fail(conn: sa.Connection) -> None:
        raise Unavailable("The database does not answer.")

    with monkeypatch.context() as broken:
        broken.setattr(server_hosts, "servers_by_image", fail)
        with pytest.raises(Unavailable):
            await counts.alike(_asked(os_type="linux"))
    both = await asyncio.gather(counts.alike(_asked(os_type="linux")), counts.alike(_asked(os_type="linux")))
    assert list(both) == [{"host-of-one": 1.0}] * 2


async def test_an_image_without_servers_is_forgotten(database: Database) -> None:
    clock = SetClock()
    counts = ImageCounts(database, clock, {})
    await database.write(_boot, "one", "image", os_type="linux")
    assert await counts.alike(_asked(os_type="linux")) == {"host-of-one": 1.0}
    await database.write(lambda conn: conn.execute(instances.delete()))
    await clock.sleep(MAX_AGE)
    assert await counts.alike(_asked(os_type="linux")) == {}
    await database.write(_boot, "two", "image", os_type="windows")  # the image has changed since
    await clock.sleep(MAX_AGE)
    assert await counts.alike(_asked(os_type="linux")) == {}
    assert await counts.alike(_asked(os_type="windows")) == {"host-of-two": 1.0}


async def test_properties_are_compared_by_their_newest_names(database: Database) -> None:
    counts = ImageCounts(database, SetClock(), {"hw_architecture": 3.0, "os_type": 0.5})
    await database.write(_boot, "one", "image", architecture="amd64", os_type="Linux")
    assert await counts.alike(_asked(hw_architecture="x86_64", os_type="linux")) == {"host-of-one": 3.5}

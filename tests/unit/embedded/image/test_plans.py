"""PostgreSQL's plans of the image service's lists: none reads the images of all projects."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.image import queries
from micronova.embedded.image.listing import Listing
from micronova.embedded.image.tables import metadata
from tests.plans import Rows, fill, rolled_back, rows_read, sequential_scans, too_many
from tests.unit.db.databases import own_schema

pytestmark = [pytest.mark.postgresql, pytest.mark.asyncio(loop_scope="module")]

IMAGES, PROJECTS = 30_000, 1_000
MOST_READ = 1_000
"""Rows of a table that a list of a project may read: a page of each part, or what has a tag."""
SMALL = {"project_usage"}
"""Has a row per project, and none here."""
ROWS: Rows = (
    (
        "images",
        IMAGES,
        {
            "id": "'i' || n",
            "name": "'image ' || n",
            "status": "'active'",
            "owner": f"'p' || n % {PROJECTS}",
            "visibility": "CASE WHEN n % 2000 = 0 THEN 'public' WHEN n % 100 = 1 THEN 'community' "
            "WHEN n % 2 = 0 THEN 'shared' ELSE 'private' END",
            "created_at": "n",
            "updated_at": "n",
            "size": "n",
        },
    ),
    ("image_members", IMAGES // 10, {"image_id": "'i' || n * 10", "member": "'q' || n % 500", "status": "'accepted'"}),
    ("image_properties", IMAGES, {"image_id": "'i' || n", "name": "'image_type'", "value": "'snapshot'"}),
    ("image_tags", IMAGES, {"image_id": "'i' || n", "tag": "'tag' || n % 50"}),
    ("deleted_images", IMAGES, {"id": "'d' || n", "deleted_at": "n"}),
)
ORDER = [("created_at", True), ("id", True)]
PAST = queries.DELETED_KEPT + IMAGES // 2


def _page(project: str, **wanted: Any) -> Callable[[sa.Connection], Any]:
    listing = Listing(order=ORDER, limit=50, **wanted)
    return lambda conn: queries.list_images(conn, listing, project, is_admin=False)


def _delete(conn: sa.Connection) -> None:
    image = queries.get(conn, "i7", "p7")
    assert image is not None
    queries.delete(conn, image, PAST)


HOT: dict[str, Callable[[sa.Connection], Any]] = {
    "a project without images": _page("none"),
    "a project with images": _page("p7"),
    "the next page": _page("p8", marker="i14008"),
    "by name": lambda conn: queries.list_images(
        conn, Listing(order=[("name", False), ("id", False)], limit=50), "p8", is_admin=False
    ),
    "images shared with a project": _page("q7"),
    "public images": _page("none", visibility="public"),
    "community images": _page("none", visibility="community"),
    "shared images": _page("q7", visibility="shared"),
    "private images": _page("p7", visibility="private"),
    "backups": _page("none", properties={"image_type": "backup"}),
    "a tag": _page("p7", tags=["tag7"]),
    "show": lambda conn: queries.get(conn, "i7", "p7"),
    "the usage of a project": lambda conn: queries.count(conn, "p7"),
    "delete": _delete,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with own_schema(request, metadata) as opened:
        await opened.write(fill, metadata, ROWS)
        yield opened


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    assert await rolled_back(database, sequential_scans, HOT[name], SMALL) == []
    assert too_many(await rolled_back(database, rows_read, HOT[name]), MOST_READ) == {}


async def test_deleting_images_forgets_ids_of_long_ago(database: Database) -> None:
    def left(conn: sa.Connection) -> int:
        _delete(conn)
        return int(conn.exec_driver_sql("SELECT count(*) FROM deleted_images").scalar_one())

    assert await rolled_back(database, left) == IMAGES + 1 - queries.FORGOTTEN_TOGETHER

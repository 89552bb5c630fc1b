"""The audit asks the image service for the images of all shelved servers, several at a time."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor import audit
from micronova.conductor.findings import images as findings
from micronova.db.tables import instances
from micronova.objects import shelved
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

SERVERS = [f"server-{number:03}" for number in range(50)]


class Images:
    """An image service that has all images but some, and counts what it is asked at the same time."""

    def __init__(self, *gone: str) -> None:
        self._gone = gone
        self._asked = self.most = self.answered = 0

    async def status_of_made(self, image_id: str) -> str | None:
        self._asked += 1
        self.most = max(self.most, self._asked)
        await asyncio.sleep(0)
        self._asked -= 1
        self.answered += 1
        return None if image_id in self._gone else "active"


class Nobody:
    """A cloud without hosts, whose conductor does not answer."""

    async def ping(self, timeout: float) -> None:
        raise TimeoutError


async def test_all_shelved_servers_are_looked_at(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "PAGE", 20)
    monkeypatch.setattr(findings, "MOST_IMAGES", 20)
    images = Images("image of server-003", "image of server-049")
    told: list[int] = []
    async with compute_database("sqlite", request) as database:

        def prepare(conn: sa.Connection) -> None:
            add_instances(conn, *SERVERS)
            for id in SERVERS:
                known = {"vm_state": "shelved_offloaded", "system_metadata": {shelved.SHELVED_IMAGE: f"image of {id}"}}
                conn.execute(sa.update(instances).where(instances.c.uuid == id).values(known))

        await database.write(prepare)
        nobody: Any = Nobody()
        found = await audit.audit(
            database,
            nobody,
            nobody,
            ManualClock(),
            service_down_time=60.0,
            images=images,
            image_progress=told.append,
        )
    assert [each.subject for each in found if each.kind == "image"] == ["server-003", "server-049"]
    assert images.answered == told[-1] == len(SERVERS)
    assert 1 < images.most <= findings.IMAGES_TOGETHER

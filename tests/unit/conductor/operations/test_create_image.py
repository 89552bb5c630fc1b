"""Cleaning up after an image that could not be made does not keep a conductor from other work."""

import asyncio
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from micronova.conductor.operations.create_image import CreateImage
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Engine, Kind, Operation
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import NotFound
from micronova.objects.operations import IMAGE_CREATION_TIME, ImagePayload
from tests.clocks import ManualClock
from tests.unit.db.databases import compute_database

PLACES = 2


class Images:
    """An image service that has no image, and notes when it was asked to delete one."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.asked: dict[str, list[float]] = {}

    async def delete_made(self, image_id: str) -> None:
        self.asked.setdefault(image_id, []).append(self._clock.time)
        raise NotFound("There is no such image.")


class Other(Kind):
    """Work of somebody else."""

    name = "stop"

    def __init__(self) -> None:
        self.ran = asyncio.Event()

    async def run(self, operations: list[Operation]) -> None:
        self.ran.set()

    async def fail(self, operation: Operation, error: Exception) -> None:
        raise AssertionError(error)


async def _record(database: Database, clock: ManualClock, kind: str, number: int) -> list[str]:
    made = [
        operation_rows.new_row(
            id=f"{kind}-{each}",
            kind=kind,
            instance_uuid=f"server-{kind}-{each}",
            batch_id=f"request-{kind}-{each}",
            step="new" if kind == Other.name else "cleanup",
            epoch=1,
            now=micros(clock.time),
            deadline=micros(clock.time + 3600),
            context=Context(),
            payload=ImagePayload(error="The image could not be created.", answered=False),
        )
        for each in range(number)
    ]
    await database.write(operation_rows.insert, made)
    return [row["id"] for row in made]


async def test_an_image_that_may_still_be_created_is_looked_for_without_a_place(
    request: pytest.FixtureRequest,
) -> None:
    """The slots of a conductor are free between two looks, of which there are few."""
    clock, other = ManualClock(), Other()
    images = Images(clock)
    async with compute_database("sqlite", request) as database:
        engine = Engine(
            database,
            clock,
            owner="conductor:a",
            lease_seconds=20.0,
            sweep_interval=2.0,
            concurrency=PLACES,
            proof_valid=60.0,
        )
        needs = cast(ConductorDependencies, SimpleNamespace(engine=engine, image_client=images))
        engine.set_kinds({"create_image": CreateImage(needs, "create_image"), other.name: other})
        cleanups = await _record(database, clock, "create_image", PLACES)
        await engine.lease_and_run(cleanups)
        await engine.lease_and_run(await _record(database, clock, other.name, 1))
        await asyncio.wait_for(other.ran.wait(), 10)
        await engine.idle()
        assert {id: len(times) for id, times in images.asked.items()} == dict.fromkeys(cleanups, 1)

        began = clock.time
        while clock.time < began + IMAGE_CREATION_TIME + 1:
            await clock.advance(1.0)
            await engine.lease_and_run(
                await database.read(operation_rows.expired, engine.now(), 10, (("create_image", 1),), with_hosts=True)
            )
            await engine.idle()
        rows = await database.read(operation_rows.get_many, cleanups)
    assert [rows[id]["result"] for id in cleanups] == ["error"] * PLACES
    for times in images.asked.values():
        assert len(times) <= 10
        assert times[-1] >= began + IMAGE_CREATION_TIME  # the API creates none any more
    assert msgspec.msgpack.decode(rows[cleanups[0]]["payload"], type=ImagePayload).error

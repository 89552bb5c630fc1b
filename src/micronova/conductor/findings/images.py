"""Images of servers: those that could not be made, those that are left, and those that shelved servers need."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.conductor.findings.finding import (
    Finding,
    Repair,
    RepairDependencies,
    RepairKind,
    Repairs,
    offer,
    refuse_busy,
)
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.db.listed import one_of
from micronova.db.tables import block_devices, instances, operations
from micronova.objects import shelved, states
from micronova.objects.errors import Conflict, NotFound, Unavailable
from micronova.objects.operations import IMAGE_KINDS

MOST_IMAGES = 1000
"""The newest images of operations that have ended that the image service is asked for; of those that shelved servers
need, it is asked for all."""
IMAGES_TOGETHER = 20
"""Images that it is asked for at the same time."""
PAGE = 1000
"""Shelved servers that are read at once."""


class ImageOfServer(msgspec.Struct, frozen=True):
    """An image that was made from a server."""

    image: str
    server: str


class AuditedImages(Protocol):
    """The part of the image client that the audit uses."""

    async def status_of_made(self, image_id: str) -> str | None:
        """Return the status of an image that was made from a server; None if there is none."""


def failed_images(conn: sa.Connection, image: str | None = None) -> dict[str, str]:
    """Return the images that the newest failed operations had to make, with their servers; both have one id.

    With `image` look at this one only.
    """
    failed = sa.and_(operations.c.kind.in_(IMAGE_KINDS), operations.c.result.in_(("error", "cancelled")))
    return _newest(conn, sa.select(operations.c.id, operations.c.instance_uuid).where(failed), image)


def _newest(conn: sa.Connection, made: sa.Select[Any], image: str | None) -> dict[str, str]:
    """Return the images of the operations that ended last, with their servers, or of one operation."""
    if image is not None:
        made = made.where(operations.c.id == image)
    rows = conn.execute(made.order_by(operations.c.finished_at.desc()).limit(MOST_IMAGES))
    return {row.id: row.instance_uuid for row in rows}


async def compare_images(
    database: Database, images: AuditedImages, progress: Callable[[int], None] | None
) -> list[Finding]:
    """Return images that are left without data, images that are missing, and images that nobody needs."""
    asked = _AskedImages(images, progress)
    findings = await _unfilled(asked, await database.read(failed_images))
    return findings + await _wrong_shelved_images(asked, database)


class _AskedImages:
    """Asks the image service for images, several at a time, and tells how many have been answered."""

    def __init__(self, images: AuditedImages, progress: Callable[[int], None] | None) -> None:
        self._images = images
        self._progress = progress
        self._done = 0

    async def statuses(self, ids: Iterable[str]) -> dict[str, str | None]:
        """Return the status of each image; None if there is none."""
        found: dict[str, str | None] = {}
        wanted = sorted(set(ids))
        for begin in range(0, len(wanted), IMAGES_TOGETHER):
            part = wanted[begin : begin + IMAGES_TOGETHER]
            found |= dict(zip(part, await asyncio.gather(*map(self._images.status_of_made, part)), strict=True))
            self._done += len(part)
            if self._progress is not None:
                self._progress(self._done)
        return found


async def _unfilled(images: _AskedImages, failed: Mapping[str, str]) -> list[Finding]:
    """Return those of the images that are left without data; one that was complete when its server went may stay."""
    status = await images.statuses(failed)
    return [
        Finding(
            kind="image",
            subject=id,
            message=f"The image of server {server} is left without data.",
            repairs=(_delete(id, server),),
        )
        for id, server in failed.items()
        if status[id] not in (None, "active")
    ]


_BUSY = operation_rows.busy_servers()
_IMAGE = instances.c.system_metadata[shelved.SHELVED_IMAGE].as_string()
_BOOTS_FROM_VOLUME = sa.exists().where(
    block_devices.c.instance_uuid == instances.c.uuid,
    block_devices.c.volume_id.is_not(None),
    block_devices.c.device["boot_index"].as_integer() == 0,
)
_NEEDED = sa.select(instances.c.uuid, _IMAGE.label("image")).where(
    instances.c.vm_state == states.SHELVED_OFFLOADED, instances.c.uuid.not_in(_BUSY), ~_BOOTS_FROM_VOLUME
)


def _needed_images(conn: sa.Connection, after: str) -> dict[str, str | None]:
    """Return the next servers without a host that no operation works on, with the images of their disks."""
    rows = conn.execute(_NEEDED.where(instances.c.uuid > after).order_by(instances.c.uuid).limit(PAGE))
    return {row.uuid: row.image for row in rows}


def _still_needed(conn: sa.Connection, servers: Sequence[str]) -> dict[str, str | None]:
    """Return those of the servers that are still shelved, with their images."""
    still = _NEEDED.where(one_of(instances.c.uuid, "servers"))
    return {row.uuid: row.image for row in conn.execute(still, {"servers": list(servers)})}


def needless_images(conn: sa.Connection, image: str | None = None) -> dict[str, str]:
    """Return the newest images of shelves that have ended whose servers do not have them any more, with the servers.

    With `image` look at this one only.
    """
    made = sa.select(operations.c.id, operations.c.instance_uuid).outerjoin(
        instances, sa.and_(instances.c.uuid == operations.c.instance_uuid, operations.c.id == _IMAGE)
    )
    needless = made.where(
        operations.c.kind == "shelve", instances.c.uuid.is_(None), operations.c.instance_uuid.not_in(_BUSY)
    )
    return _newest(conn, needless, image)


async def _wrong_shelved_images(images: _AskedImages, database: Database) -> list[Finding]:
    """Return servers whose disk is lost with their image, and images of shelves that nobody needs any more."""
    findings: list[Finding] = []
    after = ""
    while needed := await database.read(_needed_images, after):
        after = max(needed)
        status = await images.statuses(image for image in needed.values() if image)
        lost = [server for server, image in needed.items() if image is None or status[image] != "active"]
        still = await database.read(_still_needed, lost) if lost else {}  # others may have been unshelved since
        findings += [
            Finding(
                kind="image",
                subject=id,
                message=f"The image {image} of the shelved server's disk is gone.",
                advice="Restore the image from a backup of the image service, under the same id, or delete the server.",
            )
            for id, image in still.items()
            if needed[id] == image
        ]
    needless = await database.read(needless_images)
    status = await images.statuses(needless)
    left = await database.read(needless_images)
    return findings + [
        Finding(
            kind="image",
            subject=id,
            message=f"The image of server {server}, which is not shelved, is left.",
            repairs=(_delete(id, server),),
        )
        for id, server in needless.items()
        if id in left and status[id] is not None
    ]


def _delete(image: str, server: str) -> Repair:
    return offer("image", ImageOfServer(image, server), f"Delete image {image}.")


async def _delete_image(dependencies: RepairDependencies, about: ImageOfServer) -> str:
    image, server = about.image, about.server

    def needed(conn: sa.Connection) -> bool:
        refuse_busy(conn, server)
        # No other server can need it: the image of a shelve is its server's.
        return bool(conn.execute(sa.select(_IMAGE).where(instances.c.uuid == server)).scalar() == image)

    if dependencies.image_client is None:
        raise Unavailable("There is no image service.")
    if await dependencies.database.read(needed):
        raise Conflict(f"A shelved server needs image {image}: it stays.")
    if (await dependencies.database.read(needless_images, image)).get(image) != server:
        if (await dependencies.database.read(failed_images, image)).get(image) != server:
            return ""
        if await dependencies.image_client.status_of_made(image) == "active":
            raise Conflict(f"Image {image} is complete by now: it stays.")
    try:
        await dependencies.image_client.delete_made(image)
    except NotFound:
        return ""
    return f"deleted image {image}"


REPAIRS: Repairs = {"image": RepairKind(ImageOfServer, _delete_image)}

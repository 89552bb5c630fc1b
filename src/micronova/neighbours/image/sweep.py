"""Putting right what a crash left behind: uploads that nobody works on, files that no image vouches for.

To end a dead upload is to be an upload oneself, one that is always discarded: the same lock keeps others
away, and a sweep that dies half-way is swept by the next.
"""

import logging
import re

from micronova.neighbours.image import attributes, queries
from micronova.neighbours.image.catalog import Catalog
from micronova.neighbours.image.model import SAVING
from micronova.neighbours.image.store import Store

log = logging.getLogger(__name__)

_ID = attributes.UUID.strip("^$")
_FINAL = re.compile(f"({_ID})")
_PART = re.compile(rf"({_ID})\.({_ID})\.part")


async def sweep(catalog: Catalog, store: Store) -> int:
    """Mend everything; return how many things there were. Safe beside uploads and other sweeps."""
    mended = 0
    for image_id, upload_id in await catalog.database.read(queries.uploads):
        mended += await end_dead_upload(catalog, store, image_id, upload_id)
    # First the files, then the rows: a row is there before its file, so a file without one has no image.
    files = await store.files()
    with_data = await catalog.database.read(queries.with_data)
    for name in files:
        if name in with_data:
            continue
        if _PART.fullmatch(name):
            mended += not await store.is_locked(name) and await store.remove(name)
        elif _FINAL.fullmatch(name):
            mended += await _remove_orphan(catalog, store, name)
    if mended:
        log.info("mended %d things that an interrupted upload or delete had left behind", mended)
    return mended


async def end_dead_upload(catalog: Catalog, store: Store, image_id: str, upload_id: str) -> bool:
    """Put an image back to queued if nobody works on its upload any more."""
    if await store.is_under_way(image_id, upload_id):
        return False
    ours = await store.open_upload(image_id, catalog.new_id())
    try:
        if not await catalog.database.write(queries.take_over_upload, image_id, upload_id, ours.id):
            return False
        await store.remove(f"{image_id}.{upload_id}.part")
        await store.remove(image_id)
        return await catalog.database.write(queries.abort_upload, image_id, ours.id, catalog.now())
    finally:
        await store.run(ours.discard)


async def _remove_orphan(catalog: Catalog, store: Store, image_id: str) -> bool:
    if await catalog.database.read(queries.get, image_id, "") is None:
        return await store.remove(image_id)  # its id never comes back, so nobody can be writing this file
    ours = await store.open_upload(image_id, catalog.new_id())
    try:
        if not await catalog.database.write(queries.begin_upload, image_id, ours.id, SAVING, catalog.now()):
            return False  # it has got data, or an upload, meanwhile
        await store.remove(image_id)
        return await catalog.database.write(queries.abort_upload, image_id, ours.id, catalog.now())
    finally:
        await store.run(ours.discard)

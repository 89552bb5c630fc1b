"""Cleaning up after a crash: uploads whose process has died, and files without an image.

To abort a dead upload, a sweep begins an upload itself, which it always discards. So the same lock keeps others away,
and the next sweep cleans up after one that was interrupted.
"""

import logging
import re

from micronova.embedded.image import attributes, queries
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import SAVING
from micronova.embedded.image.store import Store

log = logging.getLogger(__name__)

_ID = attributes.UUID.strip("^$")
_FINAL = re.compile(f"({_ID})")
_PART = re.compile(rf"({_ID})\.({_ID})\.part")


async def sweep(core: Core, store: Store) -> int:
    """Clean up and return how many uploads and files that concerned. Uploads and other sweeps may run meanwhile."""
    removed = 0
    for image_id, upload_id in await core.database.read(queries.uploads):
        removed += await abort_dead_upload(core, store, image_id, upload_id)
    # Read the files before the rows: a row exists before its file, so a file without a row has no image.
    files = await store.files()
    with_data = await core.database.read(queries.with_data)
    for name in files:
        if name in with_data:
            continue
        if _PART.fullmatch(name):
            removed += not await store.is_locked(name) and await store.remove(name)
        elif _FINAL.fullmatch(name):
            removed += await _remove_orphan(core, store, name)
    if removed:
        log.info("cleaned up %d uploads and files that interrupted requests had left behind", removed)
    return removed


async def abort_dead_upload(core: Core, store: Store, image_id: str, upload_id: str) -> bool:
    """Set an image back to queued if the process of its upload has died; return whether that is so."""
    if await store.is_under_way(image_id, upload_id):
        return False
    ours = await store.open_upload(image_id, core.new_id())
    try:
        if not await core.database.write(queries.take_over_upload, image_id, upload_id, ours.id):
            return False
        await store.remove(f"{image_id}.{upload_id}.part")
        await store.remove(image_id)
        return await core.database.write(queries.abort_upload, image_id, ours.id, core.now())
    finally:
        await store.run(ours.discard)


async def _remove_orphan(core: Core, store: Store, image_id: str) -> bool:
    image = await core.database.read(queries.get, image_id, "")
    if image is None:
        return await store.remove(image_id)  # ids are not used again, so no upload writes this file
    ours = await store.open_upload(image_id, core.new_id())
    try:
        if not await core.database.write(queries.begin_upload, image, ours.id, SAVING, core.now()):
            return False  # it has data or another upload meanwhile
        await store.remove(image_id)
        return await core.database.write(queries.abort_upload, image_id, ours.id, core.now())
    finally:
        await store.run(ours.discard)

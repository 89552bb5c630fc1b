"""Removing what a crash has left behind: parts of files that no operation works on.

A whole file without a row is not removed. A delete removes the file before the row, so no crash leaves such a file.
It means that the database was lost, restored from an old backup or mistaken for another one. The file may be the only
copy of the data.
"""

import logging
import re
from typing import Final

from micronova.embedded.volume.backend.files import BACKUPS, SNAPSHOTS, VOLUMES, Files
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.operations.base import IMAGE
from micronova.embedded.volume.store import backup_queries, operation_queries, snapshot_queries, volume_queries
from micronova.objects.ids import UUID

log = logging.getLogger(__name__)

_PART: Final = re.compile(rf"({UUID.pattern})\.(?P<operation>{UUID.pattern})(\.{IMAGE})?\.part")
_ROWS: Final = {VOLUMES: volume_queries.ids, SNAPSHOTS: snapshot_queries.ids, BACKUPS: backup_queries.ids}


async def remove_leftovers(core: Core, files: Files) -> int:
    """Remove parts of files that nothing completes, and return how many. Requests and operations may run meanwhile."""
    removed = 0
    for directory, ids in _ROWS.items():
        # Read the files before the rows: a row exists before its file.
        names = await files.names(directory)
        known = await core.database.read(ids, core.host)
        working = await core.database.read(operation_queries.ids)
        for name in names:
            part = _PART.fullmatch(name)
            if part and part["operation"] not in working:
                removed += await files.remove(directory, name)
        if unknown := [name for name in names if UUID.fullmatch(name) and name not in known]:
            log.error(
                "%d files of %s have no row in the database, such as %s: compare the database with the directory",
                *(len(unknown), directory, files.path(directory, min(unknown))),
            )
    if files.live_copies is not None:
        copies = await files.run(files.live_copies.leftovers)
        working = await core.database.read(operation_queries.ids)
        for path in copies:
            if path.name.partition(".")[0] not in working:
                await files.discard(path)
                removed += 1
    if removed:
        log.info("removed %d files that interrupted operations had left behind", removed)
    return removed

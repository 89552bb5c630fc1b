"""The types and statuses of migrations, which are Nova's."""

from typing import Final

# types
RESIZE: Final = "resize"
MIGRATION: Final = "migration"
EVACUATION: Final = "evacuation"
LIVE_MIGRATION: Final = "live-migration"
TYPES: Final = (RESIZE, MIGRATION, EVACUATION, LIVE_MIGRATION)

# statuses
ACCEPTED: Final = "accepted"
QUEUED: Final = "queued"
PREPARING: Final = "preparing"
RUNNING: Final = "running"
PRE_MIGRATING: Final = "pre-migrating"
MIGRATING: Final = "migrating"
POST_MIGRATING: Final = "post-migrating"
FINISHED: Final = "finished"
CONFIRMING: Final = "confirming"
REVERTING: Final = "reverting"
CONFIRMED: Final = "confirmed"
REVERTED: Final = "reverted"
DONE: Final = "done"
COMPLETED: Final = "completed"
ERROR: Final = "error"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"

UNDER_WAY: Final = (ACCEPTED, QUEUED, PREPARING, RUNNING, PRE_MIGRATING, MIGRATING, POST_MIGRATING)
"""The guest is on its way; the server belongs to the source, and returns to it if something fails."""
OPEN: Final = (*UNDER_WAY, FINISHED, CONFIRMING, REVERTING)
"""The server has two hosts, which may be the same."""
IN_PROGRESS_LIVE: Final = (QUEUED, PREPARING, RUNNING, POST_MIGRATING)
"""Statuses in which /servers/{id}/migrations shows a live migration."""

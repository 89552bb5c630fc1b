"""Migrations as rows: each move of a server to another host or to another size.

During a move a server has two places. Its own row names the host that it belongs to; the other host of the migration
has a guest that arrives there or leaves it. ARCHITECTURE.md says which host is which at each step.
"""

from typing import Final, TypedDict

from micronova.objects.instance import FlavorData

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
"""The server has two places."""
IN_PROGRESS_LIVE: Final = (QUEUED, PREPARING, RUNNING, POST_MIGRATING)
"""Statuses in which /servers/{id}/migrations shows a live migration."""


class MigrationRow(TypedDict):
    """A row of `migrations`. Times are microseconds since 1970 (UTC)."""

    id: int  # shown by the API
    uuid: str  # also the consumer that holds the resources of the source
    instance_uuid: str
    migration_type: str
    status: str
    source_compute: str
    source_node: str | None
    source_node_uuid: str | None
    source_zone: str | None
    dest_compute: str | None
    dest_node: str | None
    dest_host: str | None  # the address of the destination
    old_flavor: FlavorData
    new_flavor: FlavorData
    old_vm_state: str  # of the server, before the move
    user_id: str
    project_id: str
    request_id: str
    created_at: int
    updated_at: int | None


class MigrationChanges(TypedDict, total=False):
    """The columns of a migration that change."""

    status: str
    dest_compute: str | None
    dest_node: str | None
    dest_host: str | None

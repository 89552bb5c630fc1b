"""The names of orders, states and notifications of cold moves and of live migrations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from micronova.objects import migration_states, states


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveNames:
    """The names of the steps of one kind of move, by step; `migrated` is the end of the step `migrate`."""

    orders: Mapping[str, str]  # the kind of the order
    events: Mapping[str, str]  # of the instance action; that of a step which is not here is its order with a prefix
    conductor_events: tuple[str, ...]  # of the conductor's own part, the outer one first
    task_states: Mapping[str, str]
    statuses: Mapping[str, str]  # of the migration; `undone` after a move that was undone
    notifications: Mapping[str, str]  # `prep` without its phase; `undo` begins and `undone` ends the undo
    live: bool = False  # the server is moved when the guest has arrived, and waits for no confirmation


COLD: Final = MoveNames(
    orders={
        "prep": "prep_resize",
        "migrate": "resize_instance",
        "finish": "finish_resize",
        "undo": "finish_revert_resize",
    },
    events={"undo": ""},  # there is none, as in Nova
    conductor_events=("conductor_migrate_server", "cold_migrate"),
    task_states={
        "prep": states.RESIZE_PREP,
        "migrate": states.RESIZE_MIGRATING,
        "migrated": states.RESIZE_MIGRATED,
        "finish": states.RESIZE_FINISH,
    },
    statuses={
        "prep": migration_states.PRE_MIGRATING,
        "migrate": migration_states.MIGRATING,
        "migrated": migration_states.POST_MIGRATING,
        "undone": migration_states.ERROR,
    },
    notifications={
        "prep": "resize_prep",
        "migrate": "resize.start",
        "migrated": "resize.end",
        "finish": "resize_finish.start",
        "finished": "resize_finish.end",
        "another": "resize.error",
    },
)
LIVE: Final = MoveNames(
    orders={
        "prep": "check_can_live_migrate_destination",
        "migrate": "live_migration",
        "finish": "post_live_migration_at_destination",
        "undo": "rollback_live_migration",
    },
    events={"undo": "compute_rollback_live_migration_at_destination"},
    conductor_events=("conductor_live_migrate_instance",),
    task_states={},  # it is `migrating` all the time
    statuses={
        "prep": migration_states.PREPARING,
        "migrate": migration_states.QUEUED,
        "under_way": migration_states.RUNNING,
        "migrated": migration_states.POST_MIGRATING,
        "undone": migration_states.FAILED,
    },
    notifications={
        "prep": "live_migration_pre",
        "migrated": "live_migration_post.start",
        "finish": "live_migration_post_dest.start",
        "finished": "live_migration_post_dest.end",
        "left": "live_migration_post.end",
        "undo": "live_migration_rollback.start",
        "undone": "live_migration_rollback.end",
    },
    live=True,
)

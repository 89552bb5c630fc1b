"""The types of moves, cold and live: the names of their orders, states and notifications, by step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from micronova.objects import migration_states, states
from micronova.objects.operations import Step

ROLLED_BACK: Final = "live_migration_rollback_dest"
"""The notification, without its phase, that a destination has nothing any more of a live migration that was undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStatuses:
    """The statuses of the migration."""

    prep: str
    migrate: str  # when the source has its order
    under_way: str  # when the source sends the guest
    migrated: str  # when the source has sent it
    undone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveNotifications:
    """The notifications of a move; None if there is none, as in Nova."""

    prep: str  # without its phase
    ordered: Mapping[Step, str]  # by the step whose order a host gets
    another: str | None = None  # a destination has refused, and another one is tried
    migrated: str
    finished: str
    source_finished: str | None = None
    undo: str | None = None
    undone_on_destination: str | None = None  # without its phase
    undone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveType:
    """A type of moves, as Nova's migration type."""

    live: bool  # the guest runs meanwhile; the server is moved when that is done, and waits for no confirmation
    orders: Mapping[Step, str]  # the kind of the order
    events: Mapping[Step, str]  # of the instance action; that of a step which is not here is its order with a prefix
    conductor_events: tuple[str, ...]  # of the conductor's own part, the outer one first
    task_states: Mapping[Step, str] = field(default_factory=dict)
    migrated_task_state: str | None = None  # when the source has sent the guest
    statuses: MoveStatuses
    notifications: MoveNotifications


COLD: Final = MoveType(
    live=False,
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
        "finish": states.RESIZE_FINISH,
    },
    migrated_task_state=states.RESIZE_MIGRATED,
    statuses=MoveStatuses(
        prep=migration_states.PRE_MIGRATING,
        migrate=migration_states.MIGRATING,
        under_way=migration_states.MIGRATING,
        migrated=migration_states.POST_MIGRATING,
        undone=migration_states.ERROR,
    ),
    notifications=MoveNotifications(
        prep="resize_prep",
        ordered={"migrate": "resize.start", "finish": "resize_finish.start"},
        another="resize.error",
        migrated="resize.end",
        finished="resize_finish.end",
    ),
)
LIVE: Final = MoveType(
    live=True,
    orders={
        "prep": "check_can_live_migrate_destination",
        "migrate": "live_migration",
        "finish": "post_live_migration_at_destination",
        "undo": "rollback_live_migration",
    },
    events={"undo": "compute_rollback_live_migration_at_destination"},
    conductor_events=("conductor_live_migrate_instance",),
    # The task state is `migrating` all the time.
    statuses=MoveStatuses(
        prep=migration_states.PREPARING,
        migrate=migration_states.QUEUED,
        under_way=migration_states.RUNNING,
        migrated=migration_states.POST_MIGRATING,
        undone=migration_states.FAILED,
    ),
    notifications=MoveNotifications(
        prep="live_migration_pre",
        ordered={"finish": "live_migration_post_dest.start"},
        migrated="live_migration_post.start",
        finished="live_migration_post_dest.end",
        source_finished="live_migration_post.end",
        undo="live_migration_rollback.start",
        undone_on_destination=ROLLED_BACK,
        undone="live_migration_rollback.end",
    ),
)

"""The handlers of orders by kind. A handler may run twice for an order: after a crash the order is sent again."""

from typing import Final

from micronova.compute.handlers import guests, moves, volumes
from micronova.compute.handlers.build import build
from micronova.compute.handlers.rebuild import rebuild
from micronova.compute.handlers.shared import Handler

HANDLERS: Final[dict[str, Handler]] = {
    "build": build,
    "rebuild": rebuild,
    "delete": guests.delete,
    "stop": guests.stop,
    "start": guests.start,
    "reboot": guests.reboot,
    "pause": guests.pause,
    "unpause": guests.unpause,
    "suspend": guests.suspend,
    "resume": guests.resume,
    "rescue": guests.rescue,
    "unrescue": guests.unrescue,
    "change_password": guests.change_password,
    "trigger_crash_dump": guests.trigger_crash_dump,
    "soft_delete": guests.soft_delete,
    "restore": guests.start,
    "attach_interface": guests.attach_interface,
    "detach_interface": guests.detach_interface,
    "attach_volume": volumes.attach_volume,
    "detach_volume": volumes.detach_volume,
    "extend_volume": volumes.extend_volume,
    "swap_volume": volumes.swap_volume,
    "create_image": guests.create_image,
    "create_backup": guests.create_image,
    "shelve": guests.shelve,
    "shelve_offload": guests.remove,
    "prep_resize": moves.prep_resize,
    "resize_instance": moves.resize_instance,
    "finish_resize": moves.finish_resize,
    "finish_revert_resize": moves.finish_revert_resize,
    "confirm_resize": moves.confirm_resize,
    "revert_resize": guests.remove,
    "check_can_live_migrate_destination": moves.check_can_live_migrate_destination,
    "live_migration": moves.live_migration,
    "rollback_live_migration": moves.rollback_live_migration,
    "post_live_migration_at_destination": moves.post_live_migration_at_destination,
}
"""By the kind of the order. The order `revert_resize` removes the guest on the destination."""

UNDO: Final[dict[str, Handler]] = {
    "attach_interface": guests.detach_interface,
    "attach_volume": volumes.detach_volume,
    "live_migration": moves.rollback_live_migration,
}
"""By the kind of the order: undoes work whose report came too late, so that the conductor refused it."""

"""The handlers of orders by kind. A handler may run twice for an order: after a crash the order is sent again."""

from typing import Final

from micronova.compute import move_handlers as moves
from micronova.compute import order_handlers as orders
from micronova.compute.build import build
from micronova.compute.handling import Handler
from micronova.compute.rebuild import rebuild

HANDLERS: Final[dict[str, Handler]] = {
    "build": build,
    "rebuild": rebuild,
    "delete": orders.delete,
    "stop": orders.stop,
    "start": orders.start,
    "reboot": orders.reboot,
    "pause": orders.pause,
    "unpause": orders.unpause,
    "suspend": orders.suspend,
    "resume": orders.resume,
    "rescue": orders.rescue,
    "unrescue": orders.unrescue,
    "change_password": orders.change_password,
    "trigger_crash_dump": orders.trigger_crash_dump,
    "soft_delete": orders.soft_delete,
    "restore": orders.start,
    "attach_interface": orders.attach_interface,
    "detach_interface": orders.detach_interface,
    "create_image": orders.create_image,
    "create_backup": orders.create_image,
    "shelve": orders.shelve,
    "shelve_offload": orders.delete,
    "prep_resize": moves.prep_resize,
    "resize_instance": moves.resize_instance,
    "finish_resize": moves.finish_resize,
    "finish_revert_resize": moves.finish_revert_resize,
    "confirm_resize": moves.confirm_resize,
    "revert_resize": orders.delete,
    "check_can_live_migrate_destination": moves.check_can_live_migrate_destination,
    "live_migration": moves.live_migration,
    "rollback_live_migration": moves.rollback_live_migration,
    "post_live_migration_at_destination": moves.post_live_migration_at_destination,
}
"""By the kind of the order. One that reverts a resize removes the guest on the destination."""

UNDO: Final[dict[str, Handler]] = {
    "attach_interface": orders.detach_interface,
    "live_migration": moves.rollback_live_migration,
}
"""By the kind of the order: undoes work whose report came too late, so that the conductor refused it."""

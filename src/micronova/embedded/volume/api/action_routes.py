"""Actions of volumes: their routes, and changes of a volume's row."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import field

from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import Volume
from micronova.embedded.volume.store import volume_queries
from micronova.http.request import Request
from micronova.http.service import Route

Change = Callable[[Volume], dict[str, Any]]


def action_route(action: str, handler: Any, policy: str, arguments: Any = Any, status: int = 202, **more: Any) -> Route:
    """Return the route of an action; `arguments` is the type of what the body has under the action's name."""
    name = "".join(part.capitalize() for part in action.replace("-", "_").split("_"))
    fields = [("arguments", arguments, field(name=action))]
    return Route(
        method="POST",
        path="/volumes/{volume_id}/action",
        handler=handler,
        policy=policy,
        action=action,
        body=msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True),
        status=status,
        checks_policy=True,
        **more,
    )


async def change_row(core: Core, request: Request, volume_id: str, change: Change) -> Volume:
    """Write the columns that `change` returns for a volume; return the volume as it was before."""

    async def try_once() -> Volume:
        volume = await core.load_volume(request, volume_id)
        await core.database.write(volume_queries.update, volume, change(volume), core.now())
        return volume

    return await retry_or_conflict(f"Volume {volume_id}", try_once)

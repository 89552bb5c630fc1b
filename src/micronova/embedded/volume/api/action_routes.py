"""The routes of actions, and what several actions share."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import field

from micronova.embedded.volume.api.request_bodies import Body, Text
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import ResourceColumns, Volume
from micronova.embedded.volume.store import volume_queries
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.http.versions import Range

_ALL_VERSIONS = Range()
Change = Callable[[Volume], ResourceColumns]
"""Returns the columns of a volume that change; raises an error if it must not change."""


class NewStatus(Body):
    """The arguments of os-reset_status of snapshots and backups."""

    status: Text


def action_route(
    action: str,
    handler: Handler,
    policy: str,
    arguments: Any = Any,
    status: int = 202,
    *,
    of: str = "volume",
    checks_policy: bool = True,
    versions: Range = _ALL_VERSIONS,
) -> Route:
    """Return the route of an action `of` a resource; `arguments` is the type of what the body has under its name."""
    name = "".join(part.capitalize() for part in action.replace("-", "_").split("_"))
    fields = [("arguments", arguments, field(name=action))]
    return Route(
        method="POST",
        path=f"/{of}s/{{{of}_id}}/action",
        handler=handler,
        policy=policy,
        action=action,
        body=msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True),
        status=status,
        checks_policy=checks_policy,
        versions=versions,
    )


async def change_row(core: Core, request: Request, volume_id: str, change: Change) -> Volume:
    """Write the columns that `change` returns for a volume; return the volume as it was before."""

    async def try_once() -> Volume:
        volume = await core.load_volume(request, volume_id)
        await core.database.write(volume_queries.update, volume, change(volume), core.now())
        return volume

    return await retry_or_conflict(f"volume {volume_id}", try_once)

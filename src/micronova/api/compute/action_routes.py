"""Routes of server actions: POST /servers/{id}/action with the action's name as the body's only key."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import field

from micronova.http.service import Handler, Route
from micronova.http.versions import Range

SERVER_PATHS: Final = (("/servers", Range()), ("/os-volumes_boot", Range(0, 102)))
"""The paths of servers: their name, and their old name with the versions that have it."""


@dataclass(frozen=True, kw_only=True)
class ServerAction:
    """One action: its name in the body, its handler and its policy."""

    name: str
    handler: Handler
    policy: str
    body: Any
    status: int = 202
    versions: Range = Range()
    answer: Any = None
    has_location: bool = False
    errors: tuple[int, ...] = (501,)  # the host cannot do it


def bare_body(action: str) -> type[msgspec.Struct]:
    """Return the body of an action without parameters; the value beside the action's name is ignored."""
    return msgspec.defstruct(
        f"{action}Body", [("value", Any, field(name=action, default=None))], forbid_unknown_fields=True
    )


def action_routes(actions: Iterable[ServerAction]) -> list[Route]:
    """Return the routes of actions, for both paths of servers. Their handlers ask policy when they have the server."""
    return [
        Route(
            method="POST",
            path=f"{path}/{{id}}/action",
            action=action.name,
            handler=action.handler,
            policy=action.policy,
            status=action.status,
            body=action.body,
            answer=action.answer,
            errors=action.errors,
            has_location=action.has_location,
            checks_policy=True,
            versions=Range(action.versions.since, min(known.until, action.versions.until)),
        )
        for action in actions
        for path, known in SERVER_PATHS
    ]

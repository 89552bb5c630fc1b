"""Routes of server actions: POST /servers/{id}/action with the action's name as the body's only key."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import field

from micronova.http.service import Handler, Route
from micronova.http.versions import Range

PATH: Final = "/servers"
OLD_PATH: Final = "/os-volumes_boot"
OLD_PATH_UNTIL: Final = 102
"""The path of servers, their old path, and the last microversion that has it."""


@dataclass(frozen=True, kw_only=True)
class ActionRoute:
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


def with_old_path(routes: Iterable[Route]) -> list[Route]:
    """Return routes of servers, and the same under the old path of servers."""
    found = []
    for route in routes:
        found.append(route)
        versions = Range(route.versions.since, min(route.versions.until, OLD_PATH_UNTIL))
        if versions.since <= versions.until:
            path = OLD_PATH + route.path.removeprefix(PATH)
            found.append(replace(route, path=path, versions=versions, same_as=route.label))
    return found


def action_routes(actions: Iterable[ActionRoute]) -> list[Route]:
    """Return the routes of actions, for both paths of servers. Their handlers ask policy when they have the server."""
    return with_old_path(
        Route(
            method="POST",
            path=f"{PATH}/{{id}}/action",
            action=action.name,
            handler=action.handler,
            policy=action.policy,
            status=action.status,
            body=action.body,
            answer=action.answer,
            errors=action.errors,
            has_location=action.has_location,
            checks_policy=True,
            versions=action.versions,
        )
        for action in actions
    )

"""API extensions: routes that other packages add to the compute API.

An extension is an entry point of the group `micronova.api_extensions`: a callable that gets the API's dependencies
and returns `Route`s. They are a new resource, or an action on an existing one (the same path with another `action`).
An extension cannot replace a route of ours. A faulty extension is reported and skipped; it never stops the API.
"""

import logging
from collections.abc import Sequence
from typing import Any

from micronova.http.service import Route
from micronova.plugins import entry_points

log = logging.getLogger(__name__)

GROUP = "micronova.api_extensions"


def with_extensions(own: Sequence[Route], dependencies: Any) -> list[Route]:
    """Return our routes and those of the installed extensions."""
    routes = list(own)
    taken = {_key(route) for route in own}
    for name, offered in entry_points.load(GROUP, lambda extension: list(extension(dependencies))):
        try:
            clash = next((route for route in offered if _key(route) in taken), None)
            if clash is not None:
                raise ValueError(f"{clash.label} exists already")
            _check_parameters(offered, routes)
        except Exception as error:
            log.error("the API extension %s is skipped: %s", name, error)
            continue
        routes += offered
        taken |= {_key(route) for route in offered}
    return routes


def _key(route: Route) -> tuple[str, str, str | None]:
    return route.method, route.path, route.action


def _check_parameters(offered: Sequence[Route], routes: Sequence[Route]) -> None:
    """Raise ValueError if a path names a parameter otherwise than an existing path does.

    The router wants one name for a parameter at one place, and would fail for all routes.
    """
    known: dict[tuple[str, ...], str] = {}
    for route in (*routes, *offered):
        parts: tuple[str, ...] = ()
        for part in route.path.split("/"):
            if part.startswith("{"):
                if known.setdefault(parts, part) != part:
                    raise ValueError(f"{route.path} must call the parameter {part} {known[parts]}")
                part = "{}"
            parts = (*parts, part)

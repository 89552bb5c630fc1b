"""API extensions: what other packages add to the API, by entry points of the group `micronova.api_extensions`.

An extension is a callable that gets the compute API's dependencies and returns `Route`s: a new resource, or an action
on an existing one (a route with the same path and another `action`). What we have ourselves cannot be replaced.
A faulty extension is reported and skipped; it never stops the API.
"""

import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

from micronova.http.service import Route

log = logging.getLogger(__name__)

GROUP = "micronova.api_extensions"


def load() -> list[tuple[str, Any]]:
    """Return the installed extensions by name."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            found.append((entry.name, entry.load()))
        except Exception as error:
            log.error("API extension %s (%s) is skipped: %s", entry.name, entry.value, error)
    return found


def add_routes(own: Sequence[Route], extensions: Sequence[tuple[str, Any]], needs: Any) -> list[Route]:
    """Return our routes with those of the extensions."""
    routes = list(own)
    taken = {_key(route) for route in own}
    for name, extension in extensions:
        try:
            offered = list(extension(needs))
            clash = next((route for route in offered if _key(route) in taken), None)
            if clash is not None:
                raise ValueError(f"{clash.label} is taken")
            _check_parameters(offered, routes)
        except Exception as error:
            log.error("API extension %s is skipped: %s", name, error)
            continue
        routes += offered
        taken |= {_key(route) for route in offered}
    return routes


def _key(route: Route) -> tuple[str, str, str | None]:
    return route.method, route.path, route.action


def _check_parameters(offered: Sequence[Route], routes: Sequence[Route]) -> None:
    """The router wants one name for a parameter at one place: say so before it fails for everybody."""
    known: dict[tuple[str, ...], str] = {}
    for route in (*routes, *offered):
        parts: tuple[str, ...] = ()
        for part in route.path.split("/"):
            if part.startswith("{"):
                if known.setdefault(parts, part) != part:
                    raise ValueError(f"{route.path} must call {part} {known[parts]}")
                part = "{}"
            parts = (*parts, part)

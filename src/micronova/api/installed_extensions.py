"""The installed extensions of the compute API.

An extension is used whole or not at all. A faulty one is reported with its name and its package, and skipped. It stops
the API only if operators say that they need it (`api.required_extensions`), such as one that refuses requests. An
extension cannot replace a route, a policy rule or an alias of ours, or of an extension before it.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from micronova.api.extension import Additions, Extension, Unusable, changed
from micronova.http.service import AUTHENTICATED, Route
from micronova.objects.errors import Invalid
from micronova.plugins import entry_points
from micronova.policies.enforcer import Rule

log = logging.getLogger(__name__)

GROUP = "micronova.api_extensions"


@dataclass(frozen=True)
class Installed:
    """An extension and where it comes from."""

    title: str  # the entry point and its package
    extension: Extension


class Extensions:
    """The extensions that are used, and why others are not."""

    def __init__(self, own_rules: Sequence[Rule], own_aliases: Collection[str]) -> None:
        """Load the installed extensions; `own_rules` and `own_aliases` are those of the API itself."""
        self.used: list[Installed] = []
        self.problems: dict[str, str] = {}
        self.rules = list(own_rules)  # with those of the extensions
        self._aliases = set(own_aliases)
        for entry in entry_points.installed(GROUP):
            title = entry_points.title(entry)
            try:
                extension = entry.load()
                self._check(extension)
            except Exception as error:  # code of others may raise anything while it is imported
                self._skip(title, error)
                continue
            self.used.append(Installed(title, extension))
            self.rules += extension.rules
            self._aliases.add(extension.alias)

    def _skip(self, title: str, error: Exception) -> None:
        known = isinstance(error, Unusable)
        self.problems[title] = str(error) if known else f"{type(error).__name__}: {error}"
        log.error(
            "the API extension %s is skipped: %s; mend or uninstall its package, and restart the API",
            title,
            self.problems[title],
            exc_info=None if known else error,
        )

    def _check(self, extension: Any) -> None:
        if not isinstance(extension, Extension):
            raise Unusable(f"it is a {type(extension).__name__} and must be an Extension of micronova.api.extension")
        if not extension.alias or extension.alias in self._aliases:
            raise Unusable(f"there is an extension with the alias {extension.alias!r} already")
        known = {rule.name for rule in self.rules}
        for rule in extension.rules:
            if rule.name in known:
                raise Unusable(f"there is a policy rule {rule.name} already")
            known.add(rule.name)

    def extend(self, own: Sequence[Route], dependencies: Any) -> list[Route]:
        """Return our routes with what the extensions add."""
        routes = list(own)
        for installed in list(self.used):
            try:
                routes = self._with(routes, installed.extension.add(dependencies))
            except Exception as error:
                self.used.remove(installed)
                self._skip(installed.title, error)
        return routes

    def check_required(self, aliases: Collection[str]) -> None:
        """Raise Invalid unless the extensions with these aliases are used."""
        missing = sorted(set(aliases) - {each.extension.alias for each in self.used})
        if missing:
            reasons = "".join(f" {title} is skipped: {problem}." for title, problem in self.problems.items())
            raise Invalid(
                f"api.required_extensions names {', '.join(missing)}, which the API cannot use.{reasons} "
                "Install or mend the package, or remove the name from the setting."
            )

    def _with(self, routes: list[Route], additions: Additions) -> list[Route]:
        rules = {rule.name for rule in self.rules}
        taken = {_key(route) for route in routes}
        for route in additions.routes:
            if _key(route) in taken:
                raise Unusable(f"{route.label} exists already")
            if route.policy is None or (route.policy != AUTHENTICATED and route.policy not in rules):
                raise Unusable(f"{route.label} has the policy rule {route.policy!r}, which does not exist")
            taken.add(_key(route))
        found = [*routes, *additions.routes]
        _check_parameters(found)
        for change in additions.changes:
            if all(route.label != change.route for route in found):
                raise Unusable(f"it changes the route {change.route!r}, which does not exist")
            found = [
                each
                for route in found
                for each in (changed(route, change) if change.route in (route.label, route.same_as) else (route,))
            ]
        return found


def _key(route: Route) -> tuple[str, str, str | None]:
    return route.method, route.path, route.action


def _check_parameters(routes: Sequence[Route]) -> None:
    """Raise Unusable if a path names a parameter otherwise than another path does.

    The router wants one name for a parameter at one place, and would fail for all routes.
    """
    known: dict[tuple[str, ...], str] = {}
    for route in routes:
        parts: tuple[str, ...] = ()
        for part in route.path.split("/"):
            if part.startswith("{"):
                if known.setdefault(parts, part) != part:
                    raise Unusable(f"{route.path} must call the parameter {part} {known[parts]}")
                part = "{}"
            parts = (*parts, part)

"""Hooks: code of a deployment's own around what we do, by entry points of the group `micronova.hooks`.

A hook is named for what it surrounds (`create_instance`, `build_instance`…) and is an object with any of
`pre(*args)` and `post(result, *args)`. A faulty one is reported and skipped: it never stops the work.
"""

import importlib.metadata
import logging
from typing import Any

log = logging.getLogger(__name__)

GROUP = "micronova.hooks"


class Hooks:
    """The hooks that are installed, by name."""

    def __init__(self, hooks: dict[str, list[Any]] | None = None) -> None:
        self._hooks = hooks or {}

    @classmethod
    def load(cls) -> "Hooks":
        """Find the installed hooks."""
        found: dict[str, list[Any]] = {}
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                made = entry.load()
                found.setdefault(entry.name, []).append(made() if isinstance(made, type) else made)
            except Exception as error:
                log.error("hook %s (%s) is skipped: %s", entry.name, entry.value, error)
        return cls(found)

    def pre(self, name: str, *args: Any) -> None:
        """Run what wants to come before."""
        for hook in self._hooks.get(name, ()):
            self._call(name, hook, "pre", args)

    def post(self, name: str, result: Any, *args: Any) -> None:
        """Run what wants to come after."""
        for hook in self._hooks.get(name, ()):
            self._call(name, hook, "post", (result, *args))

    def _call(self, name: str, hook: Any, method: str, args: tuple[Any, ...]) -> None:
        function = getattr(hook, method, None)
        if function is None:
            return
        try:
            function(*args)
        except Exception:
            log.exception("hook %s.%s of %r failed and is skipped", name, method, hook)

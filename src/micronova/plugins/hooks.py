"""Hooks: code of a deployment that runs before and after an action, by entry points of the group `micronova.hooks`.

The entry point has the name of the action (`create_instance`, `build_instance`). It is a class, or an object, with any
of the methods `pre(*args)` and `post(result, *args)`. If a hook raises, the error is logged and the action continues.
"""

import logging
from typing import Any

from micronova.plugins import entry_points

log = logging.getLogger(__name__)

GROUP = "micronova.hooks"


class Hooks:
    """The installed hooks by the name of their action."""

    def __init__(self, hooks: dict[str, list[Any]] | None = None) -> None:
        self._hooks = hooks or {}

    @classmethod
    def load(cls) -> "Hooks":
        """Load the installed hooks."""
        found: dict[str, list[Any]] = {}
        for name, hook in entry_points.load(GROUP, lambda loaded: loaded() if isinstance(loaded, type) else loaded):
            found.setdefault(name, []).append(hook)
        return cls(found)

    def pre(self, name: str, *args: Any) -> None:
        """Call `pre` of the hooks of this name."""
        for hook in self._hooks.get(name, ()):
            self._call(name, hook, "pre", args)

    def post(self, name: str, result: Any, *args: Any) -> None:
        """Call `post` of the hooks of this name."""
        for hook in self._hooks.get(name, ()):
            self._call(name, hook, "post", (result, *args))

    def _call(self, name: str, hook: Any, method: str, args: tuple[Any, ...]) -> None:
        function = getattr(hook, method, None)
        if function is None:
            return
        try:
            function(*args)
        except Exception:
            log.exception("the hook %s.%s of %r failed; the action continues", name, method, hook)

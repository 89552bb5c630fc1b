"""Notifications about instances, without any transport: what a role gets when none are wanted."""

from typing import Any


class NoNotifications:
    """Sends nothing."""

    def instance(self, event: str, row: Any, *, context: Any, fault: dict[str, Any] | None = None) -> None:
        """Drop it."""

    def scheduler(self, context: Any, event: str, payload: dict[str, Any]) -> None:
        """Drop it."""

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

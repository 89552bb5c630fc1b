"""Actions on servers: POST /servers/{id}/action with the action's name as the body's only key."""

from typing import Any, Literal

import msgspec
from msgspec import field

from micronova.api import inputs
from micronova.api.compute import access
from micronova.compute.api import API
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range


class StartBody(msgspec.Struct, forbid_unknown_fields=True):
    """Start; what stands beside the name has no meaning."""

    value: Any = field(name="os-start", default=None)


class StopBody(msgspec.Struct, forbid_unknown_fields=True):
    """Stop."""

    value: Any = field(name="os-stop", default=None)


class Reboot(msgspec.Struct, forbid_unknown_fields=True):
    """How to reboot."""

    type: Literal["SOFT", "HARD", "Soft", "Hard", "soft", "hard"]


class RebootBody(msgspec.Struct, forbid_unknown_fields=True):
    """Reboot."""

    reboot: Reboot


class ConsoleOutput(msgspec.Struct, forbid_unknown_fields=True):
    """How much of the console log."""

    length: int | str | None = None


class ConsoleOutputBody(msgspec.Struct, forbid_unknown_fields=True):
    """Console log."""

    value: ConsoleOutput = field(name="os-getConsoleOutput")


class ServerActions:
    """The handlers."""

    def __init__(self, database: Database, api: API) -> None:
        self._database = database
        self._api = api

    async def start(self, request: Request, id: str) -> None:
        """Switch a server on."""
        row = await access.server(self._database, request, id)
        await self._api.power(request.context, row, "start", "start")

    async def stop(self, request: Request, id: str) -> None:
        """Shut a server down."""
        row = await access.server(self._database, request, id)
        await self._api.power(request.context, row, "stop", "stop")

    async def reboot(self, request: Request, id: str) -> None:
        """Restart a server."""
        row = await access.server(self._database, request, id)
        kind = request.body.reboot.type.upper()
        action = "reboot_hard" if kind == "HARD" else "reboot"
        await self._api.power(request.context, row, "reboot", action, {"type": kind})

    async def console_output(self, request: Request, id: str) -> dict[str, str]:
        """Read the end of a server's console log."""
        row = await access.server(self._database, request, id)
        asked = request.body.value.length
        length = None if asked is None else _length(asked)
        return {"output": await self._api.console_output(request.context, row, length)}


def _length(value: int | str) -> int | None:
    """Read the number of lines; -1 means all."""
    from micronova.objects.errors import Invalid

    try:
        number = int(value)
    except ValueError:
        raise Invalid("Invalid input for field/attribute length: it is a number of lines.") from None
    if number < -1:
        raise Invalid("Invalid input for field/attribute length: it must be -1 (all) or more.")
    return None if number == -1 else inputs.whole(number, "length")


def routes(database: Database, api: API) -> list[Route]:
    """Return one route for each action, under both names of the resource."""
    handlers = ServerActions(database, api)
    table: list[tuple[str, Any, str, int, Any]] = [
        ("os-start", handlers.start, "os_compute_api:servers:start", 202, StartBody),
        ("os-stop", handlers.stop, "os_compute_api:servers:stop", 202, StopBody),
        ("reboot", handlers.reboot, "os_compute_api:servers:reboot", 202, RebootBody),
        (
            "os-getConsoleOutput",
            handlers.console_output,
            "os_compute_api:os-console-output",
            200,
            ConsoleOutputBody,
        ),
    ]
    return [
        Route(
            method="POST",
            path=f"{path}/{{id}}/action",
            action=action,
            handler=handler,
            policy=policy,
            status=status,
            body=body,
            checks_policy=True,
            versions=versions,
        )
        for path, versions in (("/servers", Range()), ("/os-volumes_boot", Range(0, 102)))
        for action, handler, policy, status, body in table
    ]

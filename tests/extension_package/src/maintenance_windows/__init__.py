"""Maintenance windows: when an operator may interrupt a server.

The extension adds the resource /os-maintenance-windows and the action os-setMaintenanceWindow; servers get the field
`os-maintenance:window`, which a request for a server and an update take and answers show from 2.90 on; a server in
the window "frozen" cannot be deleted. The window of a server is an item of its metadata.
"""

from functools import partial
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType, field

from micronova.api.compute.action_routes import ActionRoute, action_routes
from micronova.api.compute.app import APIDependencies
from micronova.api.compute.server_lookup import authorized_server, lock_changeable
from micronova.api.extension import Additions, Extension, Proceed, RouteChange
from micronova.api.inputs import Body, Query
from micronova.db import instances
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.clock import micros
from micronova.objects.errors import Conflict, NotFound
from micronova.policies.enforcer import Rule

RULE = "os_compute_api:os-maintenance-windows"
KEY = "os-maintenance:window"  # of the metadata
WINDOWS = {"nights": "22:00-04:00", "weekends": "Sat-Sun", "frozen": "never"}
Name = Literal["nights", "weekends", "frozen"]
SHAPE = {"name": str, "hours": str}


class WindowsQuery(Query):
    """Which windows to list."""

    name: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET


class SetWindow(Body):
    """The name of the window."""

    name: Name


class SetWindowBody(Body):
    """Set the window of a server."""

    value: SetWindow = field(name="os-setMaintenanceWindow")


class WindowField(Body):
    """What the body of a server gets."""

    window: Name | UnsetType = field(name=KEY, default=UNSET)


class Handlers:
    """The handlers."""

    def __init__(self, needs: APIDependencies) -> None:
        self._database = needs.database
        self._clock = needs.clock

    async def index(self, request: Request) -> dict[str, Any]:
        """List maintenance windows."""
        wanted = request.query.name
        return {"windows": [_shown(name) for name in WINDOWS if wanted in (UNSET, name)]}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a maintenance window."""
        if id not in WINDOWS:
            raise NotFound(f"There is no maintenance window {id[:64]}.")
        return {"window": _shown(id)}

    async def set_window(self, request: Request, id: str) -> None:
        """Set the maintenance window of a server."""
        await authorized_server(self._database, request, id)
        await self._database.write(self._store, id, request.body.value.name)

    def _store(self, conn: sa.Connection, id: str, name: str) -> None:
        row = lock_changeable(conn, id, "set maintenance window")
        instances.update(conn, id, micros(self._clock.now()), {"metadata": {**row["metadata"], KEY: name}})

    async def create(self, request: Request, proceed: Proceed) -> Any:
        """Take the window of a new server."""
        server = request.body.server
        if server.window is not UNSET:
            given = {} if server.metadata is UNSET else server.metadata
            server.metadata = {**given, KEY: server.window}
        return await proceed()

    async def update(self, request: Request, proceed: Proceed, id: str) -> Any:
        """Take and show a server's window."""
        answer = await proceed()
        window = request.body.server.window
        if window is not UNSET:
            await self._database.write(self._store, id, window)
            answer["server"]["metadata"] = {**answer["server"]["metadata"], KEY: window}
        return _with_windows(answer)

    async def read(self, request: Request, proceed: Proceed, **params: str) -> Any:
        """Show the windows of servers."""
        return _with_windows(await proceed())

    async def delete(self, request: Request, proceed: Proceed, id: str) -> Any:
        """Refuse to delete a server that is never to be interrupted."""
        row = await authorized_server(self._database, request, id)
        if row["metadata"].get(KEY) == "frozen":
            raise Conflict(f"Instance {id} is in the maintenance window frozen: it cannot be deleted.")
        return await proceed()


def _shown(name: str) -> dict[str, str]:
    return {"name": name, "hours": WINDOWS[name]}


def _with_windows(answer: dict[str, Any]) -> dict[str, Any]:
    for server in [answer["server"]] if "server" in answer else answer["servers"]:
        server[KEY] = server["metadata"].get(KEY)
    return answer


def _add(needs: APIDependencies) -> Additions:
    handlers = Handlers(needs)
    return Additions(
        routes=[
            Route(
                method="GET",
                path="/os-maintenance-windows",
                handler=handlers.index,
                policy=f"{RULE}:index",
                query=WindowsQuery,
                strict_query=since(1),
                answer={"windows": [SHAPE]},
            ),
            Route(
                method="GET",
                path="/os-maintenance-windows/{id}",
                handler=handlers.show,
                policy=f"{RULE}:index",
                answer={"window": SHAPE},
            ),
            *action_routes(
                [
                    ActionRoute(
                        name="os-setMaintenanceWindow",
                        handler=handlers.set_window,
                        policy=f"{RULE}:set",
                        body=SetWindowBody,
                    )
                ]
            ),
        ],
        changes=_changes(handlers),
    )


def _changes(handlers: Handlers) -> list[RouteChange]:
    """Return the changes of servers."""
    new = partial(RouteChange, versions=since(90))
    shown = {KEY: str | None}
    return [
        new(route="POST /servers", around=handlers.create, body=WindowField),
        new(route="PUT /servers/{id}", around=handlers.update, body=WindowField, answer=shown),
        new(route="GET /servers/{id}", around=handlers.read, answer=shown),
        new(route="GET /servers/detail", around=handlers.read, answer=shown),
        RouteChange(route="DELETE /servers/{id}", around=handlers.delete),
        RouteChange(route="POST /servers/{id}/action forceDelete", around=handlers.delete),
    ]


EXTENSION = Extension(
    alias="os-maintenance-windows",
    name="MaintenanceWindows",
    description="When an operator may interrupt servers.",
    updated="2026-02-27T00:00:00Z",
    rules=[
        Rule(f"{RULE}:index", "rule:project_reader_or_admin", "List maintenance windows."),
        Rule(f"{RULE}:set", "rule:context_is_admin", "Set the maintenance window of a server by the action."),
    ],
    add=_add,
)

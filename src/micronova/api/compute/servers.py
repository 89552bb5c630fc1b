"""Servers: list, show, update, delete."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.action_routes import PATH, with_old_path
from micronova.api.compute.server_inputs import access_address, disk_config, hostname
from micronova.api.compute.server_lookup import authorized_server, authorized_server_to_show
from micronova.api.compute.server_query import ListQuery, list_filters
from micronova.api.compute.server_views import BRIEF, DETAIL, SHOW, UPDATED, ViewContext
from micronova.api.inputs import STRICT
from micronova.api.links import LINKS, Links
from micronova.api.view import View
from micronova.db import instances, server_lists
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.block_device import BlockDevice
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict
from micronova.objects.instance import InstanceChanges, InstanceRow, changed
from micronova.servers.actions import ServerActions

EXTRA_SPECS = "os_compute_api:servers:show:flavor-extra-specs"
ATTRIBUTES = "os_compute_api:os-extended-server-attributes"
BRIEF_COLUMNS = ("uuid", "display_name")
WITHOUT_USER_DATA = tuple(name for name in server_lists.ALL if name not in ("user_data", "key_data"))
HOST_STATUS = "os_compute_api:servers:show:host_status"
HOST_STATUS_UNKNOWN = "os_compute_api:servers:show:host_status:unknown-only"


class Changes(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={
        "access_ip_v4": "accessIPv4",
        "access_ip_v6": "accessIPv6",
        "disk_config": "OS-DCF:diskConfig",
    },
):
    """The fields of a server that can change."""

    name: inputs.Text | UnsetType = UNSET
    description: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    access_ip_v4: str | UnsetType = UNSET
    access_ip_v6: str | UnsetType = UNSET
    disk_config: str | UnsetType = UNSET
    hostname: inputs.Text | UnsetType = UNSET
    pinned_availability_zone: inputs.Text | None | UnsetType = UNSET

    versions = {"description": since(19), "hostname": since(90), "pinned_availability_zone": since(104)}


class UpdateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of an update."""

    server: Changes


class Servers:
    """The handlers."""

    def __init__(
        self, database: Database, clock: Clock, actions: ServerActions, max_limit: int, service_down_time: float
    ) -> None:
        self._database = database
        self._clock = clock
        self._actions = actions
        self._max_limit = max_limit
        self._down_time = service_down_time

    async def index(self, request: Request) -> dict[str, Any]:
        """List servers by name."""
        return await self._list(request, BRIEF, "servers")

    async def detail(self, request: Request) -> dict[str, Any]:
        """List servers with all fields."""
        return await self._list(request, DETAIL, "servers/detail")

    async def _list(self, request: Request, view: View, path: str) -> dict[str, Any]:
        filters = list_filters(request, self._max_limit)
        flags = self.flags(request) if view is not BRIEF else frozenset()
        rows: Sequence[server_lists.Row] = []
        volumes: dict[str, tuple[BlockDevice, ...]] = {}
        if filters is not None:
            columns = _columns(view, request.minor, flags)
            rows, volumes = await self._database.read(
                _listed, filters, columns, with_services="host_status" in flags, with_volumes=view is not BRIEF
            )
        context = self._view_context(request)
        context.volumes = volumes
        shape = view.at(request.minor, flags)
        body: dict[str, Any] = {"servers": [shape(row, context) for row in rows]}
        if filters is not None and rows and len(rows) == filters.limit and filters.limit > 0:
            body["servers_links"] = context.links.next(request, path, rows[-1]["uuid"])
        return body

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a server."""
        flags = self.flags(request)
        row, volumes = await authorized_server_to_show(self._database, request, id, with_service="host_status" in flags)
        return self._body(request, row, SHOW, flags, {id: volumes})

    async def body(self, request: Request, row: InstanceRow, view: View, flags: frozenset[str]) -> dict[str, Any]:
        """Return a response about one server."""
        return self._body(request, row, view, flags, await self._database.read(instances.volumes, [row["uuid"]]))

    def _body(
        self,
        request: Request,
        row: InstanceRow,
        view: View,
        flags: frozenset[str],
        volumes: dict[str, tuple[BlockDevice, ...]],
    ) -> dict[str, Any]:
        context = self._view_context(request)
        context.volumes = volumes
        if request.minor >= 71 and row["server_group_id"]:
            context.server_groups = {row["uuid"]: [row["server_group_id"]]}
        return {"server": view.at(request.minor, flags)(row, context)}

    def flags(self, request: Request) -> frozenset[str]:
        """Return which fields policy allows the caller to see."""
        flags = set()
        if request.allows(rule=ATTRIBUTES):
            flags.add("attributes")
        if request.minor >= 16 and (request.allows(rule=HOST_STATUS) or request.allows(rule=HOST_STATUS_UNKNOWN)):
            flags.add("host_status")
        return frozenset(flags)

    def _view_context(self, request: Request) -> ViewContext:
        return ViewContext(
            Links(request),
            is_admin=request.context.is_admin,
            shows_extra_specs=request.allows(rule=EXTRA_SPECS),
            up_since=micros(self._clock.now() - self._down_time),
            all_host_states=request.allows(rule=HOST_STATUS),
        )

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Change fields of a server."""
        flags = self.flags(request)
        row = await authorized_server(self._database, request, id, with_service="host_status" in flags)
        values = self._values(request, row)
        if values:
            now = micros(self._clock.now())
            if "pinned_availability_zone" in values:
                zone = values["pinned_availability_zone"]
                there = await self._database.write(instances.pin_to_zone, id, now, values, zone=zone)
            else:
                there = await self._database.write(instances.update, id, now, values)
            if not there:
                raise Conflict(f"Instance {id} was deleted meanwhile.")
            row = {**changed(row, values), "updated_at": now}
        return await self.body(request, row, UPDATED, flags)

    def _values(self, request: Request, row: InstanceRow) -> InstanceChanges:
        asked: Changes = request.body.server
        values: InstanceChanges = {}
        if asked.name is not UNSET:
            values["display_name"] = inputs.name(asked.name, strip=request.is_v2)
        if asked.description is not UNSET:
            values["display_description"] = inputs.printable(asked.description, "description")
        if asked.access_ip_v4 is not UNSET:
            values["access_ip_v4"] = access_address("accessIPv4", asked.access_ip_v4, 4)
        if asked.access_ip_v6 is not UNSET:
            values["access_ip_v6"] = access_address("accessIPv6", asked.access_ip_v6, 6)
        if asked.disk_config is not UNSET:
            values["disk_config"] = disk_config(asked.disk_config)
        if asked.hostname is not UNSET:
            values["hostname"] = hostname(asked.hostname, request.minor)
        if asked.pinned_availability_zone is not UNSET:
            wanted = asked.pinned_availability_zone
            if wanted is not None and row["availability_zone"] not in (None, wanted):
                raise Conflict(
                    f"Instance {row['uuid']} is in availability zone {row['availability_zone']}: it can be pinned to "
                    f"that one, or to none."
                )
            values["pinned_availability_zone"] = wanted
        return values

    async def delete(self, request: Request, id: str) -> None:
        """Delete a server."""
        await self._actions.delete(request.context, await authorized_server(self._database, request, id))


def _listed(
    conn: sa.Connection,
    filters: server_lists.Filters,
    columns: tuple[str, ...],
    *,
    with_services: bool,
    with_volumes: bool,
) -> tuple[Sequence[server_lists.Row], dict[str, tuple[BlockDevice, ...]]]:
    """Return a page of servers, and their volumes."""
    rows = server_lists.list_(conn, filters, columns, with_services=with_services)
    return rows, instances.volumes(conn, [row["uuid"] for row in rows]) if with_volumes and rows else {}


def _columns(view: View, minor: int, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the columns that a list reads: no user data, which may be 64 KiB, unless it shows them."""
    if view is BRIEF:
        return BRIEF_COLUMNS
    return server_lists.ALL if "attributes" in flags and minor >= 3 else WITHOUT_USER_DATA


def routes(
    database: Database, clock: Clock, actions: ServerActions, max_limit: int, service_down_time: float
) -> list[Route]:
    """Return the routes; os-volumes_boot is the same resource under its old name."""
    handlers = Servers(database, clock, actions, max_limit, service_down_time)
    rule = "os_compute_api:servers:"
    listed = partial(Route, method="GET", query=ListQuery, strict_query=since(75))
    return with_old_path(
        [
            listed(
                path=PATH,
                handler=handlers.index,
                policy=f"{rule}index",
                answer={"servers": [BRIEF], "servers_links?": LINKS},
            ),
            listed(
                path=f"{PATH}/detail",
                handler=handlers.detail,
                policy=f"{rule}detail",
                answer={"servers": [DETAIL], "servers_links?": LINKS},
            ),
            Route(
                method="GET",
                path=f"{PATH}/{{id}}",
                handler=handlers.show,
                policy=f"{rule}show",
                answer={"server": SHOW},
                checks_policy=True,
                query=inputs.NoQuery,
                strict_query=STRICT,
            ),
            Route(
                method="PUT",
                path=f"{PATH}/{{id}}",
                handler=handlers.update,
                policy=f"{rule}update",
                answer={"server": UPDATED},
                checks_policy=True,
                body=UpdateBody,
            ),
            Route(
                method="DELETE",
                path=f"{PATH}/{{id}}",
                handler=handlers.delete,
                policy=f"{rule}delete",
                checks_policy=True,
                status=204,
            ),
        ]
    )

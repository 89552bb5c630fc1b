"""Where servers would go: the request that operators ask about becomes what the scheduler would get of it.

The same rules as for a create refuse it, except for quotas and networks. Nothing is recorded.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import sqlalchemy as sa

from micronova.clients.image.client import ImageClient
from micronova.db import aggregates, flavors, instances, server_groups
from micronova.db.engine import Database
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden, Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GROUP_HINT, SERVER_HINTS, DryRunResult, GroupSpec, RequestSpec
from micronova.scheduler.rpcapi import SchedulerAPI
from micronova.servers.create_rules import check_bootable, check_hardware, parse_zone
from micronova.servers.lookups import check_destination, check_hinted_servers, hinted_group
from micronova.servers.unsupported import Unsupported
from micronova.servers.without_effect import RATIOS

MOST_SERVERS = 1000
_MOST_REMARKS = 10  # about aggregates


class DryRunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that an operator asks about; flavor, image and project are ids or names."""

    flavor: str
    image: str = ""
    availability_zone: str = ""  # ZONE, ZONE:HOST or ZONE:HOST:NODE
    host: str = ""
    hints: dict[str, list[str]] = {}
    project: str = ""  # by default that of the servers or the group that hints name, or else none
    count: int = 1
    boot_from_volume: bool = False  # the root disk takes nothing of the host
    with_hosts: bool = False
    token: str = ""  # of the operator; without one, images and projects are those that the service user sees


class _Destination(msgspec.Struct, kw_only=True):
    availability_zone: str | None
    force_host: str | None
    force_node: str | None
    requested_host: str | None
    requested_node: str | None = None


class DryRuns:
    """Asks a running scheduler."""

    def __init__(
        self,
        *,
        database: Database,
        scheduler: SchedulerAPI,
        image_client: ImageClient | None,
        find_project: Callable[[str, str | None], Awaitable[str]],
        unsupported: Unsupported,
        default_zone: str,
        default_schedule_zone: str | None,
        timeout: float,
    ) -> None:
        self._database = database
        self._scheduler = scheduler
        self._image_client = image_client
        self._find_project = find_project
        self._unsupported = unsupported
        self._default_zone = default_zone
        self._default_schedule_zone = default_schedule_zone
        self._timeout = timeout  # seconds until a scheduler has answered

    async def run(self, context: Context, request: DryRunRequest) -> DryRunResult:
        """Return where the servers would go, or what refuses them; raise Invalid if a create would be refused (400)."""
        if not 1 <= request.count <= MOST_SERVERS:
            raise Invalid(f"The number of servers is from 1 to {MOST_SERVERS}, and not {request.count}.")
        if len(request.hints.get(GROUP_HINT, ())) > 1:
            raise Invalid("The scheduler hint group names one server group.")
        self._unsupported.check_hints(request.hints)
        zone, force_host, force_node = parse_zone(request.availability_zone)
        if request.host and (force_host or force_node):
            raise Invalid("A host in the availability zone and a host of its own exclude each other: name one.")
        place = _Destination(
            availability_zone=zone, force_host=force_host, force_node=force_node, requested_host=request.host or None
        )
        project = await self._find_project(request.project, request.token or None) if request.project else None
        owner, flavor, group = await self._database.read(self._look_up, request, place, project)
        flavor = msgspec.structs.replace(flavor, root_on_volume=request.boot_from_volume)
        self._unsupported.check_flavor(flavor)
        image = await self._image(request.image, request.token or None) if request.image else None
        if image is not None:
            check_bootable(image, flavor, allow_zero_disk=True)
            self._unsupported.check_properties(image, flavor)
        check_hardware(flavor, image)
        self._unsupported.check_devices(flavor, image)
        spec = RequestSpec(
            project_id=owner,
            user_id="",
            flavor=flavor,
            image=image,
            availability_zone=zone or self._default_schedule_zone,
            force_host=force_host,
            force_node=force_node,
            requested_host=request.host or None,
            hints=request.hints,
            server_group=group,
        )
        result = await self._scheduler.dry_run(
            context, spec, request.count, with_hosts=request.with_hosts, timeout=self._timeout
        )
        remarks = [
            *self._unsupported.remarks(flavor, image, request.hints),
            *await self._database.read(self._remarks_of_aggregates),
        ]
        return msgspec.structs.replace(result, remarks=tuple(remarks))

    def _remarks_of_aggregates(self, conn: sa.Connection) -> list[str]:
        """Return what aggregates say without effect: servers go where their metadata seems to forbid it."""
        rows = aggregates.list_(conn)
        comparing = [each.id for each in rows if not RATIOS.keys().isdisjoint(each.metadata)]
        ratios = aggregates.largest_ratios(conn, comparing) if comparing else {}
        found: list[str] = []
        for each in rows:
            found += self._unsupported.remarks_of_aggregate(each.name, each.metadata, ratios.get(each.id, {}))
        return found[:_MOST_REMARKS]

    def _look_up(
        self, conn: sa.Connection, request: DryRunRequest, place: _Destination, project: str | None
    ) -> tuple[str, Flavor, GroupSpec | None]:
        """Return the project, the flavor and the server group; check hosts, zone and the servers that hints name."""
        try:
            flavor = flavors.find(conn, request.flavor, project)
        except NotFound:
            flavor = None
        if flavor is None or flavor.disabled:
            whose = f" for project {request.project}" if project else ""
            raise Invalid(f"Flavor {request.flavor} could not be found{whose}: `openstack flavor list --all` has all.")
        check_destination(conn, place, self._default_zone)
        owner = project or _owner(conn, request) or ""
        check_hinted_servers(conn, owner, request.hints)
        return owner, flavor, hinted_group(conn, owner, request.hints)

    async def _image(self, named: str, token: str | None) -> ImageMeta:
        """Return an image by id or name, as the operator sees it."""
        if self._image_client is None:
            return ImageMeta(id=named)
        with suppress(NotFound):
            return await self._image_client.get(named, token)
        try:
            found = await self._image_client.list(token, name=named)
        except Forbidden:
            raise Invalid(f"There is no image with the id {named}, and its name may not be looked up.") from None
        if len(found) > 1:
            raise Invalid(f"{len(found)} images are called {named}: give the id of one.")
        if not found:
            raise Invalid(f"There is no image {named}: `openstack image list` has all.")
        return found[0]


def _owner(conn: sa.Connection, request: DryRunRequest) -> str | None:
    """Return the project of the server group, or of the first server, that hints name."""
    for group in request.hints.get(GROUP_HINT, ())[:1]:
        try:
            return server_groups.get(conn, group).project_id
        except NotFound:
            return None
    named = [uuid for hint in SERVER_HINTS for uuid in request.hints.get(hint, ())]
    found = instances.get_many(conn, named[:1]) if named else {}
    return next((row["project_id"] for row in found.values()), None)

"""Quota sets, quota classes, and the limits of the caller's own project."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import sqlalchemy as sa
from msgspec import Meta

from micronova.embedded.common.query import last
from micronova.embedded.volume.api.listing import QUERY_RULES
from micronova.embedded.volume.api.request_bodies import Body, identifier
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.store import quotas, type_queries
from micronova.embedded.volume.store.quotas import DEFAULT_CLASS, OF_TYPES, QUOTAS
from micronova.embedded.volume.tables import class_limits, limits
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid

LARGEST_LIMIT = 0x7FFFFFFF
Limit = (
    Annotated[int, Meta(ge=-1, le=LARGEST_LIMIT)]
    | Annotated[str, Meta(title="a whole number", pattern=r"^-?[0-9]{1,10}\Z")]
)
_ABOUT = ("tenant_id", "id", "project_id")  # what clients send back of an answer
_LIMIT_NAMES = {
    "gigabytes": ("maxTotalVolumeGigabytes", "totalGigabytesUsed"),
    "backup_gigabytes": ("maxTotalBackupGigabytes", "totalBackupGigabytesUsed"),
    "volumes": ("maxTotalVolumes", "totalVolumesUsed"),
    "snapshots": ("maxTotalSnapshots", "totalSnapshotsUsed"),
    "backups": ("maxTotalBackups", "totalBackupsUsed"),
}


class QuotaBody(Body):
    """The body of an update."""

    quota_set: Annotated[dict[str, Limit | None], Meta(min_length=1, max_length=1000)]


class ClassBody(Body):
    """The body of an update of a class."""

    quota_class_set: Annotated[dict[str, Limit | None], Meta(min_length=1, max_length=1000)]


class _Limits(NamedTuple):
    """Limits and usage of a project, or the limits of a class, by resource as rows name it."""

    names: dict[str, str]  # that users see
    maximums: dict[str, int]
    used: dict[str, int]

    def shown(self) -> dict[str, int]:
        """Return the limits by the names that users see."""
        return {self.names[resource]: maximum for resource, maximum in self.maximums.items()}


class QuotaHandlers:
    """The handlers of quotas."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        one, rule = "/os-quota-sets/{project}", "volume_extension:quotas:"
        class_, class_rule = "/os-quota-class-sets/{class_name}", "volume_extension:quota_classes:"
        route = partial(Route, checks_policy=True)
        return [
            route(method="GET", path=one, handler=self.show, policy=f"{rule}show"),
            route(method="GET", path=f"{one}/defaults", handler=self.defaults, policy=f"{rule}show"),
            route(method="PUT", path=one, handler=self.update, policy=f"{rule}update", body=QuotaBody),
            route(method="DELETE", path=one, handler=self.delete, policy=f"{rule}delete"),
            Route(method="GET", path=class_, handler=self.show_class, policy=f"{class_rule}get"),
            Route(method="PUT", path=class_, handler=self.update_class, policy=f"{class_rule}update", body=ClassBody),
            Route(method="GET", path="/limits", handler=self.limits, policy="limits_extension:used_limits"),
        ]

    async def show(self, request: Request, project: str) -> dict[str, Any]:
        """Show the limits of a project, with the usage if that is asked for."""
        request.authorize({"project_id": project})
        text = last(request.raw_query, "usage")
        found = await self._core.database.read(self._read, project, _viewer(request))
        if text is None or not QUERY_RULES.boolean("usage", text):
            return {"quota_set": {**found.shown(), "id": project}}
        with_usage = {
            found.names[resource]: {
                "limit": maximum,
                "in_use": found.used.get(resource, 0),
                "reserved": 0,
                "allocated": 0,
            }
            for resource, maximum in found.maximums.items()
        }
        return {"quota_set": {**with_usage, "id": project}}

    async def defaults(self, request: Request, project: str) -> dict[str, Any]:
        """Show the limits of projects without limits of their own."""
        request.authorize({"project_id": project})
        found = await self._core.database.read(self._defaults, viewer=_viewer(request))
        return {"quota_set": {**found.shown(), "id": project}}

    async def update(self, request: Request, project: str) -> dict[str, Any]:
        """Set limits of a project; one below what is used is refused."""
        request.authorize({"project_id": project})
        await self._core.database.write(
            self._set, limits.c.project_id, identifier(project), request.body.quota_set, True
        )
        return {"quota_set": (await self._core.database.read(self._read, project)).shown()}

    async def delete(self, request: Request, project: str) -> None:
        """Give a project the default limits."""
        request.authorize({"project_id": project})
        await self._core.database.write(quotas.delete_limits, project)

    async def show_class(self, request: Request, class_name: str) -> dict[str, Any]:
        """Show the limits of a class; those of `default` hold for projects without limits of their own."""
        found = await self._core.database.read(self._defaults, class_name)
        return {"quota_class_set": {**found.shown(), "id": class_name}}

    async def update_class(self, request: Request, class_name: str) -> dict[str, Any]:
        """Set limits of a class."""
        wanted = request.body.quota_class_set
        await self._core.database.write(self._set, class_limits.c.class_name, identifier(class_name), wanted, False)
        return {"quota_class_set": (await self._core.database.read(self._defaults, class_name)).shown()}

    async def limits(self, request: Request) -> dict[str, Any]:
        """Show the limits and the usage of the caller's project; administrators may name another from 3.39 on."""
        project = request.context.project_id
        for name in ("project_id", "tenant_id"):
            named = last(request.raw_query, name)
            if named is not None and request.minor >= 39 and request.context.is_admin:
                project = named
        found = await self._core.database.read(self._read, project)
        absolute: dict[str, int] = {}
        for resource, (most, current) in _LIMIT_NAMES.items():
            absolute |= {most: found.maximums[resource], current: found.used.get(resource, 0)}
        return {"limits": {"rate": [], "absolute": absolute}}

    # --- transactions ----------------------------------------------------------------------------------------

    def _names(self, conn: sa.Connection, viewer: str | None = None) -> dict[str, str]:
        """Return the names that users see of all resources: with the names of types instead of their ids.

        With a `viewer` only of the types that this project may use: others may be private.
        """
        names = {resource: resource for resource in QUOTAS}
        for type_id, name in sorted(type_queries.names(conn, viewer).items(), key=lambda item: item[1]):
            names |= {quotas.of_type(resource, type_id): f"{resource}_{name}" for resource in OF_TYPES}
        return names

    def _defaults(self, conn: sa.Connection, class_name: str = DEFAULT_CLASS, viewer: str | None = None) -> _Limits:
        names, settings = self._names(conn, viewer), self._core.settings.quotas
        own = quotas.class_limits_of(conn, class_name)
        return _Limits(names, {name: own.get(name, settings.get(name, -1)) for name in names}, {})

    def _read(self, conn: sa.Connection, project: str, viewer: str | None = None) -> _Limits:
        defaults, own = self._defaults(conn, viewer=viewer), quotas.limits_of(conn, project)
        maximums = {name: own.get(name, most) for name, most in defaults.maximums.items()}
        return _Limits(defaults.names, maximums, quotas.usage_of(conn, project))

    def _set(
        self, conn: sa.Connection, owner: sa.Column[str], id: str, given: Mapping[str, int | str | None], check: bool
    ) -> None:
        resources = {shown: resource for resource, shown in self._names(conn).items()}
        wanted = {name: int(value) for name, value in given.items() if name not in _ABOUT and value is not None}
        unknown = sorted(wanted.keys() - resources.keys())
        if unknown:
            raise Invalid(f"Bad key(s) in quota set: {', '.join(unknown)[:200]}.")
        used = quotas.usage_of(conn, id) if check else {}
        for name, maximum in sorted(wanted.items()):
            resource = resources[name]
            if not -1 <= maximum <= LARGEST_LIMIT:
                raise Invalid(
                    f"Invalid input for field/attribute {name}: a limit is from -1 (none) to {LARGEST_LIMIT}."
                )
            if 0 <= maximum < used.get(resource, 0):
                raise Invalid(
                    f"Quota {name} limit must be equal or greater than existing resources: {used[resource]} are used."
                )
            quotas.set_limit(conn, owner, id, resource, maximum)


def _viewer(request: Request) -> str | None:
    """Return the project whose types the caller may see; None if they may see all."""
    return None if request.context.is_admin else request.context.project_id

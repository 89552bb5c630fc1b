"""Quotas: a limit and a usage row per project and resource.

A create charges the usage row in its own transaction by a conditional update, so that concurrent creates cannot
exceed the limit together. A delete releases in its own transaction. No decision counts rows.

Every transaction updates usage rows last, in the order of project and resource. So a transaction that holds a usage
row waits for no other lock, which excludes deadlocks, and the row that a project's requests share is held briefly.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent, insert_or_update
from micronova.embedded.network.core import QUOTAS, Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.request_bodies import Body, Flag, Number, body_of_one, truth
from micronova.embedded.network.routing import checked_route
from micronova.embedded.network.tables import limits, usages
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid


def charge(conn: sa.Connection, project_id: str, resource: str, defaults: Mapping[str, int], amount: int = 1) -> None:
    """Charge a project's quota or raise Conflict (OverQuota); resources of no project are not counted."""
    if not project_id or not amount:
        return
    values = {"project": project_id, "kind": resource, "amount": amount, "default": defaults.get(resource, -1)}
    if conn.execute(_CHARGE, values).rowcount == 1:
        return
    insert_if_absent(conn, usages, {"project_id": project_id, "resource": resource, "used": 0})
    if conn.execute(_CHARGE, values).rowcount != 1:
        raise conflict(f"Quota exceeded for resources: ['{resource}'].", "OverQuota")


def charge_all(conn: sa.Connection, projects: Iterable[str], resource: str, defaults: Mapping[str, int]) -> None:
    """Charge one resource of a kind for each occurrence of a project."""
    for project_id, amount in sorted(Counter(projects).items()):
        charge(conn, project_id, resource, defaults, amount)


def charge_unchecked(conn: sa.Connection, project_id: str, resource: str, amount: int) -> None:
    """Charge resources that the service itself creates for a project, regardless of the limit."""
    if not project_id or not amount:
        return
    values = {"project": project_id, "kind": resource, "amount": amount}
    if conn.execute(_CHARGE_UNCHECKED, values).rowcount != 1:
        insert_if_absent(conn, usages, {"project_id": project_id, "resource": resource, "used": 0})
        conn.execute(_CHARGE_UNCHECKED, values)


def release(conn: sa.Connection, project_id: str, resource: str, amount: int = 1) -> None:
    """Release deleted resources from a project's quota."""
    if project_id and amount:
        conn.execute(_RELEASE, {"project": project_id, "kind": resource, "amount": amount})


def release_all(conn: sa.Connection, gone: Iterable[tuple[str, str]]) -> None:
    """Release several deleted resources, given as pairs of project and resource."""
    for (project_id, resource), amount in sorted(Counter(gone).items()):
        release(conn, project_id, resource, amount)


_u = usages.c
_maximum = sa.func.coalesce(
    sa.select(limits.c.maximum)
    .where(limits.c.project_id == sa.bindparam("project"), limits.c.resource == sa.bindparam("kind"))
    .scalar_subquery(),
    sa.bindparam("default", type_=sa.Integer),
)
_amount = sa.bindparam("amount", type_=sa.Integer)
_CHARGE_UNCHECKED = (
    usages.update()
    .where(_u.project_id == sa.bindparam("project"), _u.resource == sa.bindparam("kind"))
    .values(used=_u.used + _amount)
)
_CHARGE = _CHARGE_UNCHECKED.where(sa.or_(_maximum < 0, _u.used + _amount <= _maximum))
_RELEASE = (
    usages.update()
    .where(_u.project_id == sa.bindparam("project"), _u.resource == sa.bindparam("kind"))
    .values(used=_u.used - _amount)
)


class _QuotaOptions(Body, kw_only=True):
    force: Flag | None | UnsetType = UNSET
    check_limit: Flag | None | UnsetType = UNSET
    project_id: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    tenant_id: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET


QuotaUpdate = msgspec.defstruct(
    "QuotaUpdate",
    [(name, Number | UnsetType, UNSET) for name in QUOTAS],
    bases=(_QuotaOptions,),
    kw_only=True,
    forbid_unknown_fields=True,
)
"""New limits, by resource; -1 is no limit."""


class Quotas:
    """The quota API."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        base = "/v2.0/quotas"
        body = body_of_one("quota", QuotaUpdate)
        return [
            checked_route("GET", base, self.index, "get_quota"),
            checked_route("GET", f"{base}/{{project}}", self.show, "get_quota"),
            checked_route("GET", f"{base}/{{project}}/default", self.default, "get_quota"),
            checked_route("GET", f"{base}/{{project}}/details", self.details, "get_quota"),
            checked_route("PUT", f"{base}/{{project}}", self.update, "update_quota", body=body),
            checked_route("DELETE", f"{base}/{{project}}", self.delete, "delete_quota", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """GET /quotas: the projects with limits of their own."""
        request.authorize({})
        rows = await self.core.database.read(all_limits)
        found: dict[str, dict[str, Any]] = {}
        for project, resource, maximum in rows:
            start = {**self.core.settings.quotas, "project_id": project, "tenant_id": project}
            found.setdefault(project, start)[resource] = maximum
        return {"quotas": list(found.values())}

    async def show(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}: the limits of a project."""
        if project in ("tenant", "project"):
            request.authorized = True
            return {project: {f"{project}_id": request.context.project_id}}
        self._may_read(request, project)
        return {"quota": {**await self._limits(project), "project_id": project, "tenant_id": project}}

    async def default(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}/default: the default limits, which are no project's."""
        self._may_read(request, project)
        return {"quota": dict(self.core.settings.quotas)}

    async def details(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}/details: limits and usage."""
        self._may_read(request, project)
        limits_, used = await self._limits(project), await self.core.database.read(usage_of, project)
        return {
            "quota": {
                name: {"limit": maximum, "used": used.get(name, 0), "reserved": 0} for name, maximum in limits_.items()
            }
        }

    async def update(self, request: Request, project: str) -> dict[str, Any]:
        """PUT /quotas/{project}: set limits."""
        request.authorize({"project_id": project})
        given = msgspec.to_builtins(request.body)["quota"]
        force = truth(given.get("force") or False)
        wanted = {name: int(value) for name, value in given.items() if name in QUOTAS}
        for name, maximum in wanted.items():
            if maximum < -1:
                raise Invalid(f"Invalid input for {name}: a limit is -1 (none) or more, not {maximum}.")
        await self.core.database.write(set_limits, project[:255], wanted, force)
        return {"quota": {**await self._limits(project), "project_id": project, "tenant_id": project}}

    async def delete(self, request: Request, project: str) -> None:
        """DELETE /quotas/{project}: reset the limits to the defaults."""
        request.authorize({"project_id": project})
        await self.core.database.write(reset_limits, project)

    def _may_read(self, request: Request, project: str) -> None:
        if project == request.context.project_id:
            request.authorized = True
        else:
            request.authorize({"project_id": project})

    async def _limits(self, project: str) -> dict[str, int]:
        own = await self.core.database.read(limits_of, project)
        return {**self.core.settings.quotas, **own}


def all_limits(conn: sa.Connection) -> list[tuple[str, str, int]]:
    """Return all limits that were set."""
    rows = conn.execute(sa.select(limits).order_by(limits.c.project_id, limits.c.resource))
    return [(row.project_id, row.resource, row.maximum) for row in rows]


def limits_of(conn: sa.Connection, project: str) -> dict[str, int]:
    """Return the limits that were set for a project."""
    rows = conn.execute(sa.select(limits.c.resource, limits.c.maximum).where(limits.c.project_id == project))
    return {row.resource: row.maximum for row in rows}


def usage_of(conn: sa.Connection, project: str) -> dict[str, int]:
    """Return the usage of a project by resource."""
    rows = conn.execute(sa.select(usages.c.resource, usages.c.used).where(usages.c.project_id == project))
    return {row.resource: row.used for row in rows}


def set_limits(conn: sa.Connection, project: str, wanted: Mapping[str, int], force: bool) -> None:
    """Set limits; unless forced, raise an error for a limit below the usage."""
    used = {} if force else usage_of(conn, project)
    for name, maximum in sorted(wanted.items()):
        if 0 <= maximum < used.get(name, 0):
            raise Invalid(
                f"Quota limit {maximum} for {name} must be greater than or equal to already used {used[name]}."
            )
        insert_or_update(conn, limits, {"project_id": project, "resource": name}, {"maximum": maximum})


def reset_limits(conn: sa.Connection, project: str) -> None:
    """Delete a project's limits."""
    conn.execute(limits.delete().where(limits.c.project_id == project))

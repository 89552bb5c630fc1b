"""Quotas: a limit and a usage row per project and resource.

A create charges the usage row in its own transaction by a conditional update, so that concurrent creates cannot pass
the limit together; a delete gives back in its own. Nothing is ever counted to decide.

Usage comes last in every transaction, in the order of project and resource. Whoever holds a usage row then waits for
nothing else, so that nobody waits in a circle; and the row that a whole project contends for is held shortly.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Meta

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.network.core import QUOTAS, Core, insert_unless_there
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.tables import (
    floatingips,
    limits,
    networks,
    ports,
    routers,
    security_group_rules,
    security_groups,
    subnetpools,
    subnets,
    usages,
)
from micronova.neighbours.network.wire import Body, Flag, Number, Optional, one, refuse_nul, truth
from micronova.objects.errors import Invalid

COUNTED: Mapping[str, sa.Table] = {
    "floatingip": floatingips,
    "network": networks,
    "port": ports,
    "router": routers,
    "security_group": security_groups,
    "security_group_rule": security_group_rules,
    "subnet": subnets,
    "subnetpool": subnetpools,
}


def charge(
    conn: sa.Connection, project_id: str, resource: str, defaults: Mapping[str, int], amount: int = 1
) -> None:
    """Take from a project's quota, or raise OverQuota; what belongs to no project is not counted."""
    if not project_id or not amount:
        return
    values = {"project": project_id, "kind": resource, "amount": amount, "default": defaults.get(resource, -1)}
    if conn.execute(_CHARGE, values).rowcount == 1:
        return
    insert_unless_there(conn, usages, {"project_id": project_id, "resource": resource, "used": 0})
    if conn.execute(_CHARGE, values).rowcount != 1:
        raise conflict(f"Quota exceeded for resources: ['{resource}'].", "OverQuota")


def charge_all(conn: sa.Connection, projects: Iterable[str], resource: str, defaults: Mapping[str, int]) -> None:
    """Take several things of one kind: one for each time that a project is named."""
    for project_id, amount in sorted(Counter(projects).items()):
        charge(conn, project_id, resource, defaults, amount)


def add(conn: sa.Connection, project_id: str, resource: str, amount: int) -> None:
    """Count what the service makes by itself for a project, whatever the limit says."""
    values = {"project": project_id, "kind": resource, "amount": -amount}
    if conn.execute(_GIVE_BACK, values).rowcount != 1:
        insert_unless_there(conn, usages, {"project_id": project_id, "resource": resource, "used": 0})
        conn.execute(_GIVE_BACK, values)


def give_back(conn: sa.Connection, project_id: str, resource: str, amount: int = 1) -> None:
    """Return to a project's quota what was deleted."""
    if project_id and amount:
        conn.execute(_GIVE_BACK, {"project": project_id, "kind": resource, "amount": amount})


def give_back_all(conn: sa.Connection, gone: Iterable[tuple[str, str]]) -> None:
    """Return several things, of several projects perhaps: each is a project and a resource."""
    for (project_id, resource), amount in sorted(Counter(gone).items()):
        give_back(conn, project_id, resource, amount)


_u = usages.c
_maximum = sa.func.coalesce(
    sa.select(limits.c.maximum)
    .where(limits.c.project_id == sa.bindparam("project"), limits.c.resource == sa.bindparam("kind"))
    .scalar_subquery(),
    sa.bindparam("default", type_=sa.Integer),
)
_amount = sa.bindparam("amount", type_=sa.Integer)
_CHARGE = (
    usages.update()
    .where(_u.project_id == sa.bindparam("project"), _u.resource == sa.bindparam("kind"))
    .where(sa.or_(_maximum < 0, _u.used + _amount <= _maximum))
    .values(used=_u.used + _amount)
)
_GIVE_BACK = (
    usages.update()
    .where(_u.project_id == sa.bindparam("project"), _u.resource == sa.bindparam("kind"))
    .values(used=_u.used - _amount)
)


def drift(conn: sa.Connection) -> list[tuple[str, str, int, int]]:
    """Compare usage with what there is: (project, resource, recorded, actual) for each that differs."""
    recorded = {(row.project_id, row.resource): row.used for row in conn.execute(sa.select(usages))}
    actual: dict[tuple[str, str], int] = {}
    for resource, table in COUNTED.items():
        counted = sa.select(table.c.project_id, sa.func.count()).group_by(table.c.project_id)
        for project, count in conn.execute(counted.where(table.c.project_id != "")):
            actual[project, resource] = count
    return [
        (project, resource, recorded.get((project, resource), 0), actual.get((project, resource), 0))
        for project, resource in sorted({*recorded, *actual})
        if recorded.get((project, resource), 0) != actual.get((project, resource), 0)
    ]


class QuotaUpdate(Body, kw_only=True):
    """New limits, by resource; -1 is no limit."""

    floatingip: Number | Optional = UNSET
    network: Number | Optional = UNSET
    port: Number | Optional = UNSET
    rbac_policy: Number | Optional = UNSET
    router: Number | Optional = UNSET
    security_group: Number | Optional = UNSET
    security_group_rule: Number | Optional = UNSET
    subnet: Number | Optional = UNSET
    subnetpool: Number | Optional = UNSET
    force: Flag | None | Optional = UNSET
    check_limit: Flag | None | Optional = UNSET
    project_id: Annotated[str, Meta(max_length=255)] | Optional = UNSET
    tenant_id: Annotated[str, Meta(max_length=255)] | Optional = UNSET


class Quotas:
    """The quota API."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        base = "/v2.0/quotas"
        body = one("quota", QuotaUpdate)

        def route(method: str, path: str, handler: Any, rule: str, status: int = 200, body: Any = None) -> Route:
            return Route(
                method=method, path=path, handler=handler, policy=rule, status=status, body=body, checks_policy=True
            )

        return [
            route("GET", base, self.index, "get_quota"),
            route("GET", f"{base}/{{project}}", self.show, "get_quota"),
            route("GET", f"{base}/{{project}}/default", self.default, "get_quota"),
            route("GET", f"{base}/{{project}}/details", self.details, "get_quota"),
            route("PUT", f"{base}/{{project}}", self.update, "update_quota", body=body),
            route("DELETE", f"{base}/{{project}}", self.delete, "delete_quota", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """GET /quotas: the projects whose limits are not the defaults."""
        request.authorize({})
        rows = await self.core.database.read(all_limits)
        found: dict[str, dict[str, Any]] = {}
        for project, resource, maximum in rows:
            start = {**self.core.settings.quotas, "project_id": project, "tenant_id": project}
            found.setdefault(project, start)[resource] = maximum
        return {"quotas": list(found.values())}

    async def show(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}: its limits; everybody may see its own project's."""
        if project in ("tenant", "project"):
            request.authorized = True
            return {project: {f"{project}_id": request.context.project_id}}
        self._may_read(request, project)
        return {"quota": {**await self._limits(project), "project_id": project, "tenant_id": project}}

    async def default(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}/default: the limits of a project that has none of its own."""
        self._may_read(request, project)
        return {"quota": {**self.core.settings.quotas, "project_id": project, "tenant_id": project}}

    async def details(self, request: Request, project: str) -> dict[str, Any]:
        """GET /quotas/{project}/details: limits with what is used of them."""
        self._may_read(request, project)
        limits_, used = await self._limits(project), await self.core.database.read(usage_of, project)
        return {
            "quota": {
                name: {"limit": maximum, "used": used.get(name, 0), "reserved": 0}
                for name, maximum in limits_.items()
            }
        }

    async def update(self, request: Request, project: str) -> dict[str, Any]:
        """PUT /quotas/{project}: set limits."""
        request.authorize({"project_id": project})
        given = msgspec.to_builtins(request.body)["quota"]
        refuse_nul(given)
        refuse_nul(project, "project_id")
        force = truth(given.get("force") or False)
        wanted = {name: int(value) for name, value in given.items() if name in QUOTAS}
        for name, maximum in wanted.items():
            if maximum < -1:
                raise Invalid(f"Invalid input for {name}: a limit is -1 (none) or more, not {maximum}.")
        await self.core.database.write(set_limits, project[:255], wanted, force)
        return {"quota": {**await self._limits(project), "project_id": project, "tenant_id": project}}

    async def delete(self, request: Request, project: str) -> None:
        """DELETE /quotas/{project}: back to the defaults."""
        request.authorize({"project_id": project})
        refuse_nul(project, "project_id")
        await self.core.database.write(reset_limits, project)

    def _may_read(self, request: Request, project: str) -> None:
        refuse_nul(project, "project_id")
        if project == request.context.project_id:
            request.authorized = True
        else:
            request.authorize({"project_id": project})

    async def _limits(self, project: str) -> dict[str, int]:
        own = await self.core.database.read(limits_of, project)
        return {**self.core.settings.quotas, **own}


def all_limits(conn: sa.Connection) -> list[tuple[str, str, int]]:
    """Return every limit that somebody set."""
    rows = conn.execute(sa.select(limits).order_by(limits.c.project_id, limits.c.resource))
    return [(row.project_id, row.resource, row.maximum) for row in rows]


def limits_of(conn: sa.Connection, project: str) -> dict[str, int]:
    """Return the limits that were set for a project."""
    rows = conn.execute(sa.select(limits.c.resource, limits.c.maximum).where(limits.c.project_id == project))
    return {row.resource: row.maximum for row in rows}


def usage_of(conn: sa.Connection, project: str) -> dict[str, int]:
    """Return what a project uses, by resource."""
    rows = conn.execute(sa.select(usages.c.resource, usages.c.used).where(usages.c.project_id == project))
    return {row.resource: row.used for row in rows}


def set_limits(conn: sa.Connection, project: str, wanted: Mapping[str, int], force: bool) -> None:
    """Set limits; one below what is used already is refused unless forced."""
    used = {} if force else usage_of(conn, project)
    for name, maximum in sorted(wanted.items()):
        if 0 <= maximum < used.get(name, 0):
            raise Invalid(
                f"Quota limit {maximum} for {name} must be greater than or equal to already used {used[name]}."
            )
        row = {"project_id": project, "resource": name}
        if not insert_unless_there(conn, limits, {**row, "maximum": maximum}):
            conn.execute(limits.update().where(_is(row)).values(maximum=maximum))


def reset_limits(conn: sa.Connection, project: str) -> None:
    """Forget a project's limits."""
    conn.execute(limits.delete().where(limits.c.project_id == project))


def _is(row: Mapping[str, str]) -> sa.ColumnElement[bool]:
    return sa.and_(limits.c.project_id == row["project_id"], limits.c.resource == row["resource"])

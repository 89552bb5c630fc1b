"""Server groups: servers that the scheduler places on one host, or on different hosts."""

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.inputs import STRICT, Body, NoQuery, Query, Text, Whole
from micronova.api.view import Field, View
from micronova.db import quotas, server_groups
from micronova.db.engine import Database
from micronova.db.server_groups import NewServerGroup, ServerGroupRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.ids import new_uuid

VIEW = View(
    Field("id", "uuid", type=str),
    Field("name", "name", type=str),
    Field("policies", lambda row, _: [row.policy], until(63), type=list[str]),
    Field("metadata", lambda row, _: {}, until(63), type=dict[str, str]),
    Field("policy", "policy", since(64), type=str),
    Field("rules", "rules", since(64), type={"max_server_per_host?": int}),
    Field("members", lambda row, members: members, type=list[str]),
    Field("project_id", "project_id", since(13), type=str),
    Field("user_id", "user_id", since(13), type=str),
)

HARD = ("affinity", "anti-affinity")
Policy = Literal["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]


class Rules(Body):
    """The rules of an anti-affinity group."""

    max_server_per_host: Whole | UnsetType = UNSET


class NewGroup(Body):
    """The group to create."""

    versions = {"policies": until(63), "policy": since(64), "rules": since(64)}

    name: Text
    policies: Annotated[list[Policy], Meta(min_length=1, max_length=1)] | UnsetType = UNSET
    policy: Policy | UnsetType = UNSET
    rules: Rules | UnsetType = UNSET


class Create(Body):
    """The body of a create."""

    server_group: NewGroup


class ListQuery(Query):
    """Which groups; only administrators may list those of all projects."""

    all_projects: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    offset: Annotated[int, Meta(ge=0, le=inputs.MAX_INT)] | UnsetType = UNSET


def _policy(asked: NewGroup, minor: int) -> str:
    if minor >= 64:
        if isinstance(asked.policy, UnsetType):
            raise Invalid("Invalid input for field/attribute server_group: 'policy' is a required property.")
        return asked.policy
    if isinstance(asked.policies, UnsetType):
        raise Invalid("Invalid input for field/attribute server_group: 'policies' is a required property.")
    [policy] = asked.policies
    if minor < 15 and policy not in HARD:
        raise Invalid(f"Invalid input for field/attribute policies: it must be one of {', '.join(HARD)}.")
    return policy


def _rules(asked: NewGroup, policy: str) -> dict[str, int]:
    if isinstance(asked.rules, UnsetType) or isinstance(asked.rules.max_server_per_host, UnsetType):
        return {}
    if policy != "anti-affinity":
        raise Invalid("Only anti-affinity policy supports rules.")
    return {"max_server_per_host": inputs.whole(asked.rules.max_server_per_host, "max_server_per_host", 1)}


class ServerGroups:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random: Random,
        defaults: Mapping[str, int],
        max_limit: int,
        notifier: Announcer,
    ) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._defaults = defaults
        self._max_limit = max_limit
        self._notifier = notifier

    async def index(self, request: Request) -> dict[str, Any]:
        """List groups."""
        query: ListQuery = request.query
        everywhere = not isinstance(query.all_projects, UnsetType) and request.allows(
            rule="os_compute_api:os-server-groups:index:all_projects"
        )
        project = None if everywhere else request.context.project_id
        asked = 0 if isinstance(query.limit, UnsetType) else query.limit
        limit = min(asked or self._max_limit, self._max_limit)
        offset = 0 if isinstance(query.offset, UnsetType) else query.offset
        rows, members = await self._database.read(_list, project, offset, limit)
        shape = VIEW.at(request.minor)
        return {"server_groups": [shape(row, members[row.uuid]) for row in rows]}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a group with its servers."""
        row, members = await self._database.read(server_groups.get_with_members, id)
        self._authorize(request, row)
        return {"server_group": VIEW.at(request.minor)(row, members)}

    @staticmethod
    def _authorize(request: Request, row: ServerGroupRow) -> None:
        """Raise NotFound for a group of another project that the caller may not see."""
        target = {"project_id": row.project_id}
        if row.project_id != request.context.project_id and not request.allows(target):
            raise NotFound(f"Instance group {row.uuid} could not be found.")
        request.authorize(target)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a group."""
        asked: NewGroup = request.body.server_group
        policy = _policy(asked, request.minor)
        row: NewServerGroup = {
            "uuid": new_uuid(self._random),
            "project_id": request.context.project_id,
            "user_id": request.context.user_id,
            "name": inputs.name(asked.name, strip=request.is_v2),
            "policy": policy,
            "rules": _rules(asked, policy),
            "created_at": micros(self._clock.now()),
        }
        made = await self._database.write(self._insert, row)
        self._notifier.announce(request.context.for_bus(), partial(resources.server_group, "create", made, []))
        return {"server_group": VIEW.at(request.minor)(made, [])}

    def _insert(self, conn: sa.Connection, row: NewServerGroup) -> ServerGroupRow:
        limits = quotas.limits_for(conn, row["project_id"], self._defaults, row["user_id"])
        return server_groups.insert(conn, row, limits)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a group; its servers stay."""
        row, members = await self._database.read(server_groups.get_with_members, id)
        self._authorize(request, row)
        await self._database.write(server_groups.delete, row)
        self._notifier.announce(request.context.for_bus(), partial(resources.server_group, "delete", row, members))


def _list(
    conn: sa.Connection, project: str | None, offset: int, limit: int
) -> tuple[list[ServerGroupRow], dict[str, list[str]]]:
    rows = list(server_groups.list_(conn, project, offset=offset, limit=limit))
    return rows, server_groups.members(conn, [row.uuid for row in rows])


def routes(
    database: Database,
    clock: Clock,
    random: Random,
    quota_defaults: Mapping[str, int],
    max_limit: int,
    notifier: Announcer,
) -> list[Route]:
    """Declare the routes of server groups."""
    handlers = ServerGroups(database, clock, random, quota_defaults, max_limit, notifier)
    root, rule = "/os-server-groups", "os_compute_api:os-server-groups"
    one = partial(Route, path=f"{root}/{{id}}", checks_policy=True)
    return [
        Route(
            method="GET",
            path=root,
            handler=handlers.index,
            policy=f"{rule}:index",
            query=ListQuery,
            strict_query=Range(75),
            answer={"server_groups": [VIEW]},
        ),
        Route(
            method="POST",
            path=root,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=Create,
            answer={"server_group": VIEW},
        ),
        one(
            method="GET",
            handler=handlers.show,
            policy=f"{rule}:show",
            query=NoQuery,
            strict_query=STRICT,
            answer={"server_group": VIEW},
        ),
        one(method="DELETE", handler=handlers.delete, policy=f"{rule}:delete", status=204),
    ]

"""Quota sets: a project's limits, its usage, and the defaults."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api.compute.quota_resources import FILES, NETWORK, Amounts, view
from micronova.api.inputs import Body, Flag, NoQuery, Owner, Query, flag
from micronova.api.view import Field, Getter
from micronova.db import quotas
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, until
from micronova.objects.errors import Invalid

NETWORK_UNTIL = 35


def _with_usage(name: str) -> Getter:
    return lambda limits, of: {"limit": limits.get(name, -1), "in_use": of.used.get(name, 0), "reserved": 0}


class Of(msgspec.Struct, frozen=True):
    """What the views need besides the limits: the project, and what it uses."""

    project: str
    used: dict[str, int] = {}


_ID = Field("id", lambda limits, of: of.project, type=str)
LIMITS = view(NETWORK_UNTIL, _ID)
DETAIL = view(NETWORK_UNTIL, _ID, get=_with_usage, kind={"limit": int, "in_use": int, "reserved": int})
UPDATED = view(NETWORK_UNTIL)


class Limits(Amounts):
    """A project's limits; `force` sets them below what is in use."""

    versions = {**dict.fromkeys(NETWORK, until(NETWORK_UNTIL)), **dict.fromkeys(FILES, until(56))}

    force: Flag = False


class Update(Body):
    """The body of an update."""

    quota_set: Limits


class UserQuery(Query):
    """The user in the project, if not the whole project."""

    user_id: Owner | UnsetType = UNSET

    @property
    def user(self) -> str:
        """The user, or "" for the project."""
        return "" if isinstance(self.user_id, UnsetType) else self.user_id


class QuotaSets:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        defaults: Mapping[str, int],
        project_exists: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._database = database
        self._defaults = defaults
        self._project_exists = project_exists

    async def _checked(self, request: Request, project: str) -> None:
        request.authorize({"project_id": project})
        if not await self._project_exists(project):
            raise Invalid(f"Project ID {project} is not a valid project.")

    def _limits(self, conn: sa.Connection, project: str, user: str) -> dict[str, int]:
        limits = quotas.limits_for(conn, project, self._defaults, user)
        return {**limits, **limits.of_user}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show the limits of a project, or of a user in it."""
        await self._checked(request, id)
        limits = await self._database.read(self._limits, id, request.query.user)
        return {"quota_set": LIMITS.at(request.minor)(limits, Of(id))}

    async def detail(self, request: Request, id: str) -> dict[str, Any]:
        """Show the limits with what is in use."""
        await self._checked(request, id)
        user = request.query.user
        limits, used = await self._database.read(
            lambda conn: (self._limits(conn, id, user), quotas.usage(conn, id, user))
        )
        return {"quota_set": DETAIL.at(request.minor)(limits, Of(id, used))}

    async def defaults(self, request: Request, id: str) -> dict[str, Any]:
        """Show the limits of a project for which none were set."""
        await self._checked(request, id)
        limits = await self._database.read(quotas.class_limits, "default", self._defaults)
        return {"quota_set": LIMITS.at(request.minor)(limits, Of(id))}

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Set limits of a project, or of a user in it."""
        await self._checked(request, id)
        asked: Limits = request.body.quota_set
        limits = await self._database.write(self._set, id, request.query.user, asked.given(), flag(asked.force))
        return {"quota_set": UPDATED.at(request.minor)(limits)}

    def _set(
        self, conn: sa.Connection, project: str, user: str, asked: Mapping[str, int], force: bool
    ) -> dict[str, int]:
        if not force:
            used = quotas.usage(conn, project, user)
            for name, limit in asked.items():
                if quotas.exceeds(asked, name, used.get(name, 0)):
                    raise Invalid(
                        f"Quota limit {limit} for {name} must be greater than or equal to already used "
                        f"and reserved {used[name]}."
                    )
            if user:
                self._check_share(conn, project, user, asked)
        quotas.set_limits(conn, project, asked, user)
        return self._limits(conn, project, user)

    def _check_share(self, conn: sa.Connection, project: str, user: str, asked: Mapping[str, int]) -> None:
        """Raise Invalid if a user's limit exceeds what the limits of the project's other users leave."""
        limits = quotas.limits_for(conn, project, self._defaults)
        given = quotas.given_to_users(conn, project, user)
        for name, limit in asked.items():
            most = limits.get(name, -1)
            if most < 0:
                continue
            left = max(0, most - given.get(name, 0))
            if limit < 0 or limit > left:
                raise Invalid(f"Quota limit {limit} for {name} must be less than or equal to {left}.")

    async def delete(self, request: Request, id: str) -> None:
        """Delete the limits of a project, or of a user in it."""
        request.authorize({"project_id": id})
        await self._database.write(quotas.delete_limits, id, request.query.user)


def routes(
    database: Database,
    quota_defaults: Mapping[str, int],
    project_exists: Callable[[str], Awaitable[bool]],
) -> list[Route]:
    """Declare the routes of quota sets."""
    handlers = QuotaSets(database, quota_defaults, project_exists)
    path, rule = "/os-quota-sets/{id}", "os_compute_api:os-quota-sets"
    # The rules depend on the project in the path.
    one = partial(Route, query=UserQuery, strict_query=Range(75), checks_policy=True)
    return [
        one(method="GET", path=path, handler=handlers.show, policy=f"{rule}:show", answer={"quota_set": LIMITS}),
        one(
            method="GET",
            path=f"{path}/detail",
            handler=handlers.detail,
            policy=f"{rule}:detail",
            answer={"quota_set": DETAIL},
        ),
        Route(
            method="GET",
            path=f"{path}/defaults",
            handler=handlers.defaults,
            policy=f"{rule}:defaults",
            answer={"quota_set": LIMITS},
            query=NoQuery,
            checks_policy=True,
        ),
        one(
            method="PUT",
            path=path,
            handler=handlers.update,
            policy=f"{rule}:update",
            body=Update,
            answer={"quota_set": UPDATED},
        ),
        one(method="DELETE", path=path, handler=handlers.delete, policy=f"{rule}:delete", status=202),
    ]

"""/v3/groups and their members."""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity import attributes
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import (
    V3,
    checked_route,
    collection,
    default_domain,
    domain_target,
    page,
    route,
)
from micronova.embedded.identity.attributes import GroupAttributes, GroupChanges
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import groups, users
from micronova.embedded.identity.store.kinds import GROUPS, USERS, GroupRow, UserRow
from micronova.http.request import Request
from micronova.http.service import Route


class GroupBody(Struct):
    """A body that holds a group."""

    group: dict[str, Any]


class GroupsAPI:
    """Groups."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/groups", f"{V3}/groups/{{group_id}}"
        member = f"{one}/users/{{user_id}}"

        return [
            route("GET", path, self.index, "list_groups"),
            checked_route("POST", path, self.create, "create_group", status=201, body=GroupBody),
            checked_route("GET", one, self.show, "get_group"),
            checked_route("PATCH", one, self.update, "update_group", body=GroupBody),
            checked_route("DELETE", one, self.delete, "delete_group", status=204),
            checked_route("GET", f"{one}/users", self.members, "list_users_in_group"),
            checked_route("PUT", member, self.add_member, "add_user_to_group", status=204),
            checked_route("GET", member, self.check_member, "check_user_in_group", status=204),
            checked_route("DELETE", member, self.remove_member, "remove_user_from_group", status=204),
        ]

    async def _authorize(self, request: Request, group_id: str) -> GroupRow:
        row = await self._core.database.read(GROUPS.find, group_id)
        request.authorize(domain_target(row))
        if row is None:
            raise GROUPS.not_found(group_id)
        return row

    async def _authorize_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Authorise against the domain that group and user are both in; if they are in two, against none."""
        group, user = await self._core.database.read(_both, group_id, user_id)
        together = group and user and group["domain_id"] == user["domain_id"]
        request.authorize(domain_target(group if together else None))
        if group is None or user is None:
            raise USERS.not_found(user_id) if group else GROUPS.not_found(group_id)

    async def index(self, request: Request) -> dict[str, Any]:
        """List groups."""
        listed = await self._core.database.read(
            groups.listing, request.raw_query, request.context.domain_id, page(request)
        )
        return collection(request, "groups", [views.group(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, group_id: str) -> dict[str, Any]:
        """Show a group."""
        return {"group": views.group(request, await self._authorize(request, group_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a group, in the caller's domain unless the body names one."""
        wanted, extra = attributes.read(request.body.group, GroupAttributes, "group")
        wanted.domain_id = wanted.domain_id or default_domain(request)
        request.authorize({"domain_id": wanted.domain_id})
        row = await self._core.write(groups.create, self._core.new_id(), wanted, extra, self._core.now())
        return {"group": views.group(request, row)}

    async def update(self, request: Request, group_id: str) -> dict[str, Any]:
        """Change a group."""
        wanted, extra = attributes.changes(request.body.group, GroupChanges, "group")
        await self._authorize(request, group_id)
        return {"group": views.group(request, await self._core.write(groups.change, group_id, wanted, extra))}

    async def delete(self, request: Request, group_id: str) -> None:
        """Delete a group."""
        await self._authorize(request, group_id)
        await self._core.write_revoking(groups.delete, group_id)

    async def members(self, request: Request, group_id: str) -> dict[str, Any]:
        """List the members of a group."""
        await self._authorize(request, group_id)
        listed = await self._core.database.read(users.listing, request.raw_query, None, page(request), group_id)
        return collection(request, "users", [views.user(request, row) for row in listed.rows], listed)

    async def check_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Answer 204 if a user is in a group, 404 if not."""
        await self._authorize_member(request, group_id, user_id)
        if not await self._core.database.read(groups.is_member, group_id, user_id):
            raise groups.not_member(group_id, user_id)

    async def add_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Add a user to a group."""
        await self._authorize_member(request, group_id, user_id)
        await self._core.write(groups.add_member, group_id, user_id)

    async def remove_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Remove a user from a group."""
        await self._authorize_member(request, group_id, user_id)
        await self._core.write_revoking(groups.remove_member, group_id, user_id)


def _both(conn: sa.Connection, group_id: str, user_id: str) -> tuple[GroupRow | None, UserRow | None]:
    return GROUPS.find(conn, group_id), USERS.find(conn, user_id)

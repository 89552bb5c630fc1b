"""/v3/groups and their members."""

from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity import attributes
from micronova.neighbours.identity.api import views
from micronova.neighbours.identity.api.common import (
    V3,
    checked_route,
    collection,
    filter_domain,
    home_domain,
    in_domain,
    page,
)
from micronova.neighbours.identity.attributes import GroupAttributes, GroupChanges
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import groups, rows, users
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import groups as groups_table
from micronova.objects.errors import NotFound


class GroupBody(Struct):
    """A body that holds a group."""

    group: dict[str, Any]


class GroupsAPI:
    """Groups."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operations."""
        path, one = f"{V3}/groups", f"{V3}/groups/{{group_id}}"
        member = f"{one}/users/{{user_id}}"

        return [
            Route(method="GET", path=path, handler=self.index, policy="identity:list_groups"),
            checked_route("POST", path, self.create, "create_group", status=201, body=GroupBody),
            checked_route("GET", one, self.show, "get_group"),
            checked_route("PATCH", one, self.update, "update_group", body=GroupBody),
            checked_route("DELETE", one, self.delete, "delete_group", status=204),
            checked_route("GET", f"{one}/users", self.members, "list_users_in_group"),
            checked_route("PUT", member, self.add_member, "add_user_to_group", status=204),
            checked_route("GET", member, self.check_member, "check_user_in_group", status=204),
            checked_route("DELETE", member, self.remove_member, "remove_user_from_group", status=204),
        ]

    async def _authorize(self, request: Request, group_id: str) -> Row:
        row = await self._core.read(rows.find, groups_table, group_id)
        request.authorize(in_domain(row))
        if row is None:
            raise NotFound(f"Could not find group: {group_id[:64]}.")
        return row

    async def _authorize_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Authorise against the domain that both are in; two domains are none."""
        group, user = await self._core.read(_both, group_id, user_id)
        together = group and user and group["domain_id"] == user["domain_id"]
        request.authorize(in_domain(group if together else None))
        if group is None or user is None:
            raise NotFound(f"Could not find {'user' if group else 'group'}: {(user_id if group else group_id)[:64]}.")

    async def index(self, request: Request) -> dict[str, Any]:
        """List groups."""
        listed = await self._core.read(groups.listing, request.raw_query, filter_domain(request), page(request))
        return collection(request, "groups", [views.group(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, group_id: str) -> dict[str, Any]:
        """Show a group."""
        return {"group": views.group(request, await self._authorize(request, group_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Make a group, in the caller's domain unless the body says otherwise."""
        wanted, extra = attributes.read(request.body.group, GroupAttributes, "group")
        wanted.domain_id = wanted.domain_id or home_domain(request)
        request.authorize({"domain_id": wanted.domain_id})
        row = await self._core.write(groups.create, self._core.new_id(), wanted, extra, self._core.now)
        return {"group": views.group(request, row)}

    async def update(self, request: Request, group_id: str) -> dict[str, Any]:
        """Change a group."""
        wanted, extra = attributes.changes(request.body.group, GroupChanges, "group")
        await self._authorize(request, group_id)
        return {"group": views.group(request, await self._core.write(groups.change, group_id, wanted, extra))}

    async def delete(self, request: Request, group_id: str) -> None:
        """Delete a group."""
        await self._authorize(request, group_id)
        moment = self._core.moment()
        self._core.apply(await self._core.write(groups.delete, group_id, moment), moment)

    async def members(self, request: Request, group_id: str) -> dict[str, Any]:
        """List the members of a group."""
        await self._authorize(request, group_id)
        listed = await self._core.read(users.listing, request.raw_query, None, page(request), group_id)
        return collection(request, "users", [views.user(request, row) for row in listed.rows], listed)

    async def check_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Tell whether a user is in a group."""
        await self._authorize_member(request, group_id, user_id)
        if not await self._core.read(groups.is_member, group_id, user_id):
            raise NotFound(f"User {user_id} is not in group {group_id}.")

    async def add_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Put a user into a group."""
        await self._authorize_member(request, group_id, user_id)
        await self._core.write(groups.add_member, group_id, user_id)

    async def remove_member(self, request: Request, group_id: str, user_id: str) -> None:
        """Take a user out of a group."""
        await self._authorize_member(request, group_id, user_id)
        moment = self._core.moment()
        self._core.apply(await self._core.write(groups.remove_member, group_id, user_id, moment), moment)


def _both(conn: sa.Connection, group_id: str, user_id: str) -> tuple[Row | None, Row | None]:
    return rows.find(conn, groups_table, group_id), users.find(conn, user_id)

"""/v3/users and a user's own password, projects and groups."""

from typing import Any

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
from micronova.embedded.identity.attributes import Password, UserAttributes, UserChanges
from micronova.embedded.identity.authentication import UserRef, check_password, refused
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import grants, groups, users
from micronova.embedded.identity.store.kinds import USERS, UserRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Forbidden


class UserBody(Struct):
    """A body that holds a user."""

    user: dict[str, Any]


class PasswordChange(Struct, forbid_unknown_fields=True):
    """The old password and the new one."""

    original_password: str
    password: Password


class PasswordBody(Struct):
    """The body of POST /v3/users/{user_id}/password."""

    user: PasswordChange


class UsersAPI:
    """Users."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/users", f"{V3}/users/{{user_id}}"

        return [
            route("GET", path, self.index, "list_users"),
            checked_route("POST", path, self.create, "create_user", status=201, body=UserBody),
            checked_route("GET", one, self.show, "get_user"),
            checked_route("PATCH", one, self.update, "update_user", body=UserBody),
            checked_route("DELETE", one, self.delete, "delete_user", status=204),
            # The old password authorises the caller, so that it works without a token.
            Route(
                method="POST", path=f"{one}/password", handler=self.set_password, policy=None, status=204,
                body=PasswordBody,
            ),
            checked_route("GET", f"{one}/projects", self.projects, "list_user_projects"),
            checked_route("GET", f"{one}/groups", self.groups, "list_groups_for_user"),
        ]  # fmt: skip

    async def _authorize(self, request: Request, user_id: str) -> UserRow:
        row = await self._core.database.read(USERS.find, user_id)
        request.authorize(domain_target(row, user_id=user_id))
        if row is None:
            raise USERS.not_found(user_id)
        return row

    async def index(self, request: Request) -> dict[str, Any]:
        """List users."""
        listed = await self._core.database.read(
            users.listing, request.raw_query, request.context.domain_id, page(request)
        )
        return collection(request, "users", [views.user(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, user_id: str) -> dict[str, Any]:
        """Show a user."""
        return {"user": views.user(request, await self._authorize(request, user_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a user, in the caller's domain unless the body names one."""
        wanted, extra = attributes.read(request.body.user, UserAttributes, "user")
        wanted.domain_id = wanted.domain_id or default_domain(request)
        request.authorize({"domain_id": wanted.domain_id})
        password_hash = await self._hash(request, wanted.password) if wanted.password else None
        row = await self._core.write(users.create, self._core.new_id(), wanted, password_hash, extra, self._core.now())
        return {"user": views.user(request, row)}

    async def update(self, request: Request, user_id: str) -> dict[str, Any]:
        """Change a user."""
        wanted, extra = attributes.changes(request.body.user, UserChanges, "user")
        await self._authorize(request, user_id)
        password_hash = await self._hash(request, wanted.password) if isinstance(wanted.password, str) else None
        row = await self._core.write_revoking(users.change, user_id, wanted, password_hash, extra)
        return {"user": views.user(request, row)}

    async def delete(self, request: Request, user_id: str) -> None:
        """Delete a user."""
        await self._authorize(request, user_id)
        await self._core.write_revoking(users.delete, user_id)

    async def set_password(self, request: Request, user_id: str) -> None:
        """Change one's own password; all tokens of the user are revoked."""
        change: PasswordChange = request.body.user
        address = request.context.remote_address
        row = await check_password(self._core, UserRef(id=user_id), change.original_password, address)
        if row["options"].get("lock_password"):
            raise Forbidden("This user's password can be changed only by an administrator.")
        new_hash = await self._hash(request, change.password)
        if not await self._core.write_revoking(users.set_password, user_id, row["password_hash"], new_hash):
            raise refused()

    async def _hash(self, request: Request, password: str) -> str:
        return await self._core.passwords.hash(password, request.context.remote_address)

    async def projects(self, request: Request, user_id: str) -> dict[str, Any]:
        """List the projects that a user has a role on."""
        await self._authorize(request, user_id)
        rows, tags = await self._core.database.read(grants.projects_of, user_id, request.raw_query)
        return collection(request, "projects", [views.project(request, row, tags[row["id"]]) for row in rows])

    async def groups(self, request: Request, user_id: str) -> dict[str, Any]:
        """List the groups that a user is in."""
        await self._authorize(request, user_id)
        listed = await self._core.database.read(groups.listing, request.raw_query, None, page(request), user_id)
        items = [{**views.group(request, row), "membership_expires_at": None} for row in listed.rows]
        return collection(request, "groups", items, listed)

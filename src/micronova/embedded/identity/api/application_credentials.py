"""/v3/users/{user_id}/application_credentials"""

import secrets
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page
from micronova.embedded.identity.attributes import ID, Name
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import application_credentials, assignments, roles
from micronova.embedded.identity.store.kinds import PROJECTS, ROLES, ApplicationCredentialRow, RoleRow
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import roles as roles_table
from micronova.http.paging import parse_iso
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Forbidden, Invalid, NotFound


class RoleRef(Struct, forbid_unknown_fields=True):
    """A role, by id or by name."""

    id: ID | None = None
    name: Name | None = None


class CredentialAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new application credential. Its project is always the project of the token."""

    name: Name
    description: str | None = None
    secret: str | None = None
    roles: list[RoleRef] = []
    expires_at: str | None = None
    unrestricted: bool | None = None
    project_id: ID | None = None
    user_id: ID | None = None
    access_rules: list[Any] | None = None


class CredentialBody(Struct):
    """A body that holds an application credential."""

    application_credential: CredentialAttributes


class ApplicationCredentialsAPI:
    """Application credentials."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{V3}/users/{{user_id}}/application_credentials"

        return [
            checked_route("GET", path, self.index, "list_application_credentials"),
            checked_route("POST", path, self.create, "create_application_credential", status=201, body=CredentialBody),
            checked_route("GET", f"{path}/{{credential_id}}", self.show, "get_application_credential"),
            checked_route(
                "DELETE",
                f"{path}/{{credential_id}}",
                self.delete,
                "delete_application_credential",
                status=204,
            ),
        ]

    def _refuse_restricted(self, request: Request) -> None:
        """Raise Forbidden for a token of a restricted application credential: it may not manage credentials."""
        claims = self._core.verifier.verify(request.context.token, self._core.clock.now())
        if claims.restricted:
            raise Forbidden("A restricted application credential may not make or delete application credentials.")

    async def index(self, request: Request, user_id: str) -> dict[str, Any]:
        """List a user's application credentials."""
        request.authorize({"user_id": user_id})
        listed, held = await self._core.database.read(_list, user_id, request.raw_query, page(request))
        items = [views.application_credential(request, row, held[row["id"]]) for row in listed.rows]
        return collection(request, "application_credentials", items, listed)

    async def show(self, request: Request, user_id: str, credential_id: str) -> dict[str, Any]:
        """Show an application credential."""
        request.authorize({"user_id": user_id})
        row, held = await self._core.database.read(_get, user_id, credential_id)
        return {"application_credential": views.application_credential(request, row, held)}

    async def create(self, request: Request, user_id: str) -> dict[str, Any]:
        """Create an application credential; only this response contains its secret."""
        request.authorize({"user_id": user_id})
        self._refuse_restricted(request)
        wanted: CredentialAttributes = request.body.application_credential
        if wanted.access_rules:
            raise Invalid(
                "Invalid input for field/attribute application_credential.access_rules: access rules are not supported."
            )
        project_id = request.context.project_id
        if not project_id:
            raise Forbidden("An application credential is for a project: make it with a token for one.")
        expires_at = _expiry(wanted.expires_at, self._core.now())
        held = await self._core.database.read(_chosen_roles, user_id, project_id, wanted.roles)
        # The caller can pass on only the roles of its token, even if the user has more.
        if not wanted.roles:
            held = [row for row in held if row["name"] in request.context.roles]
        elif not {row["name"] for row in held} <= set(request.context.roles):
            raise Invalid(
                "Invalid input for field/attribute application_credential.roles: the token has not all of them."
            )
        secret = wanted.secret or secrets.token_urlsafe(64)
        row = await self._core.write(
            application_credentials.create,
            self._core.new_id(),
            user_id=user_id,
            project_id=project_id,
            name=wanted.name,
            description=wanted.description,
            secret_hash=await self._core.passwords.hash(secret, request.context.remote_address),
            role_ids=[role["id"] for role in held],
            unrestricted=bool(wanted.unrestricted),
            expires_at=expires_at,
            now=self._core.now(),
        )
        view = views.application_credential(request, row, held)
        return {"application_credential": {**view, "secret": secret}}

    async def delete(self, request: Request, user_id: str, credential_id: str) -> None:
        """Delete an application credential."""
        request.authorize({"user_id": user_id})
        self._refuse_restricted(request)
        await self._core.write_revoking(application_credentials.delete, user_id, credential_id)


def _expiry(text: str | None, now: int) -> int | None:
    if text is None:
        return None
    try:
        expires_at = parse_iso(text)
    except ValueError:
        raise Invalid(
            "Invalid input for field/attribute application_credential.expires_at: "
            "write a time like 2030-01-31T12:00:00, in UTC."
        ) from None
    if expires_at <= now:
        raise Invalid("Invalid input for field/attribute application_credential.expires_at: it must be in the future.")
    return expires_at


def _chosen_roles(conn: sa.Connection, user_id: str, project_id: str, wanted: list[RoleRef]) -> list[RoleRow]:
    """Return the wanted roles with those that they imply, or all of the user if none are wanted.

    Raise NotFound for a name that no role has, and Invalid for a role that the user lacks.
    """
    project = PROJECTS.find(conn, project_id)
    held = assignments.effective_roles(conn, user_id, project_id, project) if project else []
    if not wanted:
        return held
    chosen: list[str] = []
    for ref in wanted:
        if ref.id is None and ref.name is None:
            raise Invalid("Invalid input for field/attribute application_credential.roles: name each by id or by name.")
        found = [row for row in held if (row["id"] == ref.id if ref.id is not None else row["name"] == ref.name)]
        if not found:
            if ref.id is None and ROLES.first(conn, roles_table.c.name == ref.name) is None:
                raise NotFound(f"Could not find role: {ref.name}.")
            raise Invalid(
                "Invalid input for field/attribute application_credential.roles: only roles that the user has on the "
                "project can be given."
            )
        chosen += [row["id"] for row in found]
    ids = roles.closure(roles.implications(conn), chosen)
    return [row for row in held if row["id"] in ids]


def _get(conn: sa.Connection, user_id: str, credential_id: str) -> tuple[ApplicationCredentialRow, list[RoleRow]]:
    row = application_credentials.get(conn, user_id, credential_id)
    return row, roles.by_ids(conn, row["role_ids"])


def _list(
    conn: sa.Connection, user_id: str, query: Any, wanted: Page
) -> tuple[Listed[ApplicationCredentialRow], dict[str, list[RoleRow]]]:
    listed = application_credentials.listing(conn, user_id, query, wanted)
    return listed, {row["id"]: roles.by_ids(conn, row["role_ids"]) for row in listed.rows}

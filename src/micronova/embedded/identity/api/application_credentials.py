"""/v3/users/{user_id}/application_credentials and /v3/users/{user_id}/access_rules"""

import secrets
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import Meta, Struct

from micronova.embedded.common.query import Query
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page
from micronova.embedded.identity.api.delegation import (
    RoleRef,
    RoleRefs,
    expiry,
    is_delegated,
    named_roles,
    refuse_restricted,
    refuse_trust,
)
from micronova.embedded.identity.attributes import ID, Name
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import access_rules, application_credentials, grants, roles
from micronova.embedded.identity.store.access_rules import MAX_RULES, WantedRule
from micronova.embedded.identity.store.kinds import PROJECTS, ROLES, AccessRuleRow, ApplicationCredentialRow, RoleRow
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import roles as roles_table
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Forbidden, Invalid

LONGEST_DESCRIPTION = 4096  # characters: a user may have many of these


class AccessRule(Struct, forbid_unknown_fields=True):
    """An access rule: an existing one by id, or the service's type, the method and the path."""

    id: ID | None = None
    service: (
        Annotated[
            str, Meta(min_length=1, max_length=64, pattern=r"\A[a-zA-Z0-9-]+\Z", title="letters, digits and hyphens")
        ]
        | None
    ) = None
    path: Annotated[str, Meta(max_length=225, pattern=r"\A/", title="a path that begins with /")] | None = None
    method: Literal["DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"] | None = None


class ApplicationCredentialAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new application credential. Its project is always the project of the token."""

    name: Name
    description: Annotated[str, Meta(max_length=LONGEST_DESCRIPTION)] | None = None
    secret: str | None = None
    roles: RoleRefs = []
    expires_at: str | None = None
    unrestricted: bool | None = None
    project_id: ID | None = None
    user_id: ID | None = None
    access_rules: Annotated[list[AccessRule], Meta(max_length=MAX_RULES)] = []


class ApplicationCredentialBody(Struct):
    """A body that holds an application credential."""

    application_credential: ApplicationCredentialAttributes


class ApplicationCredentialsAPI:
    """Application credentials."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{V3}/users/{{user_id}}/application_credentials"
        return [
            checked_route("GET", path, self.index, "list_application_credentials"),
            checked_route(
                "POST", path, self.create, "create_application_credential", status=201, body=ApplicationCredentialBody
            ),
            checked_route("GET", f"{path}/{{application_credential_id}}", self.show, "get_application_credential"),
            checked_route(
                "DELETE",
                f"{path}/{{application_credential_id}}",
                self.delete,
                "delete_application_credential",
                status=204,
            ),
        ]

    async def index(self, request: Request, user_id: str) -> dict[str, Any]:
        """List a user's application credentials."""
        request.authorize({"user_id": user_id})
        refuse_trust(self._core.claims(request))
        listed, held = await self._core.database.read(_list, user_id, request.raw_query, page(request))
        items = [views.application_credential(request, row, *held[row["id"]]) for row in listed.rows]
        return collection(request, "application_credentials", items, listed)

    async def show(self, request: Request, user_id: str, application_credential_id: str) -> dict[str, Any]:
        """Show an application credential."""
        request.authorize({"user_id": user_id})
        refuse_trust(self._core.claims(request))
        row, held, rules = await self._core.database.read(_get, user_id, application_credential_id)
        return {"application_credential": views.application_credential(request, row, held, rules)}

    async def create(self, request: Request, user_id: str) -> dict[str, Any]:
        """Create an application credential; only this response contains its secret."""
        request.authorize({"user_id": user_id})
        refuse_restricted(self._core.claims(request))
        wanted: ApplicationCredentialAttributes = request.body.application_credential
        wanted_rules = [self._wanted(rule) for rule in wanted.access_rules]
        project_id = request.context.project_id
        if not project_id:
            raise Forbidden("An application credential is for a project: make it with a token for one.")
        expires_at = expiry(wanted.expires_at, self._core.now(), "application_credential")
        held = await self._core.database.read(_chosen_roles, user_id, project_id, wanted.roles)
        # A token of an application credential or a trust delegates only its own roles, even if the user has more.
        delegated = is_delegated(self._core.claims(request))
        if not wanted.roles:
            held = [row for row in held if row["name"] in request.context.roles or not delegated]
        elif delegated and not {row["name"] for row in held} <= set(request.context.roles):
            raise Invalid(
                "Invalid input for field/attribute application_credential.roles: the token does not have all of them."
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
            wanted_rules=wanted_rules,
            now=self._core.now(),
        )
        rules = await self._core.database.read(application_credentials.rules, row)
        view = views.application_credential(request, row, held, rules)
        return {"application_credential": {**view, "secret": secret}}

    def _wanted(self, rule: AccessRule) -> WantedRule:
        """Return a rule of a body; raise Invalid if it is incomplete."""
        where = "Invalid input for field/attribute application_credential.access_rules:"
        given = (rule.service, rule.path, rule.method)
        if rule.id is not None:
            if any(value is not None for value in given):
                raise Invalid(f"{where} a rule with an id exists already, and has no other attributes.")
            return WantedRule(self._core.new_id(), id=rule.id)
        if rule.service is None or rule.path is None or rule.method is None:
            raise Invalid(f"{where} each has an id, or a service, a path and a method.")
        return WantedRule(self._core.new_id(), None, rule.service, rule.path, rule.method)

    async def delete(self, request: Request, user_id: str, application_credential_id: str) -> None:
        """Delete an application credential."""
        request.authorize({"user_id": user_id})
        refuse_restricted(self._core.claims(request))
        await self._core.write_revoking(application_credentials.delete, user_id, application_credential_id)


def _chosen_roles(conn: sa.Connection, user_id: str, project_id: str, wanted: list[RoleRef]) -> list[RoleRow]:
    """Return the wanted roles with those that they imply, or all of the user if none are wanted.

    Raise NotFound for a name that no role has, and Invalid for a role that the user lacks.
    """
    project = PROJECTS.find(conn, project_id)
    held = grants.effective_roles(conn, user_id, project_id, project) if project else []
    if not wanted:
        return held
    chosen: list[str] = []
    for ref in wanted:
        found = named_roles(held, ref, "application_credential")
        if not found:
            if ref.id is None and ROLES.first(conn, roles_table.c.name == ref.name) is None:
                raise ROLES.not_found(str(ref.name))
            raise Invalid(
                "Invalid input for field/attribute application_credential.roles: only roles that the user has on the "
                "project can be given."
            )
        chosen += [row["id"] for row in found]
    ids = roles.closure(roles.implications(conn), chosen)
    return [row for row in held if row["id"] in ids]


Held = tuple[list[RoleRow], list[AccessRuleRow] | None]  # what an application credential has


def _held(conn: sa.Connection, row: ApplicationCredentialRow) -> Held:
    return roles.by_ids(conn, row["role_ids"]), application_credentials.rules(conn, row)


def _get(
    conn: sa.Connection, user_id: str, application_credential_id: str
) -> tuple[ApplicationCredentialRow, list[RoleRow], list[AccessRuleRow] | None]:
    row = application_credentials.get(conn, user_id, application_credential_id)
    return row, *_held(conn, row)


def _list(
    conn: sa.Connection, user_id: str, query: Query, wanted: Page
) -> tuple[Listed[ApplicationCredentialRow], dict[str, Held]]:
    listed = application_credentials.listing(conn, user_id, query, wanted)
    return listed, {row["id"]: _held(conn, row) for row in listed.rows}


class AccessRulesAPI:
    """Access rules, which are made with application credentials."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/users/{{user_id}}/access_rules", f"{V3}/users/{{user_id}}/access_rules/{{rule_id}}"
        return [
            checked_route("GET", path, self.index, "list_access_rules"),
            checked_route("GET", one, self.show, "get_access_rule"),
            checked_route("DELETE", one, self.delete, "delete_access_rule", status=204),
        ]

    async def index(self, request: Request, user_id: str) -> dict[str, Any]:
        """List a user's access rules."""
        request.authorize({"user_id": user_id})
        refuse_trust(self._core.claims(request))
        listed = await self._core.database.read(access_rules.listing, user_id, request.raw_query, page(request))
        return collection(request, "access_rules", [views.access_rule(request, row) for row in listed.rows], listed)

    async def show(self, request: Request, user_id: str, rule_id: str) -> dict[str, Any]:
        """Show an access rule."""
        request.authorize({"user_id": user_id})
        refuse_trust(self._core.claims(request))
        row = await self._core.database.read(access_rules.get, user_id, rule_id)
        return {"access_rule": views.access_rule(request, row)}

    async def delete(self, request: Request, user_id: str, rule_id: str) -> None:
        """Delete an access rule that no application credential has."""
        request.authorize({"user_id": user_id})
        refuse_restricted(self._core.claims(request))
        await self._core.write(access_rules.delete, user_id, rule_id)

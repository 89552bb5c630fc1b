"""Tokens: the scope that a user may have one for, their claims, and the body that describes them."""

import secrets
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity import catalog
from micronova.embedded.identity.authentication import Authenticated, Scope, domain_id_of, refused
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import assignments, domains, projects
from micronova.embedded.identity.store import catalog as catalog_store
from micronova.embedded.identity.store.kinds import (
    APPLICATION_CREDENTIALS,
    DOMAINS,
    PROJECTS,
    CatalogEntry,
    DomainRow,
    ProjectRow,
    RoleRow,
)
from micronova.http.tokens import Claims
from micronova.objects.clock import micros
from micronova.objects.errors import Invalid, Unauthorized


class GrantedScope(Struct):
    """A scope, with the roles that the user has there. Without a project, domain or system the token is unscoped."""

    roles: list[RoleRow] = []
    project: ProjectRow | None = None
    domain: DomainRow | None = None
    system: bool = False


class Details(Struct):
    """What the body that describes a token contains beyond its claims."""

    domain_names: dict[str, str]
    catalog: list[CatalogEntry]
    credential_name: str | None = None


async def issue(
    core: Core, authenticated: Authenticated, scope: Scope | str | None, with_catalog: bool, issued_at: int
) -> tuple[str, Claims, Details]:
    """Issue a token with this scope; raise Unauthorized if the user has no role there.

    `issued_at` is a time in microseconds before the user was first read, so that a revocation since then concerns the
    token.
    """
    if authenticated.credential is not None and scope is not None:
        raise refused()
    claims, details = await core.database.read(_claims_and_details, core, authenticated, scope, with_catalog, issued_at)
    return core.signer.sign(claims), claims, details


def _claims_and_details(
    conn: sa.Connection,
    core: Core,
    authenticated: Authenticated,
    scope: Scope | str | None,
    with_catalog: bool,
    issued_at: int,
) -> tuple[Claims, Details]:
    claims = _claims(core, authenticated, _granted_scope(conn, authenticated, scope), issued_at)
    return claims, read_details(conn, claims, with_catalog)


def read_details(conn: sa.Connection, claims: Claims, with_catalog: bool) -> Details:
    """Return what the body that describes a token contains beyond its claims."""
    domain_ids = [claims.user_domain_id, claims.project_domain_id, claims.domain_id]
    credential = APPLICATION_CREDENTIALS.find(conn, claims.application_credential_id)
    return Details(
        domains.names(conn, domain_ids),
        catalog_store.entries(conn) if with_catalog and is_scoped(claims) else [],
        credential["name"] if credential else None,
    )


def _granted_scope(conn: sa.Connection, authenticated: Authenticated, scope: Scope | str | None) -> GrantedScope:
    """Return the scope of the token with the user's roles there; raise Unauthorized if there are none.

    An application credential has its own project. A request without a scope gets the user's default project, and an
    unscoped token if the user has none or has no role there.
    """
    user_id = authenticated.user["id"]
    if authenticated.credential is not None:
        granted = _project_scope(conn, user_id, PROJECTS.find(conn, authenticated.credential["project_id"]))
        wanted = set(authenticated.credential["role_ids"])
        granted.roles = [role for role in granted.roles if role["id"] in wanted]
        if len(granted.roles) != len(wanted):  # the user has lost one of them
            raise refused()
        return granted
    if scope is None:
        default = PROJECTS.find(conn, authenticated.user["default_project_id"])
        try:
            return _project_scope(conn, user_id, default) if default else GrantedScope()
        except Unauthorized:
            return GrantedScope()
    return _requested_scope(conn, user_id, scope)


def _requested_scope(conn: sa.Connection, user_id: str, scope: Scope | str) -> GrantedScope:
    if isinstance(scope, str):
        return GrantedScope()
    if sum(part is not None for part in (scope.project, scope.domain, scope.system, scope.unscoped)) != 1:
        raise Invalid("Invalid input for field/attribute auth.scope: name one of project, domain, system and unscoped.")
    if scope.project is not None:
        if scope.project.id is not None:
            return _project_scope(conn, user_id, PROJECTS.find(conn, scope.project.id))
        if scope.project.name is None:
            raise Invalid(
                "Invalid input for field/attribute auth.scope.project: name it, by id, or by name and domain."
            )
        domain_id = domain_id_of(conn, scope.project.domain, "scope.project")
        return _project_scope(conn, user_id, projects.by_name(conn, domain_id or "", scope.project.name))
    if scope.domain is not None:
        domain = DOMAINS.find(conn, domain_id_of(conn, scope.domain, "scope.domain"))
        roles = assignments.effective_roles(conn, user_id, domain["id"]) if domain else []
        if domain is None or not domain["enabled"] or not roles:
            raise refused()
        return GrantedScope(roles, domain=domain)
    if scope.system is not None:
        roles = assignments.effective_roles(conn, user_id, assignments.SYSTEM)
        if not scope.system.all or not roles:
            raise refused()
        return GrantedScope(roles, system=True)
    return GrantedScope()


def _project_scope(conn: sa.Connection, user_id: str, project: ProjectRow | None) -> GrantedScope:
    if project is None or not project["enabled"]:
        raise refused()
    domain = DOMAINS.get(conn, project["domain_id"])
    roles = assignments.effective_roles(conn, user_id, project["id"], project)
    if not domain["enabled"] or not roles:
        raise refused()
    return GrantedScope(roles, project=project)


def _claims(core: Core, authenticated: Authenticated, granted: GrantedScope, issued_at: int) -> Claims:
    now = core.now()
    expires = now + micros(core.token_lifetime)
    audit_ids = [secrets.token_urlsafe(16)]
    if authenticated.parent is not None:
        # Exchanging a token does not prolong it, and revoking the first one revokes all that came from it.
        expires = min(expires, micros(authenticated.parent.expires_at))
        audit_ids.append(authenticated.parent.audit_ids[-1])
    credential = authenticated.credential
    if credential is not None and credential["expires_at"] is not None:
        expires = min(expires, credential["expires_at"])
    return Claims(
        user_id=authenticated.user["id"],
        user_name=authenticated.user["name"],
        user_domain_id=authenticated.user["domain_id"],
        issued_at=issued_at / 1_000_000,
        expires_at=expires / 1_000_000,
        audit_ids=tuple(audit_ids),
        methods=authenticated.methods,
        project_id=granted.project["id"] if granted.project else None,
        project_name=granted.project["name"] if granted.project else None,
        project_domain_id=granted.project["domain_id"] if granted.project else None,
        domain_id=granted.domain["id"] if granted.domain else None,
        system=granted.system,
        roles=tuple((role["id"], role["name"]) for role in granted.roles),
        application_credential_id=credential["id"] if credential else None,
        restricted=credential is not None and not credential["unrestricted"],
    )


def is_scoped(claims: Claims) -> bool:
    """Return whether a token has a scope."""
    return claims.system or claims.project_id is not None or claims.domain_id is not None


def body(claims: Claims, details: Details, with_catalog: bool, public_url: str) -> dict[str, Any]:
    """Return the `token` object that describes a token."""

    def domain(domain_id: str | None) -> dict[str, str | None]:
        return {"id": domain_id, "name": details.domain_names.get(domain_id or "")}

    token: dict[str, Any] = {
        "methods": claims.methods,
        "user": {
            "domain": domain(claims.user_domain_id),
            "id": claims.user_id,
            "name": claims.user_name,
            "password_expires_at": None,
        },
        "audit_ids": claims.audit_ids,
        "expires_at": iso_time(claims.expires_at),
        "issued_at": iso_time(claims.issued_at),
    }
    if claims.project_id is not None:
        token["project"] = {
            "domain": domain(claims.project_domain_id),
            "id": claims.project_id,
            "name": claims.project_name,
        }
        token["is_domain"] = False
    elif claims.domain_id is not None:
        token["domain"] = domain(claims.domain_id)
    elif claims.system:
        token["system"] = {"all": True}
    if is_scoped(claims):
        token["roles"] = [{"id": role_id, "name": name} for role_id, name in claims.roles]
        if with_catalog:
            token["catalog"] = catalog.view(details.catalog, public_url, claims)
    if claims.application_credential_id is not None:
        token["application_credential"] = {
            "id": claims.application_credential_id,
            "name": details.credential_name,
            "restricted": claims.restricted,
        }
    return token


def iso_time(seconds: float) -> str:
    """Return a time as tokens and revocations show it, with microseconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

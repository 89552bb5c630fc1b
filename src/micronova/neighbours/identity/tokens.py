"""Tokens: what a proven user may have one for, how it is made, and what is told about it."""

import secrets
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.http.tokens import Claims
from micronova.neighbours.identity import catalog
from micronova.neighbours.identity.authentication import Proven, Scope, domain_id_of, refused
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import application_credentials, assignments, domains, projects, rows
from micronova.neighbours.identity.store import catalog as catalog_store
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import domains as domains_table
from micronova.neighbours.identity.tables import projects as projects_table
from micronova.objects.clock import micros
from micronova.objects.errors import Invalid, Unauthorized


class Granted(Struct):
    """A scope that the user has roles on, or none."""

    roles: list[Row] = []
    project: Row | None = None
    domain: Row | None = None
    system: bool = False


class About(Struct):
    """What a token's body tells beyond its claims."""

    domain_names: dict[str, str]
    catalog: list[tuple[Row, list[Row]]]
    credential_name: str | None = None


async def issue(
    core: Core, proven: Proven, scope: Scope | str | None, with_catalog: bool, begun: int
) -> tuple[str, Claims, About]:
    """Make a token for a proven user; one that has no role on the scope is refused.

    `begun` is the moment before the first look at the user: what was revoked since then voids the token.
    """
    if proven.credential is not None and scope is not None:
        raise refused()
    granted, about = await core.read(_grant, proven, scope, with_catalog)
    claims = _claims(core, proven, granted, begun)
    return core.signer.sign(claims), claims, about


async def about(core: Core, claims: Claims, with_catalog: bool) -> About:
    """Look up what a token's body tells beyond its claims."""
    return await core.read(_about, claims, with_catalog)


def _grant(conn: sa.Connection, proven: Proven, scope: Scope | str | None, with_catalog: bool) -> tuple[Granted, About]:
    granted = _scoped(conn, proven, scope)
    scoped = granted.system or granted.project is not None or granted.domain is not None
    concerned = [
        proven.user["domain_id"],
        (granted.project or {}).get("domain_id"),
        (granted.domain or {}).get("id"),
    ]
    return granted, About(
        domains.names(conn, concerned),
        catalog_store.entries(conn) if with_catalog and scoped else [],
        proven.credential["name"] if proven.credential else None,
    )


def _about(conn: sa.Connection, claims: Claims, with_catalog: bool) -> About:
    concerned = [claims.user_domain_id, claims.project_domain_id, claims.domain_id]
    credential = application_credentials.find(conn, claims.application_credential_id or "")
    return About(
        domains.names(conn, concerned),
        catalog_store.entries(conn) if with_catalog and is_scoped(claims) else [],
        credential["name"] if credential else None,
    )


def _scoped(conn: sa.Connection, proven: Proven, scope: Scope | str | None) -> Granted:
    user_id = proven.user["id"]
    if proven.credential is not None:
        granted = _project(conn, user_id, rows.find(conn, projects_table, proven.credential["project_id"]))
        wanted = set(proven.credential["role_ids"])
        granted.roles = [role for role in granted.roles if role["id"] in wanted]
        if len(granted.roles) != len(wanted):  # the user has lost one of them
            raise refused()
        return granted
    if scope is None:
        default = rows.find(conn, projects_table, proven.user["default_project_id"])
        try:
            return _project(conn, user_id, default) if default else Granted()
        except Unauthorized:
            return Granted()
    if isinstance(scope, str):
        return Granted()
    if sum(part is not None for part in (scope.project, scope.domain, scope.system, scope.unscoped)) != 1:
        raise Invalid("Invalid input for field/attribute auth.scope: name one of project, domain, system and unscoped.")
    if scope.project is not None:
        if scope.project.id is not None:
            return _project(conn, user_id, rows.find(conn, projects_table, scope.project.id))
        if scope.project.name is None:
            raise Invalid(
                "Invalid input for field/attribute auth.scope.project: name it, by id, or by name and domain."
            )
        domain_id = domain_id_of(conn, scope.project.domain, "scope.project")
        return _project(conn, user_id, projects.by_name(conn, domain_id or "", scope.project.name))
    if scope.domain is not None:
        domain = rows.find(conn, domains_table, domain_id_of(conn, scope.domain, "scope.domain"))
        roles = assignments.effective_roles(conn, user_id, domain["id"]) if domain else []
        if domain is None or not domain["enabled"] or not roles:
            raise refused()
        return Granted(roles, domain=domain)
    if scope.system is not None:
        roles = assignments.effective_roles(conn, user_id, assignments.SYSTEM)
        if not scope.system.all or not roles:
            raise refused()
        return Granted(roles, system=True)
    return Granted()


def _project(conn: sa.Connection, user_id: str, project: Row | None) -> Granted:
    if project is None or not project["enabled"]:
        raise refused()
    domain = domains.get(conn, project["domain_id"])
    roles = assignments.effective_roles(conn, user_id, project["id"], project)
    if not domain["enabled"] or not roles:
        raise refused()
    return Granted(roles, project=project)


def _claims(core: Core, proven: Proven, granted: Granted, begun: int) -> Claims:
    now = core.now
    expires = now + micros(core.token_lifetime)
    audit_ids = [secrets.token_urlsafe(16)]
    if proven.parent is not None:
        # Exchanging a token does not prolong it, and revoking the first one revokes all that came from it.
        expires = min(expires, micros(proven.parent.expires_at))
        audit_ids.append(proven.parent.audit_ids[-1])
    credential = proven.credential
    if credential is not None and credential["expires_at"] is not None:
        expires = min(expires, credential["expires_at"])
    return Claims(
        user_id=proven.user["id"],
        user_name=proven.user["name"],
        user_domain_id=proven.user["domain_id"],
        issued_at=begun / 1_000_000,
        expires_at=expires / 1_000_000,
        audit_ids=tuple(audit_ids),
        methods=proven.methods,
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
    """Say whether a token is for something."""
    return claims.system or claims.project_id is not None or claims.domain_id is not None


def body(claims: Claims, about: About, with_catalog: bool, public_url: str) -> dict[str, Any]:
    """Return the `token` object that describes a token."""

    def domain(domain_id: str | None) -> dict[str, str | None]:
        return {"id": domain_id, "name": about.domain_names.get(domain_id or "")}

    token: dict[str, Any] = {
        "methods": claims.methods,
        "user": {
            "domain": domain(claims.user_domain_id),
            "id": claims.user_id,
            "name": claims.user_name,
            "password_expires_at": None,
        },
        "audit_ids": claims.audit_ids,
        "expires_at": _time(claims.expires_at),
        "issued_at": _time(claims.issued_at),
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
            token["catalog"] = catalog.view(about.catalog, public_url, claims)
    if claims.application_credential_id is not None:
        token["application_credential"] = {
            "id": claims.application_credential_id,
            "name": about.credential_name,
            "restricted": claims.restricted,
        }
    return token


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Tokens: the scope that a user may have one for, their claims, and the body that describes them."""

import secrets
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity import catalog_view
from micronova.embedded.identity.authentication import (
    Authenticated,
    Scope,
    UserRef,
    domain_id_of,
    find_user,
    is_active,
    refused,
)
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.endpoint_urls import OwnURLs
from micronova.embedded.identity.store import (
    access_rules,
    application_credentials,
    catalog,
    domains,
    grants,
    projects,
    roles,
    trusts,
)
from micronova.embedded.identity.store.kinds import (
    APPLICATION_CREDENTIALS,
    DOMAINS,
    PROJECTS,
    AccessRuleRow,
    CatalogEntry,
    DomainRow,
    ProjectRow,
    RoleRow,
    TrustRow,
    UserRow,
)
from micronova.http.access_rules import AccessRules
from micronova.http.paging import iso_from_seconds
from micronova.http.tokens import Claims
from micronova.objects.clock import micros, seconds
from micronova.objects.errors import Forbidden, Invalid, NotFound, Unauthorized


class GrantedScope(Struct):
    """A scope, with the roles that the user has there. Without a project, domain or system the token is unscoped."""

    roles: list[RoleRow] = []
    project: ProjectRow | None = None
    domain: DomainRow | None = None
    system: bool = False
    trust: TrustRow | None = None
    trustor: UserRow | None = None  # of the trust
    agents: list[UserRow] = []  # the parties of the trusts that the trust was redelegated from
    access_rules: list[AccessRuleRow] | None = None  # of the application credential


class Details(Struct):
    """What the body that describes a token contains beyond its claims."""

    domain_names: dict[str, str]
    catalog: list[CatalogEntry]
    application_credential_name: str | None = None
    access_rules: list[AccessRuleRow] | None = None


async def issue(
    core: Core, authenticated: Authenticated, scope: Scope | str | None, with_catalog: bool, issued_at: int
) -> tuple[str, Claims, Details]:
    """Issue a token with this scope; raise Unauthorized if the user has no role there.

    `issued_at` is a time in microseconds before the user was first read, so that a revocation since then concerns the
    token.
    """
    if authenticated.application_credential is not None and scope is not None:
        raise refused()
    if isinstance(scope, Scope) and scope.trust is not None:
        await _use_trust(core, authenticated, scope)
    claims, details = await core.database.read(_claims_and_details, core, authenticated, scope, with_catalog, issued_at)
    return core.signer.sign(claims), claims, details


async def _use_trust(core: Core, authenticated: Authenticated, scope: Scope) -> None:
    """Count a use of a trust if its uses are limited; raise an error if there is no token for it."""
    granted = await core.database.read(_requested_scope, authenticated.user, scope, core.now())
    assert granted.trust is not None
    if granted.trust["remaining_uses"] is not None and not await core.write(trusts.use, granted.trust["id"]):
        raise Forbidden("The trust has no uses left.")


def _claims_and_details(
    conn: sa.Connection,
    core: Core,
    authenticated: Authenticated,
    scope: Scope | str | None,
    with_catalog: bool,
    issued_at: int,
) -> tuple[Claims, Details]:
    claims = _claims(core, authenticated, _granted_scope(conn, authenticated, scope, core.now()), issued_at)
    return claims, read_details(conn, claims, with_catalog)


def read_details(conn: sa.Connection, claims: Claims, with_catalog: bool) -> Details:
    """Return what the body that describes a token contains beyond its claims."""
    domain_ids = [claims.user_domain_id, claims.project_domain_id, claims.domain_id]
    application_credential = APPLICATION_CREDENTIALS.find(conn, claims.application_credential_id)
    return Details(
        domains.names(conn, domain_ids),
        catalog.entries(conn) if with_catalog and is_scoped(claims) else [],
        application_credential["name"] if application_credential else None,
        application_credentials.rules(conn, application_credential) if application_credential else None,
    )


def _granted_scope(
    conn: sa.Connection, authenticated: Authenticated, scope: Scope | str | None, now: int
) -> GrantedScope:
    """Return the scope of the token with the user's roles there; raise Unauthorized if there are none.

    An application credential has its own project. A request without a scope gets the user's default project, and an
    unscoped token if the user has none or has no role there.
    """
    user_id = authenticated.user["id"]
    if authenticated.application_credential is not None:
        granted = _project_scope(conn, user_id, PROJECTS.find(conn, authenticated.application_credential["project_id"]))
        wanted = set(authenticated.application_credential["role_ids"])
        granted.roles = [role for role in granted.roles if role["id"] in wanted]
        if len(granted.roles) != len(wanted):  # the user has lost one of them
            raise refused()
        granted.access_rules = application_credentials.rules(conn, authenticated.application_credential)
        return granted
    if scope is None:
        default = PROJECTS.find(conn, authenticated.user["default_project_id"])
        try:
            return _project_scope(conn, user_id, default) if default else GrantedScope()
        except Unauthorized:
            return GrantedScope()
    return _requested_scope(conn, authenticated.user, scope, now)


def _requested_scope(conn: sa.Connection, user: UserRow, scope: Scope | str, now: int) -> GrantedScope:
    if isinstance(scope, str):
        return GrantedScope()
    user_id = user["id"]
    if sum(part is not None for part in (scope.project, scope.domain, scope.system, scope.trust, scope.unscoped)) != 1:
        raise Invalid(
            "Invalid input for field/attribute auth.scope: name one of project, domain, system, OS-TRUST:trust and "
            "unscoped."
        )
    if scope.trust is not None:
        return _trust_scope(conn, user_id, scope.trust.id, now)
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
        roles = grants.effective_roles(conn, user_id, domain["id"]) if domain else []
        if domain is None or not domain["enabled"] or not roles:
            raise refused()
        return GrantedScope(roles, domain=domain)
    if scope.system is not None:
        roles = grants.effective_roles(conn, user_id, grants.SYSTEM)
        if not scope.system.all or not roles:
            raise refused()
        return GrantedScope(roles, system=True)
    return GrantedScope()


def _trust_scope(conn: sa.Connection, user_id: str, trust_id: str, now: int) -> GrantedScope:
    """Return the scope of a trust: its project, with its roles; raise Forbidden if the trustor has lost one of them.

    A trust without a project has no roles.
    """
    try:
        trust = trusts.get(conn, trust_id, now)
    except NotFound:
        raise refused() from None
    if trust["trustee_user_id"] != user_id:
        raise Forbidden("The user is not the trustee of this trust.")
    trustor = find_user(conn, UserRef(id=trust["trustor_user_id"]))
    if not is_active(trustor):
        raise Forbidden("The trustor of this trust is disabled.")
    try:
        chain = trusts.origins(conn, trust, now)
    except NotFound:
        raise refused() from None
    agents: list[UserRow] = []
    for party in {each[key] for each in chain for key in ("trustor_user_id", "trustee_user_id")} - {trustor["id"]}:
        agent = find_user(conn, UserRef(id=party))
        if not is_active(agent):
            raise Forbidden("A party of a trust that this one was redelegated from is disabled.")
        agents.append(agent)
    if trust["project_id"] is None:
        return GrantedScope(trust=trust, trustor=trustor, agents=agents)
    # The roles are those of the trustor of the first trust.
    first_trustor = chain[-1]["trustor_user_id"] if chain else trustor["id"]
    granted = _project_scope(conn, first_trustor, PROJECTS.find(conn, trust["project_id"]))
    held = {role["id"] for role in granted.roles}
    if not held.issuperset(trust["role_ids"]):
        raise Forbidden("The trustor of this trust has lost a role of it.")
    wanted = roles.closure(roles.implications(conn), trust["role_ids"])
    chosen = [role for role in granted.roles if role["id"] in wanted]
    return GrantedScope(chosen, project=granted.project, trust=trust, trustor=trustor, agents=agents)


def _project_scope(conn: sa.Connection, user_id: str, project: ProjectRow | None) -> GrantedScope:
    if project is None or not project["enabled"]:
        raise refused()
    domain = DOMAINS.get(conn, project["domain_id"])
    roles = grants.effective_roles(conn, user_id, project["id"], project)
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
    trust, user = granted.trust, authenticated.user
    other_party: UserRow | None = None  # of the trust
    if trust is not None and granted.trustor is not None:
        trustee, trustor = authenticated.user, granted.trustor
        user, other_party = (trustor, trustee) if trust["impersonation"] else (trustee, trustor)
        if trust["expires_at"] is not None:
            expires = min(expires, trust["expires_at"])
    application_credential, rules = authenticated.application_credential, granted.access_rules
    if application_credential is not None and application_credential["expires_at"] is not None:
        expires = min(expires, application_credential["expires_at"])
    return Claims(
        user_id=user["id"],
        user_name=user["name"],
        user_domain_id=user["domain_id"],
        issued_at=seconds(issued_at),
        expires_at=seconds(expires),
        audit_ids=tuple(audit_ids),
        methods=authenticated.methods,
        project_id=granted.project["id"] if granted.project else None,
        project_name=granted.project["name"] if granted.project else None,
        project_domain_id=granted.project["domain_id"] if granted.project else None,
        domain_id=granted.domain["id"] if granted.domain else None,
        system=granted.system,
        roles=tuple((role["id"], role["name"]) for role in granted.roles),
        application_credential_id=application_credential["id"] if application_credential else None,
        restricted=application_credential is not None and not application_credential["unrestricted"],
        trust_id=trust["id"] if trust else None,
        trust_user_id=other_party["id"] if other_party else None,
        trust_user_domain_id=other_party["domain_id"] if other_party else None,
        impersonation=trust is not None and trust["impersonation"],
        access_rules=None if rules is None else as_claim(rules),
        trust_agents=tuple((agent["id"], agent["domain_id"]) for agent in granted.agents),
    )


def as_claim(rules: Iterable[AccessRuleRow]) -> AccessRules:
    """Return access rules as tokens carry them."""
    return tuple((rule["service"], rule["method"], rule["path"]) for rule in rules)


def is_scoped(claims: Claims) -> bool:
    """Return whether a token has a scope."""
    return claims.system or claims.project_id is not None or claims.domain_id is not None


def body(claims: Claims, details: Details, with_catalog: bool, urls: OwnURLs) -> dict[str, Any]:
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
        "expires_at": iso_from_seconds(claims.expires_at),
        "issued_at": iso_from_seconds(claims.issued_at),
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
            token["catalog"] = catalog_view.for_token(details.catalog, urls, claims)
    if claims.trust_id is not None:
        user_id, other_party_id = claims.user_id, claims.trust_user_id
        trustor, trustee = (user_id, other_party_id) if claims.impersonation else (other_party_id, user_id)
        token["OS-TRUST:trust"] = {
            "id": claims.trust_id,
            "impersonation": claims.impersonation,
            "trustee_user": {"id": trustee},
            "trustor_user": {"id": trustor},
        }
    if claims.application_credential_id is not None:
        token["application_credential"] = {
            "id": claims.application_credential_id,
            "name": details.application_credential_name,
            "restricted": claims.restricted,
        }
        if claims.access_rules is not None:
            rules = details.access_rules or ()
            token["application_credential"]["access_rules"] = [access_rules.described(rule) for rule in rules]
    return token

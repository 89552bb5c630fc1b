"""Rows as clients see them. The attributes that clients added come first, so that they cannot hide ours."""

from typing import Any

from micronova.embedded.identity.api.common import link, own_urls
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store.access_rules import described
from micronova.embedded.identity.store.kinds import (
    AccessRuleRow,
    ApplicationCredentialRow,
    CredentialRow,
    DomainRow,
    EndpointRow,
    GroupRow,
    LimitRow,
    ProjectRow,
    RegionRow,
    RegisteredLimitRow,
    RoleRow,
    ServiceRow,
    TrustRow,
    UserRow,
)
from micronova.http.paging import iso_from_seconds, iso_micros
from micronova.http.request import Request
from micronova.objects.clock import seconds


def domain(request: Request, row: DomainRow, tags: list[str]) -> dict[str, Any]:
    """Return a domain."""
    return {
        **row["extra"],
        "id": row["id"],
        "name": row["name"],
        "description": row["description"],
        "enabled": row["enabled"],
        "tags": tags,
        "options": row["options"],
        "links": {"self": link(request, "domains", row["id"])},
    }


def project(request: Request, row: ProjectRow, tags: list[str]) -> dict[str, Any]:
    """Return a project."""
    return {
        **row["extra"],
        "id": row["id"],
        "name": row["name"],
        "domain_id": row["domain_id"],
        "description": row["description"],
        "enabled": row["enabled"],
        "parent_id": row["parent_id"],
        "is_domain": False,
        "tags": tags,
        "options": row["options"],
        "links": {"self": link(request, "projects", row["id"])},
    }


def domain_as_project(request: Request, row: DomainRow, tags: list[str]) -> dict[str, Any]:
    """Return a domain in the form of a project."""
    links = {"self": link(request, "projects", row["id"])}
    return {
        **domain(request, row, tags),
        "domain_id": None,
        "parent_id": None,
        "is_domain": True,
        "links": links,
    }


def user(request: Request, row: UserRow) -> dict[str, Any]:
    """Return a user, without anything about its password."""
    view = {
        **row["extra"],
        "id": row["id"],
        "name": row["name"],
        "domain_id": row["domain_id"],
        "enabled": row["enabled"],
        "password_expires_at": None,
        "options": row["options"],
        "links": {"self": link(request, "users", row["id"])},
    }
    if row["default_project_id"] is not None:
        view["default_project_id"] = row["default_project_id"]
    return view


def group(request: Request, row: GroupRow) -> dict[str, Any]:
    """Return a group."""
    return {
        **row["extra"],
        "id": row["id"],
        "name": row["name"],
        "domain_id": row["domain_id"],
        "description": row["description"],
        "links": {"self": link(request, "groups", row["id"])},
    }


def role(request: Request, row: RoleRow) -> dict[str, Any]:
    """Return a role."""
    return {**_role(row), "links": {"self": link(request, "roles", row["id"])}}


def _role(row: RoleRow) -> dict[str, Any]:
    return {
        **row["extra"],
        "id": row["id"],
        "name": row["name"],
        "domain_id": row["domain_id"] or None,
        "description": row["description"],
        "options": row["options"],
    }


def short_role(request: Request, row: RoleRow) -> dict[str, Any]:
    """Return a role as a part of another object."""
    return {"id": row["id"], "name": row["name"], "links": {"self": link(request, "roles", row["id"])}}


def access_rule(request: Request, row: AccessRuleRow) -> dict[str, Any]:
    """Return an access rule."""
    return {**described(row), "links": {"self": link(request, "users", row["user_id"], "access_rules", row["id"])}}


def application_credential(
    request: Request, row: ApplicationCredentialRow, roles: list[RoleRow], rules: list[AccessRuleRow] | None
) -> dict[str, Any]:
    """Return an application credential, without its secret."""
    view = {
        "id": row["id"],
        "name": row["name"],
        "description": row["description"],
        "user_id": row["user_id"],
        "project_id": row["project_id"],
        "system": None,
        "expires_at": iso_micros(row["expires_at"]),
        "unrestricted": row["unrestricted"],
        "roles": [_role(each) for each in roles],
        "links": {"self": link(request, "users", row["user_id"], "application_credentials", row["id"])},
    }
    return view if rules is None else {**view, "access_rules": [described(each) for each in rules]}


def region(request: Request, row: RegionRow) -> dict[str, Any]:
    """Return a region."""
    return {
        **row["extra"],
        "id": row["id"],
        "description": row["description"],
        "parent_region_id": row["parent_region_id"],
        "links": {"self": link(request, "regions", row["id"])},
    }


def service(request: Request, row: ServiceRow) -> dict[str, Any]:
    """Return a service of the catalog."""
    view = {
        **row["extra"],
        "id": row["id"],
        "type": row["type"],
        "enabled": row["enabled"],
        "links": {"self": link(request, "services", row["id"])},
    }
    return view | {name: row[name] for name in ("name", "description") if row[name] is not None}


def endpoint(core: Core, request: Request, row: EndpointRow) -> dict[str, Any]:
    """Return an endpoint."""
    return {
        **row["extra"],
        "id": row["id"],
        "service_id": row["service_id"],
        "region_id": row["region_id"],
        "region": row["region_id"],
        "interface": row["interface"],
        "url": own_urls(core, request).fill(row["url"], row["interface"], {}),
        "enabled": row["enabled"],
        "links": {"self": link(request, "endpoints", row["id"])},
    }


def credential(request: Request, row: CredentialRow, blob: str) -> dict[str, Any]:
    """Return a credential with its blob, decrypted."""
    return {
        "id": row["id"],
        "user_id": row["user_id"],
        "project_id": row["project_id"],
        "type": row["type"],
        "blob": blob,
        "links": {"self": link(request, "credentials", row["id"])},
    }


def ec2_credential(request: Request, row: CredentialRow, *, access: Any, secret: Any, trust_id: Any) -> dict[str, Any]:
    """Return an EC2 credential with what its blob says."""
    return {
        "access": access,
        "secret": secret,
        "trust_id": trust_id,
        "user_id": row["user_id"],
        "tenant_id": row["project_id"],
        "links": {"self": link(request, "users", row["user_id"], "credentials", "OS-EC2", str(access))},
    }


def trust(request: Request, row: TrustRow) -> dict[str, Any]:
    """Return a trust without its roles, as lists show it."""
    expires_at = row["expires_at"]
    return {
        "id": row["id"],
        "trustor_user_id": row["trustor_user_id"],
        "trustee_user_id": row["trustee_user_id"],
        "project_id": row["project_id"],
        "impersonation": row["impersonation"],
        "expires_at": iso_from_seconds(seconds(expires_at)) if expires_at is not None else None,
        "remaining_uses": row["remaining_uses"],
        "redelegation_count": row["redelegation_count"],
        "redelegated_trust_id": row["redelegated_trust_id"],
        "deleted_at": None,
        "links": {"self": link(request, "OS-TRUST", "trusts", row["id"])},
    }


def trust_with_roles(request: Request, row: TrustRow, roles: list[RoleRow]) -> dict[str, Any]:
    """Return a trust with its roles."""
    return {
        **trust(request, row),
        "roles": [role(request, each) for each in roles],
        "roles_links": {
            "self": link(request, "OS-TRUST", "trusts", row["id"], "roles"),
            "next": None,
            "previous": None,
        },
    }


def registered_limit(request: Request, row: RegisteredLimitRow) -> dict[str, Any]:
    """Return a registered limit."""
    return {
        "id": row["id"],
        "service_id": row["service_id"],
        "region_id": row["region_id"] or None,
        "resource_name": row["resource_name"],
        "default_limit": row["default_limit"],
        "description": row["description"],
        "links": {"self": link(request, "registered_limits", row["id"])},
    }


def limit(request: Request, row: LimitRow) -> dict[str, Any]:
    """Return a limit of a project or a domain."""
    return {
        "id": row["id"],
        "project_id": row["project_id"] or None,
        "domain_id": row["domain_id"] or None,
        "service_id": row["service_id"],
        "region_id": row["region_id"] or None,
        "resource_name": row["resource_name"],
        "resource_limit": row["resource_limit"],
        "description": row["description"],
        "links": {"self": link(request, "limits", row["id"])},
    }

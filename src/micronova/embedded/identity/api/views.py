"""Rows as clients see them. The attributes that clients added come first, so that they cannot hide ours."""

from typing import Any

from micronova.embedded.identity import endpoint_urls
from micronova.embedded.identity.api.common import link, public_url
from micronova.embedded.identity.store.kinds import (
    AccessRuleRow,
    ApplicationCredentialRow,
    DomainRow,
    EndpointRow,
    GroupRow,
    ProjectRow,
    RegionRow,
    RoleRow,
    ServiceRow,
    UserRow,
)
from micronova.http.paging import iso_micros
from micronova.http.request import Request


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
    return {**_rule(row), "links": {"self": link(request, "users", row["user_id"], "access_rules", row["id"])}}


def _rule(row: AccessRuleRow) -> dict[str, Any]:
    return {"id": row["id"], "service": row["service"], "path": row["path"], "method": row["method"]}


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
    return view if rules is None else {**view, "access_rules": [_rule(each) for each in rules]}


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


def endpoint(request: Request, row: EndpointRow) -> dict[str, Any]:
    """Return an endpoint."""
    return {
        **row["extra"],
        "id": row["id"],
        "service_id": row["service_id"],
        "region_id": row["region_id"],
        "region": row["region_id"],
        "interface": row["interface"],
        "url": endpoint_urls.fill(row["url"], {"public_url": public_url(request)}),
        "enabled": row["enabled"],
        "links": {"self": link(request, "endpoints", row["id"])},
    }

"""The kinds of identity resources: the types of their rows, and access to the rows."""

from typing import Any, TypedDict, final

from micronova.embedded.identity import tables
from micronova.embedded.identity.store.rows import Rows

Options = dict[str, bool]
Extra = dict[str, Any]  # attributes that clients have added; they may have any JSON value


@final
class DomainRow(TypedDict):
    """A row of `domains`."""

    id: str
    name: str
    description: str | None
    enabled: bool
    options: Options
    extra: Extra
    created_at: int


@final
class ProjectRow(TypedDict):
    """A row of `projects`."""

    id: str
    domain_id: str
    parent_id: str
    name: str
    description: str | None
    enabled: bool
    options: Options
    extra: Extra
    created_at: int


class UserRow(TypedDict):
    """A row of `users`."""

    id: str
    domain_id: str
    name: str
    enabled: bool
    default_project_id: str | None
    password_hash: str | None
    options: Options
    extra: Extra
    created_at: int


class GroupRow(TypedDict):
    """A row of `groups`."""

    id: str
    domain_id: str
    name: str
    description: str | None
    extra: Extra
    created_at: int


class RoleRow(TypedDict):
    """A row of `roles`."""

    id: str
    name: str
    domain_id: str
    description: str | None
    options: Options
    extra: Extra
    created_at: int


class ApplicationCredentialRow(TypedDict):
    """A row of `application_credentials`."""

    id: str
    user_id: str
    project_id: str
    name: str
    description: str | None
    secret_hash: str
    role_ids: list[str]
    unrestricted: bool
    expires_at: int | None
    created_at: int


class AccessRuleRow(TypedDict):
    """A row of `access_rules`."""

    id: str
    user_id: str
    service: str
    path: str
    method: str
    created_at: int


class CredentialRow(TypedDict):
    """A row of `credentials`."""

    id: str
    user_id: str
    project_id: str | None
    type: str
    blob: bytes
    created_at: int


class TrustRow(TypedDict):
    """A row of `trusts`."""

    id: str
    trustor_user_id: str
    trustee_user_id: str
    project_id: str | None
    impersonation: bool
    role_ids: list[str]
    expires_at: int | None
    remaining_uses: int | None
    created_at: int
    redelegation_count: int
    redelegated_trust_id: str | None


class RegionRow(TypedDict):
    """A row of `regions`."""

    id: str
    description: str
    parent_region_id: str | None
    extra: Extra
    created_at: int


class ServiceRow(TypedDict):
    """A row of `services`."""

    id: str
    type: str
    name: str | None
    description: str | None
    enabled: bool
    extra: Extra
    created_at: int


class EndpointRow(TypedDict):
    """A row of `endpoints`."""

    id: str
    service_id: str
    region_id: str | None
    interface: str
    url: str
    enabled: bool
    extra: Extra
    created_at: int


class RegisteredLimitRow(TypedDict):
    """A row of `registered_limits`."""

    id: str
    service_id: str
    region_id: str
    resource_name: str
    default_limit: int
    description: str | None
    created_at: int


class LimitRow(TypedDict):
    """A row of `limits`."""

    id: str
    project_id: str
    domain_id: str
    service_id: str
    region_id: str
    resource_name: str
    resource_limit: int
    description: str | None
    created_at: int


CatalogEntry = tuple[ServiceRow, list[EndpointRow]]

DOMAINS: Rows[DomainRow] = Rows(tables.domains, "domain")
PROJECTS: Rows[ProjectRow] = Rows(tables.projects, "project")
USERS: Rows[UserRow] = Rows(tables.users, "user")
GROUPS: Rows[GroupRow] = Rows(tables.groups, "group")
ROLES: Rows[RoleRow] = Rows(tables.roles, "role")
APPLICATION_CREDENTIALS: Rows[ApplicationCredentialRow] = Rows(tables.application_credentials, "application credential")
ACCESS_RULES: Rows[AccessRuleRow] = Rows(tables.access_rules, "access rule")
CREDENTIALS: Rows[CredentialRow] = Rows(tables.credentials, "credential")
TRUSTS: Rows[TrustRow] = Rows(tables.trusts, "trust")
REGIONS: Rows[RegionRow] = Rows(tables.regions, "region")
SERVICES: Rows[ServiceRow] = Rows(tables.services, "service")
ENDPOINTS: Rows[EndpointRow] = Rows(tables.endpoints, "endpoint")
REGISTERED_LIMITS: Rows[RegisteredLimitRow] = Rows(tables.registered_limits, "registered limit")
LIMITS: Rows[LimitRow] = Rows(tables.limits, "limit")

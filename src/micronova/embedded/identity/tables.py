"""The schema of the identity service's own database.

Ids are uuids in hex without dashes; domains, regions and EC2 credentials may have other ids. Times are in microseconds.
`extra` contains the attributes that clients add to a resource beyond the declared ones.
"""

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, String, Text

metadata = sa.MetaData()

ID = String(64)


def _common() -> list[Column]:  # type: ignore[type-arg]
    return [
        Column("extra", sa.JSON, nullable=False, default=dict),
        Column("created_at", BigInteger, nullable=False),
    ]


domains = sa.Table(
    "domains",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("description", Text),
    Column("enabled", Boolean, nullable=False, default=True),
    Column("options", sa.JSON, nullable=False, default=dict),
    *_common(),
)

projects = sa.Table(
    "projects",
    metadata,
    Column("id", ID, primary_key=True),
    Column("domain_id", ID, ForeignKey("domains.id"), nullable=False),
    Column("parent_id", ID, nullable=False),  # another project, or the domain
    Column("name", String(255), nullable=False),
    Column("description", Text),
    Column("enabled", Boolean, nullable=False, default=True),
    Column("options", sa.JSON, nullable=False, default=dict),
    *_common(),
    sa.UniqueConstraint("domain_id", "name"),
    Index("projects_by_parent", "parent_id"),
)

# The owner is a project or a domain.
tags = sa.Table(
    "tags",
    metadata,
    Column("owner_id", ID, primary_key=True),
    Column("tag", String(255), primary_key=True),
)

users = sa.Table(
    "users",
    metadata,
    Column("id", ID, primary_key=True),
    Column("domain_id", ID, ForeignKey("domains.id"), nullable=False),
    Column("name", String(255), nullable=False),
    Column("enabled", Boolean, nullable=False, default=True),
    Column("default_project_id", ID),
    Column("password_hash", String(255)),  # NULL: the user cannot authenticate with a password
    Column("options", sa.JSON, nullable=False, default=dict),
    *_common(),
    sa.UniqueConstraint("domain_id", "name"),
)

groups = sa.Table(
    "groups",
    metadata,
    Column("id", ID, primary_key=True),
    Column("domain_id", ID, ForeignKey("domains.id"), nullable=False),
    Column("name", String(255), nullable=False),
    Column("description", Text),
    *_common(),
    sa.UniqueConstraint("domain_id", "name"),
)

memberships = sa.Table(
    "memberships",
    metadata,
    Column("user_id", ID, ForeignKey("users.id"), primary_key=True),
    Column("group_id", ID, ForeignKey("groups.id"), primary_key=True),
    Index("memberships_by_group", "group_id"),
)

roles = sa.Table(
    "roles",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(255), nullable=False),
    Column("domain_id", ID, nullable=False, default=""),  # "": no domain; not NULL, so that those names are unique too
    Column("description", Text),
    Column("options", sa.JSON, nullable=False, default=dict),
    *_common(),
    sa.UniqueConstraint("domain_id", "name"),
)

implied_roles = sa.Table(
    "implied_roles",
    metadata,
    Column("prior_id", ID, ForeignKey("roles.id"), primary_key=True),
    Column("implied_id", ID, ForeignKey("roles.id"), primary_key=True),
)

assignments = sa.Table(
    "assignments",
    metadata,
    Column("target_id", ID, primary_key=True),  # a project, a domain, or "system"
    Column("actor_id", ID, primary_key=True),  # a user or a group
    Column("role_id", ID, ForeignKey("roles.id"), primary_key=True),
    Column("inherited", Boolean, primary_key=True),  # for the projects below the target, not for the target itself
    Column("actor", String(8), nullable=False),  # "user" | "group"
    Column("target", String(8), nullable=False),  # "project" | "domain" | "system"
    Index("assignments_by_actor", "actor_id"),
    Index("assignments_by_role", "role_id"),
)

application_credentials = sa.Table(
    "application_credentials",
    metadata,
    Column("id", ID, primary_key=True),
    Column("user_id", ID, ForeignKey("users.id"), nullable=False),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("name", String(255), nullable=False),
    Column("description", Text),
    Column("secret_hash", String(255), nullable=False),
    Column("role_ids", sa.JSON, nullable=False),
    Column("unrestricted", Boolean, nullable=False, default=False),
    Column("expires_at", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    sa.UniqueConstraint("user_id", "name"),
    Index("application_credentials_by_project", "project_id"),
)

# The requests that application credentials may be limited to. A rule may be of several application
# credentials of its user.
access_rules = sa.Table(
    "access_rules",
    metadata,
    Column("id", ID, primary_key=True),
    Column("user_id", ID, ForeignKey("users.id", ondelete="CASCADE"), nullable=False),
    Column("service", String(64), nullable=False),
    Column("path", String(225), nullable=False),
    Column("method", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    sa.UniqueConstraint("user_id", "service", "path", "method"),
)

# Its column credential_id is the id of an application credential; elsewhere that is the id of a credential.
application_credential_rules = sa.Table(
    "application_credential_rules",
    metadata,
    Column("credential_id", ID, ForeignKey("application_credentials.id", ondelete="CASCADE"), primary_key=True),
    Column("rule_id", ID, ForeignKey("access_rules.id"), primary_key=True),
    Index("application_credentials_by_rule", "rule_id"),
)

regions = sa.Table(
    "regions",
    metadata,
    Column("id", String(255), primary_key=True),
    Column("description", Text, nullable=False, default=""),
    Column("parent_region_id", String(255)),
    *_common(),
)

services = sa.Table(
    "services",
    metadata,
    Column("id", ID, primary_key=True),
    Column("type", String(255), nullable=False),
    Column("name", String(255)),
    Column("description", Text),
    Column("enabled", Boolean, nullable=False, default=True),
    *_common(),
)

endpoints = sa.Table(
    "endpoints",
    metadata,
    Column("id", ID, primary_key=True),
    Column("service_id", ID, ForeignKey("services.id"), nullable=False),
    Column("region_id", String(255), ForeignKey("regions.id")),
    Column("interface", String(8), nullable=False),
    Column("url", Text, nullable=False),  # may contain placeholders, see endpoint_urls.py
    Column("enabled", Boolean, nullable=False, default=True),
    *_common(),
    Index("endpoints_by_service", "service_id"),
)

# How much of a resource a project may use unless it has a limit of its own. `region_id` is "" if no region is named; it
# is not NULL, so that these are unique too.
registered_limits = sa.Table(
    "registered_limits",
    metadata,
    Column("id", ID, primary_key=True),
    Column("service_id", ID, ForeignKey("services.id"), nullable=False),
    Column("region_id", String(255), nullable=False, default=""),
    Column("resource_name", String(255), nullable=False),
    Column("default_limit", sa.Integer, nullable=False),
    Column("description", Text),
    Column("created_at", BigInteger, nullable=False),
    sa.UniqueConstraint("service_id", "region_id", "resource_name"),
)

# The limits of single projects and domains; `project_id` or `domain_id` is "".
limits = sa.Table(
    "limits",
    metadata,
    Column("id", ID, primary_key=True),
    Column("project_id", ID, nullable=False, default=""),
    Column("domain_id", ID, nullable=False, default=""),
    Column("service_id", ID, nullable=False),
    Column("region_id", String(255), nullable=False, default=""),
    Column("resource_name", String(255), nullable=False),
    Column("resource_limit", sa.Integer, nullable=False),
    Column("description", Text),
    Column("created_at", BigInteger, nullable=False),
    sa.UniqueConstraint("project_id", "domain_id", "service_id", "region_id", "resource_name"),
    sa.ForeignKeyConstraint(
        ["service_id", "region_id", "resource_name"],
        ["registered_limits.service_id", "registered_limits.region_id", "registered_limits.resource_name"],
    ),
    Index("limits_by_resource", "service_id", "region_id", "resource_name"),
    Index("limits_by_domain", "domain_id"),
)

# Secrets that users keep here for other programs.
credentials = sa.Table(
    "credentials",
    metadata,
    Column("id", ID, primary_key=True),  # of EC2 credentials: SHA-256 of the access key
    Column("user_id", ID, ForeignKey("users.id"), nullable=False),
    Column("project_id", ID),
    Column("type", String(255), nullable=False),
    Column("blob", sa.LargeBinary, nullable=False),  # encrypted
    Column("created_at", BigInteger, nullable=False),
    Index("credentials_by_user", "user_id"),
    Index("credentials_by_project", "project_id"),
)

trusts = sa.Table(
    "trusts",
    metadata,
    Column("id", ID, primary_key=True),
    Column("trustor_user_id", ID, ForeignKey("users.id"), nullable=False),
    Column("trustee_user_id", ID, ForeignKey("users.id"), nullable=False),
    Column(
        "project_id", ID, ForeignKey("projects.id")
    ),  # null: no roles are delegated, only the identity of the trustor
    Column("impersonation", Boolean, nullable=False),  # whether the trustee appears as the trustor
    Column("role_ids", sa.JSON, nullable=False),
    Column("expires_at", BigInteger),
    Column("remaining_uses", sa.Integer),
    Column("created_at", BigInteger, nullable=False),
    Column("redelegation_count", sa.Integer, nullable=False, server_default="0"),  # how often it can be redelegated
    Column("redelegated_trust_id", ID),  # the trust that it was redelegated from; it is deleted with that one
    Index("trusts_by_trustor", "trustor_user_id"),
    Index("trusts_by_trustee", "trustee_user_id"),
    Index("trusts_by_project", "project_id"),
    Index("trusts_by_origin", "redelegated_trust_id"),
)

# The contents of http.tokens.Revocations, so that they survive a restart. http.revocation_subjects lists the subjects.
# All but `audit:ID` revoke the tokens that were issued at or before `at`.
revocations = sa.Table(
    "revocations",
    metadata,
    Column("subject", String(200), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),  # by then every token that it revokes has expired
    Index("revocations_by_at", "at"),
    Index("revocations_by_expiry", "expires_at"),
)

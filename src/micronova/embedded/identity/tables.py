"""The schema of the identity service's own database.

Ids are uuids in hex without dashes; only domains and regions may have other ids. Times are in microseconds. `extra`
contains the attributes that clients add to a resource beyond the declared ones.
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
    Column("url", Text, nullable=False),  # may contain $(public_url)s and $(project_id)s
    Column("enabled", Boolean, nullable=False, default=True),
    *_common(),
    Index("endpoints_by_service", "service_id"),
)

# The contents of http.tokens.Revocations, so that they survive a restart. `audit:ID` revokes one token. Any other
# subject (`user:ID`, `project:ID`, …) revokes the tokens that were issued at or before `at`.
revocations = sa.Table(
    "revocations",
    metadata,
    Column("subject", String(200), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),  # by then every token that it revokes has expired
    Index("revocations_by_at", "at"),
    Index("revocations_by_expiry", "expires_at"),
)

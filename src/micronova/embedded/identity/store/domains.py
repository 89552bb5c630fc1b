"""Domains."""

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity.attributes import (
    DomainAttributes,
    DomainChanges,
    given,
    merged_options,
)
from micronova.embedded.identity.store.immutable import refuse_immutable
from micronova.embedded.identity.store.kinds import DOMAINS, DomainRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.store.tags import set_tags
from micronova.embedded.identity.store.trusts import delete_where as delete_trusts
from micronova.embedded.identity.tables import (
    application_credentials,
    assignments,
    credentials,
    domains,
    groups,
    implied_roles,
    limits,
    memberships,
    projects,
    roles,
    tags,
    trusts,
    users,
)
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import Forbidden

FILTERS = ("name", "enabled")


def listing(conn: sa.Connection, query: Query, only: str | None, page: Page) -> Listed[DomainRow]:
    """Return a page of domains; with `only`, at most the domain with this id."""
    conditions = DOMAINS.filters(query, FILTERS)
    if only is not None:
        conditions.append(domains.c.id == only)
    return DOMAINS.page(conn, conditions, page)


def create(
    conn: sa.Connection, domain_id: str, wanted: DomainAttributes, extra: Mapping[str, Any], now: int
) -> DomainRow:
    """Create a domain."""
    row: DomainRow = {
        "id": domain_id,
        "name": wanted.name,
        "description": wanted.description,
        "enabled": wanted.enabled,
        "options": merged_options({}, wanted.options),
        "extra": dict(extra),
        "created_at": now,
    }
    DOMAINS.insert(conn, row, DOMAINS.name_taken(row))
    set_tags(conn, domain_id, wanted.tags)
    return row


def change(
    conn: sa.Connection, time: RevocationTime, domain_id: str, wanted: DomainChanges, extra: Mapping[str, Any]
) -> tuple[DomainRow, list[Subject]]:
    """Change a domain; disabling it revokes the tokens of its users and for its projects."""
    row = DOMAINS.get(conn, domain_id)
    refuse_immutable("domain", row, wanted.options)
    values = given(wanted, "name", "description", "enabled")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    changed = DOMAINS.update(conn, row, values, DOMAINS.name_taken({**row, **values}))
    if isinstance(wanted.tags, list):
        set_tags(conn, domain_id, wanted.tags)
    subjects = [revocation_subjects.domain(domain_id)] if row["enabled"] and not changed["enabled"] else []
    return changed, revoke(conn, time, subjects)


def delete(conn: sa.Connection, time: RevocationTime, domain_id: str) -> tuple[None, list[Subject]]:
    """Delete a disabled domain with everything in it."""
    row = DOMAINS.get(conn, domain_id)
    refuse_immutable("domain", row)
    if row["enabled"]:
        raise Forbidden("Cannot delete a domain that is enabled: disable it first.")
    inside = {table: sa.select(table.c.id).where(table.c.domain_id == domain_id) for table in (projects, users, groups)}
    own_roles = sa.select(roles.c.id).where(roles.c.domain_id == domain_id)
    for condition in (
        assignments.c.target_id == domain_id,
        assignments.c.target_id.in_(inside[projects]),
        assignments.c.actor_id.in_(inside[users]),
        assignments.c.actor_id.in_(inside[groups]),
        assignments.c.role_id.in_(own_roles),
    ):
        conn.execute(assignments.delete().where(condition))
    for table in (application_credentials, credentials):
        of_domain = table.c.user_id.in_(inside[users]) | table.c.project_id.in_(inside[projects])
        conn.execute(table.delete().where(of_domain))
    delete_trusts(
        conn,
        trusts.c.trustor_user_id.in_(inside[users])
        | trusts.c.trustee_user_id.in_(inside[users])
        | trusts.c.project_id.in_(inside[projects]),
    )
    conn.execute(limits.delete().where((limits.c.domain_id == domain_id) | limits.c.project_id.in_(inside[projects])))
    conn.execute(
        memberships.delete().where(
            memberships.c.user_id.in_(inside[users]) | memberships.c.group_id.in_(inside[groups])
        )
    )
    conn.execute(tags.delete().where((tags.c.owner_id == domain_id) | tags.c.owner_id.in_(inside[projects])))
    for table in (projects, users, groups):
        conn.execute(table.delete().where(table.c.domain_id == domain_id))
    conn.execute(
        implied_roles.delete().where(
            implied_roles.c.prior_id.in_(own_roles) | implied_roles.c.implied_id.in_(own_roles)
        )
    )
    conn.execute(roles.delete().where(roles.c.domain_id == domain_id))
    conn.execute(domains.delete().where(domains.c.id == domain_id))
    return None, revoke(conn, time, [revocation_subjects.domain(domain_id)])


def names(conn: sa.Connection, ids: Iterable[str | None]) -> dict[str, str]:
    """Return the names of domains by id."""
    return {key: row["name"] for key, row in DOMAINS.by_ids(conn, ids).items()}

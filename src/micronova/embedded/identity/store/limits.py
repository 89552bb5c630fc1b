"""Registered limits, which are defaults for all projects, and the limits of single projects and domains.

A limit belongs to the registered limit of the same service, region and resource. While it exists, the registered limit
stays as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity.store.kinds import (
    DOMAINS,
    LIMITS,
    PROJECTS,
    REGIONS,
    REGISTERED_LIMITS,
    SERVICES,
    LimitRow,
    RegisteredLimitRow,
)
from micronova.embedded.identity.store.projects import ids_in_domain
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import limits, registered_limits
from micronova.objects.errors import Forbidden, Invalid

FILTERS = ("service_id", "region_id", "resource_name")
_DUPLICATE = "There is a {noun} for this service, region and resource already."


# --- registered limits ---


def list_registered(conn: sa.Connection, query: Query, page: Page) -> Listed[RegisteredLimitRow]:
    """Return a page of registered limits."""
    return REGISTERED_LIMITS.page(conn, REGISTERED_LIMITS.filters(query, FILTERS), page)


def create_registered(conn: sa.Connection, wanted: Sequence[RegisteredLimitRow]) -> list[RegisteredLimitRow]:
    """Create registered limits, all or none."""
    for row in wanted:
        _check_service_and_region(conn, row, "registered_limit")
    message = _DUPLICATE.format(noun="registered limit")
    return [REGISTERED_LIMITS.insert(conn, row, message) for row in wanted]


def change_registered(conn: sa.Connection, limit_id: str, values: Mapping[str, Any]) -> RegisteredLimitRow:
    """Change a registered limit; raise Forbidden if there are limits of it."""
    _check_service_and_region(conn, values, "registered_limit")
    row = _unused(conn, limit_id)
    return REGISTERED_LIMITS.update(conn, row, values, _DUPLICATE.format(noun="registered limit"))


def delete_registered(conn: sa.Connection, limit_id: str) -> None:
    """Delete a registered limit; raise Forbidden if there are limits of it."""
    _unused(conn, limit_id)
    conn.execute(registered_limits.delete().where(registered_limits.c.id == limit_id))


def _unused(conn: sa.Connection, limit_id: str) -> RegisteredLimitRow:
    row = REGISTERED_LIMITS.get(conn, limit_id)
    if LIMITS.first(conn, *(limits.c[name] == row[name] for name in FILTERS)) is not None:  # type: ignore[literal-required]
        raise Forbidden(f"Cannot change or delete the registered limit {limit_id}: delete the limits of it first.")
    return row


# --- limits ---


def list_limits(
    conn: sa.Connection, query: Query, page: Page, project_id: str | None, domain_id: str | None
) -> Listed[LimitRow]:
    """Return a page of limits: all, those of a project ("": of none), or those of a domain and its projects."""
    conditions = LIMITS.filters(query, (*FILTERS, "project_id", "domain_id"))
    if project_id is not None:
        conditions += [limits.c.project_id == project_id, limits.c.project_id != ""]
    if domain_id is not None:
        conditions.append((limits.c.domain_id == domain_id) | limits.c.project_id.in_(ids_in_domain(domain_id)))
    return LIMITS.page(conn, conditions, page)


def find(conn: sa.Connection, limit_id: str) -> tuple[LimitRow | None, str | None]:
    """Return a limit, if it exists, and the domain of its project, or its own."""
    row = LIMITS.find(conn, limit_id)
    if row is None or row["domain_id"]:
        return row, row["domain_id"] if row else None
    project = PROJECTS.find(conn, row["project_id"])
    return row, project["domain_id"] if project else None


def create(conn: sa.Connection, wanted: Sequence[LimitRow]) -> list[LimitRow]:
    """Create limits, all or none; raise Forbidden if one has no registered limit."""
    made = []
    for row in wanted:
        _check_service_and_region(conn, row, "limit")
        if row["project_id"] and DOMAINS.find(conn, row["project_id"]) is not None:
            row = {**row, "domain_id": row["project_id"], "project_id": ""}  # a domain in the form of a project
        if row["project_id"] and PROJECTS.find(conn, row["project_id"]) is None:
            raise _unknown("limit", "project_id", row["project_id"])
        if row["domain_id"] and DOMAINS.find(conn, row["domain_id"]) is None:
            raise _unknown("limit", "domain_id", row["domain_id"])
        of_same = (registered_limits.c[name] == row[name] for name in FILTERS)  # type: ignore[literal-required]
        if REGISTERED_LIMITS.first(conn, *of_same) is None:
            raise Forbidden("There is no registered limit for this service, region and resource: create it first.")
        made.append(LIMITS.insert(conn, row, _DUPLICATE.format(noun="limit of the project or domain")))
    return made


def change(conn: sa.Connection, limit_id: str, values: Mapping[str, Any]) -> LimitRow:
    """Change a limit."""
    return LIMITS.update(conn, LIMITS.get(conn, limit_id), values)


def delete(conn: sa.Connection, limit_id: str) -> None:
    """Delete a limit."""
    LIMITS.get(conn, limit_id)
    conn.execute(limits.delete().where(limits.c.id == limit_id))


def _check_service_and_region(conn: sa.Connection, row: Mapping[str, Any], noun: str) -> None:
    """Raise Invalid if the service or the region does not exist."""
    if "service_id" in row and SERVICES.find(conn, row["service_id"]) is None:
        raise _unknown(noun, "service_id", row["service_id"])
    if row.get("region_id") and REGIONS.find(conn, row["region_id"]) is None:
        raise _unknown(noun, "region_id", row["region_id"])


def _unknown(noun: str, name: str, value: str) -> Invalid:
    return Invalid(f"Invalid input for field/attribute {noun}.{name}: there is no {name.removesuffix('_id')} {value}.")

"""Projects, which form a tree below each domain."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.query import Query
from micronova.embedded.identity.attributes import MAX_TAGS, ProjectAttributes, ProjectChanges, given, merged_options
from micronova.embedded.identity.store.immutable import refuse_immutable, refuse_other_domain
from micronova.embedded.identity.store.kinds import DOMAINS, PROJECTS, ProjectRow
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.store.tags import set_tags, tags_of
from micronova.embedded.identity.store.trusts import delete_where as delete_trusts
from micronova.embedded.identity.tables import (
    application_credentials,
    assignments,
    credentials,
    limits,
    projects,
    tags,
    trusts,
)
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import Forbidden, Invalid, NotFound

FILTERS = ("name", "domain_id", "enabled", "parent_id")
DEPTH = 5  # levels of projects below a domain


def by_name(conn: sa.Connection, domain_id: str, name: str) -> ProjectRow | None:
    """Return the project with this name in a domain, or None."""
    return PROJECTS.first(conn, projects.c.domain_id == domain_id, projects.c.name == name)


def listing(
    conn: sa.Connection,
    query: Query,
    domain_id: str | None,
    page: Page,
    only: Sequence[str] | None = None,
) -> tuple[Listed[ProjectRow], dict[str, list[str]]]:
    """Return a page of projects with their tags: all, or those of a domain. With `only`, those with these ids."""
    conditions = PROJECTS.filters(query, FILTERS) + _tag_conditions(query)
    if domain_id is not None:
        conditions.append(projects.c.domain_id == domain_id)
    if only is not None:
        found: list[ProjectRow] = []
        for part in chunks(only):
            found += PROJECTS.page(conn, [*conditions, projects.c.id.in_(part)], Page()).rows
        result = Listed(found)
    else:
        result = PROJECTS.page(conn, conditions, page)
    return result, tags_of(conn, [row["id"] for row in result.rows])


def create(
    conn: sa.Connection, project_id: str, wanted: ProjectAttributes, extra: Mapping[str, Any], now: int
) -> ProjectRow:
    """Create a project in the domain `wanted.domain_id`, which must be set."""
    assert wanted.domain_id is not None
    if DOMAINS.find(conn, wanted.domain_id) is None:
        raise Invalid(f"Invalid input for field/attribute project.domain_id: there is no domain {wanted.domain_id}.")
    parent_id = wanted.parent_id or wanted.domain_id
    if parent_id != wanted.domain_id:
        parent = PROJECTS.find(conn, parent_id)
        if parent is None or parent["domain_id"] != wanted.domain_id:
            raise Invalid(
                f"Invalid input for field/attribute project.parent_id: there is no project {parent_id} in the domain."
            )
        if not parent["enabled"]:
            raise Forbidden(f"The parent project {parent_id} is disabled.")
        if len(ancestors(conn, parent)) + 2 > DEPTH:
            raise Forbidden(f"Projects may be nested {DEPTH} deep.")
    row: ProjectRow = {
        "id": project_id,
        "domain_id": wanted.domain_id,
        "parent_id": parent_id,
        "name": wanted.name,
        "description": wanted.description,
        "enabled": wanted.enabled,
        "options": merged_options({}, wanted.options),
        "extra": dict(extra),
        "created_at": now,
    }
    PROJECTS.insert(conn, row, PROJECTS.name_taken(row))
    set_tags(conn, project_id, wanted.tags)
    return row


def change(
    conn: sa.Connection, time: RevocationTime, project_id: str, wanted: ProjectChanges, extra: Mapping[str, Any]
) -> tuple[tuple[ProjectRow, list[str]], list[Subject]]:
    """Change a project; return it with its tags. Disabling it revokes the tokens for it."""
    row = PROJECTS.get(conn, project_id)
    refuse_immutable("project", row, wanted.options)
    refuse_other_domain("project", row, wanted.domain_id)
    if given(wanted, "parent_id").get("parent_id", row["parent_id"]) != row["parent_id"]:
        raise Forbidden("A project stays below its parent: parent_id cannot be changed.")
    values = given(wanted, "name", "description", "enabled")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    if row["enabled"] and values.get("enabled") is False:
        below = sa.select(projects.c.id).where(projects.c.parent_id == project_id, projects.c.enabled.is_(True))
        if conn.execute(below.limit(1)).first():
            raise Forbidden(f"The project {project_id} has enabled projects below it: disable them first.")
    changed = PROJECTS.update(conn, row, values, PROJECTS.name_taken({**row, **values}))
    if isinstance(wanted.tags, list):
        set_tags(conn, project_id, wanted.tags)
    subjects = [revocation_subjects.project(project_id)] if row["enabled"] and not changed["enabled"] else []
    return (changed, tags_of(conn, [project_id])[project_id]), revoke(conn, time, subjects)


def delete(conn: sa.Connection, time: RevocationTime, project_id: str) -> tuple[None, list[Subject]]:
    """Delete a project; raise Forbidden if there are projects below it."""
    row = PROJECTS.get(conn, project_id)
    refuse_immutable("project", row)
    if conn.execute(sa.select(projects.c.id).where(projects.c.parent_id == project_id).limit(1)).first():
        raise Forbidden(f"Cannot delete the project {project_id}: there are projects below it.")
    conn.execute(assignments.delete().where(assignments.c.target_id == project_id))
    conn.execute(application_credentials.delete().where(application_credentials.c.project_id == project_id))
    conn.execute(credentials.delete().where(credentials.c.project_id == project_id))
    delete_trusts(conn, trusts.c.project_id == project_id)
    conn.execute(limits.delete().where(limits.c.project_id == project_id))
    conn.execute(tags.delete().where(tags.c.owner_id == project_id))
    conn.execute(projects.delete().where(projects.c.id == project_id))
    return None, revoke(conn, time, [revocation_subjects.project(project_id)])


def ancestors(conn: sa.Connection, project: ProjectRow) -> list[ProjectRow]:
    """Return the projects above this one, nearest first."""
    found: list[ProjectRow] = []
    row: ProjectRow | None = project
    while row is not None and row["parent_id"] != row["domain_id"] and len(found) < DEPTH:
        row = PROJECTS.find(conn, row["parent_id"])
        if row is not None:
            found.append(row)
    return found


def descendants(conn: sa.Connection, project_id: str) -> list[ProjectRow]:
    """Return the projects below this one, level by level."""
    found: list[ProjectRow] = []
    level = [project_id]
    while level:
        below: list[ProjectRow] = []
        for part in chunks(level):
            below += PROJECTS.all(conn, projects.c.parent_id.in_(part))
        found += below
        level = [row["id"] for row in below]
    return found


def targets_above(conn: sa.Connection, project: ProjectRow) -> list[str]:
    """Return the ids of the domain and the projects above this one: it has what is inherited from grants on them."""
    return [project["domain_id"], *(row["id"] for row in ancestors(conn, project))]


def below(conn: sa.Connection, target: str, target_id: str) -> list[str]:
    """Return the ids of the projects below a project or a domain, which inherit from grants on it."""
    if target == "project":
        return [row["id"] for row in descendants(conn, target_id)]
    return list(conn.execute(ids_in_domain(target_id)).scalars())


def ids_in_domain(domain_id: str) -> sa.Select[str]:
    """Return the query of the ids of a domain's projects."""
    return sa.select(projects.c.id).where(projects.c.domain_id == domain_id)


def no_tag(tag: str) -> NotFound:
    """Return the error for a tag that a project does not have."""
    return NotFound(f"Could not find project tag: {tag[:64]}.")


def add_tag(conn: sa.Connection, project_id: str, tag: str) -> None:
    """Add a tag; raise Invalid if the project has it or has too many."""
    present = _changeable_tags(conn, project_id)
    if tag in present:
        raise Invalid(f"The project has the tag {tag} already.")
    if len(present) >= MAX_TAGS:
        raise Invalid(f"A project may have {MAX_TAGS} tags.")
    conn.execute(tags.insert().values(owner_id=project_id, tag=tag))


def replace_tags(conn: sa.Connection, project_id: str, wanted: Sequence[str]) -> list[str]:
    """Replace all tags and return them sorted."""
    _changeable_tags(conn, project_id)
    set_tags(conn, project_id, wanted)
    return sorted(wanted)


def remove_tag(conn: sa.Connection, project_id: str, tag: str) -> None:
    """Remove a tag; raise NotFound if the project does not have it."""
    _changeable_tags(conn, project_id)
    if conn.execute(tags.delete().where(tags.c.owner_id == project_id, tags.c.tag == tag)).rowcount == 0:
        raise no_tag(tag)


def _changeable_tags(conn: sa.Connection, project_id: str) -> list[str]:
    """Return the tags of a project; raise Forbidden if it is immutable."""
    refuse_immutable("project", PROJECTS.get(conn, project_id))
    return tags_of(conn, [project_id])[project_id]


def _tag_conditions(query: Query) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of tags= (all of them), tags-any=, not-tags= and not-tags-any=."""

    def has(tag: str) -> sa.ColumnElement[bool]:
        return sa.exists().where(tags.c.owner_id == projects.c.id, tags.c.tag == tag)

    def every(name: str) -> list[sa.ColumnElement[bool]]:
        return [has(tag) for tag in query[name][-1].split(",")[:MAX_TAGS]]

    conditions: list[sa.ColumnElement[bool]] = []
    if "tags" in query:
        conditions += every("tags")
    if "tags-any" in query:
        conditions.append(sa.or_(*every("tags-any")))
    if "not-tags" in query:
        conditions.append(sa.not_(sa.and_(*every("not-tags"))))
    if "not-tags-any" in query:
        conditions.append(sa.not_(sa.or_(*every("not-tags-any"))))
    return conditions

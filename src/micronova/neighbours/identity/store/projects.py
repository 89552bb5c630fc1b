"""Projects: a tree below each domain."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import ProjectAttributes, ProjectChanges, given, merged_options
from micronova.neighbours.identity.store import domains, rows
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import application_credentials, assignments, projects, tags
from micronova.neighbours.identity.tables import domains as domains_table
from micronova.objects.errors import Forbidden, Invalid

FILTERS = ("name", "domain_id", "enabled", "parent_id")
DEPTH = 5  # of projects below a domain


def get(conn: sa.Connection, project_id: str) -> Row:
    """Return a project."""
    return rows.get(conn, projects, "project", project_id)


def by_name(conn: sa.Connection, domain_id: str, name: str) -> Row | None:
    """Return the project of this name in a domain."""
    chosen = projects.select().where(projects.c.domain_id == domain_id, projects.c.name == name)
    return conn.execute(chosen).mappings().first()


def listing(
    conn: sa.Connection,
    query: Mapping[str, list[str]],
    domain_id: str | None,
    page: Page,
    only: Sequence[str] | None = None,
) -> tuple[Listed, dict[str, list[str]]]:
    """Return projects with their tags: those of a domain, and `only` these, where that is given."""
    conditions = rows.filters(projects, query, FILTERS) + _tag_conditions(query)
    if domain_id is not None:
        conditions.append(projects.c.domain_id == domain_id)
    if only is not None:
        found: list[Row] = []
        for part in rows.parts(only):
            found += rows.listed(conn, projects, [*conditions, projects.c.id.in_(part)], Page()).rows
        result = Listed(found)
    else:
        result = rows.listed(conn, projects, conditions, page)
    return result, domains.tags_of(conn, [row["id"] for row in result.rows])


def create(conn: sa.Connection, project_id: str, wanted: ProjectAttributes, extra: Mapping[str, Any], now: int) -> Row:
    """Make a project; `wanted.domain_id` is set."""
    assert wanted.domain_id is not None
    if rows.find(conn, domains_table, wanted.domain_id) is None:
        raise Invalid(f"Invalid input for field/attribute project.domain_id: there is no domain {wanted.domain_id}.")
    parent_id = wanted.parent_id or wanted.domain_id
    if parent_id != wanted.domain_id:
        parent = rows.find(conn, projects, parent_id)
        if parent is None or parent["domain_id"] != wanted.domain_id:
            raise Invalid(
                f"Invalid input for field/attribute project.parent_id: there is no project {parent_id} in the domain."
            )
        if not parent["enabled"]:
            raise Forbidden(f"The parent project {parent_id} is disabled.")
        if len(ancestors(conn, parent)) + 2 > DEPTH:
            raise Forbidden(f"Projects may be nested {DEPTH} deep.")
    row = {
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
    with rows.unique(f"There is a project named {wanted.name} in the domain already."):
        conn.execute(projects.insert().values(row))
    domains.set_tags(conn, project_id, wanted.tags)
    return row


def change(
    conn: sa.Connection, project_id: str, wanted: ProjectChanges, extra: Mapping[str, Any], moment: Moment
) -> tuple[Row, list[str], list[str]]:
    """Change a project and return it, its tags, and whose tokens that voids (of a project that is disabled)."""
    row = get(conn, project_id)
    domains.refuse_immutable("project", row, wanted.options)
    if given(wanted, "domain_id").get("domain_id", row["domain_id"]) != row["domain_id"]:
        raise Invalid("Invalid input for field/attribute project.domain_id: a project stays in its domain.")
    if given(wanted, "parent_id").get("parent_id", row["parent_id"]) != row["parent_id"]:
        raise Forbidden("A project stays below its parent: parent_id cannot be changed.")
    values = given(wanted, "name", "description", "enabled")
    values["options"] = merged_options(row["options"], wanted.options)
    values["extra"] = {**row["extra"], **extra}
    if row["enabled"] and values.get("enabled") is False:
        below = sa.select(projects.c.id).where(projects.c.parent_id == project_id, projects.c.enabled.is_(True))
        if conn.execute(below.limit(1)).first():
            raise Forbidden(f"The project {project_id} has enabled projects below it: disable them first.")
    changed = rows.update(conn, projects, row, values, f"There is a project named {wanted.name} in the domain already.")
    if isinstance(wanted.tags, list):
        domains.set_tags(conn, project_id, wanted.tags)
    subjects = [f"project:{project_id}"] if row["enabled"] and not changed["enabled"] else []
    return changed, domains.tags_of(conn, [project_id])[project_id], void(conn, moment, subjects)


def delete(conn: sa.Connection, project_id: str, moment: Moment) -> list[str]:
    """Delete a project that has none below it."""
    row = get(conn, project_id)
    domains.refuse_immutable("project", row)
    if conn.execute(sa.select(projects.c.id).where(projects.c.parent_id == project_id).limit(1)).first():
        raise Forbidden(f"Cannot delete the project {project_id}: there are projects below it.")
    conn.execute(assignments.delete().where(assignments.c.target_id == project_id))
    conn.execute(application_credentials.delete().where(application_credentials.c.project_id == project_id))
    conn.execute(tags.delete().where(tags.c.owner_id == project_id))
    conn.execute(projects.delete().where(projects.c.id == project_id))
    return void(conn, moment, [f"project:{project_id}"])


def ancestors(conn: sa.Connection, project: Row) -> list[Row]:
    """Return the projects above this one, nearest first."""
    found: list[Row] = []
    row: Row | None = project
    while row is not None and row["parent_id"] != row["domain_id"] and len(found) < DEPTH:
        row = rows.find(conn, projects, row["parent_id"])
        if row is not None:
            found.append(row)
    return found


def descendants(conn: sa.Connection, project_id: str) -> list[Row]:
    """Return the projects below this one, level by level."""
    found: list[Row] = []
    level = [project_id]
    while level:
        below: list[Row] = []
        for part in rows.parts(level):
            below += conn.execute(
                projects.select().where(projects.c.parent_id.in_(part)).order_by(projects.c.created_at)
            ).mappings()
        found += below
        level = [row["id"] for row in below]
    return found


def add_tag(conn: sa.Connection, project_id: str, tag: str) -> None:
    """Add one tag."""
    present = _changeable_tags(conn, project_id)
    if tag in present:
        raise Invalid(f"The project has the tag {tag} already.")
    if len(present) >= 80:
        raise Invalid("A project may have 80 tags.")
    conn.execute(tags.insert().values(owner_id=project_id, tag=tag))


def replace_tags(conn: sa.Connection, project_id: str, wanted: Sequence[str]) -> list[str]:
    """Replace all tags and return them in the order of lists."""
    _changeable_tags(conn, project_id)
    domains.set_tags(conn, project_id, wanted)
    return sorted(wanted)


def remove_tag(conn: sa.Connection, project_id: str, tag: str) -> bool:
    """Remove one tag; say whether it was there."""
    _changeable_tags(conn, project_id)
    gone = conn.execute(tags.delete().where(tags.c.owner_id == project_id, tags.c.tag == tag))
    return gone.rowcount > 0


def _changeable_tags(conn: sa.Connection, project_id: str) -> list[str]:
    """Return the tags of a project that may be changed."""
    domains.refuse_immutable("project", get(conn, project_id))
    return domains.tags_of(conn, [project_id])[project_id]


def _tag_conditions(query: Mapping[str, list[str]]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of tags= (all of them), tags-any=, not-tags= and not-tags-any=."""

    def has(tag: str) -> sa.ColumnElement[bool]:
        return sa.exists().where(tags.c.owner_id == projects.c.id, tags.c.tag == tag)

    def every(name: str) -> list[sa.ColumnElement[bool]]:
        return [has(tag) for tag in query[name][-1].split(",")[:80]]

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

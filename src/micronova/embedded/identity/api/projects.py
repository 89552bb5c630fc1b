"""/v3/projects, their tags, and the projects above and below a project."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity import attributes
from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import (
    V3,
    checked_route,
    collection,
    default_domain,
    domain_target,
    link,
    page,
    route,
)
from micronova.embedded.identity.attributes import (
    DomainAttributes,
    DomainChanges,
    ProjectAttributes,
    ProjectChanges,
    Tags,
    given,
)
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import domains, projects
from micronova.embedded.identity.store.kinds import DOMAINS, PROJECTS, DomainRow, ProjectRow
from micronova.embedded.identity.store.rows import flag
from micronova.embedded.identity.store.tags import tags_of
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import Invalid


class ProjectBody(Struct):
    """A body that holds a project."""

    project: dict[str, Any]


class TagsBody(Struct, forbid_unknown_fields=True):
    """A body that holds all tags of a project."""

    tags: Tags


class ProjectsAPI:
    """Projects."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/projects", f"{V3}/projects/{{project_id}}"
        tags, tag = f"{one}/tags", f"{one}/tags/{{tag}}"

        return [
            route("GET", path, self.index, "list_projects"),
            checked_route("POST", path, self.create, "create_project", status=201, body=ProjectBody),
            checked_route("GET", one, self.show, "get_project"),
            checked_route("PATCH", one, self.update, "update_project", body=ProjectBody),
            checked_route("DELETE", one, self.delete, "delete_project", status=204),
            checked_route("GET", tags, self.list_tags, "list_project_tags"),
            checked_route("PUT", tags, self.replace_tags, "update_project_tags", body=TagsBody),
            checked_route("DELETE", tags, self.delete_tags, "delete_project_tags", status=204),
            checked_route("GET", tag, self.check_tag, "get_project_tag", status=204),
            checked_route("PUT", tag, self.add_tag, "create_project_tag", status=201),
            checked_route("DELETE", tag, self.remove_tag, "delete_project_tag", status=204),
        ]

    async def _authorize(self, request: Request, project_id: str) -> ProjectRow:
        row = await self._core.database.read(PROJECTS.find, project_id)
        request.authorize(domain_target(row, project_id=project_id))
        if row is None:
            raise PROJECTS.not_found(project_id)
        return row

    async def index(self, request: Request) -> dict[str, Any]:
        """List projects; with is_domain=true, the domains in the form of projects."""
        if flag(request.raw_query, "is_domain"):
            only = request.context.domain_id
            domains_listed = await self._core.database.read(domains.listing, request.raw_query, only, page(request))
            tags = await self._tags(domains_listed.rows)
            items = [views.domain_as_project(request, row, tags[row["id"]]) for row in domains_listed.rows]
            return collection(request, "projects", items, domains_listed)
        listed, tags = await self._core.database.read(
            projects.listing, request.raw_query, request.context.domain_id, page(request)
        )
        items = [views.project(request, row, tags[row["id"]]) for row in listed.rows]
        return collection(request, "projects", items, listed)

    async def show(self, request: Request, project_id: str) -> dict[str, Any]:
        """Show a project, or a domain in the form of one; if the query asks, with the projects above and below it."""
        row = await self._core.database.read(PROJECTS.find, project_id)
        if row is None:
            domain = await self._core.database.read(DOMAINS.find, project_id)
            request.authorize({"domain_id": domain["id"] if domain else None, "project_id": project_id})
            if domain is None:
                raise PROJECTS.not_found(project_id)
            tags = await self._tags([domain])
            return {"project": views.domain_as_project(request, domain, tags[project_id])}
        request.authorize(domain_target(row, project_id=project_id))
        tags = await self._tags([row])
        view = views.project(request, row, tags[project_id])
        for name in ("parents", "subtree"):
            as_list, as_ids = (f"{name}_as_{form}" in request.raw_query for form in ("list", "ids"))
            if as_list and as_ids:
                raise Invalid(f"Ask for {name}_as_list or for {name}_as_ids, not for both.")
            if as_list or as_ids:
                found = await self._core.database.read(_relatives, row, name)
                view[name] = _nested(row, found, name) if as_ids else await self._visible_relatives(request, found)
        return {"project": view}

    async def _tags(self, rows: Sequence[DomainRow] | Sequence[ProjectRow]) -> dict[str, list[str]]:
        """Return the tags of domains or projects by id."""
        return await self._core.database.read(tags_of, [row["id"] for row in rows])

    async def _visible_relatives(self, request: Request, found: list[ProjectRow]) -> list[dict[str, Any]]:
        """Return those of the projects that the caller may see."""
        rule = "identity:get_project"
        seen = [row for row in found if request.allows(domain_target(row, project_id=row["id"]), rule)]
        tags = await self._tags(seen)
        return [{"project": views.project(request, row, tags[row["id"]])} for row in seen]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a project, in the caller's domain unless the body names one."""
        wanted, extra = attributes.read(request.body.project, ProjectAttributes, "project")
        if wanted.is_domain:
            return await self._create_domain(request, wanted, extra)
        wanted.domain_id = wanted.domain_id or await self._parents_domain(wanted) or default_domain(request)
        request.authorize({"domain_id": wanted.domain_id})
        row = await self._core.write(projects.create, self._core.new_id(), wanted, extra, self._core.now())
        return {"project": views.project(request, row, sorted(wanted.tags))}

    async def _create_domain(
        self, request: Request, wanted: ProjectAttributes, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Create a domain, in the form of a project that has neither a domain nor a parent."""
        if wanted.domain_id is not None or wanted.parent_id is not None:
            raise Invalid("Invalid input for field/attribute project.is_domain: a domain is in no domain or project.")
        request.authorize(rule="identity:create_domain")
        new = DomainAttributes(
            name=wanted.name,
            description=wanted.description,
            enabled=wanted.enabled,
            tags=wanted.tags,
            options=wanted.options,
        )
        row = await self._core.write(domains.create, self._core.new_id(), new, extra, self._core.now())
        return {"project": views.domain_as_project(request, row, sorted(wanted.tags))}

    async def _is_domain(self, request: Request, project_id: str, rule: str) -> bool:
        """Return whether the id is a domain's, after the rule for domains was asked."""
        if await self._core.database.read(PROJECTS.find, project_id) is not None:
            return False
        if await self._core.database.read(DOMAINS.find, project_id) is None:
            return False
        request.authorize(rule=rule)
        return True

    async def _parents_domain(self, wanted: ProjectAttributes) -> str | None:
        parent = await self._core.database.read(PROJECTS.find, wanted.parent_id) if wanted.parent_id else None
        if parent is not None:
            return str(parent["domain_id"])
        domain = await self._core.database.read(DOMAINS.find, wanted.parent_id) if wanted.parent_id else None
        return str(domain["id"]) if domain is not None else None

    async def update(self, request: Request, project_id: str) -> dict[str, Any]:
        """Change a project."""
        wanted, extra = attributes.changes(request.body.project, ProjectChanges, "project")
        if await self._is_domain(request, project_id, "identity:update_domain"):
            if not set(given(wanted, "domain_id", "parent_id").values()) <= {None} or wanted.is_domain is False:
                raise Invalid("Invalid input for field/attribute project: a domain is in no domain and stays a domain.")
            changed = DomainChanges(**given(wanted, "name", "description", "enabled", "tags", "options"))
            domain = await self._core.write_revoking(domains.change, project_id, changed, extra)
            tagged = await self._core.database.read(tags_of, [project_id])
            return {"project": views.domain_as_project(request, domain, tagged[project_id])}
        await self._authorize(request, project_id)
        if wanted.is_domain is True:
            raise Invalid("Invalid input for field/attribute project.is_domain: a project does not become a domain.")
        row, tags = await self._core.write_revoking(projects.change, project_id, wanted, extra)
        return {"project": views.project(request, row, tags)}

    async def delete(self, request: Request, project_id: str) -> None:
        """Delete a project, or a domain in the form of one."""
        if await self._is_domain(request, project_id, "identity:delete_domain"):
            await self._core.write_revoking(domains.delete, project_id)
            return
        await self._authorize(request, project_id)
        await self._core.write_revoking(projects.delete, project_id)

    async def list_tags(self, request: Request, project_id: str) -> dict[str, Any]:
        """List the tags of a project."""
        await self._authorize(request, project_id)
        tags = (await self._core.database.read(tags_of, [project_id]))[project_id]
        return {"tags": tags, "links": {"self": link(request, "projects", project_id, "tags")}}

    async def replace_tags(self, request: Request, project_id: str) -> dict[str, Any]:
        """Replace all tags of a project."""
        await self._authorize(request, project_id)
        tags = await self._core.write(projects.replace_tags, project_id, request.body.tags)
        return {"tags": tags, "links": {"self": link(request, "projects", project_id, "tags")}}

    async def delete_tags(self, request: Request, project_id: str) -> None:
        """Remove all tags from a project."""
        await self._authorize(request, project_id)
        await self._core.write(projects.replace_tags, project_id, [])

    async def check_tag(self, request: Request, project_id: str, tag: str) -> None:
        """Answer 204 if a project has a tag, 404 if not."""
        await self._authorize(request, project_id)
        if tag not in (await self._core.database.read(tags_of, [project_id]))[project_id]:
            raise projects.no_tag(tag)

    async def add_tag(self, request: Request, project_id: str, tag: str) -> Response:
        """Add a tag to a project."""
        await self._authorize(request, project_id)
        if not attributes.is_tag(tag):
            raise Invalid("Invalid input for field/attribute tag: 1 to 255 characters, without commas and slashes.")
        await self._core.write(projects.add_tag, project_id, tag)
        return Response(headers={"location": link(request, "projects", project_id, "tags", quote(tag, safe=""))})

    async def remove_tag(self, request: Request, project_id: str, tag: str) -> None:
        """Remove a tag from a project."""
        await self._authorize(request, project_id)
        await self._core.write(projects.remove_tag, project_id, tag)


def _relatives(conn: sa.Connection, row: ProjectRow, name: str) -> list[ProjectRow]:
    return projects.ancestors(conn, row) if name == "parents" else projects.descendants(conn, row["id"])


def _nested(row: ProjectRow, found: list[ProjectRow], name: str) -> dict[str, Any] | None:
    """Return the ids above or below a project as nested objects."""
    if name == "parents":
        nested: dict[str, Any] | None = {row["domain_id"]: None}
        for each in reversed(found):
            nested = {each["id"]: nested}
        return nested
    below: dict[str, dict[str, Any]] = {row["id"]: {}, **{each["id"]: {} for each in found}}
    for each in reversed(found):  # deepest first, so that a subtree is complete when it is added to its parent
        below[each["parent_id"]][each["id"]] = below[each["id"]] or None
    return below[row["id"]] or None

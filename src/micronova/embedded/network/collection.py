"""The base classes of resources: list, show, create, update, delete, policy of fields, tags, and their routes."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import retry
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import RevisionMismatch, not_found
from micronova.embedded.network.listing import Attributes, Clause, Listing, flags
from micronova.embedded.network.request_bodies import objects
from micronova.embedded.network.routing import checked_route
from micronova.embedded.network.row_types import OwnedRow
from micronova.embedded.network.sharing import (
    SHARED,
    Access,
    access_of,
    own_or_shared,
    reading_for,
    share_with_all,
    shared_with,
)
from micronova.embedded.network.tables import tags
from micronova.http.paging import iso
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.objects.errors import Invalid
from micronova.policies.network import NAMES

R = TypeVar("R")
"""The type of the rows of a collection."""


@dataclass(slots=True)
class Resource:
    """One resource: its attributes in the API, and the target for its policy rules."""

    values: dict[str, Any]
    target: dict[str, Any]
    access: Access | None = None  # who may use it, or the network that it is on

    @property
    def id(self) -> str:
        """The id of the resource."""
        return str(self.values["id"])


class Collection(ABC, Generic[R]):
    """The list and the show of one kind of resource; subclasses define what is specific to it.

    A kind that can be created, changed or deleted is also Creatable, Updatable or Deletable.
    """

    singular: ClassVar[str]
    plural: ClassVar[str]
    slug: ClassVar[str]  # the collection's name in paths
    attributes: Attributes
    defaults: ClassVar[Mapping[str, Any]] = {}  # setting an attribute to its default needs no permission
    object_type: ClassVar[str | None] = None  # in RBAC policies, if projects can share the resources

    def __init__(self, core: Core) -> None:
        self.core = core
        prefix = f"get_{self.singular}:"
        # The fields with a policy rule of their own.
        self.hidden = tuple((name.removeprefix(prefix), name) for name in sorted(NAMES) if name.startswith(prefix))
        # Built once, because building the statement costs more than running it.
        self._by_id = self.select().where(self.attributes.table.c.id == sa.bindparam("id"))

    # --- what a subclass defines ---

    def select(self) -> sa.Select[Any]:
        """Return the statement for the rows that `resources` needs."""
        return sa.select(self.attributes.table)

    def visible_rows(self, request: Request) -> Clause | None:
        """Return the condition on rows that the caller may see; None for all rows."""
        if self.crosses_projects(request):
            return None  # policy decides about each row
        mine = request.context.project_id
        if self.object_type is not None:
            return own_or_shared(self.object_type, mine)
        return self.attributes.table.c.project_id == mine

    def shared_with_caller(self, request: Request) -> Clause:
        """Return the condition that a resource is shared with the caller's project."""
        assert self.object_type is not None
        return shared_with(self.object_type, self.attributes.table.c.id, request.context.project_id)

    def attributes_for(self, request: Request) -> Attributes:
        """Return the attributes by which the caller can filter: `shared` says what is shared with the caller."""
        if self.object_type is None:
            return self.attributes
        mine = flags(shared=self.shared_with_caller(request))
        return replace(self.attributes, special={**self.attributes.special, **mine})

    def access_to(self, conn: sa.Connection, rows: Sequence[OwnedRow]) -> dict[str, Access]:
        """Return who may use resources."""
        assert self.object_type is not None
        return access_of(conn, self.object_type, [row.id for row in rows])

    def share(self, conn: sa.Connection, id: str, owner: str, action: str = SHARED) -> int:
        """Share a resource with all projects; return how many RBAC policies this adds."""
        assert self.object_type is not None
        return share_with_all(conn, self.core.new_id, self.object_type, id, owner, action)

    @abstractmethod
    def resources(self, conn: sa.Connection, rows: Sequence[R]) -> list[Resource]:
        """Return the resources of rows."""

    # --- routes ---

    @property
    def path(self) -> str:
        """The path of the collection."""
        return f"/v2.0/{self.slug}"

    @property
    def one_path(self) -> str:
        """The path of a single resource."""
        return f"{self.path}/{{id}}"

    def routes(self) -> list[Route]:
        """Return the routes of this kind of resource."""
        policy = f"get_{self.singular}"
        return [self.route("GET", self.path, self.index, policy), self.route("GET", self.one_path, self.show, policy)]

    @staticmethod
    def route(method: str, path: str, handler: Handler, policy: str, status: int = 200, body: Any = None) -> Route:
        """Return a route whose handler checks policy itself; one that writes runs again if it raises Changed."""
        if method != "GET":
            handler = functools.partial(retry, handler)
        return checked_route(method, path, handler, policy, status, body)

    async def index(self, request: Request) -> dict[str, Any]:
        """List the resources that the caller may see."""
        request.authorized = True  # a caller that may see nothing gets an empty list
        listing = Listing.parse(request.raw_query, self.attributes_for(request), self.core.settings.max_limit)
        conditions = listing.conditions()
        if any(name in listing.filters and not request.allows(rule=rule) for name, rule in self.hidden):
            # A filter on a hidden field would reveal its value.
            conditions.append(sa.false())
        visible = self.visible_rows(request)
        read = reading_for([request.context.project_id], self.page)
        found = await self.core.database.read(read, listing, conditions, visible)
        if found is None:
            raise not_found(self.singular, listing.marker)
        shown = self.view_all(request, found)
        body: dict[str, Any] = {self.plural: [listing.choose(each) for each in shown]}
        links = listing.links(f"{request.base_url}{self.path}", [resource.id for resource in found])
        if links:
            body[f"{self.plural}_links"] = links
        return body

    def page(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], visible: Clause | None
    ) -> list[Resource] | None:
        """Return a page of resources; None if its marker does not exist."""
        rows = self.rows(conn, listing, conditions, visible)
        return None if rows is None else self.resources(conn, rows)

    def rows(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], visible: Clause | None
    ) -> list[R] | None:
        """Return the rows of a page."""
        statement = self.select().where(*conditions)
        if visible is not None:
            statement = statement.where(visible)
        return cast(list[R] | None, listing.page(conn, statement))

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show one resource."""
        resource = await self.find(request, id)
        listing = Listing.parse({k: v for k, v in request.raw_query.items() if k == "fields"}, self.attributes)
        return {self.singular: listing.choose(self.view(request, resource))}

    # --- loading, and what the caller may see ---

    async def find(
        self, request: Request, id: str, rule: str | None = None, load: Callable[..., Resource | None] | None = None
    ) -> Resource:
        """Return a resource; raise NotFound if the caller may not see it, Forbidden if it may only see it."""
        read = reading_for([request.context.project_id], load or self.load)
        resource = await self.core.database.read(read, id) if _plausible(id) else None
        if resource is not None:
            resource = seen_by(request, resource)
        if resource is None or not request.allows(resource.target, f"get_{self.singular}"):
            raise not_found(self.singular, id)
        if rule is not None:
            request.authorize(resource.target, rule)
        request.authorized = True
        return resource

    async def find_to(
        self, request: Request, action: str, id: str, load: Callable[..., Resource | None] | None = None
    ) -> Resource:
        """Return the resource that a request updates or deletes; check `If-Match`."""
        resource = await self.find(request, id, f"{action}_{self.singular}", load)
        check_revision(request, resource)
        return resource

    def load(self, conn: sa.Connection, id: str) -> Resource | None:
        """Return a resource without a check of policy; None if there is none."""
        row = conn.execute(self._by_id, {"id": id}).first()
        return None if row is None else self.resources(conn, [cast(R, row)])[0]

    def reload(self, conn: sa.Connection, id: str) -> Resource:
        """Return a resource that this transaction has created or changed."""
        resource = self.load(conn, id)
        assert resource is not None
        return resource

    def reload_all(self, conn: sa.Connection, ids: Sequence[str]) -> list[Resource]:
        """Return resources that this transaction has created, in the order of the ids."""
        rows = {row.id: row for row in conn.execute(self.select().where(self.attributes.table.c.id.in_(ids)))}
        return self.resources(conn, [cast(R, rows[id]) for id in ids])

    def view(self, request: Request, resource: Resource) -> dict[str, Any]:
        """Return the attributes of a resource that the caller may see."""
        return self.view_all(request, [resource])[0]

    def view_all(self, request: Request, resources: Sequence[Resource]) -> list[dict[str, Any]]:
        """Return the attributes that the caller may see, of each resource that it may see."""
        decided: dict[tuple[Any, ...], tuple[str, ...] | None] = {}
        shown = []
        for resource in (seen_by(request, each) for each in resources):
            key = tuple(resource.target.values())
            if key not in decided:
                decided[key] = self._hidden_from(request, resource.target)
            hide = decided[key]
            if hide is not None:
                shown.append({k: v for k, v in resource.values.items() if k not in hide} if hide else resource.values)
        return shown

    def _hidden_from(self, request: Request, target: Mapping[str, Any]) -> tuple[str, ...] | None:
        if not request.allows(target, f"get_{self.singular}"):
            return None
        return tuple(name for name, rule in self.hidden if not request.allows(target, rule))

    def check_fields(self, request: Request, action: str, given: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        """Raise Forbidden if the caller may not set one of the attributes."""
        defaults = self.defaults if action == "create" else {}
        chosen = {name: value for name, value in given.items() if (name, value) not in defaults.items()}
        self.check_names(request, f"{action}_{self.singular}:", chosen, target)

    @staticmethod
    def check_names(request: Request, prefix: str, given: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        """Raise Forbidden if a rule for one of the attributes, which begins with the prefix, refuses it."""
        for name, value in given.items():
            rule = prefix + name
            if rule not in NAMES:
                continue
            request.authorize(target, rule)
            parts = value if isinstance(value, list) else [value]
            for key in sorted({key for part in parts if isinstance(part, dict) for key in part}):
                if f"{rule}:{key}" in NAMES:
                    request.authorize(target, f"{rule}:{key}")

    def given(self, request: Request) -> list[dict[str, Any]]:
        """Return the objects of the request's body."""
        return objects(request.body, self.singular, self.plural)

    def answer(self, request: Request, resources: Sequence[Resource]) -> dict[str, Any]:
        """Return the response to a create: one resource or a list, as in the request."""
        shown = self.view_all(request, resources)
        if getattr(request.body, self.singular, None):
            return {self.singular: shown[0] if shown else resources[0].values}
        return {self.plural: shown}

    @staticmethod
    def crosses_projects(request: Request) -> bool:
        """Return whether the caller may see resources of all projects, and create and use them for other projects."""
        return request.context.is_admin or request.allows(rule="service_api")


class Creatable(Collection[R]):
    """Adds create to a kind of resource."""

    create_body: ClassVar[Any]

    @abstractmethod
    async def create(self, request: Request) -> dict[str, Any]:
        """Create one resource, or all of several or none; raise Changed to be called again."""

    def routes(self) -> list[Route]:
        """Return the routes of this kind of resource."""
        policy = f"create_{self.singular}"
        return [*super().routes(), self.route("POST", self.path, self.create, policy, 201, self.create_body)]


class Updatable(Collection[R]):
    """Adds update to a kind of resource."""

    update_body: ClassVar[Any]

    @abstractmethod
    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update the given attributes of a resource; raise Changed to be called again."""

    def routes(self) -> list[Route]:
        """Return the routes of this kind of resource."""
        policy = f"update_{self.singular}"
        return [*super().routes(), self.route("PUT", self.one_path, self.update, policy, 200, self.update_body)]


class Deletable(Collection[R]):
    """Adds delete to a kind of resource."""

    @abstractmethod
    async def delete(self, request: Request, id: str) -> None:
        """Delete a resource that nothing uses; raise Changed to be called again."""

    def routes(self) -> list[Route]:
        """Return the routes of this kind of resource."""
        policy = f"delete_{self.singular}"
        return [*super().routes(), self.route("DELETE", self.one_path, self.delete, policy, 204)]


def check_revision(request: Request, resource: Resource) -> None:
    """Raise RevisionMismatch unless the resource has the revision in `If-Match: revision_number=N`."""
    header = request.header("if-match")
    if not header:
        return
    name, _, number = header.strip().strip('"').partition("=")
    if name != "revision_number" or not number.isdecimal() or len(number) > 18:
        raise Invalid("Invalid input for If-Match: it must be revision_number=NUMBER.")
    if int(number) != resource.values["revision_number"]:
        raise RevisionMismatch(
            f"Constrained to {number[:20]}, but current revision is {resource.values['revision_number']}.",
            type="RevisionNumberConstraintFailed",
        )


_IN_TARGETS: Mapping[str, Callable[[Access, str | None], bool]] = {
    "shared": Access.is_shared,
    "router:external": Access.is_external,
    "network:shared": Access.is_shared,
    "network:router:external": Access.is_external,
}


def seen_by(request: Request, resource: Resource) -> Resource:
    """Return a resource as the caller's project sees it: whether it, or its network, is shared with that project."""
    access, project = resource.access, request.context.project_id
    if access is None:
        return resource
    target = {
        name: _IN_TARGETS[name](access, project) if name in _IN_TARGETS else value
        for name, value in resource.target.items()
    }
    values = resource.values
    if "shared" in values:
        values = {**values, "shared": target["shared"]}
    return Resource(values, target, access)


def standard_values(row: OwnedRow, tagged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the attributes that nearly all resources have."""
    return {
        "id": row.id,
        "project_id": row.project_id,
        "tenant_id": row.project_id,
        "description": row.description,
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
        "revision_number": row.revision,
        "tags": list(tagged.get(row.id, ())),
    }


def tags_of(conn: sa.Connection, ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the tags of the resources that have any."""
    found: dict[str, list[str]] = {}
    for part in chunks(ids):
        for row in conn.execute(_TAGS, {"ids": part}):
            found.setdefault(row.resource_id, []).append(row.tag)
    return found


_TAGS = (
    sa.select(tags.c.resource_id, tags.c.tag)
    .where(tags.c.resource_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(tags.c.tag)
)


def set_tags(conn: sa.Connection, id: str, wanted: Iterable[str]) -> None:
    """Replace the tags of a resource."""
    conn.execute(tags.delete().where(tags.c.resource_id == id))
    rows = [{"resource_id": id, "tag": tag} for tag in dict.fromkeys(wanted)]
    if rows:
        conn.execute(tags.insert(), rows)


def _plausible(id: str) -> bool:
    return len(id) <= 64 and id.isascii()

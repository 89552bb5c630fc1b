"""What all kinds of things share: list, show, the policy of fields, tags, and the routes of all these."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sqlalchemy as sa

from micronova.http.paging import iso
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.network.core import Core, again
from micronova.neighbours.network.errors import RevisionMismatch, not_found
from micronova.neighbours.network.listing import Attributes, Clause, Listing
from micronova.neighbours.network.tables import tags
from micronova.neighbours.network.wire import objects
from micronova.objects.errors import Invalid
from micronova.policies.network import NAMES

CHUNK = 500  # ids in one IN list


@dataclass(slots=True)
class Thing:
    """One resource: as clients see it, and as policy sees it."""

    values: dict[str, Any]
    target: dict[str, Any]

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.values["id"])


class Collection(ABC):
    """One kind of thing; a subclass says what is particular to it."""

    singular: ClassVar[str]
    plural: ClassVar[str]
    slug: ClassVar[str]  # the collection's name in paths
    attributes: ClassVar[Attributes]
    create_body: ClassVar[Any] = None
    update_body: ClassVar[Any] = None
    defaults: ClassVar[Mapping[str, Any]] = {}  # a create that names the default needs no field's permission
    taggable: ClassVar[bool] = True
    hidden: ClassVar[tuple[tuple[str, str], ...]] = ()  # fields that only some may see, with their rules

    def __init_subclass__(cls) -> None:
        prefix = f"get_{cls.singular}:"
        cls.hidden = tuple((name.removeprefix(prefix), name) for name in sorted(NAMES) if name.startswith(prefix))

    def __init__(self, core: Core) -> None:
        self.core = core
        # Building a statement costs more than running it: the one that every request needs is built once.
        self._by_id = self.select().where(self.attributes.table.c.id == sa.bindparam("id"))

    # --- what a subclass brings; to create, update and remove only what has such a route ---

    def select(self) -> sa.Select[Any]:
        """The rows that `things` needs."""
        return sa.select(self.attributes.table)

    def scope(self, request: Request) -> Clause | None:
        """Which rows the caller may know of at all; None for all."""
        if self.may_name_projects(request):
            return None  # policy decides about each
        return self.attributes.table.c.project_id == request.context.project_id

    @abstractmethod
    def things(self, conn: sa.Connection, rows: Sequence[Any]) -> list[Thing]:
        """Turn rows into things."""

    async def create_now(self, request: Request) -> Any:
        """Create what the body asks for."""
        raise NotImplementedError

    async def update_now(self, request: Request, id: str) -> Any:
        """Change what the body asks for."""
        raise NotImplementedError

    async def delete_now(self, request: Request, id: str) -> Any:
        """Delete one."""
        await self.find_to(request, "delete", id)
        await self.core.database.write(self.remove, id)

    def remove(self, conn: sa.Connection, id: str) -> None:
        """Delete one that nothing uses."""
        raise NotImplementedError

    # --- routes ---

    @property
    def path(self) -> str:
        """Where the collection is."""
        return f"/v2.0/{self.slug}"

    def routes(self) -> list[Route]:
        """Declare the operations of this kind of thing."""
        one = f"{self.path}/{{id}}"
        found = [
            self._route("GET", self.path, self.index, f"get_{self.singular}"),
            self._route("GET", one, self.show, f"get_{self.singular}"),
        ]
        if self.create_body is not None:
            create = self._route("POST", self.path, self.create, f"create_{self.singular}", 201, self.create_body)
            found.append(create)
        if self.update_body is not None:
            found.append(self._route("PUT", one, self.update, f"update_{self.singular}", 200, self.update_body))
        if f"delete_{self.singular}" in NAMES:
            found.append(self._route("DELETE", one, self.delete, f"delete_{self.singular}", 204))
        return found

    @staticmethod
    def _route(method: str, path: str, handler: Any, policy: str, status: int = 200, body: Any = None) -> Route:
        return Route(
            method=method, path=path, handler=handler, policy=policy, status=status, body=body, checks_policy=True
        )

    async def create(self, request: Request) -> Any:
        """POST: create one, or many at once (all or none)."""
        return await again(self.create_now, request)

    async def update(self, request: Request, id: str) -> Any:
        """PUT: change the attributes that are given."""
        return await again(self.update_now, request, id)

    async def delete(self, request: Request, id: str) -> None:
        """DELETE: make an end of it, if nothing uses it."""
        await again(self.delete_now, request, id)

    async def index(self, request: Request) -> dict[str, Any]:
        """GET of the collection: what the caller may see of it."""
        request.authorized = True  # whoever may see nothing gets an empty list
        listing = Listing.parse(request.raw_query, self.attributes)
        conditions = listing.conditions()
        if any(name in listing.filters and not request.allows(rule) for name, rule in self.hidden):
            # A filter on what the caller may not see would tell it.
            conditions.append(sa.false())
        scope = self.scope(request)
        found = await self.core.database.read(self.page, listing, conditions, scope)
        if found is None:
            raise not_found(self.singular, listing.marker)
        shown = self.view_all(request, found)
        body: dict[str, Any] = {self.plural: [listing.choose(each) for each in shown]}
        links = listing.links(f"{request.base_url}{self.path}", [thing.id for thing in found])
        if links:
            body[f"{self.plural}_links"] = links
        return body

    def page(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], scope: Clause | None
    ) -> list[Thing] | None:
        """Return a page of things; None when its marker does not exist."""
        rows = self.rows(conn, listing, conditions, scope)
        return None if rows is None else self.things(conn, rows)

    def rows(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], scope: Clause | None
    ) -> list[Any] | None:
        """Return the rows of a page."""
        statement = self.select().where(*conditions)
        if scope is not None:
            statement = statement.where(scope)
        return listing.page(conn, statement)

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """GET of one."""
        thing = await self.find(request, id)
        listing = Listing.parse({k: v for k, v in request.raw_query.items() if k == "fields"}, self.attributes)
        return {self.singular: listing.choose(self.view(request, thing))}

    # --- finding, and who may see what ---

    async def find(
        self, request: Request, id: str, rule: str | None = None, load: Callable[..., Thing | None] | None = None
    ) -> Thing:
        """Load one for a request; 404 for strangers, 403 for those who may see it but not do this."""
        thing = await self.core.database.read(load or self.load, id) if _plausible(id) else None
        if thing is None or not request.allows(f"get_{self.singular}", thing.target):
            raise not_found(self.singular, id)
        if rule is not None:
            request.authorize(thing.target, rule)
        request.authorized = True
        return thing

    async def find_to(
        self, request: Request, action: str, id: str, load: Callable[..., Thing | None] | None = None
    ) -> Thing:
        """Load one that the request is to "update" or "delete", and honour `If-Match`."""
        thing = await self.find(request, id, f"{action}_{self.singular}", load)
        check_revision(request, thing)
        return thing

    def load(self, conn: sa.Connection, id: str) -> Thing | None:
        """Load one, whoever asks."""
        row = conn.execute(self._by_id, {"id": id}).first()
        return None if row is None else self.things(conn, [row])[0]

    def reload(self, conn: sa.Connection, id: str) -> Thing:
        """Load one that this transaction has made or changed."""
        thing = self.load(conn, id)
        assert thing is not None
        return thing

    def reload_all(self, conn: sa.Connection, ids: Sequence[str]) -> list[Thing]:
        """Load those that this transaction has made, in this order."""
        rows = {row.id: row for row in conn.execute(self.select().where(self.attributes.table.c.id.in_(ids)))}
        return self.things(conn, [rows[id] for id in ids])

    def view(self, request: Request, thing: Thing) -> dict[str, Any]:
        """Return what the caller may see of a thing."""
        return self.view_all(request, [thing])[0]

    def view_all(self, request: Request, things: Sequence[Thing]) -> list[dict[str, Any]]:
        """Return what the caller may see of each thing; the ones that it may not see at all are left out."""
        decided: dict[tuple[Any, ...], tuple[str, ...] | None] = {}
        shown = []
        for thing in things:
            key = tuple(thing.target.values())
            if key not in decided:
                decided[key] = self._hidden_from(request, thing.target)
            hide = decided[key]
            if hide is not None:
                shown.append({k: v for k, v in thing.values.items() if k not in hide} if hide else thing.values)
        return shown

    def _hidden_from(self, request: Request, target: Mapping[str, Any]) -> tuple[str, ...] | None:
        if not request.allows(f"get_{self.singular}", target):
            return None
        return tuple(name for name, rule in self.hidden if not request.allows(rule, target))

    def check_fields(
        self, request: Request, action: str, given: Mapping[str, Any], target: Mapping[str, Any]
    ) -> None:
        """Refuse attributes that the caller may not set (403)."""
        prefix = f"{action}_{self.singular}:"
        for name, value in given.items():
            rule = prefix + name
            if rule not in NAMES or (action == "create" and (name, value) in self.defaults.items()):
                continue
            request.authorize(target, rule)
            parts = value if isinstance(value, list) else [value]
            for key in sorted({key for part in parts if isinstance(part, dict) for key in part}):
                if f"{rule}:{key}" in NAMES:
                    request.authorize(target, f"{rule}:{key}")

    def given(self, request: Request) -> list[dict[str, Any]]:
        """Return the objects of the request's body."""
        return objects(request.body, self.singular, self.plural)

    def answer(self, request: Request, things: Sequence[Thing]) -> dict[str, Any]:
        """Return what was created, in the form in which it was asked for."""
        shown = self.view_all(request, things)
        if getattr(request.body, self.singular, None):
            return {self.singular: shown[0] if shown else things[0].values}
        return {self.plural: shown}

    @staticmethod
    def may_name_projects(request: Request) -> bool:
        """Say whether the caller may make things in another project's name."""
        return request.allows("context_is_admin") or request.allows("service_api")


def check_revision(request: Request, thing: Thing) -> None:
    """Honour `If-Match: revision_number=N`."""
    header = request.header("if-match")
    if not header:
        return
    name, _, number = header.strip().strip('"').partition("=")
    if name != "revision_number" or not number.isdecimal() or len(number) > 18:
        raise Invalid("Invalid input for If-Match: it must be revision_number=NUMBER.")
    if int(number) != thing.values["revision_number"]:
        raise RevisionMismatch(
            f"Constrained to {number[:20]}, but current revision is {thing.values['revision_number']}.",
            type="RevisionNumberConstraintFailed",
        )


def standard(row: Any, tagged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The attributes that (nearly) everything has."""
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
    """Return the tags of each thing that has any."""
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
    """Give a thing these tags and no others."""
    conn.execute(tags.delete().where(tags.c.resource_id == id))
    rows = [{"resource_id": id, "tag": tag} for tag in dict.fromkeys(wanted)]
    if rows:
        conn.execute(tags.insert(), rows)


def chunks(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    """Cut a list of ids into pieces that fit into one statement."""
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _plausible(id: str) -> bool:
    return len(id) <= 64 and id.isascii() and "\0" not in id

"""The definitions in a namespace: objects, properties and tags. Their handlers differ in names, bodies and views."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from micronova.embedded.common.query import last
from micronova.embedded.image.core import Core
from micronova.embedded.image.listing import read_page
from micronova.embedded.image.metadefs import bodies, queries, views
from micronova.embedded.image.metadefs.core import load
from micronova.embedded.image.metadefs.model import Item, Kind, Namespace
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

SORT_KEYS = ("created_at", "updated_at", "name")


class DefinitionHandlers(ABC):
    """The handlers of one kind of definition."""

    def __init__(
        self,
        core: Core,
        kind: Kind,
        *,
        plural: str,
        parameter: str,  # of the path
        body: type[bodies.Object | bodies.Property | bodies.Tag],
        deletes: str = "delete",  # the verb in the names of the rules
    ) -> None:
        self._core = core
        self._kind = kind
        self._plural = plural
        self._body = body
        self._parameter = parameter
        self._deletes = deletes

    def routes(self) -> list[Route]:
        """Return the routes."""
        kind, plural = self._kind.value, self._plural
        all_ = f"/v2/metadefs/namespaces/{{namespace}}/{plural}"
        one = f"{all_}/{{{self._parameter}}}"
        delete = f"{self._deletes}_metadef_{kind}"
        # Glance has a rule of its own only for the deletion of all tags.
        delete_all = "delete_metadef_tags" if self._kind is Kind.TAG else "delete_metadef_namespace"
        route = partial(Route, checks_policy=True)
        return [
            route(method="GET", path=all_, handler=self.list, policy=f"get_metadef_{plural}"),
            route(method="DELETE", path=all_, handler=self.delete_all, policy=delete_all, status=204),
            *self._creation(all_, one),
            route(method="GET", path=one, handler=self.show, policy=f"get_metadef_{kind}"),
            route(method="PUT", path=one, handler=self.change, policy=f"modify_metadef_{kind}", body=self._body),
            route(method="DELETE", path=one, handler=self.delete, policy=delete, status=204),
        ]

    def _creation(self, all_: str, one: str) -> list[Route]:
        rule = f"add_metadef_{self._kind.value}"
        return [
            Route(
                method="POST",
                path=all_,
                handler=self.create,
                policy=rule,
                body=self._body,
                status=201,
                checks_policy=True,
            )
        ]

    async def list(self, request: Request, namespace: str) -> dict[str, Any]:
        """List the definitions of this kind."""
        found = await self._load(request, namespace)
        page = read_page(request.raw_query, SORT_KEYS, default=None, most=bodies.MAX_ITEMS)
        items = await self._core.database.read(queries.items, found.id, self._kind, page)
        if items is None:
            raise queries.no_item(self._kind, page.marker or "")
        return self._shown_list(found, items)

    async def create(self, request: Request, namespace: str) -> dict[str, Any]:
        """Add a definition."""
        made = self._made(request.body)
        found = await self._load(request, namespace)
        await self._core.database.write(queries.add_items, found, self._kind, [made])
        return self._shown(found, made)

    async def show(self, request: Request, namespace: str, **name: str) -> dict[str, Any]:
        """Show a definition."""
        found = await self._load(request, namespace)
        stored = await self._stored_name(request, found, name[self._parameter])
        item = await self._core.database.read(queries.item, found.id, self._kind, stored)
        if item is None:
            raise queries.no_item(self._kind, stored)
        return self._shown(found, item)

    async def change(self, request: Request, namespace: str, **name: str) -> dict[str, Any]:
        """Put another definition in the place of one, perhaps with another name."""
        new = self._made(request.body)
        found = await self._load(request, namespace)
        changed = await self._core.database.write(queries.change_item, found, self._kind, name[self._parameter], new)
        return self._shown(found, changed)

    async def delete(self, request: Request, namespace: str, **name: str) -> None:
        """Delete a definition."""
        found = await self._load(request, namespace)
        await self._core.database.write(queries.delete_item, found, self._kind, name[self._parameter])

    async def delete_all(self, request: Request, namespace: str) -> None:
        """Delete all definitions of this kind."""
        found = await self._load(request, namespace)
        await self._core.database.write(queries.delete_items, found, self._kind)

    async def _load(self, request: Request, namespace: str) -> Namespace:
        return await load(self._core, request, namespace)

    async def _stored_name(self, request: Request, namespace: Namespace, name: str) -> str:
        """Return the name under which a definition is stored."""
        return name

    def _made(self, body: Any) -> Item:
        bodies.check_read_only(body)
        now = self._core.now()
        return Item(name=body.name, definition=bodies.definition(body), created_at=now, updated_at=now)

    @abstractmethod
    def _shown(self, namespace: Namespace, item: Item) -> dict[str, Any]:
        """Return a definition as clients see it."""

    @abstractmethod
    def _shown_list(self, namespace: Namespace, items: Sequence[Item]) -> dict[str, Any]:
        """Return the body of a list of definitions."""


class ObjectHandlers(DefinitionHandlers):
    """The handlers of objects."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, Kind.OBJECT, plural="objects", parameter="object_name", body=bodies.Object)

    def _shown(self, namespace: Namespace, item: Item) -> dict[str, Any]:
        return views.object_(namespace.namespace, item)

    def _shown_list(self, namespace: Namespace, items: Sequence[Item]) -> dict[str, Any]:
        return {
            "objects": [self._shown(namespace, item) for item in items],
            "schema": f"{views.SCHEMAS}/objects",
        }


class PropertyHandlers(DefinitionHandlers):
    """The handlers of properties."""

    def __init__(self, core: Core) -> None:
        super().__init__(
            core, Kind.PROPERTY, plural="properties", parameter="property_name", body=bodies.Property, deletes="remove"
        )

    async def _stored_name(self, request: Request, namespace: Namespace, name: str) -> str:
        """With a resource type in the query the name has the prefix of that type."""
        resource_type = last(request.raw_query, "resource_type")
        if not resource_type:
            return name
        request.authorize(namespace.target(), "get_metadef_resource_type")
        associations = (await self._core.database.read(queries.associations, [namespace.id])).get(namespace.id, [])
        association = next((each for each in associations if each.name == resource_type), None)
        if association is None:
            raise NotFound(f"The namespace is not associated with the resource type {resource_type[:80]}.")
        if not association.prefix or not name.startswith(association.prefix):
            raise NotFound(f"Property {name[:80]} does not begin with the prefix '{association.prefix or ''}'.")
        return name.removeprefix(association.prefix)

    def _shown(self, namespace: Namespace, item: Item) -> dict[str, Any]:
        return {"name": item.name, **views.property_(item)}

    def _shown_list(self, namespace: Namespace, items: Sequence[Item]) -> dict[str, Any]:
        return {"properties": {item.name: views.property_(item) for item in items}}


class TagHandlers(DefinitionHandlers):
    """The handlers of tags."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, Kind.TAG, plural="tags", parameter="tag_name", body=bodies.Tag)

    def _creation(self, all_: str, one: str) -> list[Route]:
        route = partial(Route, method="POST", status=201, checks_policy=True)
        return [
            route(path=all_, handler=self.create_all, policy="add_metadef_tags", body=bodies.Tags),
            route(path=one, handler=self.create_one, policy="add_metadef_tag"),
        ]

    async def create_all(self, request: Request, namespace: str) -> dict[str, Any]:
        """Put these tags in the place of all tags, or with the header X-Openstack-Append add them."""
        body: bodies.Tags = request.body
        now = self._core.now()
        made = [Item(name=each.name, definition={}, created_at=now, updated_at=now) for each in body.tags]
        found = await self._load(request, namespace)
        appends = (request.header("x-openstack-append") or "").lower() == "true"
        write: Callable[..., None] = queries.add_items if appends else queries.replace_items
        await self._core.database.write(write, found, self._kind, made)
        return self._shown_list(found, made)

    async def create_one(self, request: Request, namespace: str, tag_name: str) -> dict[str, Any]:
        """Add a tag, whose name is in the path."""
        if len(tag_name) > bodies.MAX_NAME:
            raise Invalid(f"The name of a tag may have {bodies.MAX_NAME} characters.")
        request.body = bodies.Tag(name=tag_name)
        return await self.create(request, namespace)

    def _shown(self, namespace: Namespace, item: Item) -> dict[str, Any]:
        return views.tag(item)

    def _shown_list(self, namespace: Namespace, items: Sequence[Item]) -> dict[str, Any]:
        return {"tags": [views.tag_name(item) for item in items]}

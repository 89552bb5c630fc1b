"""Namespaces of metadata definitions."""

from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from micronova.embedded.common.query import last
from micronova.embedded.image.core import Core
from micronova.embedded.image.listing import choice, links, read_page, refuse_others
from micronova.embedded.image.metadefs import bodies, queries, views
from micronova.embedded.image.metadefs.core import load
from micronova.embedded.image.metadefs.model import Association, Contents, Item, Kind, Namespace
from micronova.http.request import Request, Response
from micronova.http.service import Route

SORT_KEYS = ("created_at", "updated_at", "namespace", "visibility")
_RULES = {Kind.OBJECT: "get_metadef_objects", Kind.PROPERTY: "get_metadef_properties", Kind.TAG: "get_metadef_tags"}


class NamespaceHandlers:
    """The handlers of namespaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/v2/metadefs/namespaces", "/v2/metadefs/namespaces/{namespace}"
        route = partial(Route, checks_policy=True)
        body = bodies.NamespaceBody
        return [
            Route(method="GET", path=all_, handler=self.list, policy="get_metadef_namespaces"),
            Route(method="POST", path=all_, handler=self.create, policy="add_metadef_namespace", body=body, status=201),
            route(method="GET", path=one, handler=self.show, policy="get_metadef_namespace"),
            route(method="PUT", path=one, handler=self.change, policy="modify_metadef_namespace", body=body),
            route(method="DELETE", path=one, handler=self.delete, policy="delete_metadef_namespace", status=204),
        ]

    async def list(self, request: Request) -> dict[str, Any]:
        """List the namespaces that the caller may see."""
        query = request.raw_query
        visibility = choice("visibility", last(query, "visibility"), ("public", "private"))
        wanted = last(query, "resource_types")
        page = read_page(query, SORT_KEYS, "visibility", "resource_types")
        context = request.context
        found = await self._core.database.read(
            queries.list_namespaces,
            page,
            context.project_id,
            context.is_admin,
            visibility,
            wanted.split(",") if wanted else [],
        )
        if found is None:
            raise queries.no_namespace(page.marker or "")
        shown, more = found
        associations = await self._core.database.read(queries.associations, [each.id for each in shown])
        return {
            "namespaces": [
                views.namespace(each, associations.get(each.id, []))
                for each in shown
                if request.allows(each.target(), "get_metadef_namespace")
            ],
            "schema": f"{views.SCHEMAS}/namespaces",
            **links("/v2/metadefs/namespaces", query, shown[-1].namespace if shown and more else None),
        }

    async def create(self, request: Request) -> Response:
        """Create a namespace, with what the body has of definitions and associations."""
        body: bodies.NamespaceBody = request.body
        bodies.check_read_only(body)
        now = self._core.now()

        def item(name: str, given: Any) -> Item:
            return Item(name=name, definition=bodies.definition(given), created_at=now, updated_at=now)

        contents = Contents(
            items={
                Kind.OBJECT: [item(each.name, each) for each in body.objects],
                Kind.PROPERTY: [item(name, each) for name, each in body.properties.items()],
                Kind.TAG: [item(each.name, each) for each in body.tags],
            },
            associations=[_association(each, now) for each in body.resource_type_associations],
        )
        made = self._namespace(request, body, now)
        await self._core.database.write(queries.create, made, contents)
        headers = {"location": f"{request.base_url}{views.path_of(quote(made.namespace))}"}
        return Response(body=views.namespace(made, contents.associations, contents), headers=headers)

    async def show(self, request: Request, namespace: str) -> dict[str, Any]:
        """Show a namespace with what the caller may see of it."""
        found = await load(self._core, request, namespace, "get_metadef_namespace")
        contents = await self._core.database.read(queries.contents, found.id)
        visible = {
            kind: items for kind, items in contents.items.items() if request.allows(found.target(), _RULES[kind])
        }
        sees_types = request.allows(found.target(), "get_metadef_resource_type")
        associations = contents.associations if sees_types else []
        shown = views.namespace(found, associations, msgspec.structs.replace(contents, items=visible))
        wanted = last(request.raw_query, "resource_type")
        prefix = next((each.prefix for each in associations if each.name == wanted), None)
        return views.prefixed(shown, prefix) if prefix else shown

    async def change(self, request: Request, namespace: str) -> dict[str, Any]:
        """Change a namespace's own attributes, its name among them."""
        body: bodies.NamespaceBody = request.body
        bodies.check_read_only(body)
        found = await load(self._core, request, namespace, "modify_metadef_namespace")
        changed = self._namespace(request, body, found.created_at, found.id)
        await self._core.database.write(queries.replace, found.id, changed)
        return views.namespace(changed, [])

    async def delete(self, request: Request, namespace: str) -> None:
        """Delete a namespace and all that is in it."""
        found = await load(self._core, request, namespace, "delete_metadef_namespace")
        await self._core.database.write(queries.delete, found)

    def _namespace(
        self, request: Request, body: bodies.NamespaceBody, created_at: int, id: str | None = None
    ) -> Namespace:
        return Namespace(
            id=id or self._core.new_id(),
            namespace=body.namespace,
            display_name=None if body.display_name is UNSET else body.display_name,
            description=None if body.description is UNSET else body.description,
            visibility=body.visibility,
            protected=body.protected,
            owner=request.context.project_id if body.owner is UNSET else body.owner,
            created_at=created_at,
            updated_at=self._core.now(),
        )


def _association(given: bodies.AssociationSchema, now: int) -> Association:
    return Association(
        name=given.name,
        prefix=None if given.prefix is UNSET else given.prefix,
        properties_target=None if given.properties_target is UNSET else given.properties_target,
        created_at=now,
        updated_at=now,
    )


class ResourceTypeHandlers:
    """The handlers of resource types and of their associations with namespaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_ = "/v2/metadefs/namespaces/{namespace}/resource_types"
        one = f"{all_}/{{resource_type}}"
        route = partial(Route, checks_policy=True)
        add, remove = "add_metadef_resource_type_association", "remove_metadef_resource_type_association"
        return [
            Route(
                method="GET",
                path="/v2/metadefs/resource_types",
                handler=self.list,
                policy="list_metadef_resource_types",
            ),
            route(method="GET", path=all_, handler=self.list_associations, policy="get_metadef_resource_type"),
            route(method="POST", path=all_, handler=self.add, policy=add, body=bodies.AssociationBody, status=201),
            route(method="DELETE", path=one, handler=self.remove, policy=remove, status=204),
        ]

    async def list(self, request: Request) -> dict[str, Any]:
        """List all resource types."""
        refuse_others(request.raw_query)
        found = await self._core.database.read(queries.resource_types)
        return {"resource_types": [views.resource_type(each) for each in found]}

    async def list_associations(self, request: Request, namespace: str) -> dict[str, Any]:
        """List the resource types that a namespace is for."""
        refuse_others(request.raw_query)
        found = await load(self._core, request, namespace, "get_metadef_resource_type")
        associations = await self._core.database.read(queries.associations, [found.id])
        return {"resource_type_associations": [views.association(each) for each in associations.get(found.id, [])]}

    async def add(self, request: Request, namespace: str) -> dict[str, Any]:
        """Associate a namespace with a resource type."""
        body: bodies.AssociationBody = request.body
        bodies.check_read_only(body)
        found = await load(self._core, request, namespace, "add_metadef_resource_type_association")
        made = _association(body, self._core.now())
        await self._core.database.write(queries.associate, found, made)
        return views.association(made)

    async def remove(self, request: Request, namespace: str, resource_type: str) -> None:
        """Remove the association of a namespace with a resource type."""
        found = await load(self._core, request, namespace, "remove_metadef_resource_type_association")
        await self._core.database.write(queries.dissociate, found, resource_type)

"""Metadata definitions as clients see them: attributes without a value are left out, as Glance does."""

from typing import Any

from micronova.embedded.image.metadefs.model import Association, Contents, Item, Kind, Namespace, ResourceType
from micronova.http.paging import iso

SCHEMAS = "/v2/schemas/metadefs"


def path_of(namespace: str) -> str:
    """Return the path of a namespace, relative to the service."""
    return f"/v2/metadefs/namespaces/{namespace}"


def namespace(item: Namespace, associations: list[Association], contents: Contents | None = None) -> dict[str, Any]:
    """Return a namespace, with all that is in it if that is given."""
    shown = _given(
        namespace=item.namespace,
        display_name=item.display_name,
        description=item.description,
        visibility=item.visibility,
        protected=item.protected,
        owner=item.owner,
        created_at=iso(item.created_at),
        updated_at=iso(item.updated_at),
        schema=f"{SCHEMAS}/namespace",
        self=path_of(item.namespace),
        resource_type_associations=[association(each) for each in associations] or None,
    )
    if contents is None:
        return shown
    found = contents.items
    return shown | _given(
        objects=[object_(item.namespace, each) for each in found.get(Kind.OBJECT, ())] or None,
        properties={each.name: property_(each) for each in found.get(Kind.PROPERTY, ())} or None,
        tags=[tag_name(each) for each in found.get(Kind.TAG, ())] or None,
    )


def object_(namespace: str, item: Item) -> dict[str, Any]:
    """Return an object."""
    return {
        "name": item.name,
        **item.definition,
        "created_at": iso(item.created_at),
        "updated_at": iso(item.updated_at),
        "schema": f"{SCHEMAS}/object",
        "self": f"{path_of(namespace)}/objects/{item.name}",
    }


def property_(item: Item) -> dict[str, Any]:
    """Return a property; its name is the key under which it stands."""
    return item.definition


def tag_name(item: Item) -> dict[str, Any]:
    """Return a tag of a list."""
    return {"name": item.name}


def tag(item: Item) -> dict[str, Any]:
    """Return one tag."""
    return {"name": item.name, "created_at": iso(item.created_at), "updated_at": iso(item.updated_at)}


def association(item: Association) -> dict[str, Any]:
    """Return the association of a namespace with a resource type."""
    return _given(
        name=item.name,
        prefix=item.prefix,
        properties_target=item.properties_target,
        created_at=iso(item.created_at),
        updated_at=iso(item.updated_at),
    )


def resource_type(item: ResourceType) -> dict[str, Any]:
    """Return a resource type."""
    return {"name": item.name, "created_at": iso(item.created_at), "updated_at": iso(item.updated_at)}


def prefixed(shown: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a namespace or an object with the names of its properties as resources of a type have them."""
    changed: dict[str, Any] = {}
    if "properties" in shown:
        changed["properties"] = {prefix + name: value for name, value in shown["properties"].items()}
    if "required" in shown:
        changed["required"] = [prefix + name for name in shown["required"]]
    if "objects" in shown:
        changed["objects"] = [prefixed(each, prefix) for each in shown["objects"]]
    return {**shown, **changed}


def _given(**attributes: Any) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}

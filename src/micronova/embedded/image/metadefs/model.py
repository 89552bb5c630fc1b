"""Metadata definitions as the service reads them."""

from enum import Enum
from typing import Any

import msgspec

RESOURCE_TYPES = (
    "OS::Cinder::Volume",
    "OS::Glance::Image",
    "OS::Nova::Aggregate",
    "OS::Nova::Flavor",
    "OS::Nova::Server",
    "OS::Trove::Instance",
)
"""The types of resources that OpenStack's own metadata definitions are for."""


class Kind(Enum):
    """A kind of definition in a namespace, by the word that clients use."""

    OBJECT = "object"
    PROPERTY = "property"
    TAG = "tag"


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace without what is in it."""

    id: str
    namespace: str
    display_name: str | None
    description: str | None
    visibility: str
    protected: bool
    owner: str | None
    created_at: int
    updated_at: int

    def target(self) -> dict[str, str | None]:
        """Return the policy target."""
        return {"project_id": self.owner, "owner": self.owner, "visibility": self.visibility}

    def is_visible_to(self, project_id: str, is_admin: bool) -> bool:
        """Return whether a caller of this project may see the namespace."""
        return is_admin or self.visibility == "public" or bool(project_id and self.owner == project_id)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An object, a property or a tag."""

    name: str
    definition: dict[str, Any]
    created_at: int
    updated_at: int


class Association(msgspec.Struct, frozen=True, kw_only=True):
    """A resource type that the definitions of a namespace are for."""

    name: str
    prefix: str | None
    properties_target: str | None
    created_at: int
    updated_at: int


class ResourceType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of resource that definitions may be for."""

    name: str
    created_at: int
    updated_at: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """All that is in a namespace."""

    items: dict[Kind, list[Item]]
    associations: list[Association]

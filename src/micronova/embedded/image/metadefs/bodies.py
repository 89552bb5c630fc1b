"""The bodies of requests about metadata definitions."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from micronova.objects.errors import Forbidden, Invalid, TooLarge

MAX_NAME = 80
MAX_ITEMS = 256  # objects, properties or tags of a namespace, and its associations
MAX_ITEM = 16_384  # bytes of an object or a property as JSON

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_NAME)]
Description = Annotated[str, Meta(max_length=500)]
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Type = Literal["array", "boolean", "integer", "number", "object", "string"]


class ArrayItems(Struct):
    """What the items of an array must be."""

    type: Type | UnsetType = UNSET
    enum: list[Any] | UnsetType = UNSET


class PropertySchema(Struct, rename="camel", forbid_unknown_fields=True):
    """The definition of a property, as a part of JSON schema. Its name is the key under which it stands."""

    title: str
    type: Type
    name: Name | UnsetType = UNSET
    description: str | UnsetType = UNSET
    operators: list[str] | UnsetType = UNSET
    required: list[str] | UnsetType = UNSET
    minimum: float | int | UnsetType = UNSET
    maximum: float | int | UnsetType = UNSET
    max_length: Amount | UnsetType = UNSET
    min_length: Amount | UnsetType = UNSET
    pattern: str | UnsetType = UNSET
    enum: list[Any] | UnsetType = UNSET
    readonly: bool | UnsetType = UNSET
    default: Any = UNSET
    items: ArrayItems | UnsetType = UNSET
    max_items: Amount | UnsetType = UNSET
    min_items: Amount | UnsetType = UNSET
    unique_items: bool | UnsetType = UNSET
    additional_items: bool | UnsetType = UNSET


class Property(PropertySchema, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The body of one property."""

    name: Name
    created_at: Any = field(name="created_at", default=UNSET)
    updated_at: Any = field(name="updated_at", default=UNSET)


Properties = dict[Name, PropertySchema]


class ObjectSchema(Struct):
    """An object: a group of properties."""

    name: Name
    description: str | UnsetType = UNSET
    required: list[str] | UnsetType = UNSET
    properties: Properties | UnsetType = UNSET


class Object(ObjectSchema, forbid_unknown_fields=True):
    """The body of one object."""

    itself: Any = field(name="self", default=UNSET)
    schema: Any = UNSET
    created_at: Any = UNSET
    updated_at: Any = UNSET


class TagName(Struct, forbid_unknown_fields=True):
    """A tag in a list."""

    name: Name


class Tag(TagName, forbid_unknown_fields=True):
    """The body of one tag."""

    created_at: Any = UNSET
    updated_at: Any = UNSET


class Tags(Struct, forbid_unknown_fields=True):
    """The body of the tags of a namespace."""

    tags: Annotated[list[TagName], Meta(max_length=MAX_ITEMS)]


class AssociationSchema(Struct):
    """A resource type that the definitions of a namespace are for."""

    name: Name
    prefix: Text | UnsetType = UNSET
    properties_target: Text | UnsetType = UNSET


class AssociationBody(AssociationSchema, forbid_unknown_fields=True):
    """The body of one association."""

    created_at: Any = UNSET
    updated_at: Any = UNSET


class NamespaceBody(Struct, forbid_unknown_fields=True):
    """The body of a namespace. A change uses its own attributes only, and what is left out gets its default again."""

    namespace: Name
    display_name: Text | UnsetType = UNSET
    description: Description | UnsetType = UNSET
    visibility: Literal["public", "private"] = "private"
    protected: bool = False
    owner: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET
    itself: Any = field(name="self", default=UNSET)
    schema: Any = UNSET
    created_at: Any = UNSET
    updated_at: Any = UNSET
    resource_type_associations: Annotated[list[AssociationSchema], Meta(max_length=MAX_ITEMS)] = []
    properties: Annotated[Properties, Meta(max_length=MAX_ITEMS)] = {}
    objects: Annotated[list[ObjectSchema], Meta(max_length=MAX_ITEMS)] = []
    tags: Annotated[list[TagName], Meta(max_length=MAX_ITEMS)] = []


def check_read_only(body: Struct) -> None:
    """Raise Forbidden if a body sets an attribute that the service sets."""
    for attribute, name in zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True):
        if name in ("self", "schema", "created_at", "updated_at") and getattr(body, attribute) is not UNSET:
            raise Forbidden(f"Attribute '{name}' is read-only.")


def definition(body: PropertySchema | ObjectSchema | TagName) -> dict[str, Any]:
    """Return what is stored of a definition: all that was given but its name; raise an error if that is too much."""
    given: dict[str, Any] = {
        name: value for name, value in msgspec.to_builtins(body).items() if name not in ("name", "self", "schema")
    }
    if isinstance(body, PropertySchema) and UNSET not in (body.minimum, body.maximum) and body.minimum > body.maximum:  # type: ignore[operator]
        raise Invalid(f"Property '{body.title[:64]}': minimum must not be greater than maximum.")
    if len(msgspec.json.encode(given)) > MAX_ITEM:
        raise TooLarge(f"A definition may have {MAX_ITEM} bytes.")
    return given

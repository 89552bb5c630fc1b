"""The schema documents of metadata definitions, for clients that make forms and commands from them."""

from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "maxLength": 80}
_STRINGS: Schema = {"type": "array", "items": _STRING, "uniqueItems": True}
_AMOUNT: Schema = {"type": "integer", "minimum": 0}
_TYPE: Schema = {"type": "string", "enum": ["array", "boolean", "integer", "number", "object", "string", None]}
_TIMES: dict[str, Schema] = {
    "created_at": {"type": "string", "format": "date-time", "readOnly": True, "description": "When it was created"},
    "updated_at": {"type": "string", "format": "date-time", "readOnly": True, "description": "When it was changed"},
}
_LINKS: dict[str, Schema] = {
    "self": {"type": "string", "readOnly": True},
    "schema": {"type": "string", "readOnly": True},
}
_PROPERTY: dict[str, Schema] = {
    "name": _NAME,
    "title": _STRING,
    "description": _STRING,
    "operators": {"type": "array", "items": _STRING},
    "type": _TYPE,
    "required": _STRINGS,
    "minimum": {"type": "number"},
    "maximum": {"type": "number"},
    "maxLength": _AMOUNT,
    "minLength": {**_AMOUNT, "default": 0},
    "pattern": {"type": "string", "format": "regex"},
    "enum": {"type": "array"},
    "readonly": {"type": "boolean"},
    "default": {},
    "items": {"type": "object", "properties": {"type": _TYPE, "enum": {"type": "array"}}},
    "maxItems": _AMOUNT,
    "minItems": {**_AMOUNT, "default": 0},
    "uniqueItems": {"type": "boolean", "default": False},
    "additionalItems": {"type": "boolean"},
}
_PROPERTIES: Schema = {
    "type": "object",
    "additionalProperties": {"type": "object", "required": ["title", "type"], "properties": _PROPERTY},
}
_OBJECT: dict[str, Schema] = {
    "name": _NAME,
    "description": _STRING,
    "required": _STRINGS,
    "properties": _PROPERTIES,
}
_ASSOCIATION: dict[str, Schema] = {
    "name": {**_NAME, "description": "The type of resource, as orchestration names it: OS::Nova::Flavor"},
    "prefix": {**_NAME, "description": "What the names of properties begin with on resources of this type"},
    "properties_target": {**_NAME, "description": "Which of a resource's sets of properties is meant"},
}
_NAMESPACE: dict[str, Schema] = {
    "namespace": {**_NAME, "description": "The unique name of the namespace"},
    "display_name": {**_NAME, "description": "The name that is shown to people"},
    "description": {"type": "string", "maxLength": 500, "description": "What the namespace is for"},
    "visibility": {"type": "string", "enum": ["public", "private"], "description": "Who may see the namespace"},
    "protected": {"type": "boolean", "description": "Whether the namespace cannot be deleted"},
    "owner": {"type": "string", "maxLength": 255, "description": "The project that the namespace belongs to"},
    **_TIMES,
    **_LINKS,
    "resource_type_associations": {"type": "array", "items": {"type": "object", "properties": _ASSOCIATION}},
    "properties": _PROPERTIES,
    "objects": {"type": "array", "items": {"type": "object", "properties": _OBJECT}},
    "tags": {"type": "array", "items": {"type": "object", "properties": {"name": _NAME}}},
}


def _document(name: str, properties: dict[str, Schema], *required: str) -> Schema:
    return {"name": name, "properties": properties, "required": list(required), "additionalProperties": False}


def _list(name: str, item: Schema) -> Schema:
    links = {key: {"type": "string"} for key in ("first", "next", "schema")}
    return {
        "name": name,
        "properties": {name: {"type": "array", "items": item}, **links},
        "links": [
            {"rel": "first", "href": "{first}"},
            {"rel": "next", "href": "{next}"},
            {"rel": "describedby", "href": "{schema}"},
        ],
    }


_ONE = {
    "namespace": _document("namespace", _NAMESPACE, "namespace"),
    "resource_type": _document("resource_type_association", {**_ASSOCIATION, **_TIMES}, "name"),
    "object": _document("object", {**_OBJECT, **_LINKS, **_TIMES}, "name"),
    "property": _document("property", _PROPERTY, "type", "title", "name"),
    "tag": _document("tag", {"name": _NAME, **_TIMES}, "name"),
}
SCHEMAS: dict[str, Schema] = {
    **_ONE,
    "namespaces": _list("namespaces", _ONE["namespace"]),
    "resource_types": _list("resource_type_associations", _ONE["resource_type"]),
    "objects": _list("objects", _ONE["object"]),
    "properties": {
        "name": "properties",
        "properties": {"properties": {"type": "object", "additionalProperties": _document("property", _PROPERTY)}},
    },
    "tags": _list("tags", _ONE["tag"]),
}

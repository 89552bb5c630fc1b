"""The JSON schemas of the Placement API's bodies and queries, at each microversion."""

from typing import Any, Final

from micronova.placement.model import MOST_UNITS

Schema = dict[str, Any]
LARGEST_RATIO: Final = 3.40282e38
UUID_KEY: Final = "^[0-9a-fA-F-]{36}$"
CLASS: Final = "^[A-Z0-9_]+$"
CUSTOM: Final = "^CUSTOM_[A-Z0-9_]+$"
PRINTABLE: Final = "^[^\\x00-\\x1f\\x7f]*$"
NUMBERED: Final = "[1-9][0-9]*"  # the suffixes of groups before 1.33
NAMED: Final = "[a-zA-Z0-9_-]{1,64}"  # and since

_UUID: Schema = {"type": "string", "format": "uuid"}
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 255}
_MOST: Final = 1000
"""Consumers or providers of one request: each takes statements in one transaction."""
_GENERATION: Schema = {"type": "integer", "minimum": -MOST_UNITS, "maximum": MOST_UNITS}  # the columns are alike


def _object(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def provider_query(minor: int) -> Schema:
    """The query of GET /resource_providers."""
    properties: Schema = {"name": _TEXT, "uuid": _UUID}
    for since, name, schema in (
        (3, "member_of", _TEXT),
        (4, "resources", _TEXT),
        (14, "in_tree", _UUID),
        (18, "required", _TEXT),
    ):
        if minor >= since:
            properties[name] = schema
    return _object(properties)


def new_provider(minor: int) -> Schema:
    """The body of POST /resource_providers."""
    properties: Schema = {"name": {"type": "string", "maxLength": 200, "pattern": PRINTABLE}, "uuid": _UUID}
    if minor >= 14:
        properties["parent_provider_uuid"] = {"type": ["string", "null"], "format": "uuid"}
    return _object(properties, ("name",))


def changed_provider(minor: int) -> Schema:
    """The body of PUT /resource_providers/{uuid}."""
    properties = dict(new_provider(minor)["properties"])
    del properties["uuid"]
    return _object(properties, ("name",))


def _integer(least: int) -> Schema:
    return {"type": "integer", "maximum": MOST_UNITS, "minimum": least}


_INVENTORY: Schema = {
    "resource_provider_generation": _GENERATION,
    "total": _integer(1),
    "reserved": _integer(0),
    "min_unit": _integer(1),
    "max_unit": _integer(1),
    "step_size": _integer(1),
    "allocation_ratio": {"type": "number", "maximum": LARGEST_RATIO},
}


def new_inventory(minor: int) -> Schema:
    """The body of POST /resource_providers/{uuid}/inventories."""
    return _object({**_INVENTORY, "resource_class": {"type": "string", "pattern": CLASS}}, ("total", "resource_class"))


def changed_inventory(minor: int) -> Schema:
    """The body of PUT /resource_providers/{uuid}/inventories/{resource_class}."""
    return _object(_INVENTORY, ("total", "resource_provider_generation"))


def all_inventories(minor: int) -> Schema:
    """The body of PUT /resource_providers/{uuid}/inventories."""
    return _object(
        {
            "resource_provider_generation": _GENERATION,
            "inventories": {"type": "object", "patternProperties": {CLASS: _object(_INVENTORY, ("total",))}},
        },
        ("resource_provider_generation", "inventories"),
    )


def aggregates(minor: int) -> Schema:
    """The body of PUT /resource_providers/{uuid}/aggregates."""
    listed: Schema = {"type": "array", "items": _UUID, "uniqueItems": True}
    if minor < 19:
        return listed
    return _object(
        {"aggregates": listed, "resource_provider_generation": _GENERATION},
        ("aggregates", "resource_provider_generation"),
    )


def provider_traits(minor: int) -> Schema:
    """The body of PUT /resource_providers/{uuid}/traits."""
    return _object(
        {"traits": {"type": "array", "items": _NAME}, "resource_provider_generation": _GENERATION},
        ("traits", "resource_provider_generation"),
    )


def trait_query(minor: int) -> Schema:
    """The query of GET /traits."""
    return _object({"name": _TEXT, "associated": _TEXT})


def resource_class(minor: int) -> Schema:
    """The body that names a resource class."""
    return _object({"name": {"type": "string", "pattern": CUSTOM, "maxLength": 255}}, ("name",))


def usage_query(minor: int) -> Schema:
    """The query of GET /usages."""
    properties: Schema = {"project_id": _NAME, "user_id": _NAME}
    if minor >= 38:
        properties["consumer_type"] = {**_NAME, "pattern": f"{CLASS}|^all|^unknown$"}
    return _object(properties, ("project_id",))


def _resources() -> Schema:
    return {
        "type": "object",
        "minProperties": 1,
        "patternProperties": {CLASS: _integer(1)},
        "additionalProperties": False,
    }


def _by_provider(least: int) -> Schema:
    one = _object({"generation": _GENERATION, "resources": _resources()}, ("resources",))
    return {
        "type": "object",
        "minProperties": least,
        "maxProperties": _MOST,
        "patternProperties": {UUID_KEY: one},
        "additionalProperties": False,
    }


def allocations(minor: int, *, of_one: bool = True) -> Schema:
    """The body of PUT /allocations/{consumer_uuid}, and with `of_one` false a part of that of POST /allocations."""
    required = ["allocations"]
    if minor < 12 and of_one:
        provider = _object({"uuid": _UUID}, ("uuid",))
        each = _object({"resource_provider": provider, "resources": _resources()}, ("resource_provider", "resources"))
        properties: Schema = {"allocations": {"type": "array", "minItems": 1, "items": each}}
    else:
        properties = {"allocations": _by_provider(1 if minor < 28 and of_one else 0)}
    if minor >= 8:
        properties |= {"project_id": _NAME, "user_id": _NAME}
        required += ["project_id", "user_id"]
    if minor >= 28:
        properties["consumer_generation"] = {**_GENERATION, "type": ["integer", "null"]}
        required.append("consumer_generation")
    if minor >= 34:
        providers = {"type": "array", "minItems": 1, "items": _UUID}
        # Keys that are no suffixes are ignored; those of the group without a suffix are empty.
        properties["mappings"] = {"type": "object", "minProperties": 1, "patternProperties": {NAMED: providers}}
    if minor >= 38:
        properties["consumer_type"] = {**_NAME, "pattern": CLASS}
        required.append("consumer_type")
    return _object(properties, tuple(required))


def many_allocations(minor: int, least: int = 1) -> Schema:
    """The body of POST /allocations."""
    return {
        "type": "object",
        "minProperties": least,
        "maxProperties": _MOST,
        "patternProperties": {UUID_KEY: allocations(minor, of_one=False)},
        "additionalProperties": False,
    }


def reshaped(minor: int) -> Schema:
    """The body of POST /reshaper."""
    inventories = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": _MOST,
        "patternProperties": {UUID_KEY: all_inventories(minor)},
        "additionalProperties": False,
    }
    properties = {"inventories": inventories, "allocations": many_allocations(minor, 0)}
    return _object(properties, ("inventories", "allocations"))


def candidate_query(minor: int) -> Schema:
    """The query of GET /allocation_candidates."""
    properties: Schema = {}
    if minor >= 16:
        properties["limit"] = {"type": "string", "pattern": "^[1-9][0-9]*$", "minLength": 1}
    if minor < 25:
        properties["resources"] = _TEXT
        if minor >= 17:
            properties["required"] = _TEXT
        if minor >= 21:
            properties["member_of"] = _TEXT
        return _object(properties, ("resources",))
    properties["group_policy"] = {"type": "string", "enum": ["none", "isolate"]}
    for since, name in ((35, "root_required"), (36, "same_subtree")):
        if minor >= since:
            properties[name] = _TEXT
    suffix = NAMED if minor >= 33 else NUMBERED
    kinds = ("resources", "required", "member_of", *(("in_tree",) if minor >= 31 else ()))
    return {**_object(properties), "patternProperties": {f"^{kind}({suffix})?$": _TEXT for kind in kinds}}

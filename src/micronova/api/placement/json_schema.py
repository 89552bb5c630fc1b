"""A validator of JSON against the part of JSON Schema that the Placement API's schemas use.

Its messages have the form that clients of Placement know: what is wrong, then the keyword and its place in the schema.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from micronova.api.placement.uuids import is_uuid
from micronova.objects.errors import Invalid

Schema = Mapping[str, Any]
_LONGEST_SHOWN: Final = 300
_MOST_NAMED: Final = 10
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def check(value: Any, schema: Schema) -> None:
    """Raise Invalid, with the reason, for a value that does not validate."""
    _check(value, schema, "schema")


def _shown(value: object) -> str:
    """Return a value for a message, which may be as long as the whole body."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _matches(pattern: str, text: str) -> bool:
    """Return whether a text matches; `$` is its end here, as in JSON Schema, and not before a newline at its end."""
    return re.search(pattern.replace("$", r"\Z"), text) is not None


def _fail(message: str, keyword: str, place: str) -> None:
    raise Invalid(f"{message}\n\nFailed validating '{keyword}' in {place}")


def _check(value: Any, schema: Schema, place: str) -> None:
    for keyword in _IN_ORDER:
        if keyword in schema:
            _KEYWORDS[keyword](value, schema[keyword], schema, place)


def _type(value: Any, wanted: Any, schema: Schema, place: str) -> None:
    names = wanted if isinstance(wanted, list) else [wanted]
    known = tuple(kind for name in names for kind in _TYPES[name])
    if not isinstance(value, known) or isinstance(value, bool):
        _fail(f"{_shown(value)} is not of type {', '.join(map(repr, names))}", "type", place)


def _properties(value: Any, wanted: Any, schema: Schema, place: str) -> None:
    for name, own in wanted.items():
        if name in value:
            _check(value[name], own, f"{place}['properties']['{name}']")


def _pattern_properties(value: Any, wanted: Any, schema: Schema, place: str) -> None:
    for pattern, own in wanted.items():
        for name, item in value.items():
            if _matches(pattern, name):
                _check(item, own, f"{place}['patternProperties']['{pattern}']")


def _additional(value: Any, allowed: Any, schema: Schema, place: str) -> None:
    if allowed:
        return
    patterns = schema.get("patternProperties", {})
    more = [
        name
        for name in value
        if name not in schema.get("properties", {}) and not any(_matches(pattern, name) for pattern in patterns)
    ]
    if not more:
        return
    named = ", ".join(map(_shown, sorted(more)[:_MOST_NAMED]))
    if patterns:
        verb = "does" if len(more) == 1 else "do"
        listed = ", ".join(map(repr, sorted(patterns)))
        _fail(f"{named} {verb} not match any of the regexes: {listed}", "additionalProperties", place)
    verb = "was" if len(more) == 1 else "were"
    _fail(f"Additional properties are not allowed ({named} {verb} unexpected)", "additionalProperties", place)


def _required(value: Any, names: Any, schema: Schema, place: str) -> None:
    for name in names:
        if name not in value:
            _fail(f"{name!r} is a required property", "required", place)


def _min_properties(value: Any, least: int, schema: Schema, place: str) -> None:
    if len(value) < least:
        _fail(f"{_shown(value)} does not have enough properties", "minProperties", place)


def _max_properties(value: Any, most: int, schema: Schema, place: str) -> None:
    if len(value) > most:
        _fail(f"{_shown(value)} has too many properties", "maxProperties", place)


def _min_items(value: Any, least: int, schema: Schema, place: str) -> None:
    if len(value) < least:
        _fail(f"{_shown(value)} is too short", "minItems", place)


def _unique(value: Any, wanted: bool, schema: Schema, place: str) -> None:
    if wanted and len({repr(item) for item in value}) != len(value):
        _fail(f"{_shown(value)} has non-unique elements", "uniqueItems", place)


def _items(value: Any, own: Schema, schema: Schema, place: str) -> None:
    for item in value:
        _check(item, own, f"{place}['items']")


def _min_length(value: Any, least: int, schema: Schema, place: str) -> None:
    if isinstance(value, str) and len(value) < least:
        _fail(f"{_shown(value)} is too short", "minLength", place)


def _max_length(value: Any, most: int, schema: Schema, place: str) -> None:
    if isinstance(value, str) and len(value) > most:
        _fail(f"{_shown(value)} is too long", "maxLength", place)


def _pattern(value: Any, pattern: str, schema: Schema, place: str) -> None:
    if isinstance(value, str) and not _matches(pattern, value):
        _fail(f"{_shown(value)} does not match {pattern!r}", "pattern", place)


def _format(value: Any, name: str, schema: Schema, place: str) -> None:
    if isinstance(value, str) and not is_uuid(value):
        _fail(f"{_shown(value)} is not a {name!r}", "format", place)


def _minimum(value: Any, least: int, schema: Schema, place: str) -> None:
    if isinstance(value, int | float) and value < least:
        _fail(f"{_shown(value)} is less than the minimum of {least}", "minimum", place)


def _maximum(value: Any, most: float, schema: Schema, place: str) -> None:
    if isinstance(value, int | float) and value > most:
        _fail(f"{_shown(value)} is greater than the maximum of {most}", "maximum", place)


def _enum(value: Any, known: Any, schema: Schema, place: str) -> None:
    if value not in known:
        _fail(f"{_shown(value)} is not one of {known!r}", "enum", place)


_KEYWORDS: dict[str, Callable[[Any, Any, Schema, str], None]] = {
    "type": _type,
    "required": _required,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "additionalProperties": _additional,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "minItems": _min_items,
    "uniqueItems": _unique,
    "items": _items,
    "minLength": _min_length,
    "maxLength": _max_length,
    "pattern": _pattern,
    "format": _format,
    "minimum": _minimum,
    "maximum": _maximum,
    "enum": _enum,
}
_IN_ORDER = tuple(_KEYWORDS)

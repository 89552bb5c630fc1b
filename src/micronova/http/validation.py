"""Validation of bodies and query strings against msgspec types, with messages that name the field."""

import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from micronova.http.versions import Range, Ranges
from micronova.objects.errors import Invalid
from micronova.objects.wrong_values import wrong_value

# A struct may have a class attribute `versions = {"field": since(52), …}`, with names as clients send them: the field
# is accepted only at these microversions. A query's struct may have a class attribute `once = since(53)`, or one such
# range for each of some parameters: at these microversions a parameter that is given twice is refused.

# An escaped U+0000, which no database stores. An escaped backslash before u0000 is another text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def body(raw: bytes, kind: Any, minor: int, ignore_unknown: bool = False) -> Any:
    """Decode and check a request body; `ignore_unknown` (the /v2 API) ignores unknown fields."""
    if not raw:
        raw = b"null"
    if b"\\u0000" in raw and _NUL.search(raw):
        raise Invalid("Malformed request body: a text must not have the character U+0000.")
    try:
        if ignore_unknown:
            value = msgspec.convert(_known_only(msgspec.json.decode(raw), kind), kind)
        else:
            value = _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise Invalid(_explain(error, kind, minor)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(malformed(error)) from None
    if not ignore_unknown:
        check_versions(value, minor)
    return value


def query(values: Mapping[str, list[str]], kind: Any, strict: bool, minor: int) -> Any:
    """Check a query string against a struct; a list field takes every value, any other the last one."""
    fields = _query_fields(kind)
    once: Range | Mapping[str, Range] | None = getattr(kind, "once", None)
    found: dict[str, Any] = {}
    for name, given in values.items():
        repeated = fields.get(name)
        if repeated is None:
            if strict:
                raise Invalid(
                    f"Additional properties are not allowed ('{name[:64]}' was unexpected); "
                    f"known query parameters: {', '.join(sorted(fields))}."
                )
            continue
        singular = once.get(name) if isinstance(once, Mapping) else once
        if len(given) > 1 and singular is not None and minor in singular:
            raise Invalid(f"Invalid input for query parameter {name}: it must be given only once.")
        found[name] = given if repeated else given[-1]
    try:
        value = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(_explain(error, kind, minor, "query parameter")) from None
    check_versions(value, minor, ignore=not strict)
    return value


def malformed(error: Exception) -> str:
    """Return the message for a body that cannot be decoded."""
    if isinstance(error, RecursionError):
        return "Malformed request body: it is nested too deeply."
    return f"Malformed request body: it must be JSON in UTF-8 ({str(error)[:200]})."


def check_versions(value: Any, minor: int, path: str = "", ignore: bool = False) -> None:
    """Raise Invalid for fields that do not exist at this microversion; `ignore` drops them instead."""
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, msgspec.Struct):
                check_versions(item, minor, path, ignore)
        return
    if not isinstance(value, msgspec.Struct):
        return
    declared: Mapping[str, Range | Ranges] = getattr(value, "versions", {})
    for attribute, wire in _fields(type(value)):
        item = getattr(value, attribute)
        if wire in declared and minor not in declared[wire] and _is_given(value, attribute):
            if not ignore:
                where = f" in '{path}'" if path else ""
                raise Invalid(
                    f"Invalid input{where}: Additional properties are not allowed ('{wire}' was unexpected at "
                    f"this microversion)."
                )
            setattr(value, attribute, msgspec.UNSET)
        elif isinstance(item, msgspec.Struct | list | tuple):
            check_versions(item, minor, f"{path}.{wire}" if path else wire, ignore)


def _explain(error: msgspec.ValidationError, kind: Any, minor: int, noun: str = "field/attribute") -> str:
    def exists(struct: type, name: str) -> bool:
        declared: Mapping[str, Range | Ranges] = getattr(struct, "versions", {})
        return name not in declared or minor in declared[name]

    wrong = wrong_value(error, kind, exists)
    return f"Invalid input for {noun} {wrong.place or 'body'}: {wrong.problem}."


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _is_given(value: msgspec.Struct, attribute: str) -> bool:
    """Return whether a request has a field. A null that is the default may have been left out."""
    item = getattr(value, attribute)
    return item is not msgspec.UNSET and (item is not None or attribute not in _null_by_default(type(value)))


@cache
def _null_by_default(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(each.name for each in msgspec.structs.fields(kind) if each.default is None)


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    return list(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


@cache
def _query_fields(kind: type[msgspec.Struct]) -> dict[str, bool]:
    """Return each query parameter with whether it may repeat."""
    hints = typing.get_type_hints(kind)
    return {wire: _is_list(hints[attribute]) for attribute, wire in _fields(kind)}


def _is_list(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_list(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Annotated:
        return _is_list(typing.get_args(hint)[0])
    return hint is list or typing.get_origin(hint) is list


def _known_only(value: Any, kind: Any) -> Any:
    """Drop fields that the struct does not declare, at all depths."""
    info = msgspec.inspect.type_info(kind)
    return _prune(value, info)


def _prune(value: Any, info: msgspec.inspect.Type) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        for part in info.types:
            if isinstance(part, msgspec.inspect.StructType) and isinstance(value, dict):
                return _prune(value, part)
            if isinstance(part, msgspec.inspect.ListType) and isinstance(value, list):
                return _prune(value, part)
        return value
    if isinstance(info, msgspec.inspect.Metadata):
        return _prune(value, info.type)
    if isinstance(info, msgspec.inspect.StructType) and isinstance(value, dict):
        known = {field.encode_name: field.type for field in info.fields}
        return {key: _prune(item, known[key]) for key, item in value.items() if key in known}
    if isinstance(info, msgspec.inspect.ListType) and isinstance(value, list):
        return [_prune(item, info.item_type) for item in value]
    return value

"""Bad bodies made from good ones: every field that a route's body type declares, with everything that may be wrong.

A body type says what is wrong by itself: what msgspec cannot convert must be a 400 that names the field. Anything
else may be accepted or refused, and must never be a 5xx.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as kinds

from micronova.http.service import Route

LONG = "x" * 70_000
HUGE = 10**30
VALUES: tuple[Any, ...] = (
    None, True, -1, HUGE, 1.5, "", "zörk", LONG, [], {}, [None], {"zork": 1}, "99999999999999999999", "a\u0000b", " \n",
)  # fmt: skip


@dataclass(frozen=True)
class Bad:
    """A body with one thing changed in it."""

    what: str
    body: Any
    field: str = ""  # the wire name of what was changed
    parent: str = ""  # and of what it is in
    invalid: bool = False  # its type says that it cannot be

    def named_in(self, message: str) -> bool:
        """Return whether a message tells what is wrong.

        Keys that a type does not declare (of metadata, of extra specs) are known by what they are in. Two checks are
        about the body as a whole: that of U+0000, and that the body of an action has one key.
        """
        known = (self.field, f"{self.parent}[...]", f"attribute {self.parent or 'body'}:", "U+0000", "exactly one key")
        return any(name in message for name in known)


def from_route(route: Route, good: Any) -> Iterator[Bad]:
    """Change, drop and add every field at every level that the route's body has."""
    return from_good(good) if callable(route.body) and not isinstance(route.body, type) else from_type(route.body, good)


def from_good(good: Any) -> Iterator[Bad]:
    """Change, drop and add every field of a good body; its JSON schema depends on the microversion."""
    for path, target in _objects(good, ()):
        parent = str(path[-1]) if path else ""
        yield Bad("added", _with(good, path, "zork", "zork"), "zork", parent)
        for name in target:
            removed = copy.deepcopy(good)
            del _at(removed, path)[name]
            yield Bad(f"{name} removed", removed, name, parent)
            for value in VALUES:
                yield Bad(f"{name} = {_short(value)}", _with(good, path, name, value), name, parent)


def from_type(kind: Any, good: Any) -> Iterator[Bad]:
    """Change, drop and add every field at every level that the type knows of."""
    for path, name in _places(kinds.type_info(kind), good, ()):
        for value in VALUES:
            yield _judged(kind, f"= {_short(value)}", _with(good, path, name, value), path, name)
    for path, target in _objects(good, ()):
        yield _judged(kind, "added", _with(good, path, "zork", "zork"), path, "zork")
        for name in target:
            removed = copy.deepcopy(good)
            del _at(removed, path)[name]
            yield _judged(kind, "removed", removed, path, name)


def from_names(noun: str, good: dict[str, Any], names: tuple[str, ...]) -> Iterator[Bad]:
    """Change and add attributes that no type declares: some services take any; `noun` is what they are in."""
    path = (noun,) if noun else ()
    for number, name in enumerate(names):
        for value in VALUES[number % 2 :: 2]:
            yield Bad(f"{noun}.{name} = {_short(value)}", _with(good, path, name, value), name, noun)


def whole(good: Any) -> Iterator[tuple[str, bytes]]:
    """Bodies that are wrong from the first byte."""
    encoded = msgspec.json.encode(good)
    yield from {
        "nothing": b"", "null": b"null", "a number": b"5", "a text": b'"x"', "true": b"true", "an array": b"[]",
        "an empty object": b"{}", "in an array": b"[" + encoded + b"]", "in itself": b'{"zork":' + encoded + b"}",
        "half": encoded[: len(encoded) // 2], "twice": encoded + encoded, "not JSON": b"zork", "a form": b"a=b&c=d",
        "not UTF-8": encoded.replace(b'"', b'"\xff', 1), "UTF-16": encoded.decode().encode("utf-16"),
        "deep arrays": b"[" * 100_000, "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        "deep inside": encoded[:-1] + b',"zork":' + b"[" * 50_000 + b"]" * 50_000 + encoded[-1:],
        "NaN": b'{"zork": NaN}', "a huge number": b'{"zork": 1' + b"0" * 5000 + b"}", "1e999": b'{"zork": 1e999}',
        "a lone surrogate": b'{"zork": "\\ud800"}', "half a pair": b'{"\\udc00": 1}', "U+0000": b'{"zork": "\\u0000"}',
    }.items()  # fmt: skip


def _judged(kind: Any, what: str, body: Any, path: tuple[Any, ...], name: str) -> Bad:
    where = ".".join(str(step) for step in (*path, name))
    parent = ".".join(str(step) for step in path)
    try:
        msgspec.convert(body, kind)
    except msgspec.ValidationError:
        return Bad(f"{where} {what}", body, name, parent, invalid=True)
    return Bad(f"{where} {what}", body, name, parent)


def _places(info: kinds.Type, good: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Walk the fields of a type as far as the good body goes; below that, their values are made up anyway."""
    if isinstance(info, kinds.Metadata):
        yield from _places(info.type, good, path)
    elif isinstance(info, kinds.UnionType):
        for part in info.types:
            if isinstance(part, kinds.StructType | kinds.ListType | kinds.DictType):
                yield from _places(part, good, path)
    elif isinstance(info, kinds.StructType) and isinstance(good, dict):
        for field in info.fields:
            yield path, field.encode_name
            if field.encode_name in good:
                yield from _places(field.type, good[field.encode_name], (*path, field.encode_name))
    elif isinstance(info, kinds.ListType) and isinstance(good, list) and good:
        yield from _places(info.item_type, good[0], (*path, 0))
    elif isinstance(info, kinds.DictType) and isinstance(good, dict):
        for name in good:
            yield path, name


def _objects(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
        for name, item in value.items():
            yield from _objects(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from _objects(value[0], (*path, 0))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _with(good: Any, path: tuple[Any, ...], name: str, value: Any) -> Any:
    changed = copy.deepcopy(good)
    _at(changed, path)[name] = value
    return changed


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:20]}… ({len(text)})"

"""Requests that try every property of Nova's request schemas, at every version at which a schema changes."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

UUID = "5f3d9a55-6c0f-4a0c-9d57-0fb0fb5e6f0e"
LONG = "x" * 256
# What each property of a body gets: values that schemas tell apart.
VALUES: tuple[Any, ...] = (
    None, "", " ", "x", " x ", LONG, "x/y", "\u00e9", "1", "-1", "0", 0, 1, -1, -2, 2**31, 1.5, True, "True", "yes",
    UUID, "10.0.0.1", "::1", "auto", "2026-01-01T00:00:00Z", [], ["x"], ["x", "x"], {}, {"x": "y"},
    {"x": 1}, {"x": None}, {LONG: "y"},
)  # fmt: skip
# What each query parameter gets.
TEXTS = ("", "x", "1", "-1", "0", "1.5", "True", LONG, UUID, "2026-01-01T00:00:00", "10.0.0.1", "(")


@dataclass(frozen=True)
class Probe:
    """A request that differs from a good one in one place."""

    operation: int  # its number in Nova's list
    kind: str  # body or query
    minor: int
    value: Any
    place: str  # what is tried
    tried: str


def minimal(schema: Schema) -> Any:
    """Return a value that a schema probably accepts; the caller asks Nova."""
    for several in ("oneOf", "anyOf"):
        if several in schema and "properties" not in schema:
            return minimal(schema[several][0])
    if "enum" in schema:
        return schema["enum"][0]
    kinds = schema.get("type", "object")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "object":
        known = schema.get("properties", {})
        wanted = schema.get("required") or ([] if schema.get("additionalProperties", True) else list(known)[:1])
        found = {name: minimal(known.get(name, {})) for name in wanted}
        return found or ({"x": "y"} if schema.get("patternProperties") and schema.get("minProperties") else {})
    if kind == "array":
        return [minimal(schema.get("items", {}))] if schema.get("minItems") else []
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum", 1))
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    return {"uuid": UUID, "date-time": "2026-01-01T00:00:00Z", "ipv4": "10.0.0.1", "ipv6": "::1"}.get(
        schema.get("format", ""), "x"
    )


def body_probes(
    operation: int, minor: int, schema: Schema, before: Schema | None, good: Any, gone: Any
) -> Iterator[Probe]:
    """Return the probes of a body; of a schema with a predecessor only what has changed since it."""

    def probe(path: tuple[Any, ...], value: Any, tried: str) -> Probe:
        return Probe(operation, "body", minor, _with(good, path, value), ".".join(map(str, path)), tried)

    def walk(path: tuple[Any, ...], schema: Schema, before: Schema | None, present: Any) -> Iterator[Probe]:
        if schema == before:
            return
        parts = [schema, *schema.get("oneOf", ()), *schema.get("anyOf", ()), *schema.get("allOf", ())]
        known: Schema = {}
        for part in parts:
            known |= part.get("properties", {}) if isinstance(part, dict) else {}
        old = (before or {}).get("properties", {})
        if known or schema.get("type") == "object":
            yield probe((*path, "zork"), "x", "an unknown field")
            for name in {**(gone or {}), **old}:
                if name not in known:
                    yield probe((*path, name), "x", "a field of another version")
            for name in schema.get("required", ()):
                if isinstance(present, dict) and name in present:
                    yield probe((*path, name), _REMOVED, "left out")
        for name, each in known.items():
            if each == old.get(name):
                continue
            here = present.get(name, _REMOVED) if isinstance(present, dict) else _REMOVED
            for value in (*VALUES, *each.get("enum", ())):
                yield probe((*path, name), value, json.dumps(value)[:40])
            inner = minimal(each) if here is _REMOVED else here
            yield from walk((*path, name), each, old.get(name), inner)
            for part in [each, *each.get("oneOf", ()), *each.get("anyOf", ())]:
                items = part.get("items")
                if isinstance(items, dict):
                    item = inner[0] if isinstance(inner, list) and inner else minimal(items)
                    for value in VALUES:
                        yield probe((*path, name), [value], f"[{json.dumps(value)[:40]}]")
                    if isinstance(item, dict):
                        yield from _items((*path, name), items, item, probe)

    yield from walk((), schema, before, good)


def _items(path: tuple[Any, ...], items: Schema, item: dict[str, Any], probe: Any) -> Iterator[Probe]:
    parts = [items, *items.get("oneOf", ()), *items.get("anyOf", ())]
    known: Schema = {}
    for part in parts:
        known |= part.get("properties", {})
    yield probe(path, [{**item, "zork": "x"}], "an item with an unknown field")
    for name, each in known.items():
        for value in (*VALUES, *each.get("enum", ())):
            yield probe(path, [{**item, name: value}], f"{name}: {json.dumps(value)[:40]}")


def query_probes(operation: int, minor: int, schema: Schema, gone: set[str]) -> Iterator[Probe]:
    """Return the probes of a query string."""

    def probe(name: str, values: list[str], tried: str) -> Probe:
        return Probe(operation, "query", minor, {name: values}, name, tried)

    yield probe("zork", ["x"], "an unknown parameter")
    for name in gone - set(schema.get("properties", {})):
        yield probe(name, ["1"], "a parameter of another version")
    for name in schema.get("properties", {}):
        for text in TEXTS:
            yield probe(name, [text], json.dumps(text)[:40])
        yield probe(name, ["1", "1"], "twice")


_REMOVED = object()


def _with(good: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a value with something else at a place."""
    if not path:
        return value
    name, *rest = path
    copied = copy.deepcopy(good) if isinstance(good, dict) else {}
    if not rest and value is _REMOVED:
        copied.pop(name, None)
    else:
        copied[name] = _with(copied.get(name), tuple(rest), value)
    return copied

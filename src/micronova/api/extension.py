"""What an extension of the compute API consists of; docs/extend.md has an example.

An extension is an entry point of the group `micronova.api_extensions`: an `Extension`. It adds routes (new resources,
and actions on existing ones), changes routes that exist (fields of bodies, queries and answers, and behaviour around
their handlers), and brings policy rules. Clients find it in GET /extensions. Its declarations are of the same kind as
the API's own, so validation, microversions, policy and the OpenAPI document follow from them.
"""

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from micronova.api.view import Field, View
from micronova.http.service import Handler, Route
from micronova.http.versions import Range
from micronova.policies.enforcer import Rule

Proceed = Callable[[], Awaitable[Any]]
"""Calls the route's own handler, or the next change, and returns its answer."""


@dataclass(frozen=True, kw_only=True)
class RouteChange:
    """What an extension adds to a route that exists."""

    route: str  # its label: METHOD PATH, and for actions the action's name, e.g. "POST /servers/{id}/action rebuild"
    # async def around(request, proceed, **path parameters): returns what `await proceed()` returned, perhaps changed.
    # It may raise an error before or after. Policy and existence may be checked only by `proceed`.
    around: Callable[..., Awaitable[Any]]
    versions: Range = Range()  # the microversions at which the change exists
    body: type[msgspec.Struct] | None = None  # further fields of the object in the body, all with defaults
    query: type[msgspec.Struct] | None = None  # further query parameters, all with defaults
    # Further fields of the object in the answer, or of each object of its list, with their types as in api/openapi.py.
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What an extension adds to an API."""

    routes: Sequence[Route] = ()
    changes: Sequence[RouteChange] = ()


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extension: how clients see it, its policy rules, and the function that makes its additions."""

    alias: str  # names it in GET /extensions, e.g. "os-racks"
    name: str
    description: str
    updated: str  # when its interface last changed, e.g. "2026-02-27T00:00:00Z"
    add: Callable[[Any], Additions]  # gets the API's dependencies (`APIDependencies` in api/compute/app.py)
    rules: Sequence[Rule] = ()


class Unusable(Exception):
    """Why an extension is not used."""


def changed(route: Route, change: RouteChange) -> Iterator[Route]:
    """Return a route with a change: up to three routes, because the change may exist at some microversions only."""
    first, last = max(route.versions.since, change.versions.since), min(route.versions.until, change.versions.until)
    if first > last:
        yield route
        return
    if route.versions.since < first:
        yield replace(route, versions=Range(route.versions.since, first - 1))
    yield replace(
        route,
        versions=Range(first, last),
        handler=_surrounded(route.handler, change.around),
        body=route.body if change.body is None else _with_body_fields(route.label, route.body, change.body),
        query=route.query if change.query is None else _with_parameters(route.label, route.query, change.query),
        answer=_with_answer_fields(route, change.answer) if change.answer else route.answer,
    )
    if last < route.versions.until:
        yield replace(route, versions=Range(last + 1, route.versions.until))


def _surrounded(handler: Handler, around: Callable[..., Awaitable[Any]]) -> Handler:
    @functools.wraps(handler)
    async def handle(request: Any, **params: str) -> Any:
        return await around(request, functools.partial(handler, request, **params), **params)

    return handle


def _with_body_fields(label: str, outer: Any, more: type[msgspec.Struct]) -> Any:
    """Return the type of the body whose first field, which is an object, has the further fields."""
    envelope, inner, is_optional = _envelope(outer)
    if inner is None:
        raise Unusable(f"{label} has no object in its body that could get fields")
    _check_fields(label, inner, more)
    return _with_grown_envelope(outer, envelope.name, envelope.encode_name, _grown(inner, more), is_optional)


def _envelope(outer: Any) -> tuple[Any, type[msgspec.Struct] | None, bool]:
    """Return the first field of a body, the struct that it holds, if any, and whether it may be null."""
    if not (isinstance(outer, type) and issubclass(outer, msgspec.Struct) and outer.__struct_fields__):
        return None, None, False
    envelope = msgspec.structs.fields(outer)[0]
    info = msgspec.inspect.type_info(envelope.type)
    parts = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    inner = next((part.cls for part in parts if isinstance(part, msgspec.inspect.StructType)), None)
    return envelope, inner, isinstance(info, msgspec.inspect.UnionType) and info.includes_none


def _with_parameters(label: str, query: Any, more: type[msgspec.Struct]) -> Any:
    if query is None:
        raise Unusable(f"{label} declares no query that could get parameters")
    _check_fields(label, query, more)
    return _grown(query, more)


def _check_fields(label: str, kind: type[msgspec.Struct], more: type[msgspec.Struct]) -> None:
    known = {name for each in msgspec.structs.fields(kind) for name in (each.name, each.encode_name)}
    for each in msgspec.structs.fields(more):
        if clash := {each.name, each.encode_name} & known:
            raise Unusable(f"{label} has the field {min(clash)} already")
        if each.required:
            raise Unusable(f"the field {each.encode_name} of {label} needs a default: clients do not know it")


# Cached, because routes that share a type go on to share it: the OpenAPI document has one schema for each name.
@functools.cache
def _grown(kind: type[msgspec.Struct], more: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the struct with the fields of another one."""
    fields = []
    for each in msgspec.structs.fields(more):
        if each.default is not msgspec.NODEFAULT:
            default = msgspec.field(name=each.encode_name, default=each.default)
        else:
            default = msgspec.field(name=each.encode_name, default_factory=each.default_factory)
        fields.append((each.name, each.type, default))
    versions = {**getattr(kind, "versions", {}), **getattr(more, "versions", {})}
    return _derived(f"{kind.__name__}_{more.__name__}", kind, fields, versions)


@functools.cache
def _with_grown_envelope(
    outer: type[msgspec.Struct], name: str, wire: str, inner: type[msgspec.Struct], is_optional: bool
) -> type[msgspec.Struct]:
    kind: Any = inner | None if is_optional else inner
    field = (name, kind, msgspec.field(name=wire))
    return _derived(f"{outer.__name__}_{inner.__name__}", outer, [field], getattr(outer, "versions", {}))


def _derived(
    name: str, kind: type[msgspec.Struct], fields: list[tuple[str, Any, Any]], versions: Mapping[str, Any]
) -> type[msgspec.Struct]:
    namespace = {"__doc__": kind.__doc__, "versions": versions}
    return msgspec.defstruct(name, fields, bases=(kind,), module=kind.__module__, namespace=namespace, kw_only=True)


def _with_answer_fields(route: Route, more: Mapping[str, Any]) -> Any:
    """Return the declaration of the answer whose first field, an object or a list of objects, has further fields."""
    first, *others = route.answer if isinstance(route.answer, tuple) else (route.answer,)
    if not (isinstance(first, dict) and first):
        raise Unusable(f"{route.label} has no object in its answer that could get fields")
    key = next(iter(first))
    grown = {**first, key: _with_fields(route, first[key], more)}
    return (grown, *others) if others else grown


def _with_fields(route: Route, shape: Any, more: Mapping[str, Any]) -> Any:
    if isinstance(shape, list):
        return [_with_fields(route, shape[0], more)]
    if isinstance(shape, View):
        known = {each.name for each in shape.fields}
    elif isinstance(shape, dict) and "*" not in shape:
        known = {name.removesuffix("?") for name in shape}
    else:
        raise Unusable(f"{route.label} has no object in its answer that could get fields")
    if clash := known & {name.removesuffix("?") for name in more}:
        raise Unusable(f"{route.label} has the field {min(clash)} in its answer already")
    if isinstance(shape, View):
        # The extension itself puts the values in; the view that the handler renders stays as it is.
        added = (
            Field(name.removesuffix("?"), _absent, optional=name.endswith("?"), type=kind)
            for name, kind in more.items()
        )
        return View(*shape.fields, *added, keyed=shape.keyed)
    return {**shape, **more}


def _absent(row: Any, context: Any) -> Any:
    raise AssertionError("a view that describes an answer is not rendered")

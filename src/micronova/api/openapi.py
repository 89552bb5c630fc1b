"""An OpenAPI 3.1 document of a service at one microversion, from the declarations of its routes.

Bodies and query strings are msgspec types, and msgspec makes their schemas; fields of other microversions are left
out. What a route answers with (`Route.answer`, `Field.type`) is written as:

- a type that msgspec knows: `int`, `str | None`, `dict[str, str]`, a `Literal`;
- a `View`: an object with the view's fields at this microversion;
- `[item]`: an array; `(one, other)`: either of them;
- `{"name": …, "other?": …}`: an object with these fields and no others, the second one optional;
- `{"*": …}`: an object with any names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from micronova.api.view import UNDECLARED, View
from micronova.http.faults import TITLES
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import Range, Ranges, Versions

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
# Whatever a request is about: it is malformed, refused, about something that is not there, at a version that does not
# exist, in conflict with another; or a service that it needs is away.
_ERRORS = (400, 404, 406, 409, 503)
_ERRORS_WITH_TOKEN = (401, 403)
_ERRORS_WITH_BODY = (408, 413, 415)


def document(
    routes: Iterable[Route],
    versions: Versions,
    minor: int,
    *,
    title: str,
    description: str,
    url: str,
    faults: Iterable[str],
) -> Schema:
    """Return the document; `faults` are the keys that the bodies of errors may have."""
    here = [route for route in routes if minor in route.versions]
    schemas = _Schemas(here, minor)
    paths: dict[str, Schema] = {}
    operations: dict[tuple[str, str], list[Route]] = {}
    for route in here:
        operations.setdefault((_PARAMETER.sub(r"{\1}", route.path) or "/", route.method), []).append(route)
    for (path, method), found in operations.items():
        item = paths.setdefault(path, _path_item(path))
        item[method.lower()] = _operation(path, found, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": versions.text(minor), "description": description},
        "servers": [{"url": url}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.components, "Fault": _fault(faults)},
            "parameters": {"microversion": _version_parameter(versions, minor)},
            "headers": _headers(versions, minor),
            "responses": {
                str(status): {
                    "description": TITLES.get(status, "Error"),
                    "headers": {
                        **_header_refs("request-id"),
                        **(_header_refs("www-authenticate") if status == 401 else {}),
                    },
                    "content": _json({"$ref": _REF.format(name="Fault")}),
                }
                for status in sorted({status for route in here for status in _errors_of(route)})
            },
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-Auth-Token",
                    "description": "A token of the identity service.",
                }
            },
        },
    }


class _Schemas:
    """The schemas of the declared types at one microversion; structs are components."""

    def __init__(self, routes: Sequence[Route], minor: int) -> None:
        self._minor = minor
        types = [kind for route in routes for kind in (route.body, route.query) if kind is not None]
        for route in routes:
            for declared in (route.answer, *route.also.values()):
                types += [] if declared is None else self._leaves(declared)
        structs = {struct for kind in types for struct in _structs(msgspec.inspect.type_info(kind))}
        kinds = list(dict.fromkeys([*sorted(structs, key=_component_name), *types]))
        schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._schemas: dict[Any, Schema] = dict(zip(kinds, schemas, strict=True))
        names: dict[str, str] = {}
        self.components: dict[str, Schema] = {}
        for struct in structs:
            given = self._schemas[struct]["$ref"].rpartition("/")[2]
            names[self._schemas[struct]["$ref"]] = _REF.format(name=_component_name(struct))
            self.components[_component_name(struct)] = components[given]
            _restrict(components[given], struct, minor)
        queries = {route.query for route in routes}  # they become parameters
        self.queries = {struct: self.components.pop(_component_name(struct)) for struct in structs & queries}
        self.components = dict(sorted(self.components.items()))
        for schema in (*components.values(), *schemas):
            _write_portably(schema, names)

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type that msgspec knows."""
        return self._schemas[kind]

    def declared(self, shape: Any) -> Schema:
        """Return the schema of what a route or a field declares."""
        if shape is UNDECLARED:
            return {}
        if isinstance(shape, View):
            return self._view(shape)
        if isinstance(shape, list):
            return {"type": "array", "items": self.declared(shape[0])}
        if isinstance(shape, tuple):
            return {"anyOf": [self.declared(each) for each in shape]}
        if isinstance(shape, dict):
            if set(shape) == {"*"}:
                return {"type": "object", "additionalProperties": self.declared(shape["*"])}
            fields = {name.removesuffix("?"): self.declared(each) for name, each in shape.items()}
            return _object(fields, [name for name in shape if not name.endswith("?")])
        return self.of(shape)

    def _view(self, view: View) -> Schema:
        fields = [field for field in view.fields if self._minor in field.versions]
        required = [field.name for field in fields if not field.optional and not field.when]
        return _object({field.name: self.declared(field.type) for field in fields}, required)

    def _leaves(self, shape: Any) -> Iterator[Any]:
        """Return the types in a declaration that msgspec makes the schemas of."""
        if shape is UNDECLARED:
            return
        if isinstance(shape, View):
            for field in shape.fields:
                if self._minor in field.versions:
                    yield from self._leaves(field.type)
        elif isinstance(shape, list | tuple | dict):
            for each in shape.values() if isinstance(shape, dict) else shape:
                yield from self._leaves(each)
        else:
            yield shape


def _operation(path: str, routes: Sequence[Route], schemas: _Schemas) -> Schema:
    """Return the operation of a method on a path; several routes are its actions."""
    first = routes[0]
    found: Schema = {
        "operationId": f"{first.method.lower()}{re.sub('[^A-Za-z0-9]+', '_', path).rstrip('_') or '_root'}",
        "tags": [path.split("/")[1] or "versions"],
        "summary": _summary(first) if first.action is None else "Act on the resource; the body names the action.",
        "x-policy": _policies(routes),
    }
    if first.policy is None:
        found["security"] = []
    if all(route.status == 410 for route in routes):
        found["deprecated"] = True
    if first.query is not None:
        found["parameters"] = list(_query_parameters(first.query, schemas))
    bodies = [(route, schemas.of(route.body)) for route in routes if route.body is not None]
    if bodies:
        shown = [{**schema, "description": _summary(route)} if route.action else schema for route, schema in bodies]
        schema = shown[0] if len(shown) == 1 else {"anyOf": shown}
        found["requestBody"] = {"required": not _may_be_null(first.body), "content": _json(schema)}
    found["responses"] = _responses(routes, schemas)
    if first.action is not None:
        answers = {route.action: {str(route.status): route.answer} for route in routes if route.answer is not None}
        found["x-answers"] = {
            action: {status: schemas.declared(answer) for status, answer in each.items()}
            for action, each in answers.items()
        }
    return found


def _responses(routes: Sequence[Route], schemas: _Schemas) -> Schema:
    answers: dict[int, list[Any]] = {}
    for route in routes:
        for status, answer in ((route.status, route.answer), *route.also.items()):
            answers.setdefault(status, []).append(answer)
    found: Schema = {}
    for status, declared in answers.items():
        if status >= 400:
            continue
        headers = {**_header_refs("request-id"), **_header_refs("version")}
        if any(status in (201, 202) and route.has_location for route in routes):
            headers["Location"] = {"$ref": "#/components/headers/location"}
        found[str(status)] = {"description": _DONE.get(status, "Done"), "headers": headers}
        bodies = [schemas.declared(each) for each in declared if each is not None]
        if bodies and len(bodies) == len(declared):  # OpenAPI cannot say that there may be no body
            found[str(status)]["content"] = _json(bodies[0] if len(bodies) == 1 else {"anyOf": bodies})
    errors = sorted({status for route in routes for status in _errors_of(route)})
    return found | {str(status): {"$ref": f"#/components/responses/{status}"} for status in errors}


_DONE = {
    200: "The answer",
    201: "It was created",
    202: "The request was accepted",
    204: "Done; there is nothing to show",
    207: "Some parts of the request failed; the answer has the result of each",
    300: "Several versions can be meant",
}


def _errors_of(route: Route) -> tuple[int, ...]:
    found = _ERRORS + route.errors
    if route.policy is not None:
        found += _ERRORS_WITH_TOKEN
    if route.body is not None:
        found += _ERRORS_WITH_BODY
    return found + ((route.status,) if route.status >= 400 else ())


def _query_parameters(kind: Any, schemas: _Schemas) -> Iterator[Schema]:
    for name, each in schemas.queries[kind]["properties"].items():
        repeats = each.get("type") == "array"
        yield {"name": name, "in": "query", "schema": each, **({"style": "form", "explode": True} if repeats else {})}


def _restrict(schema: Schema, struct: type[msgspec.Struct], minor: int) -> None:
    """Leave out the fields that do not exist at this microversion."""
    declared: Mapping[str, Range | Ranges] = getattr(struct, "versions", {})
    for name in [name for name, versions in declared.items() if minor not in versions]:
        schema["properties"].pop(name, None)
        if name in schema.get("required", ()):
            schema["required"].remove(name)


def _structs(info: msgspec.inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """Return the structs that a type consists of."""
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
        for field in info.fields:
            yield from _structs(field.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for part in info.types:
            yield from _structs(part)
    elif isinstance(info, msgspec.inspect.Metadata):
        yield from _structs(info.type)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from _structs(info.item_type)
    elif isinstance(info, msgspec.inspect.DictType):
        yield from _structs(info.value_type)


def _component_name(struct: type[msgspec.Struct]) -> str:
    return f"{struct.__module__.rpartition('.')[2]}.{struct.__qualname__}"


def _write_portably(schema: Any, names: Mapping[str, str]) -> None:
    """Give components our names, and write Python's end of a text in patterns as other languages do."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = schema["pattern"].replace(r"\Z", "$")
        if isinstance(schema.get("$ref"), str):
            schema["$ref"] = names.get(schema["$ref"], schema["$ref"])
        for each in schema.values():
            _write_portably(each, names)
    elif isinstance(schema, list):
        for each in schema:
            _write_portably(each, names)


def _may_be_null(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    return isinstance(info, msgspec.inspect.UnionType) and info.includes_none


def _summary(route: Route) -> str:
    text = (route.handler.__doc__ or "").strip().partition("\n")[0]
    return text or route.label


def _policies(routes: Sequence[Route]) -> Any:
    rules = {route.action or "": "any token" if route.policy == AUTHENTICATED else route.policy for route in routes}
    return rules[""] if set(rules) == {""} else rules


def _path_item(path: str) -> Schema:
    parameters: list[Schema] = [{"$ref": "#/components/parameters/microversion"}]
    for name in _PARAMETER.findall(path):
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    return {"parameters": parameters}


def _version_parameter(versions: Versions, minor: int) -> Schema:
    text = f"{versions.service} {versions.text(minor)}"
    about = f"The microversion of this document. Without the header it is {versions.text(versions.least)}."
    return {
        "name": "OpenStack-API-Version",
        "in": "header",
        "required": minor != versions.least,
        "description": about,
        "schema": {"type": "string", "const": text},
    }


def _headers(versions: Versions, minor: int) -> Schema:
    return {
        "request-id": {
            "description": "The id of the request, in the logs of all services.",
            "schema": {"type": "string"},
        },
        "version": {
            "description": "The microversion of the answer.",
            "required": True,
            "schema": {"type": "string", "const": f"{versions.service} {versions.text(minor)}"},
        },
        "www-authenticate": {"description": "Where to get a token.", "required": True, "schema": {"type": "string"}},
        "location": {"description": "The URL of what was created.", "schema": {"type": "string"}},
    }


_WIRE_NAMES = {
    "request-id": "X-OpenStack-Request-ID", "version": "OpenStack-API-Version", "www-authenticate": "WWW-Authenticate",
}  # fmt: skip


def _header_refs(name: str) -> Schema:
    return {_WIRE_NAMES[name]: {"$ref": f"#/components/headers/{name}"}}


def _fault(names: Iterable[str]) -> Schema:
    detail = _object({"code": {"type": "integer"}, "message": {"type": "string"}}, ["code", "message"])
    return {
        "type": "object",
        "description": "One key, which names the fault.",
        "properties": dict.fromkeys(sorted(names), detail),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _object(properties: Schema, required: list[str]) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": required} if required else found


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}

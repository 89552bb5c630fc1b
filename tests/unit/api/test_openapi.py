"""The OpenAPI document: valid at every microversion, complete, and made of what is declared."""

import asyncio
import functools
import importlib
import json
import pkgutil
import re
from typing import Any, Literal

import jsonschema_rs
import msgspec
import pytest
from click.testing import CliRunner
from msgspec import UNSET, UnsetType
from openapi_spec_validator import OpenAPIV31SpecValidator
from openapi_spec_validator.schemas import schema_v31

from micronova.api import compute
from micronova.api.compute import api_document
from micronova.api.compute.extensions import load_extensions
from micronova.api.compute.versions_doc import LEAST, NEWEST, VERSIONS
from micronova.api.openapi import document
from micronova.api.view import UNDECLARED, Field, View
from micronova.cli import openapi
from micronova.cli.main import main
from micronova.conf.settings import load
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from tests.schemas.openapi import Document, Wrong


@functools.cache
def routes() -> tuple[Route, ...]:
    return tuple(asyncio.run(openapi.composed_routes(load(None), load_extensions())))


def changes() -> list[int]:
    """Return the microversions at which a route, a body, a query or a view changes, from the declarations."""
    ranges = [route.versions for route in routes()]
    ranges += [field.versions for view in views().values() for field in view.fields]
    for route in routes():
        for kind in (route.body, route.query):
            for each in getattr(kind, "versions", {}).values():
                ranges += each.ranges if hasattr(each, "ranges") else [each]
    found = {each.since for each in ranges} | {each.until + 1 for each in ranges}
    return sorted({LEAST, NEWEST, *(minor for minor in found if LEAST <= minor <= NEWEST)})


def views() -> dict[str, View]:
    """Return every view of the compute API."""
    found: dict[str, View] = {}
    for each in pkgutil.iter_modules(compute.__path__):
        module = importlib.import_module(f"{compute.__name__}.{each.name}")
        found |= {f"{each.name}.{name}": value for name, value in vars(module).items() if isinstance(value, View)}
    return found


@pytest.mark.parametrize("minor", [LEAST, 35, 90, NEWEST])
def test_the_document_is_valid(minor: int) -> None:
    content = msgspec.json.decode(msgspec.json.encode(api_document.document(routes(), minor)))
    assert content["openapi"].startswith("3.1") and content["info"]["version"] == f"2.{minor}"
    problems = list(OpenAPIV31SpecValidator(content).iter_errors())
    assert not problems, problems[0]


def test_the_document_of_every_microversion_that_changes_it_matches_the_schema_of_openapi() -> None:
    form = jsonschema_rs.Draft202012Validator(dict(schema_v31))
    assert len(changes()) > 40
    for minor in changes():
        content = msgspec.json.decode(msgspec.json.encode(api_document.document(routes(), minor)))
        form.validate(content)
        for reference in re.findall(r'"\$ref":"#/([^"]+)"', msgspec.json.encode(content).decode()):
            found = content
            for part in reference.split("/"):
                found = found[part]
        operations = [each for item in content["paths"].values() for name, each in item.items() if name != "parameters"]
        ids = [operation["operationId"] for operation in operations]
        assert len(set(ids)) == len(ids)
        for answer in (answer for operation in operations for answer in operation["responses"].values()):
            for media in answer.get("content", {}).values():
                jsonschema_rs.meta.validate(media["schema"])


def test_every_view_and_every_field_says_what_it_is() -> None:
    unclear = [
        f"{name} {field.name}" for name, view in views().items() for field in view.fields if field.type is UNDECLARED
    ]
    assert len(views()) > 20
    assert not unclear, "Field(…, type=…) is missing"


@pytest.mark.parametrize("minor", [1, 52, 90, NEWEST])
def test_every_route_of_the_microversion_is_there(minor: int) -> None:
    paths = api_document.document(routes(), minor)["paths"]
    for route in routes():
        there = route.method.lower() in paths.get(route.path or "/", {})
        others = [each for each in routes() if (each.path, each.method) == (route.path, route.method)]
        assert there == any(minor in each.versions for each in others), route.label
        if not there or minor not in route.versions:
            continue
        operation = paths[route.path or "/"][route.method.lower()]
        assert str(route.status) in operation["responses"]
        assert operation["security"] == [] if route.policy is None else "401" in operation["responses"]
        if route.action is not None and route.status != 410:
            assert route.action in operation["x-policy"]


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    versions = {"new": since(5), "old": until(4)}

    old: int
    new: str | UnsetType = UNSET


class Body(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner
    several: list[Inner] = []


class Filters(msgspec.Struct):
    versions = {"since_five": since(5)}

    since_five: str | UnsetType = UNSET
    several: list[str] | UnsetType = UNSET


async def handler(request: Any) -> None:
    """Do it."""


VIEW = View(
    Field("id", "id", until(4), type=int),
    Field("id", "uuid", since(5), type=str),
    Field("secret", "secret", when="admin", type=str | None),
    Field("maybe", "maybe", optional=True, type=Literal["a", "b"]),
)
ROUTES = [
    Route(
        method="POST", path="/things/{id}", handler=handler, policy="rule", body=Body, query=Filters, status=202,
        answer={"thing": VIEW, "links?": [{"href": str}], "by_name": {"*": (int, None)}}, also={204: None},
        errors=(501,),
    ),
    Route(method="GET", path="/things/{id}", handler=handler, policy=None, versions=Range(3, 6)),
]  # fmt: skip


def small(minor: int) -> dict[str, Any]:
    return document(ROUTES, VERSIONS, minor, title="t", description="d", url="/", faults=["bad"])


def test_fields_of_other_microversions_are_left_out() -> None:
    old, new = (small(minor)["components"]["schemas"]["test_openapi.Inner"] for minor in (4, 5))
    assert set(old["properties"]) == {"old"} and old["required"] == ["old"]
    assert set(new["properties"]) == {"new"} and not new["required"]
    parameters = small(4)["paths"]["/things/{id}"]["post"]["parameters"]
    assert [each["name"] for each in parameters] == ["several"] and parameters[0]["explode"]
    assert [each["name"] for each in small(5)["paths"]["/things/{id}"]["post"]["parameters"]] == [
        "since_five",
        "several",
    ]
    assert "get" not in small(2)["paths"]["/things/{id}"] and "get" in small(6)["paths"]["/things/{id}"]


def test_what_a_route_answers_with_becomes_its_schema() -> None:
    responses = small(5)["paths"]["/things/{id}"]["post"]["responses"]
    assert responses["202"]["content"]["application/json"]["schema"] == {
        "type": "object",
        "properties": {
            "thing": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "secret": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "maybe": {"enum": ["a", "b"]},
                },
                "required": ["id"],
                "additionalProperties": False,
            },
            "links": {
                "type": "array",
                "items": {
                    "type": "object", "properties": {"href": {"type": "string"}}, "required": ["href"],
                    "additionalProperties": False,
                },
            },
            "by_name": {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
        "required": ["thing", "by_name"],
        "additionalProperties": False,
    }  # fmt: skip
    assert "content" not in responses["204"]
    assert set(responses) == {"202", "204", *map(str, (400, 401, 403, 404, 406, 408, 409, 413, 415, 501, 503))}
    assert small(5)["paths"]["/things/{id}"]["get"]["security"] == []


def test_actions_have_their_own_answers() -> None:
    operation = api_document.document(routes(), 45)["paths"]["/servers/{id}/action"]["post"]
    assert "content" not in operation["responses"]["202"], "some actions have no body"
    assert set(operation["x-answers"]["createImage"]["202"]["properties"]) == {"image_id"}
    assert "os-start" not in operation["x-answers"]
    judge = Document(routes(), 45)
    headers = {"content-type": "application/json", "openstack-api-version": "compute 2.45"}

    def check(answer: bytes, action: bytes) -> None:
        judge.check("POST", "/compute/v2.1/servers/x/action", 202, headers, answer, b'{"' + action + b'": null}')

    check(b"", b"os-start")
    check(b'{"image_id": "i"}', b"createImage")
    for answer, action in ((b"", b"createImage"), (b"{}", b"os-start"), (b'{"image": "i"}', b"createImage")):
        with pytest.raises(Wrong):
            check(answer, action)


def test_the_judge_refuses_what_the_document_does_not_allow() -> None:
    judge = Document(routes(), 53)
    headers = {"content-type": "application/json", "openstack-api-version": "compute 2.53"}
    good = {"keypairs": [{"keypair": {"name": "n", "public_key": "k", "fingerprint": "f", "type": "ssh"}}]}

    def check(status: int, body: Any, method: str = "GET", path: str = "/os-keypairs") -> None:
        judge.check(method, f"/compute/v2.1{path}", status, headers, b"" if body is None else json.dumps(body).encode())

    check(200, good)
    check(404, {"itemNotFound": {"code": 404, "message": "m"}}, path="/os-keypairs/x")
    check(204, None, "DELETE", "/os-keypairs/x")
    for status, body, method, path in (
        (200, {**good, "more": 1}, "GET", "/os-keypairs"),
        (200, {"keypairs": [{"keypair": {"name": "n"}}]}, "GET", "/os-keypairs"),
        (200, {"keypairs": None}, "GET", "/os-keypairs"),
        (201, good, "GET", "/os-keypairs"),
        (500, {"computeFault": {"code": 500, "message": "m"}}, "GET", "/os-keypairs"),
        (404, {"error": "m"}, "GET", "/os-keypairs/x"),
        (204, {"a": 1}, "DELETE", "/os-keypairs/x"),
        (200, {}, "GET", "/nothing"),
    ):
        with pytest.raises(Wrong):
            check(status, body, method, path)
    del headers["openstack-api-version"]
    with pytest.raises(Wrong, match="header"):
        check(200, good)


def test_the_command_prints_it() -> None:
    printed = CliRunner().invoke(main, ["openapi", "--microversion", "2.90"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.output) == json.loads(msgspec.json.encode(api_document.document(routes(), 90)))
    assert json.loads(CliRunner().invoke(main, ["openapi"]).output)["info"]["version"] == f"2.{NEWEST}"
    wrong = CliRunner().invoke(main, ["openapi", "--microversion", "2.999"])
    assert wrong.exit_code == 1 and "2.999" in wrong.output

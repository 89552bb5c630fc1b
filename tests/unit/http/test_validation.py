"""What clients read when a body or a query is refused."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from micronova import api, embedded
from micronova.api.compute.flavors import Create as CreateFlavor
from micronova.api.compute.server_create_body import Body as CreateBody
from micronova.api.inputs import Paged
from micronova.embedded.identity import attributes
from micronova.http import validation
from micronova.objects.errors import Invalid


def _refused(raw: bytes, kind: Any = CreateBody, minor: int = 90) -> str:
    with pytest.raises(Invalid) as caught:
        validation.body(raw, kind, minor)
    return caught.value.message


def test_texts_name_the_field_and_what_would_be_right() -> None:
    server = b'{"server": {"name": "a", "flavorRef": "1", "imageRef": "b", %s}}'
    assert _refused(b"{}") == "Invalid input for field/attribute body: 'server' is a required property."
    assert "server: 'flavorRef' is a required property." in _refused(b'{"server": {"name": "a"}}')
    assert _refused(server % b'"networks": [{"uuid": 1}]').endswith("server.networks[0].uuid: it must be a UUID.")
    assert _refused(server % b'"metdata": {}').endswith(
        "server: Additional properties are not allowed ('metdata' was unexpected; did you mean 'metadata'?)."
    )
    with pytest.raises(Invalid, match="Invalid input for query parameter limit: it must be a whole number of at least"):
        validation.query({"limit": ["many"]}, Paged, True, 90)
    with pytest.raises(Invalid, match=r"field/attribute user.name: it must be a string that is not only white space"):
        attributes.read({"name": " "}, attributes.UserAttributes, "user")


def test_fields_of_other_microversions_are_not_offered() -> None:
    flavor = b'{"flavor": {"name": "a", "ram": 1, "vcpus": 1, "disk": 1, "descriptio": "b"}}'
    assert "did you mean 'description'" in _refused(flavor, CreateFlavor, minor=55)
    assert "did you mean" not in _refused(flavor, CreateFlavor, minor=54)


def _structs(package: ModuleType) -> Iterator[type[msgspec.Struct]]:
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "migrations" not in each.name:
            module = importlib.import_module(each.name)
            for cls in vars(module).values():
                if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__module__ == each.name:
                    yield cls


def _patterns(node: inspect.Type, title: str = "") -> Iterator[tuple[str, str]]:
    """Yield each pattern with its title."""
    if isinstance(node, inspect.Metadata):
        yield from _patterns(node.type, title or (node.extra_json_schema or {}).get("title", ""))
    elif isinstance(node, inspect.StrType) and node.pattern:
        yield node.pattern, title
    elif isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from _patterns(each, title)
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(node, name):
            yield from _patterns(getattr(node, name))


def test_patterns_of_requests_are_described_in_words() -> None:
    """A pattern is nothing to show to people."""
    kinds = [kind for package in (api, embedded) for kind in _structs(package)]
    found = {
        (kind.__name__, field.encode_name, pattern)
        for kind in kinds
        for field in inspect.type_info(kind).fields  # type: ignore[attr-defined]
        for pattern, title in _patterns(field.type)
        if not title and not re.fullmatch(r"(\^|\\A)\([\w|]+\)(\$|\\Z)", pattern)
    }
    assert len(kinds) > 300
    assert found == set()

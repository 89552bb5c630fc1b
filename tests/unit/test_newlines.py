"""A pattern that users' input has to match does not let a newline through at its end."""

from typing import Any

import msgspec
import pytest

from micronova.api import inputs
from micronova.api.compute import flavors, server_inputs, server_metadata
from micronova.embedded.network import port_input, request_bodies
from micronova.virt.libvirt.definition import interfaces

TYPES: list[tuple[Any, str]] = [
    (inputs.Whole, "7"), (inputs.HostName, "a-host"), (inputs.Key, "key"), (flavors.FlavorId, "m1"),
    (flavors.Factor, "1.5"), (server_inputs.Id, "6f70656e-7374-4163-8b00-000000000000"), (request_bodies.Number, "7"),
    (request_bodies.Flag, "true"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "good"), TYPES)
def test_types(kind: Any, good: str) -> None:
    assert msgspec.convert(good, kind) == good
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good + "\n", kind)


def test_keys_of_metadata() -> None:
    assert msgspec.convert({"key": "value"}, server_metadata.Items)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"key\n": "value"}, server_metadata.Items)


@pytest.mark.parametrize(
    ("pattern", "good"),
    [(request_bodies._MAC, "fa:16:3e:00:00:01"), (port_input._LABEL, "name"), (interfaces._MAC, "fa:16:3e:00:00:01"),
     (interfaces._DEVICE, "tap1")],
)  # fmt: skip
def test_patterns(pattern: Any, good: str) -> None:
    assert pattern.match(good)
    assert not pattern.match(good + "\n")

"""Words for data that does not have its type."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import UNSET, Meta, UnsetType

from micronova.objects.wrong_values import what_is_right, wrong_value

Name = Annotated[str, Meta(min_length=1, max_length=8)]
Uuid = Annotated[str, Meta(pattern=r"\A[0-9a-f-]{36}\Z", title="a UUID")]
Whole = Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern=r"\A[0-9]+\Z", title="a whole number")]


class Port(msgspec.Struct, forbid_unknown_fields=True):
    uuid: Uuid
    size: Whole | None | UnsetType = UNSET
    mode: Literal["slow", "fast"] = "slow"


class Server(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    ports: Annotated[list[Port], Meta(max_length=2)] = []
    metadata: dict[Annotated[str, Meta(max_length=3)], str] = {}
    parts: dict[str, Port] = {}
    ratio: Annotated[float, Meta(gt=0)] = 1.0
    pair: tuple[int, int] = (0, 0)
    flag: bool | Literal["true", "false"] = True
    imageRef: str = ""

    def __post_init__(self) -> None:
        if self.name == "refused":
            raise ValueError("The name refused is taken.")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    server: Server


P = "0" * 8 + "-0000-0000-0000-" + "0" * 12


@pytest.mark.parametrize(
    ("server", "place", "problem"),
    [
        (5, "server", "it must be an object"),
        ({}, "server", "'name' is a required property"),
        ({"name": ""}, "server.name", "it must be a string of 1 to 8 characters"),
        ({"name": "refused"}, "server", "The name refused is taken"),
        ({"name": "a", "imageref": "b"}, "server",
         "Additional properties are not allowed ('imageref' was unexpected; did you mean 'imageRef'?)"),
        ({"name": "a", "zzz": "b"}, "server",
         "Additional properties are not allowed ('zzz' was unexpected; "
         "known are flag, imageRef, metadata, name, pair, parts, ports, ratio)"),
        ({"name": "a", "ports": [{"uuid": "x"}]}, "server.ports[0].uuid", "it must be a UUID"),
        ({"name": "a", "ports": [{"uuid": P}] * 3}, "server.ports", "it must be a list of at most 2 items"),
        ({"name": "a", "ports": [{"uuid": P}, {"uuid": P, "size": 0}]}, "server.ports[1].size",
         "it must be a whole number of at least 1 or null"),
        ({"name": "a", "ports": [{"uuid": P, "mode": "x"}]}, "server.ports[0].mode",
         'it must be one of "fast", "slow"'),
        ({"name": "a", "metadata": {"k": 1}}, "server.metadata", "each value must be a string"),
        ({"name": "a", "metadata": {"long": "v"}}, "server.metadata",
         "each key must be a string of at most 3 characters"),
        ({"name": "a", "parts": {"p": {"uuid": 1}}}, "server.parts.*.uuid", "it must be a UUID"),
        ({"name": "a", "ratio": 0}, "server.ratio", "it must be a number above 0"),
        ({"name": "a", "pair": [1]}, "server.pair", "it must be a list of 2 items"),
        ({"name": "a", "pair": [1, "b"]}, "server.pair[1]", "it must be a whole number"),
        ({"name": "a", "flag": 3}, "server.flag", "it must be true or false"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_would_be_right(server: Any, place: str, problem: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode({"server": server}), type=Body)
    wrong = wrong_value(caught.value, Body)
    assert (wrong.place, wrong.problem) == (place, problem)


def test_fields_that_the_sender_cannot_have_are_not_offered() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"uuid": P, "sizes": 1}, Port)
    wrong = wrong_value(caught.value, Port, lambda cls, name: name != "size")
    assert wrong.problem == "Additional properties are not allowed ('sizes' was unexpected; known are mode, uuid)"


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        (Annotated[str, Meta(pattern=r"^(a|b)$")], 'one of "a", "b"'),
        (Annotated[str, Meta(pattern=r"^.+=.+$", examples=["cpu=1"])], 'a string such as "cpu=1"'),
        (Annotated[str, Meta(min_length=1)], "a string that is not empty"),
        (Annotated[str, Meta(pattern="x", title="letters", max_length=1)], "letters, at most 1 character"),
        (Annotated[int, Meta(ge=0, le=65535)], "a whole number from 0 to 65535"),
        (Annotated[int, Meta(gt=0, lt=3)], "a whole number above 0 and below 3"),
        (Annotated[dict[str, str], Meta(max_length=1)], "an object of at most 1 entry"),
        (str | None, "a string or null"),
        (None | int, "a whole number or null"),
    ],
)
def test_what_is_right_for_a_type(kind: Any, right: str) -> None:
    assert what_is_right(kind) == right

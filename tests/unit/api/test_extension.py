"""Extensions of the compute API: what they add to routes, and why one is refused. It is skipped whole and named."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from msgspec import UNSET, UnsetType, field

from micronova.api.extension import Additions, Extension, Proceed, RouteChange
from micronova.api.inputs import Body, Paged, Query
from micronova.api.installed_extensions import Extensions
from micronova.http import validation
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid
from micronova.policies.enforcer import Rule

RULES = [Rule("cars:show", "@")]
Load = Callable[..., Extensions]


class Car(Body, rename={"wheels": "carWheels"}):
    wheels: int


class CarBody(Body):
    car: Car | None
    hints: dict[str, str] = {}


class Colour(Body):
    colour: str | UnsetType = field(name="paint:colour", default=UNSET)
    doors: list[str] = []

    versions = {"paint:colour": since(7)}


class Required(Body):
    colour: str


class Wheels(Body):
    carWheels: int = 4  # noqa: N815


class Year(Query):
    year: int | UnsetType = UNSET


async def handler(request: Request) -> dict[str, Any]:
    """Make a car."""
    return {"car": {"carWheels": 4}}


async def around(request: Request, proceed: Proceed) -> Any:
    answer = await proceed()
    answer["car"]["paint:colour"] = "red"
    return answer


CARS = Route(
    method="POST",
    path="/cars",
    handler=handler,
    policy="cars:show",
    body=CarBody,
    query=Paged,
    answer={"car": {"carWheels": int}},
)


def extension(*changes: RouteChange, routes: tuple[Route, ...] = (), **fields: Any) -> Extension:
    add = fields.pop("add", lambda _: Additions(routes=routes, changes=changes))
    known = {"alias": "paint", "name": "Paint", "description": "Paints.", "updated": "2026-01-01T00:00:00Z"}
    return Extension(add=add, **{**known, **fields})


class Entry:
    """Stands in for an installed entry point."""

    dist = None

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self._thing = name, thing

    def load(self) -> Any:
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    def with_(**things: Any) -> Extensions:
        entries = [Entry(name, thing) for name, thing in things.items()]
        monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
        return Extensions(RULES, {"wheels"})

    return with_


async def test_a_change_adds_fields_and_behaviour(load: Load) -> None:
    change = RouteChange(
        route="POST /cars", around=around, versions=since(5), body=Colour, query=Year, answer={"paint:colour": str}
    )
    before, changed = load(paint=extension(change)).extend([CARS], None)
    assert (before.body, before.handler, before.versions.until) == (CarBody, handler, 4)
    assert changed.versions.since == 5 and changed.answer == {"car": {"carWheels": int, "paint:colour": str}}
    assert await changed.handler(None) == {"car": {"carWheels": 4, "paint:colour": "red"}}
    body = validation.body(b'{"car": {"carWheels": 3, "paint:colour": "red"}}', changed.body, 7)
    assert (body.car.wheels, body.car.colour, body.car.doors, body.hints) == (3, "red", [], {})
    assert validation.body(b'{"car": null}', changed.body, 7).car is None
    for wrong in (b'{"car": {"carWheels": 3, "paint:colour": 1}}', b'{"car": {"carWheels": 3, "colour": "red"}}'):
        with pytest.raises(Invalid):
            validation.body(wrong, changed.body, 7)
    with pytest.raises(Invalid, match="paint:colour"):  # the field itself may be younger than the change
        validation.body(b'{"car": {"carWheels": 3, "paint:colour": "red"}}', changed.body, 6)
    query = validation.query({"year": ["1999"], "limit": ["3"]}, changed.query, True, 7)
    assert (query.year, query.limit) == (1999, 3)


def test_routes_that_share_a_body_go_on_to_share_it(load: Load) -> None:
    cars = [CARS, Route(method="POST", path="/autos", handler=handler, policy="cars:show", body=CarBody)]
    changes = [RouteChange(route=route.label, around=around, body=Colour) for route in cars]
    first, second = load(paint=extension(*changes)).extend(cars, None)
    assert first.body is second.body is not CarBody


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (ImportError("no such module"), "ImportError: no such module"),
        (handler, "it is a function and must be an Extension of micronova.api.extension"),
        (extension(alias="wheels"), "there is an extension with the alias 'wheels' already"),
        (extension(rules=[Rule("cars:show", "!")]), "there is a policy rule cars:show already"),
        (extension(add=lambda _: 1 / 0), "ZeroDivisionError: division by zero"),
        (extension(routes=(CARS,)), "POST /cars exists already"),
        (
            extension(routes=(Route(method="GET", path="/paints", handler=handler, policy="paints"),)),
            "GET /paints has the policy rule 'paints', which does not exist",
        ),
        (
            extension(routes=(Route(method="GET", path="/paints", handler=handler, policy=None),)),
            "GET /paints has the policy rule None, which does not exist",
        ),
        (
            extension(RouteChange(route="GET /cars", around=around)),
            "it changes the route 'GET /cars', which does not exist",
        ),
        (
            extension(RouteChange(route="POST /cars", around=around, body=Required)),
            "the field colour of POST /cars needs a default: clients do not know it",
        ),
        (
            extension(RouteChange(route="POST /cars", around=around, body=Wheels)),
            "POST /cars has the field carWheels already",
        ),
        (
            extension(RouteChange(route="POST /cars", around=around, answer={"carWheels": str})),
            "POST /cars has the field carWheels in its answer already",
        ),
        (
            extension(RouteChange(route="GET /roads/{id}", around=around, body=Colour)),
            "GET /roads/{id} has no object in its body that could get fields",
        ),
        (
            extension(RouteChange(route="GET /roads/{id}", around=around, query=Year)),
            "GET /roads/{id} declares no query that could get parameters",
        ),
        (
            extension(RouteChange(route="GET /roads/{id}", around=around, answer={"paint:colour": str})),
            "GET /roads/{id} has no object in its answer that could get fields",
        ),
        (
            extension(routes=(Route(method="PUT", path="/roads/{name}", handler=handler, policy=""),)),
            "/roads/{name} must call the parameter {name} {id}",
        ),
    ],
)
def test_a_faulty_extension_is_skipped_whole(
    load: Load, caplog: pytest.LogCaptureFixture, thing: Any, reason: str
) -> None:
    own = [CARS, Route(method="GET", path="/roads/{id}", handler=handler, policy="")]
    fine = extension(alias="fine", routes=(Route(method="GET", path="/fine", handler=handler, policy=""),))
    extensions = load(faulty=thing, fine=fine)
    found = extensions.extend(own, None)
    assert [route.label for route in found] == ["POST /cars", "GET /roads/{id}", "GET /fine"]
    assert found[:2] == own
    assert [each.title for each in extensions.used] == ["fine"] and extensions.problems == {"faulty": reason}
    assert f"the API extension faulty is skipped: {reason}; mend or uninstall its package" in caplog.text


def test_a_change_of_a_route_changes_it_under_its_old_path(load: Load) -> None:
    """Otherwise a client goes around an extension that refuses something."""
    old = replace(CARS, path="/os-cars", same_as=CARS.label)
    changes = RouteChange(route="POST /cars", around=around, versions=since(7))
    extensions = load(first=extension(changes), second=extension(changes, alias="second"))
    found = extensions.extend([CARS, old], None)
    assert [(route.path, route.versions.since) for route in found] == [
        (path, first) for path in ("/cars", "/os-cars") for first in (0, 7)
    ]
    assert all(route.handler is not handler for route in found if route.versions.since == 7)
    assert not extensions.problems


def test_the_api_does_not_start_without_a_required_extension(load: Load) -> None:
    extensions = load(faulty=extension(RouteChange(route="GET /none", around=around)), fine=extension(alias="fine"))
    extensions.extend([CARS], None)
    extensions.check_required(["fine"])
    with pytest.raises(Invalid, match=r"names lost, paint, which the API cannot use\. faulty is skipped: it changes"):
        extensions.check_required(["fine", "paint", "lost"])

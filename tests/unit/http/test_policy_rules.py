"""The policy rule of a route: what handlers check unless they name another one."""

from typing import Any, cast

import pytest

from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route


async def handler(request: Request) -> None:
    """Answer nothing."""


def _request(policy: str | None) -> Request:
    http: Any = None
    made = Request(cast(Any, None), http, {})
    made.route = Route(method="GET", path="/things", handler=handler, policy=policy)
    return made


def test_a_handler_that_checks_policy_needs_a_rule() -> None:
    with pytest.raises(ValueError, match="GET /things needs no token"):
        Route(method="GET", path="/things", handler=handler, policy=None, checks_policy=True)


def test_the_rule_of_a_request_is_that_of_its_route() -> None:
    assert _request("things:show").rule == "things:show"


@pytest.mark.parametrize("policy", [None, AUTHENTICATED])
def test_a_route_without_a_rule_has_none_to_check(policy: str | None) -> None:
    with pytest.raises(AssertionError, match="GET /things has no policy rule"):
        assert _request(policy).rule

"""Pages of the web origins that the settings name may call the APIs from a browser; pages of others may not."""

import pytest

from tests.functional.cloud import Caller, CloudOptions

ORIGIN = "https://dashboard.example.org"
CLOUD = CloudOptions(hosts=2, api={"api": {"cors_allowed_origins": [ORIGIN]}})


def _listed(value: str) -> set[str]:
    return {each.strip().lower() for each in value.split(",")}


async def test_a_preflight_request_is_answered_without_a_token(user: Caller) -> None:
    wanted = "Content-Type, X-Auth-Token, X-Subject-Token, OpenStack-API-Version, X-OpenStack-Nova-API-Version"
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        asks = {"origin": ORIGIN, "access-control-request-method": method, "x-auth-token": ""}
        answer = await user.request("OPTIONS", "/servers", headers={**asks, "access-control-request-headers": wanted})
        assert answer.status == 200 and answer.body == b""
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-allow-methods"] == method
        assert answer.headers["access-control-max-age"] == "3600"
        assert _listed(answer.headers["access-control-allow-headers"]) == _listed(wanted)
        assert "origin" in _listed(answer.headers["vary"])


async def test_a_page_can_read_an_answer_and_its_headers(user: Caller) -> None:
    answer = await user.request("GET", "/servers", headers={"origin": ORIGIN})
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    exposed = {"x-openstack-request-id", "openstack-api-version", "x-subject-token", "location"}
    assert exposed <= _listed(answer.headers["access-control-expose-headers"])


async def test_an_error_is_readable_too(user: Caller) -> None:
    answer = await user.request("GET", "/servers/none", headers={"origin": ORIGIN})
    assert answer.status == 404 and answer.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("origin", ["https://other.example.org", "https://dashboard.example.org.evil.org", "null", ""])
async def test_pages_of_other_origins_get_nothing(user: Caller, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        answer = await user.request(
            method, "/servers", headers={"origin": origin, "access-control-request-method": "GET"}
        )
        assert not [name for name in answer.headers if name.startswith("access-control-")]

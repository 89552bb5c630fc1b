"""Pages of the web origins that the settings name may call the APIs from a browser; pages of others may not."""

import pytest

from tests.functional.cloud import ORIGIN, Caller, CloudOptions

CLOUD = CloudOptions(hosts=2, settings={"api": {"cors_allowed_origins": [ORIGIN]}}, cluster_too=True)


def _listed(value: str) -> set[str]:
    return {each.strip().lower() for each in value.split(",")}


async def test_a_preflight_request_names_what_a_page_may_send(user: Caller) -> None:
    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "x-auth-token": ""}
    answer = await user.request("OPTIONS", "/servers", headers=asks)
    assert answer.status == 204 and answer.body == b""
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "origin" in _listed(answer.headers["vary"])
    assert {"get", "post", "put", "patch", "delete"} <= _listed(answer.headers["access-control-allow-methods"])
    sent = {"content-type", "x-auth-token", "x-subject-token", "openstack-api-version", "x-openstack-nova-api-version"}
    assert sent <= _listed(answer.headers["access-control-allow-headers"])


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
        answer = await user.request(method, "/servers", headers={"origin": origin})
        assert not [name for name in answer.headers if name.startswith("access-control-")]

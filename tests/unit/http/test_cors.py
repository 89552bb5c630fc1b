"""Cross-origin requests: the headers that oslo.middleware gives for the same settings."""

from typing import Any

import pytest

from micronova.http.mount import Mounts

SITE = "https://dashboard.example.org"
OTHER = "https://other.example.org"
EXPOSED = (
    "x-auth-token, x-openstack-request-id, x-subject-token, x-service-token, openstack-api-version, "
    "x-openstack-nova-api-version, location"
)


async def _service(scope: Any, receive: Any, send: Any) -> None:
    status = 405 if scope["method"] == "OPTIONS" else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _ask(origins: tuple[str, ...], method: str, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Return the status and the headers that concern CORS."""
    events: list[Any] = []

    async def send(event: Any) -> None:
        events.append(event)

    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/compute/v2.1", "headers": sent, "client": ("192.0.2.1", 1)}
    await Mounts({"/compute": _service}, origins=origins)(scope, None, send)  # type: ignore[arg-type]
    found = {name.decode(): value.decode() for name, value in events[0]["headers"]}
    return events[0]["status"], {name: found[name] for name in found if name == "vary" or name.startswith("access-")}


def _allowed(origin: str, **more: str) -> dict[str, str]:
    shared = {"access-control-allow-origin": origin, "access-control-allow-credentials": "true", "vary": "Origin"}
    return {**shared, **{f"access-control-{name.replace('_', '-')}": value for name, value in more.items()}}


@pytest.mark.parametrize(
    ("origins", "origin", "shown"),
    [
        ((SITE,), SITE, SITE),
        ((SITE,), OTHER, None),
        ((SITE,), None, None),
        (("*",), OTHER, "*"),
        (("*",), None, None),
        (("*", SITE), SITE, SITE),
        (("*", SITE), OTHER, "*"),
        ((), SITE, None),
    ],
)
async def test_origins(origins: tuple[str, ...], origin: str | None, shown: str | None) -> None:
    headers = {} if origin is None else {"origin": origin}
    expected = {} if shown is None else _allowed(shown, expose_headers=EXPOSED)
    assert await _ask(origins, "GET", headers) == (200, expected)
    headers["access-control-request-method"] = "PUT"
    expected = {} if shown is None else _allowed(shown, max_age="3600", allow_methods="PUT")
    assert await _ask(origins, "OPTIONS", headers) == (200 if origins else 405, expected)


@pytest.mark.parametrize(
    ("method", "asked", "allowed"),
    [
        ("POST", "", ""),
        ("POST", "X-Auth-Token,content-type", "X-Auth-Token,content-type"),
        ("POST", " X-Subject-Token , If-Match ", "X-Subject-Token,If-Match"),
        ("POST", "X-Auth-Token, X-Unknown", None),
        ("CONNECT", "", None),
        ("post", "", None),
        (None, "", None),
    ],
)
async def test_preflight_requests(method: str | None, asked: str, allowed: str | None) -> None:
    headers = {"origin": SITE, **({} if method is None else {"access-control-request-method": method})}
    if asked:
        headers["access-control-request-headers"] = asked
    expected = {}
    if allowed is not None:
        expected = _allowed(SITE, max_age="3600", allow_methods=str(method))
        if allowed:
            expected["access-control-allow-headers"] = allowed
    assert await _ask((SITE,), "OPTIONS", headers) == (200, expected)

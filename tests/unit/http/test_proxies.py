"""X-Forwarded-* headers: believed from trusted proxies, removed from everybody else's requests."""

from typing import Any

import pytest

from micronova.http.asgi import Receive, Scope, Send, header
from micronova.http.mount import Mounts
from micronova.http.proxies import TrustedProxies
from micronova.objects.errors import Invalid

FORWARDED = {"x-forwarded-proto": "https", "x-forwarded-host": "evil.example", "x-forwarded-for": "203.0.113.9"}


async def seen(
    client: str, headers: dict[str, str] | list[tuple[str, str]], *proxies: str, kind: str = "http"
) -> dict[str, str]:
    """Return what a service behind the mounts sees of a request from an address."""
    found: dict[str, str] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scheme=scope["scheme"], host=header(scope, b"host"), client=scope["client"][0])
        found["left"] = ",".join(sorted(name.decode() for name, _ in scope["headers"] if b"forwarded" in name))

    async def nothing(*_: Any) -> Any:
        return None

    mounts = Mounts({"/x": app}, proxies=TrustedProxies(proxies), websockets=frozenset({"/x"}))
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    raw = [(b"host", b"cloud"), *((name.encode(), value.encode()) for name, value in pairs)]
    scope = {"type": kind, "method": "GET", "path": "/x/", "headers": raw, "client": (client, 1)}
    scope["scheme"] = "http" if kind == "http" else "ws"
    await mounts(scope, nothing, nothing)
    return found


@pytest.mark.parametrize("client", ["192.0.2.1", "in-process", "::2", "127.0.0.1.evil"])
async def test_a_stranger_decides_nothing(client: str) -> None:
    found = await seen(client, FORWARDED, "127.0.0.1", "::1", "10.0.0.0/8")
    assert found == {"scheme": "http", "host": "cloud", "client": client, "left": "x-forwarded-for"}


@pytest.mark.parametrize("client", ["10.1.2.3", "::1", "::ffff:10.1.2.3"])
async def test_a_trusted_proxy_is_believed(client: str) -> None:
    found = await seen(client, FORWARDED, "::1", "10.0.0.0/8")
    assert (found["scheme"], found["host"], found["client"]) == ("https", "evil.example", "203.0.113.9")


async def test_websockets_keep_their_scheme() -> None:
    assert (await seen("10.1.2.3", FORWARDED, "10.0.0.0/8", kind="websocket"))["scheme"] == "wss"


@pytest.mark.parametrize(
    ("forwarded_for", "client"),
    [
        ("198.51.100.1, 203.0.113.9", "203.0.113.9"),  # the first was invented by the client
        ("198.51.100.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),  # two proxies, one after the other
        ("10.0.0.3", "10.1.2.3"),
        ("nonsense", "10.1.2.3"),
        ("", "10.1.2.3"),
    ],
)
async def test_the_client_is_the_last_that_no_proxy_of_ours_is(forwarded_for: str, client: str) -> None:
    found = await seen("10.1.2.3", {"x-forwarded-for": forwarded_for}, "10.0.0.0/8")
    assert found["client"] == client


async def test_a_header_of_the_client_does_not_replace_the_one_that_the_proxy_adds() -> None:
    client = [("x-forwarded-for", "198.51.100.1"), ("x-forwarded-proto", "http"), ("x-forwarded-host", "evil.example")]
    proxy = [
        ("x-forwarded-for", "203.0.113.9"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "cloud.example"),
    ]
    joined = {name: f"{before}, {after}" for (name, before), (_, after) in zip(client, proxy, strict=True)}
    for headers in ([*client, *proxy], list(joined.items())):
        found = await seen("10.1.2.3", headers, "10.0.0.0/8")
        assert (found["client"], found["scheme"], found["host"]) == ("203.0.113.9", "https", "cloud.example")


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        (["198.51.100.1, 203.0.113.9", "10.0.0.2"], "203.0.113.9"),  # two proxies, the second adds a line
        (["198.51.100.1", "nonsense"], "10.1.2.3"),
        (["10.0.0.3", "10.0.0.2"], "10.1.2.3"),
    ],
)
async def test_the_lines_of_x_forwarded_for_are_one_list(lines: list[str], client: str) -> None:
    found = await seen("10.1.2.3", [("x-forwarded-for", line) for line in lines], "10.0.0.0/8")
    assert found["client"] == client


@pytest.mark.parametrize("host", ["a b", "x/y", 'h"t', "", "a" * 300])
async def test_a_host_that_is_none_is_ignored(host: str) -> None:
    found = await seen("10.1.2.3", {"x-forwarded-host": host, "x-forwarded-proto": "gopher"}, "10.0.0.0/8")
    assert (found["host"], found["scheme"]) == ("cloud", "http")


def test_a_setting_that_is_no_address_is_refused() -> None:
    with pytest.raises(Invalid, match=r"trusted_proxies has 'proxy\.example'"):
        TrustedProxies(["proxy.example"])


async def test_without_a_proxy_nobody_is_believed() -> None:
    assert (await seen("127.0.0.1", FORWARDED))["host"] == "cloud"

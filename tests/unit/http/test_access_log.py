"""The access log: who asked for what, without what gives access to something."""

import logging
import urllib.parse
from typing import Any

import pytest

from micronova.http.access_log import AccessLog, shown
from micronova.http.client import ASGITransport
from micronova.http.proxies import TrustedProxies
from micronova.objects.clock import SystemClock
from micronova.servers.consoles import vnc_url


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"x-openstack-request-id", b"req-1")]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": b"12345"})


async def test_each_request_has_a_line_while_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "micronova.http.access")
    log = AccessLog(_answer, SystemClock(), TrustedProxies(), on=False)
    transport = ASGITransport(log)
    await transport.request("GET", "/compute/v2.1/servers", {}, None)
    assert caplog.messages == []
    log.on = True
    await transport.request("POST", "/compute/v2.1/servers?name=a&ticket=abc", {}, b"{}")
    [line] = caplog.messages
    assert line.startswith("in-process POST /compute/v2.1/servers?name=a&ticket=*** 202 5 bytes ")
    assert line.endswith(" ms [req-1]")


async def test_a_request_that_fails_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    caplog.set_level(logging.INFO, "micronova.http.access")
    transport = ASGITransport(AccessLog(fail, SystemClock(), TrustedProxies(), on=True))
    with pytest.raises(RuntimeError):
        await transport.request("GET", "/image", {}, None)
    assert caplog.messages[0].startswith("in-process GET /image unanswered 0 bytes")


@pytest.mark.parametrize(
    ("path", "query", "wanted"),
    [
        ("/servers", b"", "/servers"),
        ("/console", b"token=abc&path=x", "/console?token=***&path=x"),
        (
            "/v2/images/1/file",
            b"X-Amz-Signature=abc&sort_key=name",
            "/v2/images/1/file?X-Amz-Signature=***&sort_key=name",
        ),
        (
            "/console/vnc_lite.html",
            b"path=console%2Fwebsockify%3Ftoken%3Dabc&x=y",
            "/console/vnc_lite.html?path=***&x=y",
        ),
        ("/console", b"path=%253Ftoken%253Dabc", "/console?path=***"),
        ("/console", b"%74oken=abc", "/console?%74oken=***"),
        ("/a 200 5 bytes 1.0 ms [req-2]\n", b"", "/a%20200%205%20bytes%201.0%20ms%20%5Breq-2%5D%0A"),
        ("/compute/v2.1/os-console-auth-tokens/abc", b"", "/compute/v2.1/os-console-auth-tokens/***"),
    ],
)
def test_what_gives_access_is_not_shown(path: str, query: bytes, wanted: str) -> None:
    assert shown(path, query) == wanted


@pytest.mark.parametrize("base", ["https://console.example/console/vnc_lite.html", "https://console.example/"])
def test_the_token_of_a_console_link_is_not_shown(base: str) -> None:
    link = urllib.parse.urlsplit(vnc_url(base, "6d0b8a4e"))
    assert "6d0b8a4e" in link.query and "6d0b8a4e" not in shown(link.path, link.query.encode())

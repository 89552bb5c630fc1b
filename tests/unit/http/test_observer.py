"""The observer of HTTP requests: request ids, metrics."""

import asyncio
import logging
from typing import Any
from urllib.parse import quote

import pytest

from micronova.http.client import ASGITransport
from micronova.http.faults import compute_fault
from micronova.http.observer import MOST_ANONYMOUS, RequestObserver
from micronova.http.service import Route, Service
from micronova.http.versions import Versions
from micronova.objects.clock import Clock, SystemClock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized
from micronova.telemetry.logs import request_id, server_id
from micronova.telemetry.metrics import Metrics


class Anybody:
    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        return context

    def is_admin(self, context: RequestContext) -> bool:
        return False

    def enforce(self, rule: str, context: RequestContext, target: Any) -> None:
        pass

    def allows(self, rule: str, context: RequestContext, target: Any) -> bool:
        return True

    def check_scope(self, rule: str, context: RequestContext) -> None:
        pass


class StoppedClock(SystemClock):
    def __init__(self) -> None:
        self.seconds = 1.0

    def monotonic(self) -> float:
        return self.seconds


def service(
    metrics: Metrics, *routes: Route, versions: Versions | None = None, clock: Clock | None = None
) -> ASGITransport:
    anybody = Anybody()
    made = Service(
        "tea",
        routes,
        policy=anybody,
        authenticator=anybody,
        fault_body=compute_fault,
        versions=versions,
        observer=RequestObserver(metrics, clock or SystemClock()),
    )
    return ASGITransport(made.app)


async def test_lines_about_a_server_have_its_id_and_nothing_else_that_a_path_names() -> None:
    """The id is behind each line: a path must not look like another line."""
    seen = []

    async def show(request: Any, id: str) -> dict[str, str]:
        seen.append(server_id.get())
        return {}

    asked = service(Metrics(), Route(method="GET", path="/servers/{id}", handler=show, policy=None))
    server, forged = "0f4b1c2a-7a0e-4c63-9d0e-2f1b6f0a9c11", "] ERROR conductor: all guests are lost"[:36]
    for id in (server, forged, "servers"):
        await asked.request("GET", f"/servers/{quote(id)}", {}, None)
    assert seen == [server, "", ""]


async def test_what_a_handler_logs_belongs_to_its_request() -> None:
    seen = []

    async def inner(request: Any) -> dict[str, str]:
        seen.append(request_id.get())
        return {}

    async def outer(request: Any) -> dict[str, str]:
        before = request_id.get()
        await within.request("GET", "/inner", {}, None)
        assert request_id.get() == before == request.context.request_id  # the inner request has given way again
        return {"id": before}

    metrics = Metrics()
    within = service(metrics, Route(method="GET", path="/inner", handler=inner, policy=None))
    around = service(metrics, Route(method="GET", path="/outer", handler=outer, policy=None))
    answer = await around.request("GET", "/outer", {}, None)
    assert answer.json()["id"] == answer.headers["x-openstack-request-id"] != seen[0] != ""
    assert request_id.get() == ""
    assert set(metrics.requests) == {("tea", "GET /inner", 200), ("tea", "GET /outer", 200)}


async def test_what_fails_is_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: Any, id: str) -> None:
        raise ZeroDivisionError

    metrics = Metrics()
    versions = Versions("tea", major=2, least=1, newest=5)
    transport = service(metrics, Route(method="GET", path="/cups/{id}", handler=broken, policy=None), versions=versions)
    with caplog.at_level(logging.CRITICAL):
        await transport.request("GET", "/cups/1", {}, None)
    await transport.request("GET", "/cups/1", {"openstack-api-version": "tea 2.99"}, None)
    assert metrics.requests == {("tea", "GET /cups/{id}", 500): 1, ("tea", "GET /cups/{id}", 406): 1}


async def test_requests_of_nobody_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Who has no token can send as many as the network takes."""

    async def refuse(request: Any) -> None:
        raise Unauthorized("Send a token.")

    caplog.set_level(logging.INFO)
    clock = StoppedClock()
    transport = service(Metrics(), Route(method="POST", path="/", handler=refuse, policy=None), clock=clock)
    for _ in range(2):
        caplog.clear()
        for _ in range(100):
            assert (await transport.request("POST", "/", {}, None)).status == 401
        assert sum("is refused with 401" in message for message in caplog.messages) == MOST_ANONYMOUS
        assert "the others have no line" in caplog.messages[-1] and len(caplog.messages) == MOST_ANONYMOUS + 1
        clock.seconds += 1


async def test_a_request_that_is_cancelled_lets_go_of_its_id() -> None:
    started = asyncio.Event()

    async def endless(request: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    metrics = Metrics()
    transport = service(metrics, Route(method="GET", path="/", handler=endless, policy=None))
    task = asyncio.create_task(transport.request("GET", "/", {}, None))
    await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(metrics.requests.values()) == 1

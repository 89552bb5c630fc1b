"""`/healthcheck` and `/healthcheck/ready` of a cloud that works, and of one whose database is away."""

import asyncio
from pathlib import Path

import pytest

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.http.client import Answer, ASGITransport
from micronova.http.healthcheck import healthcheck
from micronova.objects.clock import SystemClock
from tests.functional.full_cloud import FullCloud, full_cloud
from tests.services.lossy_proxy import LossyProxy
from tests.services.postgres import Postgres

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"accept": "application/json"}


async def _get(cloud: FullCloud, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Answer:
    return await cloud.transport.request(method, path, headers or {}, None)


async def test_a_cloud_that_works(full_cloud: FullCloud) -> None:
    live = await _get(full_cloud, "/healthcheck")
    assert (live.status, live.body, live.headers["cache-control"]) == (200, b"OK\n", "no-store")
    ready = await _get(full_cloud, "/healthcheck/ready", JSON)
    assert ready.status == 200
    assert ready.json() == {
        "status": "ok",
        "checks": {"bus": "ok"}
        | {f"database {name}": "ok" for name in ("compute", "identity", "image", "network", "volume")},
    }
    assert (await _get(full_cloud, "/healthcheck/ready")).body == b"OK\n"
    head = await _get(full_cloud, "/healthcheck", method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert (await _get(full_cloud, "/healthcheck/nothing")).status == 404
    refused = await _get(full_cloud, "/healthcheck", method="POST")
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.postgresql
async def test_a_database_that_is_away(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.create_database("healthcheck")
    try:
        async with LossyProxy(url) as proxy:
            process = Process(
                load(None, {}, database={"connection": proxy.url}), ["identity"], StateDirectory(tmp_path)
            )
            await process.start()
            cloud = ASGITransport(process.application(), "cloud:8774")
            assert (await cloud.request("GET", "/healthcheck/ready", {}, None)).status == 200
        while (ready := await cloud.request("GET", "/healthcheck/ready", {}, None)).status == 200:
            await asyncio.sleep(0)  # an answer is shared for a second
        assert (ready.status, ready.body) == (503, b"UNAVAILABLE: database identity\n")
        assert (await cloud.request("GET", "/healthcheck", {}, None)).status == 200
        await process.stop()
    finally:
        postgres.drop_database("healthcheck")


async def test_many_who_ask_share_one_question() -> None:
    asked = 0

    async def check() -> bool:
        nonlocal asked
        asked += 1
        return True

    cloud = ASGITransport(healthcheck({"database": check}, SystemClock()), "cloud:8774")
    answers = await asyncio.gather(*(cloud.request("GET", "/ready", {}, None) for _ in range(100)))
    assert {answer.status for answer in answers} == {200}
    assert asked == 1


@pytest.mark.parametrize("role", ["identity", "image", "network", "volume", "metadata"])
async def test_each_http_role_answers_on_its_own(tmp_path: Path, role: str) -> None:
    settings = load(None, {}, api={"auth_strategy": "noauth2"}, default={"transport_url": "local://"})
    process = Process(settings, [role], StateDirectory(tmp_path))
    await process.start()
    try:
        transport = ASGITransport(process.application(), "cloud:8774")
        live = await transport.request("GET", "/healthcheck", {}, None)
        ready = await transport.request("GET", "/healthcheck/ready", JSON, None)
        assert (live.status, ready.status, ready.json()["status"]) == (200, 200, "ok")
        assert ready.json()["checks"], "readiness has something to ask"
    finally:
        await process.stop()


async def test_the_apis_and_the_console_proxy_share_the_healthcheck_of_their_process(full_cloud: FullCloud) -> None:
    assert {"/compute", "/placement", "/console"} <= set(full_cloud.process.apps)
    assert (await _get(full_cloud, "/healthcheck/ready")).status == 200

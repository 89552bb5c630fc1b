"""The console proxy as a process of its own, in a region on PostgreSQL and RabbitMQ."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import Cluster
from tests.functional.cloud import IMAGE
from tests.functional.consoles import ConsoleClient, closed, read_until, token_of
from tests.services.process import free_port

PORT, RELAY = free_port(), free_port()


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A process for each role."""
    made = Cluster(
        Path(tmp_path_factory.mktemp("region")),
        request.getfixturevalue("module_database_url"),
        request.getfixturevalue("module_amqp_url"),
        vnc={"novncproxy_base_url": f"http://127.0.0.1:{PORT}/console/vnc_lite.html"},
        serial_console={"base_url": f"ws://127.0.0.1:{PORT}/console/websockify"},
    )
    for role in ("api", "conductor", "scheduler"):
        made.add(role, role)
    made.add(
        "compute", "compute", MICRONOVA__DEFAULT__HOST="host-1", MICRONOVA__CONSOLE__RELAY_LISTEN=f"127.0.0.1:{RELAY}"
    )
    made.add("console", "console", MICRONOVA__API__PORT=str(PORT), MICRONOVA__DATABASE__CONNECTION="")
    try:
        made.start()
        made.wait_ready(hosts=1)
        yield made
    finally:
        made.stop()


async def test_a_proxy_without_a_database_shows_servers_of_a_region(region: Cluster) -> None:
    body = {"server": {"name": "far", "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}}
    server = _ok(region.request("POST", "/servers", body))["server"]["id"]
    async with asyncio.timeout(30):
        while _ok(region.request("GET", f"/servers/{server}"))["server"]["status"] != "ACTIVE":
            await asyncio.sleep(0.1)  # other processes tell us nothing: we have to ask

    def link(protocol: str, kind: str) -> str:
        wanted = {"remote_console": {"protocol": protocol, "type": kind}}
        return str(_ok(region.request("POST", f"/servers/{server}/remote-consoles", wanted))["remote_console"]["url"])

    assert link("vnc", "novnc").startswith(f"http://127.0.0.1:{PORT}/console/vnc_lite.html?path=console%2Fwebsockify")
    serial = link("serial", "serial")
    console = _ok(region.request("GET", f"/os-console-auth-tokens/{token_of(serial)}", version="2.99"))["console"]
    assert (console["host"], console["port"]) == ("127.0.0.1", RELAY)  # nobody but the host's relay is reached
    async with aiohttp.ClientSession() as client:
        async with client.ws_connect(serial) as socket:  # the link is the WebSocket itself
            await read_until(socket, b"far login: ")
            assert region.request("DELETE", f"/servers/{server}")[0] == 204
            assert "closed its console" in await closed(socket)
        console_client = ConsoleClient(f"http://127.0.0.1:{PORT}", client)
        assert await console_client.refused(token_of(serial)) == 403
    log = region.log("console") + region.log("api") + region.log("conductor")
    assert "console: ready" in log
    assert token_of(serial) not in log


def _ok(answer: tuple[int, Any]) -> Any:
    status, body = answer
    assert status < 300, body
    return body

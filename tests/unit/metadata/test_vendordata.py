"""The operator's data for guests: from a file, and from services over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from micronova.metadata.vendordata import LARGEST, VendorDataSource, parse_targets, read_static
from micronova.objects.errors import Invalid, Unavailable
from tests.unit.metadata.world import UUID, instance


class Services:
    """Some services at one address, and what they were asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[dict[str, str], Any]] = []
        self.never = asyncio.Event()

    async def good(self, request: web.Request) -> web.Response:
        self.asked.append(({k.lower(): v for k, v in request.headers.items()}, await request.json()))
        return web.json_response({"told": "you"})

    async def empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def broken(self, request: web.Request) -> web.Response:
        return web.json_response({"internal": "details"}, status=500)

    async def garbage(self, request: web.Request) -> web.Response:
        return web.Response(body=b"{no json")

    async def huge(self, request: web.Request) -> web.Response:
        return web.Response(body=b'"' + b"x" * LARGEST + b'"')

    async def silent(self, request: web.Request) -> web.Response:
        await self.never.wait()
        return web.Response()


@pytest_asyncio.fixture
async def services() -> AsyncIterator[Services]:
    made = Services()
    app = web.Application()
    for name in ("good", "empty", "broken", "garbage", "huge", "silent"):
        handler: Callable[[web.Request], Awaitable[web.Response]] = getattr(made, name)
        app.router.add_post(f"/{name}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.never.set()
    await runner.cleanup()


async def test_a_service_is_told_about_the_guest(services: Services) -> None:
    source = VendorDataSource(static={"a": 1}, targets={"join": f"{services.url}/good", "x": f"{services.url}/empty"})
    spec = instance()
    found = await source.about(spec)
    await source.close()
    assert found.together() == {"static": {"a": 1}, "join": {"told": "you"}, "x": {}}
    [(headers, body)] = services.asked
    assert headers["content-type"] == headers["accept"] == "application/json"
    assert body == {
        "project-id": "project-1", "instance-id": UUID, "image-id": "0f6c3a8e-0000-4000-8000-000000000001",
        "user-data": spec.user_data, "hostname": "server-1", "metadata": {"role": "web"}, "boot-roles": "",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["broken", "garbage", "huge", "silent", "nobody"])
@pytest.mark.parametrize("fatal", [False, True])
async def test_a_service_that_fails(services: Services, name: str, fatal: bool) -> None:
    url = "http://127.0.0.1:1" if name == "nobody" else f"{services.url}/{name}"
    source = VendorDataSource(
        static=None, targets={"bad": url, "join": f"{services.url}/good"}, read_timeout=0.1, fatal=fatal
    )
    try:
        if fatal:
            with pytest.raises(Unavailable, match="bad"):
                await source.about(instance())
        else:
            assert (await source.about(instance())).together() == {"bad": {}, "join": {"told": "you"}}
    finally:
        await source.close()


def test_the_file(tmp_path: Path) -> None:
    assert read_static("") == {}
    file = tmp_path / "vendor.json"
    with pytest.raises(Invalid, match=r"vendordata_jsonfile_path .*vendor.json: No such file"):
        read_static(str(file))
    file.write_text("{")
    with pytest.raises(Invalid, match="not valid JSON"):
        read_static(str(file))
    file.write_text(json.dumps({"cloud-init": "#cloud-config"}))
    assert read_static(str(file)) == {"cloud-init": "#cloud-config"}


def test_targets() -> None:
    assert parse_targets(["a@http://h/x@y", "b@https://h"]) == {"a": "http://h/x@y", "b": "https://h"}
    for bad in ("http://h", "@http://h", "a@ftp://h", "a"):
        with pytest.raises(Invalid, match="NAME@URL"):
            parse_targets([bad])
    for taken in (["a@http://h", "a@http://i"], ["static@http://h"]):
        with pytest.raises(Invalid, match="taken"):
            parse_targets(taken)

"""What a browser gets at `/` of a cloud's port, while programs get what they always got."""

import re

import pytest

from micronova.http.client import Answer
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def _get(cloud: FullCloud, path: str, headers: dict[str, str], method: str = "GET") -> Answer:
    return await cloud.transport.request(method, path, headers, None)


async def test_a_browser_gets_a_page(full_cloud: FullCloud) -> None:
    answer = await _get(full_cloud, "/", BROWSER)
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    text = answer.body.decode()
    for mount in ("/compute/", "/identity/", "/image/", "/network/", "/volume/"):
        assert f'<a href="{mount}">' in text
        assert (await _get(full_cloud, mount, {})).status in (200, 300)
    assert "OS_CLIENT_CONFIG_FILE" in text and "MICRONOVA_DIR" in text
    # A server without a key pair could never be reached by `micronova ssh`.
    assert "openstack keypair create" in text and "--image test-image" in text and "--key-name mine" in text
    for command in ("ssh", "timeline", "status"):
        assert f"micronova {command}" in text
    head = await _get(full_cloud, "/", BROWSER, "HEAD")
    assert head.status == 200 and head.body == b"" and int(head.headers["content-length"]) == len(answer.body)


async def test_the_page_loads_nothing_and_tells_no_secrets(full_cloud: FullCloud) -> None:
    answer = await _get(full_cloud, "/", BROWSER)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    text = answer.body.decode()
    assert "<script" not in text and " style=" not in text
    loaded = re.findall(r'src="([^"]*)"|<link [^>]*href="([^"]*)"', text)
    assert {a or b for a, b in loaded} == {"/favicon.ico"}
    assert str(full_cloud.process.directory.path) not in text
    assert full_cloud.process.keys.admin_password not in text


async def test_programs_get_what_they_always_got(full_cloud: FullCloud) -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}, {"accept": "application/json, text/html"}):
        answer = await _get(full_cloud, "/", accept)
        assert answer.status == 404 and answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["message"] == "No service is mounted here." and "/compute" in error["services"]
    assert (await _get(full_cloud, "/", BROWSER, "POST")).status == 404
    assert (await _get(full_cloud, "/nothing", BROWSER)).status == 404


async def test_the_icon(full_cloud: FullCloud) -> None:
    answer = await _get(full_cloud, "/favicon.ico", {"accept": "image/*"})
    assert answer.status == 200 and answer.headers["content-type"] == "image/svg+xml"
    assert answer.body.startswith(b"<svg ")

"""Consoles in a real browser: what a user with a link sees, types and is told."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.browser import chromium, connected, pixels, shows, window
from tests.functional.cloud import Caller, Cloud, CloudOptions, cloud, user
from tests.functional.consoles import ConsoleClient, console_client, link

__all__ = ["cloud", "console_client", "user"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOUD = CloudOptions(hosts=2, roles=("console",))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with window(browser) as opened:
        yield opened


async def _open(page: Page, console_client: ConsoleClient, url: str) -> None:
    """Open a link as the API gave it, except that this cloud's host has a name only within the test."""
    await page.goto(url.replace("http://cloud:8774", console_client.base))


async def test_a_serial_console_is_typed_into(user: Caller, console_client: ConsoleClient, page: Page) -> None:
    server = await user.boot(name="talkative")
    await _open(page, console_client, await link(user, server["id"]))
    await connected(page)
    await shows(page, "#server", "talkative")
    await shows(page, ".xterm-rows", "talkative login:")
    await expect(page.get_by_text("press Enter")).to_be_hidden()  # it speaks by itself
    await page.keyboard.type("ada\n")
    await shows(page, ".xterm-rows", "ada@talkative:~$")
    await page.keyboard.type("uname\n")
    await shows(page, ".xterm-rows", "Linux talkative 6.1.0-simulated")


async def test_a_screen_is_shown_and_takes_keys(
    cloud: Cloud, user: Caller, console_client: ConsoleClient, page: Page
) -> None:
    server = await user.boot()
    await _open(page, console_client, await link(user, server["id"], "vnc"))
    await connected(page)
    before = await _more_colours_than(3, cloud, page)
    await page.locator("canvas").click()
    await page.keyboard.type("micronova")
    await _more_colours_than(before, cloud, page)
    await page.get_by_role("button", name="Ctrl+Alt+Del").click()
    await connected(page)


async def _more_colours_than(count: int, cloud: Cloud, page: Page) -> int:
    async def probe() -> int | None:
        found = len(await pixels(page))
        return found if found > count else None

    return await cloud.until(probe, f"more than {count} colours")


async def test_a_link_that_is_not_good_says_what_to_do(console_client: ConsoleClient, page: Page) -> None:
    for path in (
        "serial.html?token=nonsense", "spice_auto.html?token=nonsense",
        "vnc_lite.html?path=console%2Fwebsockify%3Ftoken%3Dnonsense",
    ):  # fmt: skip
        await page.goto(f"{console_client.base}/console/{path}")
        await shows(page, "#message", "ask for a new one")
        await shows(page, "#state", "not connected")


async def test_a_link_to_the_other_console_says_so(user: Caller, console_client: ConsoleClient, page: Page) -> None:
    url = await link(user, (await user.boot())["id"])
    await _open(page, console_client, url.replace("serial.html", "vnc_lite.html"))
    await shows(page, "#message", "serial console")


async def test_the_end_of_a_server_is_told(user: Caller, console_client: ConsoleClient, page: Page) -> None:
    id = (await user.boot())["id"]
    await _open(page, console_client, await link(user, id, "vnc"))
    await connected(page)
    await user.delete(f"/servers/{id}")
    await shows(page, "#message", "closed its console")
    await user.gone(id)
    await page.get_by_role("button", name="Connect again").click()
    await shows(page, "#message", "ask for a new one")

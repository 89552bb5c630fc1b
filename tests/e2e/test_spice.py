"""SPICE on a cloud that offers it: a real guest's screen in a real browser, by four WebSockets with one token."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.browser import chromium, connected, pixels, press, shows, window
from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.guests import Guest, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

SETTINGS = """
[libvirt]
spice_enabled = true
"""
LIT = 2000
"""Pixels of letters on a screen that shows some lines of text."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(can_run_guests: None) -> AsyncIterator[Guest]:
    async with real_cloud(RealCloud(SETTINGS)) as cloud:
        tenant = await cloud.tenant("10.81.0.0/24", router=False)
        try:
            made = await tenant.boot("sage")
            await made.ready()
            yield made
        finally:
            await tenant.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as launched:
        yield launched


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with window(browser) as opened:
        yield opened


async def _lit(page: Page) -> None:
    async def lit() -> bool:
        return sum((await pixels(page))[1:]) > LIT  # what does not have the background's colour

    await until(lit, "letters on the screen")


async def test_the_screen_is_not_blank_and_takes_keys(guest: Guest, page: Page, tmp_path: Path) -> None:
    url = await guest.console("spice", "spice-html5")
    assert "/console/spice_auto.html?token=" in url
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    await page.goto(url)
    await connected(page)
    assert len(sockets) >= 4  # main, screen, keys, cursor
    assert {socket.partition("?")[2] for socket in sockets} == {url.partition("?")[2]}
    await _lit(page)
    await page.locator("canvas").click()
    await press(page, "\necho typed-by-hand >/dev/ttyS0\n")
    await guest.shows("typed-by-hand")


async def test_whoever_opens_it_later_takes_it_over(guest: Guest, browser: Browser, page: Page) -> None:
    url = await guest.console("spice", "spice-html5")
    await page.goto(url)
    await connected(page)
    async with window(browser) as second:
        await second.goto(url)
        await connected(second)
        await shows(page, "#message", "another window")
        await _lit(second)


async def test_the_other_screen_is_there_too(guest: Guest, page: Page) -> None:
    await page.goto(await guest.console("vnc", "novnc"))
    await connected(page)
    await _lit(page)


async def test_it_ends_with_the_server(guest: Guest, page: Page) -> None:
    await page.goto(await guest.console("spice", "spice-html5"))
    await connected(page)
    await guest.delete()
    await shows(page, "#message", "closed its console")
    await page.get_by_role("button", name="Connect again").click()
    await shows(page, "#message", "ask for a new one")

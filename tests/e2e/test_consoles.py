"""Consoles of a real guest in a real browser: its screen by VNC and SPICE, and its serial port that answers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.browser import chromium, connected, pixels, press, shows, window
from tests.e2e.cloud import RealCloud
from tests.e2e.guests import Guest, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

LIT = 2000
"""Pixels of letters on a screen that shows some lines of text."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.79.0.0/24", router=False)
    try:
        made = await tenant.boot("dora")
        await made.ready()
        yield made
    finally:
        await tenant.clear()
    assert cloud.guest_leftovers() == []


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


@pytest.mark.parametrize(("protocol", "kind"), [("vnc", "novnc"), ("spice", "spice-html5")])
async def test_the_screen_is_not_blank_and_takes_keys(guest: Guest, page: Page, protocol: str, kind: str) -> None:
    await page.goto(await guest.console(protocol, kind))
    await connected(page)
    await _lit(page)
    await page.locator("canvas").click()
    await press(page, f"\necho typed-by-{protocol} >/dev/ttyS0\n")
    await guest.shows(f"typed-by-{protocol}")


async def test_a_ticket_that_begins_with_zeros_connects(guest: Guest, page: Page) -> None:
    """One in 256 does, of each channel; spice-html5 leaves the zeros out, and the guest refuses the channel."""

    async def always(route: Route) -> None:
        source = await (await route.fetch()).text()
        again = "let t; do t = encrypt(...given); while (t.length > 127); return t;"
        await route.fulfill(
            body=source.replace("rsa_encrypt", "encrypt").replace("  encrypt,\n", "")
            + f"export function rsa_encrypt(...given) {{ {again} }}",
            content_type="text/javascript",
        )

    await page.route("**/spice-html5/ticket.js", always)
    await page.goto(await guest.console("spice", "spice-html5"))
    await connected(page)


async def test_all_channels_of_spice_have_one_token(guest: Guest, page: Page) -> None:
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    url = await guest.console("spice", "spice-html5")
    await page.goto(url)
    await connected(page)
    assert len(sockets) >= 4  # main, screen, keys, cursor
    assert {socket.partition("?")[2] for socket in sockets} == {url.partition("?")[2]}


async def test_whoever_opens_spice_later_takes_it_over(guest: Guest, browser: Browser, page: Page) -> None:
    url = await guest.console("spice", "spice-html5")
    await page.goto(url)
    await connected(page)
    async with window(browser) as second:
        await second.goto(url)
        await connected(second)
        await shows(page, "#message", "another window")
        await _lit(second)


async def test_the_serial_port_answers(guest: Guest, page: Page) -> None:
    await page.goto(await guest.console("serial", "serial"))
    await connected(page)
    await expect(page.get_by_text("press Enter")).to_be_visible()  # a guest that is silent looks like one that is dead
    await page.keyboard.type("\n")
    await shows(page, ".xterm-rows", "root@dora:~#")
    await expect(page.get_by_text("press Enter")).to_be_hidden()
    await page.keyboard.type("echo answer-$((40+2))\n")
    await shows(page, ".xterm-rows", "answer-42")


async def test_consoles_end_with_the_server(guest: Guest, browser: Browser, page: Page) -> None:
    async with window(browser) as other:
        await page.goto(await guest.console("vnc", "novnc"))
        await other.goto(await guest.console("spice", "spice-html5"))
        await connected(page)
        await connected(other)
        await guest.delete()
        for each in (page, other):
            await shows(each, "#message", "closed its console")
            await each.get_by_role("button", name="Connect again").click()
            await shows(each, "#message", "ask for a new one")

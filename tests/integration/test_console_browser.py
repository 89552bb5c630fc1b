"""Consoles in a real browser: what a user with a link sees, types and is told."""

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.functional.cloud import Caller, Cloud, Wanted, cloud, user
from tests.functional.consoles import Viewer, link, viewer

__all__ = ["cloud", "user", "viewer"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOUD = Wanted(hosts=2, roles=("console",))
PATIENCE = 30_000  # milliseconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium."""
    program = shutil.which("chromium")
    assert program, "there is no chromium: make test installs it"
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A window in which nothing may go wrong."""
    opened = await browser.new_page(viewport={"width": 1000, "height": 700})
    opened.set_default_timeout(PATIENCE)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    await opened.close()
    assert errors == []


async def _open(page: Page, viewer: Viewer, url: str) -> None:
    """Open a link as the API gave it, except that this cloud's host has a name only within the test."""
    await page.goto(url.replace("http://cloud:8774", viewer.base))


async def _state(page: Page, state: str) -> None:
    await expect(page.locator("#state")).to_have_text(state, timeout=PATIENCE)


async def test_a_serial_console_is_typed_into(user: Caller, viewer: Viewer, page: Page):
    server = await user.boot(name="talkative")
    await _open(page, viewer, await link(user, server["id"]))
    await _state(page, "connected")
    await expect(page.locator("#server")).to_have_text("talkative")
    rows = page.locator(".xterm-rows")
    await expect(rows).to_contain_text("talkative login:", timeout=PATIENCE)
    await page.keyboard.type("ada\n")
    await expect(rows).to_contain_text("ada@talkative:~$", timeout=PATIENCE)
    await page.keyboard.type("uname\n")
    await expect(rows).to_contain_text("Linux talkative 6.1.0-simulated", timeout=PATIENCE)


async def test_a_screen_is_shown_and_takes_keys(cloud: Cloud, user: Caller, viewer: Viewer, page: Page):
    server = await user.boot()
    await _open(page, viewer, await link(user, server["id"], "vnc"))
    await _state(page, "connected")
    before = await _more_colours_than(3, cloud, page)
    await page.locator("canvas").click()
    await page.keyboard.type("micronova")
    await _more_colours_than(before, cloud, page)
    await page.get_by_role("button", name="Ctrl+Alt+Del").click()
    await _state(page, "connected")


async def test_a_link_that_is_not_good_says_what_to_do(user: Caller, viewer: Viewer, page: Page):
    for path in ("serial.html?token=nonsense", "vnc_lite.html?path=console%2Fwebsockify%3Ftoken%3Dnonsense"):
        await page.goto(f"{viewer.base}/console/{path}")
        await expect(page.locator("#message")).to_contain_text("ask for a new one", timeout=PATIENCE)
        await _state(page, "not connected")


async def test_a_link_to_the_other_console_says_so(user: Caller, viewer: Viewer, page: Page):
    url = await link(user, (await user.boot())["id"])
    await _open(page, viewer, url.replace("serial.html", "vnc_lite.html"))
    await expect(page.locator("#message")).to_contain_text("serial console", timeout=PATIENCE)


async def test_the_end_of_a_server_is_told(cloud: Cloud, user: Caller, viewer: Viewer, page: Page):
    id = (await user.boot())["id"]
    await _open(page, viewer, await link(user, id, "vnc"))
    await _state(page, "connected")
    await user.delete(f"/servers/{id}")
    await expect(page.locator("#message")).to_contain_text("closed its console", timeout=PATIENCE)
    await user.gone(id)
    await page.get_by_role("button", name="Connect again").click()
    await expect(page.locator("#message")).to_contain_text("ask for a new one", timeout=PATIENCE)


async def _more_colours_than(count: int, cloud: Cloud, page: Page) -> int:
    """Wait until the screen shows so many different colours."""

    async def probe() -> int | None:
        found = int(await page.evaluate(_COLOURS))
        return found if found > count else None

    return await cloud.until(probe, f"more than {count} colours")


_COLOURS = """() => {
  const canvas = document.querySelector("canvas");
  if (!canvas || !canvas.width) return 0;
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
}"""

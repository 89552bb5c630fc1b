"""A real browser, Debian's Chromium, in which tests open consoles."""

import contextlib
import re
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, Page, async_playwright, expect

PATIENCE = 30_000  # milliseconds

_PIXELS = """() => {
  const canvas = document.querySelector("canvas");
  if (!canvas || !canvas.width) return [];
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const counts = new Map();
  for (const pixel of new Uint32Array(data.buffer)) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  return [...counts.values()];
}"""


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start the browser."""
    program = shutil.which("chromium")
    assert program, "there is no chromium: scripts/ensure-packages chromium"
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield launched
        await launched.close()


@contextlib.asynccontextmanager
async def window(browser: Browser) -> AsyncIterator[Page]:
    """Open a window in which no script may fail."""
    opened = await browser.new_page(viewport={"width": 1000, "height": 700})
    opened.set_default_timeout(PATIENCE)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    await opened.close()
    assert errors == []


async def shows(page: Page, place: str, text: str) -> None:
    """Wait until a part of the page contains a text."""
    await expect(page.locator(place)).to_contain_text(text, timeout=PATIENCE)


async def connected(page: Page) -> None:
    """Wait until the page says that it is connected; if it gives up, fail with the reason that it shows."""
    state = page.locator("#state")
    await expect(state).to_have_text(re.compile("^(not )?connected$"), timeout=PATIENCE)
    assert await state.text_content() == "connected", await page.locator("#message").text_content()


async def press(page: Page, text: str) -> None:
    """Type on the keys of a keyboard, which is what a screen's guest gets: large letters are small ones with Shift."""
    keys = {"\n": "Enter", ">": "Shift+Period", "S": "Shift+KeyS"}
    for letter in text:
        await page.keyboard.press(keys.get(letter, letter), delay=10)


async def pixels(page: Page) -> list[int]:
    """Return how many pixels of the screen have each of its colours, the most frequent one first."""
    return sorted(await page.evaluate(_PIXELS), reverse=True)

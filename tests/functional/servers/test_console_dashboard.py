"""A dashboard whose origin the settings name may show consoles in a frame, and may open their WebSockets itself."""

import pytest

from tests.functional.cloud import Caller, CloudOptions, only_in_one_process
from tests.functional.consoles import ConsoleClient, console_client, link, read_until, token_of

__all__ = ["console_client"]

DASHBOARD = "https://dashboard.example.org"
SOCKET = "wss://console.example.org/console/websockify"
CLOUD = CloudOptions(
    hosts=2,
    roles=("console",),
    api={"console": {"allowed_origins": [DASHBOARD]}, "serial_console": {"base_url": SOCKET}},
)
pytestmark = only_in_one_process("the settings are those of the console proxy")


@pytest.mark.parametrize("page", ["vnc_lite.html", "spice_auto.html", "serial.html"])
async def test_pages_say_who_may_frame_them(console_client: ConsoleClient, page: str) -> None:
    _, _, headers = await console_client.page(page)
    assert f"frame-ancestors 'self' {DASHBOARD}" in headers["content-security-policy"]
    assert "x-frame-options" not in {name.lower() for name in headers}


async def test_links_to_serial_consoles_may_name_the_websocket(user: Caller, console_client: ConsoleClient) -> None:
    url = await link(user, (await user.boot())["id"])
    assert url.startswith(f"{SOCKET}?token=")
    async with console_client.socket(token_of(url), Origin=DASHBOARD) as socket:
        await read_until(socket, b"login: ")
    assert await console_client.refused(token_of(url), Origin="https://other.example.org") == 403

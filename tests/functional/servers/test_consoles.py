"""Consoles: their URLs, access, content, and the end of connections."""

import asyncio
import contextlib
import logging
import struct
import urllib.parse
import uuid

import aiohttp
import pytest
import sqlalchemy as sa

from micronova.db.tables import console_tokens
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import NEWEST, Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.consoles import ConsoleClient, closed, console_client, link, read_until, token_of
from tests.schemas import tempest

__all__ = ["console_client"]

DIRECT = "http://127.0.0.1:13002/nova"
CLOUD = CloudOptions(hosts=2, roles=("console",), api={"spice": {"spice_direct_proxy_base_url": DIRECT}})


# --- URLs ----------------------------------------------------------------------------------------------------------


async def test_links_lead_to_the_pages_of_the_proxy(cloud: Cloud, user: Caller) -> None:
    """They are where the API was asked, if no settings say where."""
    id = (await user.boot())["id"]
    vnc = await link(user, id, "vnc")
    assert vnc.startswith(f"{cloud.console_url}/console/vnc_lite.html?path=console%2Fwebsockify%3Ftoken%3D")
    serial = await link(user, id)
    assert serial == f"{cloud.console_url}/console/serial.html?token={token_of(serial)}"
    assert token_of(vnc) != token_of(serial)


async def test_the_answer_is_what_tempest_wants(user: Caller) -> None:
    id = (await user.boot())["id"]
    for minor in (6, 8, 99, NEWEST):
        body = {"remote_console": {"protocol": "vnc", "type": "novnc"}}
        answer = await user.at(minor).request("POST", f"/servers/{id}/remote-consoles", body)
        tempest.check("servers", "get_remote_consoles", minor, answer.status, answer.json())
    answer = await user.at(1).request("POST", f"/servers/{id}/action", {"os-getVNCConsole": {"type": "novnc"}})
    tempest.check("servers", "get_vnc_console", 1, answer.status, answer.json())


async def test_up_to_2_5_there_were_actions_instead(user: Caller) -> None:
    id = (await user.boot())["id"]
    old = user.at(5)
    vnc = (await old.act(id, "os-getVNCConsole", {"type": "novnc"}, 200))["console"]
    assert vnc["type"] == "novnc" and token_of(vnc["url"])
    serial = (await old.act(id, "os-getSerialConsole", {"type": "serial"}, 200))["console"]
    assert serial["type"] == "serial" and token_of(serial["url"])
    said = await old.refused(400, "POST", f"/servers/{id}/action", {"os-getVNCConsole": {"type": "xvpvnc"}})
    assert "Unavailable console type xvpvnc: this cloud has novnc, spice-html5, spice-direct and serial" in said
    await old.refused(400, "POST", f"/servers/{id}/action", {"os-getVNCConsole": {"type": "serial"}})
    await old.refused(410, "POST", f"/servers/{id}/action", {"os-getRDPConsole": {"type": "rdp-html5"}})
    await old.refused(404, "POST", f"/servers/{id}/remote-consoles", {})
    await user.at(6).refused(404, "POST", f"/servers/{id}/action", {"os-getVNCConsole": {"type": "novnc"}})
    await user.at(6).refused(400, "POST", f"/servers/{id}/action", {"os-getNoConsole": {"type": "novnc"}})


async def test_types_that_are_not_available_are_refused(user: Caller) -> None:
    id = (await user.boot())["id"]

    async def refused(protocol: str, type: str, minor: int = NEWEST) -> str:
        body = {"remote_console": {"protocol": protocol, "type": type}}
        return await user.at(minor).refused(400, "POST", f"/servers/{id}/remote-consoles", body)

    for protocol, type in (("rdp", "rdp-html5"), ("mks", "webmks"), ("vnc", "xvpvnc")):
        assert f"Unavailable console type {type}" in await refused(protocol, type)
    assert "protocol spice, not vnc" in await refused("vnc", "spice-html5")
    assert "protocol vnc, not serial" in await refused("serial", "novnc")
    assert "since 2.8" in await refused("mks", "webmks", 7)
    assert "since 2.99" in await refused("spice", "spice-direct", 98)
    assert "type" in await refused("vnc", "telepathy")


@only_in_one_process("changes what the driver of the hosts offers")
@pytest.mark.parametrize(
    ("protocol", "type", "action"),
    [
        ("vnc", "novnc", "os-getVNCConsole"),
        ("spice", "spice-html5", "os-getSPICEConsole"),
        ("serial", "serial", "os-getSerialConsole"),
    ],
)
async def test_a_console_that_the_host_does_not_offer_is_a_bad_request(
    user: Caller, monkeypatch: pytest.MonkeyPatch, protocol: str, type: str, action: str
) -> None:
    """As in Nova, where the type is not enabled: 400, and 501 never."""
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {f"{protocol}_console"})
    id = (await user.boot())["id"]
    for minor, path, body in (
        (5, f"/servers/{id}/action", {action: {"type": type}}),
        (6, f"/servers/{id}/remote-consoles", {"remote_console": {"protocol": protocol, "type": type}}),
        (NEWEST, f"/servers/{id}/remote-consoles", {"remote_console": {"protocol": protocol, "type": type}}),
    ):
        answer = await user.at(minor).request("POST", path, body)
        assert (answer.status, list(answer.json())) == (400, ["badRequest"])
        assert answer.json()["badRequest"]["message"].startswith(f"Unavailable console type {protocol}")


async def test_a_server_that_does_not_run_has_no_console(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    body = {"remote_console": {"protocol": "serial", "type": "serial"}}
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    assert "does not run" in await user.refused(409, "POST", f"/servers/{id}/remote-consoles", body)
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": user.project}):
        waiting = await user.create(name=user.project)
        await user.refused(409, "POST", f"/servers/{waiting}/remote-consoles", body)
        await user.delete(f"/servers/{waiting}")
        await user.gone(waiting)
    await user.refused(404, "POST", f"/servers/{uuid.uuid4()}/remote-consoles", body)


async def test_other_projects_get_no_console(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    body = {"remote_console": {"protocol": "vnc", "type": "novnc"}}
    await cloud.caller().refused(404, "POST", f"/servers/{id}/remote-consoles", body)
    assert await link(user.admin, id, "vnc")


async def test_admins_may_look_up_a_token(user: Caller) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    for minor in (31, 99, NEWEST):
        answer = await user.admin.at(minor).request("GET", f"/os-console-auth-tokens/{token}")
        found = answer.json()["console"]
        assert (found["instance_uuid"], found["host"]) == (id, "127.0.0.1")
        assert found["port"] > 0 and found["internal_access_path"] is None
        assert "tls_port" not in found
        if minor >= 99:
            tempest.check("servers", "console_auth_tokens", minor, answer.status, answer.json())
    await user.admin.at(30).refused(400, "GET", f"/os-console-auth-tokens/{token}")
    await user.admin.refused(404, "GET", f"/os-console-auth-tokens/{uuid.uuid4()}")
    await user.admin.refused(400, "GET", f"/os-console-auth-tokens/{token}?more=1")
    await user.refused(403, "GET", f"/os-console-auth-tokens/{token}")


async def test_tokens_are_not_in_the_database(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    rows = await cloud.read(sa.select(console_tokens).where(console_tokens.c.instance_uuid == id))
    assert len(rows) == 1
    assert token not in str(rows)


# --- consoles ------------------------------------------------------------------------------------------------------


async def test_a_serial_console_is_typed_into_and_answers(user: Caller, console_client: ConsoleClient) -> None:
    server = await user.boot(name="talkative")
    async with console_client.socket(token_of(await link(user, server["id"]))) as socket:
        assert socket.protocol == "binary"
        await read_until(socket, b"talkative login: ")
        await socket.send_bytes(b"ada\r")
        await read_until(socket, b"ada@talkative:~$ ")
        await socket.send_str("echo hello\r")
        assert b"\r\nhello\r\n" in await read_until(socket, b"hello\r\nada@")


async def test_a_screen_is_shown_and_reacts_to_keys(user: Caller, console_client: ConsoleClient) -> None:
    server = await user.boot()
    async with console_client.socket(token_of(await link(user, server["id"], "vnc"))) as socket:
        stream = _Stream(socket)
        assert await stream.read(12) == b"RFB 003.008\n"
        await socket.send_bytes(b"RFB 003.008\n")
        assert await stream.read(2) == b"\x01\x01"  # one security type: None
        await socket.send_bytes(b"\x01")
        assert await stream.read(4) == bytes(4)
        await socket.send_bytes(b"\x01")
        width, height = struct.unpack(">HH16x", await stream.read(20))
        name = await stream.read(struct.unpack(">I", await stream.read(4))[0])
        assert server["name"].encode() in name

        async def picture(incremental: bool) -> bytes:
            await socket.send_bytes(struct.pack(">BBHHHH", 3, incremental, 0, 0, width, height))
            assert await stream.read(4) == b"\x00\x00\x00\x01"
            assert await stream.read(12) == struct.pack(">HHHHi", 0, 0, width, height, 0)
            return await stream.read(width * height * 4)

        first = await picture(False)
        assert len(set(first)) > 3  # not blank
        await socket.send_bytes(struct.pack(">BBHI", 4, 1, 0, ord("a")))
        assert await picture(True) != first


async def test_a_screen_is_shown_by_spice(user: Caller, console_client: ConsoleClient) -> None:
    """A viewer opens the main channel, which names the others, then the display and the inputs."""
    server = await user.boot()
    token = token_of(await link(user, server["id"], "spice", "spice-html5"))
    async with console_client.socket(token) as main:
        stream = await _spice(main, 1)
        assert (await _message(stream))[0] == 103  # the session begins
        await main.send_bytes(struct.pack("<HI", 104, 0))
        kind, channels = await _message(stream)
        assert (kind, channels) == (104, struct.pack("<IBBBB", 2, 2, 0, 3, 0))
        async with console_client.socket(token) as screen, console_client.socket(token) as keys:
            shown = await _spice(screen, 2)
            kind, surface = await _message(shown)
            assert kind == 314
            _, width, height, _, _ = struct.unpack("<5I", surface)
            kind, first = await _message(shown)
            assert kind == 304 and len(set(first[-4 * width * height :])) > 3  # not blank
            assert (await _message(shown))[0] == 102
            await _spice(keys, 3)
            await keys.send_bytes(struct.pack("<HII", 101, 4, 30))
            kind, second = await _message(shown)
            assert kind == 304 and len(second) == len(first) and second != first


async def _spice(socket: aiohttp.ClientWebSocketResponse, channel: int) -> "_Stream":
    """Open a channel of SPICE, as a viewer without a password does."""
    stream = _Stream(socket)
    await socket.send_bytes(_hello(channel) + struct.pack("<I", 1) + bytes(128))
    magic, major, minor, size, error = struct.unpack("<4sIIII", await stream.read(20))
    assert (magic, major, minor, error) == (b"REDQ", 2, 2, 0)
    assert len(await stream.read(size - 4)) == 162 + 16  # the key, the capabilities
    assert await stream.read(4) == bytes(4)
    return stream


def _hello(channel: int) -> bytes:
    return struct.pack("<4sIIIIBBIIIII", b"REDQ", 2, 2, 26, 0, channel, 0, 1, 1, 18, 0b1011, 0)


async def _message(stream: "_Stream") -> tuple[int, bytes]:
    kind, size = struct.unpack("<HI", await stream.read(6))
    return kind, await stream.read(size)


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (_hello(1)[:4].lower() + _hello(1)[4:], b""),
        (_hello(9), struct.pack("<4sII4xI", b"REDQ", 2, 2, 9)),  # there is no such channel
        (struct.pack("<4sIIIIBBIII", b"REDQ", 1, 0, 18, 0, 1, 0, 0, 0, 18), struct.pack("<4sII4xI", b"REDQ", 2, 2, 4)),
        (struct.pack("<4sIIIIBBIII", b"REDQ", 2, 2, 18, 0, 1, 0, 9, 0, 18), struct.pack("<4sII4xI", b"REDQ", 2, 2, 3)),
    ],
    ids=["other protocol", "other channel", "other version", "cut off"],
)
async def test_what_is_no_viewer_of_spice_is_refused(
    user: Caller, console_client: ConsoleClient, greeting: bytes, said: bytes
) -> None:
    server = await user.boot()
    async with console_client.socket(token_of(await link(user, server["id"], "spice", "spice-html5"))) as socket:
        await socket.send_bytes(greeting)
        if said:
            reply = await _Stream(socket).read(20)
            assert reply[:12] + reply[16:] == said[:12] + said[16:]
        await closed(socket)


async def test_a_proxy_of_ones_own_connects_to_the_guest_directly(user: Caller) -> None:
    """It gets a user's link of the type spice-direct, and asks as an admin where the console is."""
    server = await user.boot()
    url = await link(user, server["id"], "spice", "spice-direct")
    assert url == f"{DIRECT}?token={token_of(url)}"
    console = (await user.admin.get(f"/os-console-auth-tokens/{token_of(url)}"))["console"]
    assert console["instance_uuid"] == server["id"] and console["internal_access_path"] is None
    assert console["tls_port"] is None  # the console's only port has no TLS
    older = (await user.admin.at(98).get(f"/os-console-auth-tokens/{token_of(url)}"))["console"]
    assert older == {name: value for name, value in console.items() if name != "tls_port"}
    reader, writer = await asyncio.open_connection(console["host"], console["port"])
    try:
        writer.write(_hello(1))
        assert struct.unpack("<4sII4xI", await reader.readexactly(20)) == (b"REDQ", 2, 2, 0)
    finally:
        writer.close()


class _Stream:
    """Reads the bytes of a WebSocket, independent of its messages."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._left = b""

    async def read(self, count: int) -> bytes:
        while len(self._left) < count:
            self._left += await self._socket.receive_bytes(timeout=10)
        found, self._left = self._left[:count], self._left[count:]
        return found


async def test_a_viewer_who_reads_late_gets_everything(user: Caller, console_client: ConsoleClient) -> None:
    """Output that is not read yet waits at the guest and is not lost."""
    server = await user.boot()
    async with console_client.socket(token_of(await link(user, server["id"], "vnc"))) as socket:
        await socket.send_bytes(b"RFB 003.008\n\x01\x01")
        for _ in range(100):
            await socket.send_bytes(struct.pack(">BBHHHH", 3, 0, 0, 0, 9, 9))
        left = 100 * (16 + 320 * 200 * 4)
        left -= len((await read_until(socket, b"(simulated)")).partition(b"(simulated)")[2])
        while left > 0:
            left -= len(await socket.receive_bytes(timeout=10))
        assert left == 0


async def test_a_later_connection_takes_a_serial_console_over(user: Caller, console_client: ConsoleClient) -> None:
    token = token_of(await link(user, (await user.boot())["id"]))
    async with console_client.socket(token) as first:
        await read_until(first, b"login: ")
        async with console_client.socket(token) as second:
            await read_until(second, b"login: ")
            assert "another window" in await closed(first)


# --- access --------------------------------------------------------------------------------------------------------


async def test_only_a_good_token_gets_in(
    user: Caller, console_client: ConsoleClient, caplog: pytest.LogCaptureFixture
) -> None:
    token = token_of(await link(user, (await user.boot())["id"]))
    assert await console_client.refused() == 403
    assert await console_client.refused("x" * 4000) == 403
    assert await console_client.refused(str(uuid.uuid4())) == 403
    assert await console_client.refused(token, "console/elsewhere") == 403
    assert await console_client.refused(token, "compute/v2.1/servers") == 403
    assert await console_client.refused(token, "nowhere") == 403
    assert await console_client.refused(token, "console/websockify?a=1&a=2" + "&b=1" * 20) == 400
    async with console_client.socket(Cookie=f"token={token}") as socket:
        await read_until(socket, b"login: ")
    assert token not in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_pages_of_other_sites_do_not_get_in(user: Caller, console_client: ConsoleClient) -> None:
    token = token_of(await link(user, (await user.boot())["id"]))
    assert await console_client.refused(token, Origin="http://evil.example.org") == 403
    assert await console_client.refused(token, Origin="null") == 403
    assert await console_client.refused(token, Origin="http://[") == 403
    async with console_client.socket(token, Origin=console_client.base) as socket:
        await read_until(socket, b"login: ")


async def test_a_deleted_server_takes_its_tokens_and_viewers_with_it(
    cloud: Cloud, user: Caller, console_client: ConsoleClient
) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    async with console_client.socket(token) as socket:
        await read_until(socket, b"login: ")
        await user.delete(f"/servers/{id}")
        assert "closed its console" in await closed(socket)
    await user.gone(id)
    assert await console_client.refused(token) == 403
    assert (await console_client.session(token))[0] == 404
    assert await cloud.read(sa.select(console_tokens).where(console_tokens.c.instance_uuid == id)) == []


async def test_a_server_that_stops_hangs_up_and_its_token_waits(user: Caller, console_client: ConsoleClient) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    async with console_client.socket(token) as socket:
        await read_until(socket, b"login: ")
        await user.act(id, "os-stop")
        await closed(socket)
    await user.wait_for(id, "SHUTOFF")
    status, said = await console_client.session(token)
    assert status == 409 and "does not run" in said["error"]
    assert await console_client.refused(token) == 409
    await user.act(id, "os-start")
    await user.wait_for(id, "ACTIVE")
    async with console_client.socket(token) as socket:
        await read_until(socket, b"login: ")


async def test_connections_to_one_server_are_limited(user: Caller, console_client: ConsoleClient) -> None:
    token = token_of(await link(user, (await user.boot())["id"], "vnc"))
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            await stack.enter_async_context(console_client.socket(token))
        assert await console_client.refused(token) == 409


# --- pages ---------------------------------------------------------------------------------------------------------


async def test_pages_look_up_their_token(user: Caller, console_client: ConsoleClient) -> None:
    server = await user.boot()
    status, said = await console_client.session(token_of(await link(user, server["id"], "vnc")))
    assert status == 200
    assert said == {"server": {"id": server["id"], "name": server["name"], "protocol": "vnc"}}
    status, said = await console_client.session("no such token")
    assert status == 404 and "ask for a new one" in said["error"]


async def test_pages_keep_tokens_to_themselves(console_client: ConsoleClient) -> None:
    pages = ("vnc_lite.html?path=x%3Ftoken%3Dy", "serial.html?token=y", "spice_auto.html?token=y")
    for path in (*pages, "console.css", "nowhere"):
        _, _, headers = await console_client.page(path)
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        assert "script-src 'self'" in headers["content-security-policy"]


async def test_nothing_but_pages_and_libraries_is_served(console_client: ConsoleClient) -> None:
    assert (await console_client.page("console.css"))[0] == 200
    for path in (
        "novnc/..%2F..%2F..%2Fetc%2Fpasswd", "novnc/../app.py", "novnc//etc/passwd", "nowhere.html", "pages.py",
        "novnc/.hidden.js", "novnc/core", "",
    ):  # fmt: skip
        status, text, _ = await console_client.page(path)
        assert status == 404 and "root:" not in text and "import" not in text, path


async def test_a_refusal_says_why_and_sends_no_data(console_client: ConsoleClient) -> None:
    address = urllib.parse.urlsplit(console_client.base)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        lines = [
            "GET /console/websockify?token=bad HTTP/1.1", f"Host: {address.netloc}", "Upgrade: websocket",
            "Connection: Upgrade", "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: binary",
        ]  # fmt: skip
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head, _, data = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert head.startswith(b"HTTP/1.1 403") and b"x-console-error: This console link is not valid" in head
    assert data == b""  # Tempest would take it for a frame

"""The parts of the console proxy: links, files, and the sockets that it connects to."""

import asyncio
from pathlib import Path

import pytest

from micronova.compute.consoles import serial_url, vnc_url
from micronova.console.endpoints import Connector
from micronova.console.pages import Pages
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.errors import Unavailable
from micronova.virt.fake.guests import FakeGuest
from micronova.virt.fake.terminal import Terminal


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("http://c:8774/console/vnc_lite.html", "?path=console%2Fwebsockify%3Ftoken%3Dt"),
        ("http://c:6080/vnc_auto.html", "?path=websockify%3Ftoken%3Dt"),
        ("https://c/a/b/vnc.html?view=1", "&path=a%2Fb%2Fwebsockify%3Ftoken%3Dt"),
    ],
)
def test_links_to_screens_name_the_websocket_beside_the_page(base: str, expected: str) -> None:
    assert vnc_url(base, "t") == base + expected


def test_links_to_serial_ports_may_be_websockets() -> None:
    assert serial_url("ws://c/console/websockify", "t") == "ws://c/console/websockify?token=t"


def test_a_missing_library_is_told_with_its_package(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "novnc", tmp_path / "xterm")
    status, _, content = pages.find("/vnc_lite.html") or (0, "", b"")
    assert status == 503
    assert b"apt-get install novnc" in content and b"console.novnc_path" in content
    assert len(pages.missing()) == 2
    (tmp_path / "xterm").mkdir()
    (tmp_path / "xterm" / "xterm.js").write_text("// here")
    assert [text for text in pages.missing() if "xterm" in text] == []
    found = pages.find("/serial.html")
    assert found is not None and found[0] == 200
    assert pages.find("/xterm/xterm.js") == (200, "text/javascript; charset=utf-8", b"// here")


@pytest.mark.parametrize(
    "path",
    ["/xterm/../secret.js", "/xterm//etc/x.js", "/xterm/.x.js", "/xterm/\0.js", "/xterm/secret.txt", "/../app.js", "/"],
)
def test_only_files_below_the_folders_are_served(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.js").write_text("secret")
    folder = tmp_path / "xterm"
    folder.mkdir()
    for name in ("xterm.js", ".x.js", "secret.txt"):
        (folder / name).write_text("x")
    assert Pages(tmp_path, folder).find(path) is None


async def test_unix_sockets_are_consoles_only_below_one_directory(tmp_path: Path) -> None:
    inside = tmp_path / "state" / ("long-" * 30) / "sockets"  # longer than an address can be
    inside.mkdir(parents=True)
    outside = tmp_path / "o.sock"

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    short = tmp_path / "s"
    short.symlink_to(inside)
    servers = [await asyncio.start_unix_server(greet, path) for path in (short / "a.vnc", outside)]
    connector = Connector(tmp_path / "state")
    reader, writer = await connector.open(ConsoleEndpoint(path=str(inside / "a.vnc")))
    assert await reader.read() == b"hello"
    writer.close()
    for path in (outside, inside / ".." / ".." / ".." / "o.sock"):
        with pytest.raises(Unavailable, match="on another machine"):
            await connector.open(ConsoleEndpoint(path=str(path)))
    with pytest.raises(Unavailable, match="cannot be reached"):
        await connector.open(ConsoleEndpoint(path=str(inside / "b.vnc")))
    for server in servers:
        server.close()


async def test_a_port_that_nobody_listens_on_is_told(unused_tcp_port: int) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await Connector(Path("/")).open(ConsoleEndpoint(host="127.0.0.1", port=unused_tcp_port))


def test_the_simulated_terminal_edits_lines() -> None:
    terminal = Terminal(FakeGuest(uuid="u", cloud="c", node="n", epoch=1, name="vm", hostname="vm"))
    assert terminal.greeting().endswith(b"vm login: ")
    assert terminal.typed(b"ada\r").endswith(b"ada@vm:~$ ")
    assert terminal.typed(b"hostnamX\x7fe\r") == b"hostnamX\b \be\r\nvm\r\nada@vm:~$ "
    assert b"not found" in terminal.typed(b"rm -rf /\r")
    assert terminal.typed(b"abc\x03") == b"abc^C\r\nada@vm:~$ "
    assert terminal.typed(b"exit\r").endswith(b"vm login: ")
    assert len(terminal.typed(b"x" * 100_000)) <= 1024

"""The parts of the console proxy: links, files, and the sockets that it connects to."""

import asyncio
from pathlib import Path

import pytest

from micronova.console.bundle import bundle
from micronova.console.endpoints import Connector
from micronova.console.pages import Pages
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.errors import Unavailable
from micronova.servers.consoles import page_url, vnc_url
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
    assert page_url("ws://c/console/websockify", "t") == "ws://c/console/websockify?token=t"


def test_a_missing_library_is_told_with_its_package(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "novnc", tmp_path / "xterm", tmp_path / "spice")
    status, _, content = pages.find("/vnc_lite.html") or (0, "", b"")
    assert status == 503
    assert b"apt-get install novnc" in content and b"console.novnc_path" in content
    status, _, content = pages.find("/spice_auto.html") or (0, "", b"")
    assert status == 503
    assert b"apt-get install spice-html5" in content and b"console.spice_html5_path" in content
    assert len(pages.missing()) == 2  # of SPICE nobody is warned who may not offer it
    assert pages.find("/xterm.js") is None and pages.find("/xterm.css") is None
    (tmp_path / "xterm" / "lib").mkdir(parents=True)
    (tmp_path / "xterm" / "lib" / "xterm.js").write_text("module.exports = 1")
    assert [text for text in pages.missing() if "xterm" in text] == []
    found = pages.find("/serial.html")
    assert found is not None and found[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/novnc/../secret.js", "/novnc//etc/x.js", "/novnc/.x.js", "/novnc/\0.js", "/novnc/a.txt", "/../app.js", "/"],
)
def test_only_files_below_the_folders_are_served(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.js").write_text("secret")
    folder = tmp_path / "novnc"
    folder.mkdir()
    for name in ("a.js", ".x.js", "a.txt"):
        (folder / name).write_text("x")
    pages = Pages(folder, tmp_path, folder)
    for each in (path, path.replace("novnc", "spice-html5")):
        assert pages.find(each) is None
    assert pages.find("/spice-html5/a.js") == (200, "text/javascript; charset=utf-8", b"x")
    assert pages.find("/novnc/a.js") == (200, "text/javascript; charset=utf-8", b"x")


def test_a_package_of_modules_becomes_one_script(tmp_path: Path) -> None:
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "main.js").write_text('const d = require("./deep/d"); module.exports = { Thing: d.value };')
    (tmp_path / "lib" / "deep" / "d.js").write_text("require('../e.js'); exports.value = 7;")
    (tmp_path / "lib" / "e.js").write_text('require("./main"); // a circle')
    script = bundle(tmp_path, "lib/main.js", "Thing").decode()
    assert script.count("function (require, module, exports)") == 3
    assert '"lib/deep/d.js":{"../e.js":"lib/e.js"}' in script
    (tmp_path / "lib" / "e.js").write_text('require("../../outside")')
    with pytest.raises(FileNotFoundError):
        bundle(tmp_path, "lib/main.js", "Thing")


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

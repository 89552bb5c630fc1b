"""The relay of a compute host: a secret gives access to one console, once."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from micronova.console.endpoints import Connector
from micronova.console.relay import ConsoleRelay
from micronova.http.sockets import listen_unix
from micronova.objects.clock import SystemClock
from micronova.objects.console import ConsoleEndpoint, at_registered_relay
from micronova.objects.errors import MicronovaError


class Late(SystemClock):
    """The machine's clock, which a test can advance."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[ConsoleEndpoint]:
    """A console that repeats everything."""
    talks: set[asyncio.Task[None]] = set()

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data * 2)
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(repeat(reader, writer)))

    server = await asyncio.start_unix_server(accept, tmp_path / "c")
    yield ConsoleEndpoint(path=str(tmp_path / "c"))
    server.close()
    await asyncio.gather(*talks)


@pytest.fixture
async def clock() -> Late:
    return Late()


@pytest.fixture
async def relay(clock: Late) -> AsyncIterator[ConsoleRelay]:
    made = ConsoleRelay("127.0.0.1:0", clock, random.Random(1))
    await made.start()
    yield made
    await made.stop()


async def _says(endpoint: ConsoleEndpoint) -> bytes:
    """Connect as a proxy does, send something, and return the answer."""
    reader, writer = await Connector(Path("/nowhere")).open(endpoint)
    try:
        writer.write(b"hello")
        return await reader.read(1000)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_secret_is_good_once(relay: ConsoleRelay, console: ConsoleEndpoint) -> None:
    offered = relay.offer(console)
    assert (offered.path, offered.host) == ("", "127.0.0.1")
    assert await _says(offered) == b"hellohello"
    assert await _says(offered) == b""


async def test_a_wrong_or_an_old_secret_is_not_good(relay: ConsoleRelay, console: ConsoleEndpoint, clock: Late) -> None:
    offered = relay.offer(console)
    assert await _says(msgspec.structs.replace(offered, secret="0" * 64)) == b""
    clock.ahead = 61.0
    assert await _says(offered) == b""


async def test_every_console_is_relayed(relay: ConsoleRelay) -> None:
    offered = relay.offer(ConsoleEndpoint(host="192.0.2.7", port=5900))
    assert offered.host == "127.0.0.1" and offered.secret


async def test_a_host_without_a_relay_tells_where_its_consoles_are(console: ConsoleEndpoint, clock: Late) -> None:
    relay = ConsoleRelay("", clock, random.Random(1))
    await relay.start()
    assert relay.offer(console) == console
    await relay.stop()


async def test_an_address_in_use_is_one_clear_line(clock: Late) -> None:
    first = ConsoleRelay("127.0.0.1:0", clock, random.Random(1))
    await first.start()
    taken = first.offer(ConsoleEndpoint(path="/x")).port
    with pytest.raises(MicronovaError, match=r"console\.relay_listen"):
        await ConsoleRelay(f"127.0.0.1:{taken}", clock, random.Random(1)).start()
    await first.stop()


async def test_a_proxy_on_this_machine_connects_by_a_socket(
    tmp_path: Path, console: ConsoleEndpoint, clock: Late
) -> None:
    relay = ConsoleRelay("", clock, random.Random(1), listen_unix(tmp_path / "relay"))
    await relay.start()
    try:
        answer = relay.offer(console)
        # What the conductor makes of it: of the host's answer only the secret counts.
        liar = msgspec.structs.replace(answer, path="/run/docker.sock")
        offered = at_registered_relay(liar, "host", str(tmp_path / "relay"))
        assert offered == answer
        connector = Connector(tmp_path)
        reader, writer = await connector.open(offered)
        writer.write(b"hello")
        assert await reader.read(1000) == b"hellohello"
        writer.close()
        reader, writer = await connector.open(msgspec.structs.replace(offered, secret="0" * 64))
        assert await reader.read(1000) == b""
        writer.close()
    finally:
        await relay.stop()

"""A bus finds a broker of its cluster that can be used, or says what to do."""

import asyncio
import random
import socket

import pamqp.frame
import pytest
from pamqp import commands

from micronova.objects.clock import SystemClock
from micronova.rpc.amqp import connection
from micronova.rpc.amqp.bus import AmqpBus
from micronova.rpc.contract import Interface
from micronova.rpc.errors import BusUnavailable
from tests.unit.rpc.amqp.fake_broker import FakeBroker
from tests.unit.rpc.bus_suite import soon


def _closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("seed", range(4))  # which broker is asked first is random
async def test_a_broker_of_the_cluster_that_is_down_does_not_matter(seed: int) -> None:
    async with FakeBroker() as broker:
        url = broker.url.replace("127.0.0.1", f"127.0.0.1:{_closed_port()},127.0.0.1")
        bus = AmqpBus(url, clock=SystemClock(), random=random.Random(seed))
        await soon(bus.start())
        assert bus.stats().broker.connected
        await soon(bus.stop())


async def test_each_broker_that_cannot_be_used_is_named() -> None:
    ports = [_closed_port(), _closed_port()]
    url = f"amqp://guest:secret@{','.join(f'127.0.0.1:{port}' for port in ports)}/"
    bus = AmqpBus(url, clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable) as caught:
        await soon(bus.start())
    assert all(f"127.0.0.1:{port}: " in caught.value.message for port in ports)
    assert "secret" not in caught.value.message


async def _reason(url: str) -> str:
    """Return why a bus cannot be started."""
    bus = AmqpBus(url, clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable) as caught:
        await soon(bus.start())
    return caught.value.message.partition("/: ")[2] or caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # a name may have several addresses
async def test_nothing_listens(host: str) -> None:
    said = await _reason(f"amqp://guest:guest@{host}:{_closed_port()}/")
    assert said == "nothing accepts connections there: start RabbitMQ, or correct transport_url"


async def test_a_name_that_is_none() -> None:
    assert (await _reason("amqp://guest:guest@a..b/")).startswith("its name is not valid: correct transport_url")


async def test_a_file_that_is_missing() -> None:
    said = await _reason("amqps://guest:guest@127.0.0.1/?cafile=/no/such/ca.pem")
    assert "a file that transport_url names cannot be used (/no/such/ca.pem): " in said


@pytest.mark.parametrize(
    ("scheme", "answer", "expected"),
    [
        ("amqp", b"", "it closed the connection before the login: it may accept only TLS"),
        ("amqps", b"AMQP\x00\x00\x09\x01", "TLS cannot be used with it: correct the port in transport_url"),
        (
            "amqp",
            pamqp.frame.marshal(commands.Connection.Close(403, "ACCESS_REFUSED - no.", 0, 0), 0),
            "ACCESS_REFUSED - no: correct user and password in transport_url",
        ),
        (
            "amqp",
            pamqp.frame.marshal(commands.Connection.Close(530, "NOT_ALLOWED - vhost x not found", 0, 0), 0),
            "NOT_ALLOWED - vhost x not found: correct the vhost in transport_url",
        ),
    ],
)
async def test_a_broker_that_refuses(scheme: str, answer: bytes, expected: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    said = await _reason(f"{scheme}://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    server.close()
    assert said.startswith(expected)


async def test_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = await _reason(f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/")
    assert said.startswith("it does not answer within ")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), ValueError("a bug")])
async def test_a_bus_connects_again_whatever_an_attempt_raises(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A process whose attempt to connect again failed for want of a thread had no bus until it was restarted."""
    raised = asyncio.Event()

    async def cannot(*_: object, **__: object) -> None:
        raised.set()
        raise error

    loop = asyncio.get_running_loop()
    async with FakeBroker() as broker:
        bus = AmqpBus(broker.url, clock=SystemClock(), random=random.Random(1))
        await soon(bus.start())
        with monkeypatch.context() as lacking:
            lacking.setattr(loop, "create_connection", cannot)
            for peer in broker.peers:
                peer.close()
            await soon(raised.wait())
        await soon(bus.serve(Interface("example"), object()))
        assert bus.stats().broker.connected
        await soon(bus.stop())

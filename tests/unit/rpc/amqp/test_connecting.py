"""A bus finds a broker of its cluster that can be used."""

import random
import socket

import pytest

from micronova.objects.clock import SystemClock
from micronova.rpc.amqp.bus import AmqpBus
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

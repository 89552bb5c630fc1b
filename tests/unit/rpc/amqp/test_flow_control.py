"""Publishing stops when the broker asks for it or does not keep up, for a limited time, and nothing grows meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from pamqp import commands

from micronova.objects.clock import SystemClock
from micronova.rpc import base
from micronova.rpc.amqp import channel as channels
from micronova.rpc.amqp.bus import AmqpBus
from micronova.rpc.amqp.channel import UNCONFIRMED_OF_ONE_QUEUE, Channel
from micronova.rpc.errors import BusUnavailable, CallTimeout
from micronova.telemetry.metrics import render
from tests.unit.rpc.amqp.fake_broker import FakeBroker
from tests.unit.rpc.bus_suite import CONTEXT, Handler, Job, SampleAPI, api, soon  # noqa: F401


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        yield broker


@asynccontextmanager
async def started(broker: FakeBroker, send_wait: float = 20.0) -> AsyncIterator[AmqpBus]:
    """A bus that is connected to the broker, and stopped at the end."""
    bus = AmqpBus(broker.url, clock=SystemClock(), random=random.Random(), grace=1.0, send_wait=send_wait)
    await bus.start()
    try:
        yield bus
    finally:
        await soon(bus.stop())


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until something is so."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def cast(bus: AmqpBus, api: SampleAPI, number: int = 1, size: int = 0, host: str | None = None) -> asyncio.Task[None]:
    """Begin to cast."""
    return asyncio.create_task(bus.cast(api.target(host), api.work, Job(number, ["x" * size]), context=CONTEXT))


def waiting(bus: AmqpBus) -> int:
    """How many casts wait for their turn."""
    assert bus._connection is not None
    return len(bus._connection.confirmed._waiting_to_publish)


async def blocked(bus: AmqpBus, broker: FakeBroker) -> None:
    """Block the bus, and wait until it knows."""
    broker.publishing.block()
    await until(lambda: bus.stats().broker.blocked)


async def test_casts_wait_while_the_broker_blocks_us(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker) as bus:
        await blocked(bus, broker)
        state = bus.stats().broker
        assert (state.connected, state.blocked_reason) == (True, "low on memory")
        assert b"micronova_bus_blocked 1.0" in render({}, bus)
        casts = [cast(bus, api, n) for n in range(3)]
        await until(lambda: waiting(bus) == 3)
        assert broker.publishing.published == 0
        broker.publishing.unblock()
        await broker.publishing.until_published(3)
        broker.publishing.confirm(3)
        await soon(asyncio.gather(*casts))
        assert not bus.stats().broker.blocked
        assert b"micronova_bus_blocked 0.0" in render({}, bus)


async def test_a_cast_raises_when_the_broker_blocks_us_for_too_long(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker, send_wait=0.3) as bus:
        await blocked(bus, broker)
        with pytest.raises(BusUnavailable, match="low on memory"):
            await soon(cast(bus, api))
        # The next one need not wait: it is known by now that the broker blocks us for longer than a message may wait.
        begin = asyncio.get_running_loop().time()
        with pytest.raises(BusUnavailable, match="low on memory"):
            await soon(cast(bus, api))
        assert asyncio.get_running_loop().time() - begin < 0.3
        assert broker.publishing.published == 0


async def test_a_cast_that_was_sent_before_raises_in_time(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker, send_wait=0.3) as bus:
        sent = cast(bus, api)
        await broker.publishing.until_published(1)
        broker.publishing.block()
        with pytest.raises(BusUnavailable, match="low on memory"):
            await soon(sent)


async def test_calls_fail_clearly_while_the_broker_blocks_us(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker, send_wait=0.2) as bus:
        sent = asyncio.create_task(bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=1.0))
        await broker.publishing.until_published(1)
        await blocked(bus, broker)
        with pytest.raises(BusUnavailable, match="low on memory"):
            await soon(bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600))
        with pytest.raises(CallTimeout, match="low on memory"):
            await soon(sent)


class MovedClock(SystemClock):
    """A clock that the test moves forward."""

    moved = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.moved


async def test_a_call_that_waited_expires_when_its_caller_gives_up(broker: FakeBroker, api: SampleAPI) -> None:
    clock = MovedClock()
    bus = AmqpBus(broker.url, clock=clock, random=random.Random(), send_wait=600)
    await bus.start()
    await blocked(bus, broker)
    call = asyncio.create_task(bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=100))
    await until(lambda: bus.stats().pending_calls == 1)
    clock.moved = 40.0
    broker.publishing.unblock()
    await broker.publishing.until_published(1)
    await until(lambda: broker.publishing.expiration != "")
    assert 0 < int(broker.publishing.expiration) <= 60_000
    call.cancel()
    await soon(bus.stop())


async def test_casts_wait_while_the_broker_does_not_read(broker: FakeBroker, api: SampleAPI) -> None:
    size, number = 100_000, 300
    async with started(broker) as bus:
        broker.publishing.reading.clear()
        casts = [cast(bus, api, n, size, host=f"host-{n % 3}") for n in range(number)]
        await until(lambda: waiting(bus) > 0)
        await asyncio.sleep(0.1)
        assert bus._connection is not None
        transport = bus._connection.publishing._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 5 * size
        # What the kernel buffers on loopback counts as sent.
        assert waiting(bus) > number // 2
        broker.publishing.reading.set()
        await broker.publishing.until_published(number)
        broker.publishing.confirm(number)
        await soon(asyncio.gather(*casts))


async def test_unconfirmed_casts_are_limited(
    broker: FakeBroker, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1_000
    monkeypatch.setattr(channels, "UNCONFIRMED_LIMIT", limit)
    async with started(broker) as bus:
        casts = [cast(bus, api, n, host=f"host-{n % 100}") for n in range(limit + 300)]
        await broker.publishing.until_published(limit)
        await until(lambda: waiting(bus) == 300)
        for given_up in casts[-200:-100]:
            given_up.cancel()
        broker.publishing.confirm(150)
        await broker.publishing.until_published(limit + 150)
        assert broker.publishing.published == limit + 150
        broker.publishing.confirm(limit + 150)
        await broker.publishing.until_published(limit + 200)
        broker.publishing.confirm(limit + 200)
        results = await soon(asyncio.gather(*casts, return_exceptions=True))
        assert [isinstance(result, asyncio.CancelledError) for result in results[-200:]] == [True] * 100 + [False] * 100
        assert results[:-200] == [None] * (limit + 100)


async def test_a_queue_that_confirms_nothing_stops_no_other_one(broker: FakeBroker, api: SampleAPI) -> None:
    """Such as a quorum queue without a leader."""
    most = UNCONFIRMED_OF_ONE_QUEUE
    async with started(broker, send_wait=0.5) as bus:
        for _ in range(2):
            stuck = [cast(bus, api, n, host="stuck") for n in range(1_100)]
            results = await soon(asyncio.gather(*stuck, return_exceptions=True))
            assert all(isinstance(result, BusUnavailable) for result in results)
            assert broker.publishing.published == most
        assert "confirms no messages to micronova." in str(results[-1])
        for number in range(3):
            other = cast(bus, api)
            await broker.publishing.until_published(most + number + 1)
            broker.publishing.send(commands.Basic.Ack(most + number + 1), broker.publishing.channel)
            await soon(other)
        # It has a leader again, which confirms what nobody waits for any more.
        broker.publishing.confirm(most + 3)
        back = cast(bus, api, host="stuck")
        await broker.publishing.until_published(most + 4)
        broker.publishing.confirm(most + 4)
        await soon(back)


async def test_waiting_casts_move_to_a_new_connection(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker) as bus:
        await blocked(bus, broker)
        casts = [cast(bus, api, n) for n in range(3)]
        await until(lambda: waiting(bus) == 3)
        broker.publishing.close()
        await until(lambda: len(broker.peers) == 4)
        await broker.publishing.until_published(3)
        broker.publishing.confirm(3)
        await soon(asyncio.gather(*casts))
        assert not bus.stats().broker.blocked


async def test_stopping_closes_both_connections(broker: FakeBroker) -> None:
    async with started(broker) as bus:
        await soon(bus.stop())
        assert [peer.closed_by_client for peer in broker.peers] == [True, True]


async def test_a_blocked_bus_stops_at_once(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker) as bus:
        await blocked(bus, broker)
        waits = cast(bus, api)
        await until(lambda: waiting(bus) == 1)
        broker.publishing.reading.clear()  # it would not see that we close the connection
        begin = asyncio.get_running_loop().time()
        await bus.stop()
        assert asyncio.get_running_loop().time() - begin < 5
        with pytest.raises(BusUnavailable):
            await soon(waits)


async def test_a_channel_without_confirms_has_no_limit_of_them(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker) as bus:
        assert bus._connection is not None
        channel: Channel = bus._connection.unconfirmed
        for _ in range(UNCONFIRMED_OF_ONE_QUEUE + 10):
            assert channel.can_publish and channel.has_room("reply")
            channel.publish("", "reply", b"")
        await broker.publishing.until_published(UNCONFIRMED_OF_ONE_QUEUE + 10)


async def test_pending_calls_are_limited(broker: FakeBroker, api: SampleAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PENDING_CALLS_LIMIT", 2)
    async with started(broker) as bus:
        calls = [
            asyncio.create_task(bus.call(api.target(), api.ask, Job(n), context=CONTEXT, timeout=600)) for n in range(2)
        ]
        await broker.publishing.until_published(2)
        with pytest.raises(BusUnavailable, match="2 calls"):
            await bus.call(api.target(), api.ask, Job(3), context=CONTEXT, timeout=600)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert bus.stats().pending_calls == 0


async def test_a_call_that_waits_on_a_channel_that_the_broker_closes(broker: FakeBroker, api: SampleAPI) -> None:
    async with started(broker) as bus:
        await blocked(bus, broker)
        call = asyncio.create_task(bus.call(api.target(), api.work, Job(1, []), context=CONTEXT, timeout=20.0))
        session = bus._connection
        assert session is not None
        await until(lambda: bool(session.unconfirmed._waiting_to_publish))
        closed = commands.Channel.Close(reply_code=403, reply_text="ACCESS_REFUSED", class_id=0, method_id=0)
        broker.publishing.send(closed, session.unconfirmed.number)
        with pytest.raises(BusUnavailable, match="ACCESS_REFUSED"):
            await soon(call)

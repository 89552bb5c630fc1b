"""Messages that are too large to be carried: their sender learns it, and nobody else is kept from anything."""

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from micronova.objects.clock import SystemClock
from micronova.rpc import envelope
from micronova.rpc.bus import Bus, connect
from micronova.rpc.errors import BusUnavailable, MessageTooLarge
from micronova.rpc.unix import frames as f
from tests.unit.rpc.bus_suite import CONTEXT, Handler, Job, SampleAPI, soon
from tests.unit.rpc.test_unix import Other, other

LARGE = Job(1, ["x" * 20_000])
SMALL = Job(7)

__all__ = ["other"]  # the fixture


@pytest_asyncio.fixture
async def client(other: Other) -> AsyncIterator[Bus]:
    made = connect(f"unix://{other.path}", clock=SystemClock(), random=random.Random(), name="client")
    await made.start()
    yield made
    await soon(made.stop())


@pytest.fixture
def api() -> SampleAPI:
    return SampleAPI("large")


async def test_a_sender_is_told_at_once(
    other: Other, client: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envelope, "LARGEST", 10_000)
    handler = Handler()
    await client.serve(api.interface, handler)
    for bus in (other.bus, client):
        with pytest.raises(MessageTooLarge, match="may have 10000"):
            await bus.cast(api.target(), api.work, LARGE, context=CONTEXT)
        with pytest.raises(MessageTooLarge):
            await bus.call(api.target(), api.ask, LARGE, context=CONTEXT, timeout=20)
    await other.bus.cast(api.target(), api.work, SMALL, context=CONTEXT)
    assert (await soon(handler.next_job())).number == 7


async def test_a_caller_is_told_that_the_answer_is_too_large(
    other: Other, client: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Handler):
        async def ask(self, context: object, job: Job) -> Job:
            if job.number == 2:
                raise MessageTooLarge("x" * 20_000)
            return LARGE

    await client.serve(api.interface, Large())
    monkeypatch.setattr(envelope, "LARGEST", 2_000)
    for bus in (other.bus, client):
        for number in (1, 2):  # the result, and the error of the handler
            with pytest.raises(MessageTooLarge, match="the reply has"):
                await soon(bus.call(api.target(), api.ask, Job(number), context=CONTEXT, timeout=20))


def test_what_the_bus_takes_fits_into_a_frame() -> None:
    assert f.LARGEST - envelope.LARGEST >= 1 << 20
    assert envelope.LARGEST < 16 << 20, "RabbitMQ's limit"


async def test_what_does_not_fit_into_a_frame_takes_none_of_a_clients_slots(
    other: Other, client: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f, "LARGEST", 10_000)
    handler = Handler()
    await client.serve(api.interface, handler, prefetch=2)
    for _ in range(2):
        with contextlib.suppress(BusUnavailable):
            await other.bus.cast(api.target(), api.work, LARGE, context=CONTEXT)
    await other.bus.cast(api.target(), api.work, SMALL, context=CONTEXT)
    assert (await soon(handler.next_job())).number == 7
    assert other.bus.exchange.dead_letter_count == 2


async def test_what_does_not_fit_into_a_frame_does_not_keep_a_client_out(
    other: Other, client: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f, "LARGEST", 10_000)
    first = await client.serve(api.interface, Handler())  # makes the queue
    await first.stop()
    await other.bus.cast(api.target(), api.work, LARGE, context=CONTEXT)
    await other.bus.cast(api.target(), api.work, SMALL, context=CONTEXT)
    handler = Handler()
    await client.serve(api.interface, handler)
    assert (await soon(handler.next_job())).number == 7

"""How many notifications wait for the broker, and when the oldest are dropped."""

import asyncio
from random import Random

from micronova.notifications.publisher import BURST_LIMIT, QUEUE_LIMIT, STALL_SECONDS, Notification, Publisher
from tests.clocks import ManualClock, settle


class Delivering(Publisher):
    """Delivers to a broker that accepts everything while it is open."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__("amqp://broker/", "nova", clock=clock, random=Random(1))
        self.open = asyncio.Event()
        self.open.set()

    async def _deliver(self, batch: list[Notification]) -> None:
        await self.open.wait()
        self.sent += len(batch)

    def burst(self, number: int) -> None:
        for _ in range(number):
            self.put(tuple)


async def test_a_burst_is_not_dropped_while_the_broker_accepts_messages() -> None:
    """The heartbeats of one transaction may have 5,000 power changes, each with three notifications."""
    publisher = Delivering(ManualClock())
    await publisher.start()
    publisher.burst(15_000)
    await publisher.stop()
    assert (publisher.sent, publisher.dropped) == (15_000, 0)


async def test_it_is_known_when_the_broker_has_what_was_put() -> None:
    clock = ManualClock()
    publisher = Delivering(clock)
    await publisher.start()
    await publisher.wait_until_sent()
    publisher.open.clear()
    publisher.burst(3)
    waiting = asyncio.create_task(publisher.wait_until_sent())
    await settle()
    publisher.burst(5)  # of others, who go on: these are not waited for
    await clock.advance(60.0)
    assert not waiting.done()
    publisher.open.set()
    await settle()
    await clock.advance(60.0)
    await asyncio.wait_for(waiting, 10)
    await publisher.stop()


async def test_a_broker_that_accepts_nothing_gets_the_newest() -> None:
    clock = ManualClock()
    publisher = Delivering(clock)
    await publisher.start()
    publisher.burst(1)
    await settle()
    publisher.open.clear()
    publisher.burst(BURST_LIMIT)
    await settle()
    assert publisher.dropped == 0
    await clock.advance(STALL_SECONDS)
    publisher.burst(1)
    assert BURST_LIMIT - publisher.dropped <= QUEUE_LIMIT + 100  # a batch is being delivered
    dropped = publisher.dropped
    publisher.burst(10)
    assert publisher.dropped == dropped + 10
    publisher.open.set()
    await settle()
    publisher.burst(BURST_LIMIT - QUEUE_LIMIT)
    await publisher.stop()
    assert publisher.dropped == dropped + 10

"""Buses by URL."""

import asyncio
import random

import pytest

from micronova.objects.clock import SystemClock
from micronova.rpc.bus import connect
from micronova.rpc.errors import BusUnavailable
from tests.unit.rpc.bus_suite import CONTEXT, Job, SampleAPI


def test_loops_do_not_meet() -> None:
    api = SampleAPI("sample")

    async def leave_a_message() -> int:
        bus = connect("local://tests", clock=SystemClock(), random=random.Random())
        await bus.start()
        with pytest.raises(BusUnavailable):
            await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=20)
        await bus.cast(api.target(), api.work, Job(), context=CONTEXT)
        await bus.stop()
        return 1

    assert asyncio.run(leave_a_message()) + asyncio.run(leave_a_message()) == 2


def test_unknown_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="local://, unix://, amqp:// or amqps://"):
        connect("kafka://x", clock=SystemClock(), random=random.Random())

"""The bus within one process."""

import random

import pytest

from micronova.objects.clock import SystemClock
from micronova.rpc import local
from micronova.rpc.bus import Bus, connect
from micronova.rpc.errors import BusUnavailable
from tests.unit.rpc.bus_suite import *
from tests.unit.rpc.bus_suite import CONTEXT, Handler, Job, SampleAPI


@pytest.fixture
def bus_url() -> str:
    return "local://tests"


@pytest.fixture
def sender() -> str:
    return "tests"


async def test_a_full_queue_refuses(bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "QUEUE_LIMIT", 3)
    for n in range(3):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    with pytest.raises(BusUnavailable):
        await bus.cast(api.target(), api.work, Job(3), context=CONTEXT)
    handler = Handler()
    await bus.serve(api.interface, handler)
    assert [(await handler.next_job()).number for _ in range(3)] == [0, 1, 2]


async def test_buses_of_other_names_do_not_meet(bus: Bus, api: SampleAPI) -> None:
    other = connect("local://other", clock=SystemClock(), random=random.Random())
    await other.start()
    await bus.serve(api.interface, Handler())
    with pytest.raises(BusUnavailable):
        await other.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=20)
    await other.stop()


async def test_a_busy_sender_does_not_drown_its_servers(bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await bus.serve(api.interface, handler)
    for n in range(local.QUEUE_LIMIT + 1_000):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=20)
    assert handler.seen.qsize() == local.QUEUE_LIMIT + 1_001

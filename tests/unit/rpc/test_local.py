"""The bus within one process."""

import random

import pytest

from micronova.objects.clock import SystemClock
from micronova.rpc import local
from micronova.rpc.bus import Bus, connect
from micronova.rpc.errors import BusUnavailable, CallTimeout
from tests.unit.rpc.bus_suite import *
from tests.unit.rpc.bus_suite import CONTEXT, Gate, Handler, Job, SampleAPI


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


async def test_a_call_that_waited_too_long_is_logged(
    bus: Bus, api: SampleAPI, sender: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    handler = Handler(gate)
    await bus.serve(api.interface, handler, prefetch=1)
    await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
    await handler.next_job()
    with pytest.raises(CallTimeout):
        await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=0.1)
    gate.open.set()
    await bus.call(api.target(), api.ask, Job(3), context=CONTEXT, timeout=20)
    assert bus.stats().expired == {api.ask.label: 1}
    assert f"{api.ask.label} from {sender} waited for a handler longer than its caller waits" in caplog.text

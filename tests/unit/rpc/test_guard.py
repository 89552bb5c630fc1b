"""Hosts can write to every queue; servers refuse their messages except on interfaces that are for hosts."""

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from micronova.compute.rpcapi import COMPUTE_INTERFACE
from micronova.conductor.rpcapi import CONSOLE, HOSTS, KEYS, TASKS
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Forbidden
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Interface
from micronova.rpc.guard import GuardedBus
from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE
from tests.unit.rpc.bus_suite import CONTEXT, Handler, Job, SampleAPI, soon


@pytest_asyncio.fixture
async def buses() -> AsyncIterator[dict[str, Bus]]:
    """One of the cloud's own processes, and one of a host's."""
    made = {
        name: connect("local://guarded", clock=SystemClock(), random=random.Random(1), name=name)
        for name in ("cloud", "host-1")
    }
    for bus in made.values():
        await bus.start()
    yield made
    for bus in made.values():
        await bus.stop()


async def test_only_the_clouds_own_users_are_heard(buses: dict[str, Bus]) -> None:
    api, handler = SampleAPI("orders"), Handler()
    await GuardedBus(buses["cloud"], frozenset({"cloud"})).serve(api.interface, handler)
    with pytest.raises(Forbidden, match=r"host-1 may not send orders\.ask"):
        await buses["host-1"].call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=20)
    await buses["host-1"].cast(api.target(), api.work, Job(2), context=CONTEXT)
    assert await buses["cloud"].call(api.target(), api.ask, Job(4), context=CONTEXT, timeout=20) == Job(4)
    assert (await soon(handler.seen.get()))[1] == Job(4) and handler.seen.empty()


async def test_hosts_are_heard_where_they_may_speak(buses: dict[str, Bus]) -> None:
    api, handler = SampleAPI("reports"), Handler()
    api.interface.from_hosts = True
    await GuardedBus(buses["cloud"], frozenset({"cloud"})).serve(api.interface, handler)
    for number, bus in enumerate(buses.values()):
        assert await bus.call(api.target(), api.ask, Job(number), context=CONTEXT, timeout=20) == Job(number)


@pytest.mark.parametrize(
    ("interface", "from_hosts"),
    [
        (HOSTS, True),
        (KEYS, True),
        (TASKS, False),
        (CONSOLE, False),
        (SCHEDULER_INTERFACE, False),
        (COMPUTE_INTERFACE, False),
    ],
)
def test_what_hosts_may_send(interface: Interface, from_hosts: bool) -> None:
    assert interface.from_hosts is from_hosts

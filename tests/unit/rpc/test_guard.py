"""Who may send what: hosts reach every queue, and are heard only where they may speak."""

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from micronova.compute.rpcapi import COMPUTE
from micronova.conductor.rpcapi import CONSOLE, HOST, KEYS, TASKS
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Forbidden
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Interface
from micronova.rpc.guard import GuardedBus
from micronova.scheduler.rpcapi import SCHEDULER
from tests.unit.rpc.bus_suite import CONTEXT, Handler, Job, Room, soon


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
    room, handler = Room("orders"), Handler()
    await GuardedBus(buses["cloud"], frozenset({"cloud"})).serve(room.interface, handler)
    with pytest.raises(Forbidden, match=r"host-1 may not send orders\.ask"):
        await buses["host-1"].call(room.target(), room.ask, Job(1), context=CONTEXT, timeout=20)
    await buses["host-1"].cast(room.target(), room.work, Job(2), context=CONTEXT)
    await buses["host-1"].fanout("orders", room.work, Job(3), context=CONTEXT)
    assert await buses["cloud"].call(room.target(), room.ask, Job(4), context=CONTEXT, timeout=20) == Job(4)
    assert (await soon(handler.seen.get()))[1] == Job(4) and handler.seen.empty()


async def test_hosts_are_heard_where_they_may_speak(buses: dict[str, Bus]) -> None:
    room, handler = Room("reports"), Handler()
    room.interface.from_hosts = True
    await GuardedBus(buses["cloud"], frozenset({"cloud"})).serve(room.interface, handler)
    for number, bus in enumerate(buses.values()):
        assert await bus.call(room.target(), room.ask, Job(number), context=CONTEXT, timeout=20) == Job(number)


@pytest.mark.parametrize(
    ("interface", "from_hosts"),
    [(HOST, True), (KEYS, True), (TASKS, False), (CONSOLE, False), (SCHEDULER, False), (COMPUTE, False)],
)
def test_what_hosts_may_send(interface: Interface, from_hosts: bool) -> None:
    assert interface.from_hosts is from_hosts

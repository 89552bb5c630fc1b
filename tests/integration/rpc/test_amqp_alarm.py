"""A broker that is short of memory accepts no messages; everything else goes on, and publishing resumes by itself."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from micronova.notifications.envelope import Message
from micronova.notifications.publisher import Publisher
from micronova.objects.clock import SystemClock
from micronova.rpc.amqp.bus import AmqpBus
from micronova.rpc.errors import BusUnavailable
from micronova.telemetry.metrics import render
from tests.services.rabbitmq import RabbitMQ
from tests.unit.rpc.bus_suite import CONTEXT, Gate, Handler, Job, SampleAPI, api, soon  # noqa: F401

SEND_WAIT = 1.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A broker of our own: an alarm stops all its publishers."""
    broker = RabbitMQ.start(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.stop()


@asynccontextmanager
async def alarm(broker: RabbitMQ) -> AsyncIterator[None]:
    """Let the broker find itself short of memory, and wait until each of its connections knows."""
    set_watermark = "vm_memory_monitor:set_vm_memory_high_watermark({absolute, %d})"
    wait = (
        "Wait = fun Wait() -> States = rabbit_networking:connection_info_all([state]),"
        " case lists:member([{state, running}], States) of true -> timer:sleep(10), Wait(); false -> ok end end, Wait()"
    )
    await asyncio.to_thread(broker.eval, f"{set_watermark % 1}, {wait}.")
    try:
        yield
    finally:
        await asyncio.to_thread(broker.eval, f"{set_watermark % 1_000_000_000}.")


@pytest_asyncio.fixture
async def buses(broker: RabbitMQ) -> AsyncIterator[tuple[AmqpBus, AmqpBus]]:
    """A client and a server."""
    made = [
        AmqpBus(broker.url, clock=SystemClock(), random=random.Random(), grace=5.0, send_wait=SEND_WAIT)
        for _ in range(2)
    ]
    for bus in made:
        await bus.start()
    yield made[0], made[1]
    for bus in made:
        await soon(bus.stop())


async def resumed(bus: AmqpBus) -> None:
    """Wait until the broker accepts messages of a bus that it blocked."""
    async with asyncio.timeout(20):
        while bus.stats().broker.blocked:
            await asyncio.sleep(0.01)


async def test_publishing_stops_and_consuming_goes_on(
    broker: RabbitMQ, buses: tuple[AmqpBus, AmqpBus], api: SampleAPI
) -> None:
    client, server = buses
    gate = Gate()
    handler = Handler(gate)
    await server.serve(api.interface, handler, prefetch=2)
    for n in range(10):
        await client.cast(api.target(), api.work, Job(n), context=CONTEXT)
    async with alarm(broker):
        for bus in (client, server):
            with pytest.raises(BusUnavailable, match="low on memory"):
                await bus.cast(api.target("other"), api.work, Job(), context=CONTEXT)
            assert bus.stats().broker.blocked_reason == "low on memory"
            assert b"micronova_bus_blocked 1.0" in render({}, bus)
        with pytest.raises(BusUnavailable, match="low on memory"):
            await client.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600)
        # More messages than the server may hold unacknowledged: the broker must read the acknowledgements.
        gate.open.set()
        assert [(await handler.next_job()).number for _ in range(10)] == list(range(10))
        await server.serve(SampleAPI(f"{api.topic}-2").interface, Handler())
    await resumed(client)
    await resumed(server)
    assert await client.call(api.target(), api.ask, Job(7), context=CONTEXT, timeout=20) == Job(7)
    await server.cast(api.target(), api.work, Job(), context=CONTEXT)


async def test_a_reply_waits_for_the_broker(broker: RabbitMQ, buses: tuple[AmqpBus, AmqpBus], api: SampleAPI) -> None:
    client, server = buses
    gate = Gate()
    handler = Handler(gate)
    running = await server.serve(api.interface, handler)
    call = asyncio.create_task(client.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=60))
    await handler.next_job()
    async with alarm(broker):
        await server.probe()
        assert server.stats().broker.blocked
        gate.open.set()
        while gate.inside:
            await asyncio.sleep(0)
        assert running.running == 1
        assert not call.done()
    assert await soon(call) == Job(1)


async def test_who_asks_learns_of_the_alarm(broker: RabbitMQ, buses: tuple[AmqpBus, AmqpBus]) -> None:
    """The broker tells only those that publish; an idle process finds out when it is asked for its status."""
    client, _ = buses
    assert not (await client.probe()).broker.blocked
    async with alarm(broker):
        state = (await client.probe()).broker
        assert (state.connected, state.blocked_reason) == (True, "low on memory")
    await resumed(client)
    assert not (await client.probe()).broker.blocked


async def test_a_cast_that_a_short_alarm_delays_arrives(
    broker: RabbitMQ, buses: tuple[AmqpBus, AmqpBus], api: SampleAPI
) -> None:
    client, server = buses
    client._send_wait = 20.0
    handler = Handler()
    await server.serve(api.interface, handler)
    async with alarm(broker):
        await client.probe()
        waits = asyncio.create_task(client.cast(api.target(), api.work, Job(5), context=CONTEXT))
        await asyncio.wait([waits], timeout=0.1)
        assert not waits.done()
    await soon(waits)
    assert (await handler.next_job()).number == 5


async def test_a_publisher_without_rights_gets_a_clear_error(
    broker: RabbitMQ, buses: tuple[AmqpBus, AmqpBus], api: SampleAPI
) -> None:
    client, _ = buses
    await client.cast(api.target(), api.work, Job(1), context=CONTEXT)
    rights = (
        'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"/">>, <<".*">>, <<"%s">>, <<".*">>, <<"t">>).'
    )
    await asyncio.to_thread(broker.eval, rights % "^$")
    try:
        # It is known by now that the user may write: the broker remembers that for each connection.
        assert client._connection is not None
        client._connection.abort()
        with pytest.raises(BusUnavailable, match="refused"):
            await soon(client.cast(api.target(), api.work, Job(2), context=CONTEXT))
    finally:
        await asyncio.to_thread(broker.eval, rights % ".*")
    client._send_wait = 20.0
    await soon(client.cast(api.target(), api.work, Job(3), context=CONTEXT))


async def test_notifications_wait_for_the_broker(broker: RabbitMQ) -> None:
    publisher = Publisher(broker.url, "amq.topic", clock=SystemClock(), random=random.Random())
    await publisher.start()

    async def sent(number: int) -> None:
        async with asyncio.timeout(20):
            while publisher.sent < number:
                await asyncio.sleep(0.01)

    publisher.put(lambda: (Message("notifications.info", b"1"),))
    await sent(1)
    async with alarm(broker):
        for _ in range(300):
            publisher.put(lambda: (Message("notifications.info", b"2"),))
        connection = publisher._connection
        assert connection is not None
        async with asyncio.timeout(20):
            while connection.accepts_messages:
                await asyncio.sleep(0)
        assert publisher.sent == 1
    await sent(301)
    assert publisher.dropped == 0
    await soon(publisher.stop())


async def _check(url: str, directory: Path) -> str:
    """Return what `micronova check` says with a broker's URL."""
    settings = directory / "micronova.toml"
    settings.write_text(f'[default]\ntransport_url = "{url}"\nstate_path = "{directory}"\n')
    command = [sys.executable, "-m", "micronova.cli.main", "check", "--config", str(settings)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    return done.stdout


async def test_the_check_of_a_region_finds_the_alarm(broker: RabbitMQ, tmp_path: Path) -> None:
    said = await _check(broker.url, tmp_path)
    assert "ok    broker" in said and "ok    room at the broker" in said
    assert "default.control_users: it is empty: every user of the broker may give orders to hosts" in said
    async with alarm(broker):
        assert "the broker accepts no messages (low on memory)" in await _check(broker.url, tmp_path)


async def test_the_check_says_which_rights_a_user_lacks(broker: RabbitMQ, tmp_path: Path) -> None:
    await asyncio.to_thread(broker.ctl, "add_user", "mute", "hush")
    await asyncio.to_thread(broker.ctl, "set_permissions", "mute", ".*", "^$", ".*")
    said = await _check(broker.url.replace("guest:guest", "mute:hush"), tmp_path)
    assert "FAIL  rights at the broker: default.transport_url: ACCESS_REFUSED" in said and "hush" not in said
    assert "rabbitmqctl set_permissions -p '/' mute '^(micronova" in said  # without a database they are a host's

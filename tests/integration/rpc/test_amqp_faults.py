"""What only a broker can do to us: cut connections, die, come back, refuse, count deliveries, check the sender."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pamqp import commands

from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.rpc.amqp import server
from micronova.rpc.amqp.bus import AmqpBus
from micronova.rpc.amqp.channel import ChannelClosed
from micronova.rpc.amqp.connection import Connection
from micronova.rpc.amqp.permissions import for_host
from micronova.rpc.amqp.session import DEAD_QUEUE, DELIVERY_LIMIT, PREFIX
from micronova.rpc.amqp.url import parse
from micronova.rpc.envelope import OutgoingReply, encode
from micronova.rpc.errors import BusUnavailable, CallTimeout
from tests.services.rabbitmq import RabbitMQ
from tests.unit.rpc.bus_suite import CONTEXT, Gate, Handler, Job, SampleAPI, api, soon  # noqa: F401


@asynccontextmanager
async def amqp_bus(url: str, send_wait: float = 20.0, control_users: Iterable[str] = ()) -> AsyncIterator[AmqpBus]:
    """A started bus, stopped at the end."""
    users = frozenset(control_users)
    bus = AmqpBus(url, clock=SystemClock(), random=random.Random(), grace=5.0, send_wait=send_wait, control_users=users)
    await bus.start()
    try:
        yield bus
    finally:
        await soon(bus.stop())


def cut(bus: AmqpBus) -> None:
    """Pull the cable."""
    assert bus._connection is not None
    bus._connection.abort()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A broker of our own, to be killed."""
    directory: Path = tmp_path_factory.mktemp("broker")
    broker = RabbitMQ.start(directory)
    yield broker
    broker.stop()


async def test_a_message_is_delivered_again_when_its_consumer_is_cut_off(amqp_url: str, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        await server_bus.serve(api.interface, handler)
        await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
        await handler.next_job()
        cut(server_bus)
        # The first handler still runs; it cannot acknowledge any more, so the message comes again.
        assert (await handler.next_job()).number == 1
        assert gate.inside == 2
        gate.open.set()
        await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=20)
        assert (await handler.next_job()).number == 2
        assert handler.seen.empty()


async def test_a_message_that_takes_its_consumers_down_ends_as_dead_letter(amqp_url: str, api: SampleAPI) -> None:
    handler = Handler(Gate())
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        serving = await server_bus.serve(api.interface, handler)
        await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
        for _ in range(DELIVERY_LIMIT + 1):
            await handler.next_job()
            cut(server_bus)
        async with asyncio.timeout(20):
            while (await bus.probe()).broker.dead_letters == 0:
                await asyncio.sleep(0)
        assert handler.seen.empty()
        await serving.stop(grace=0)


async def test_calls_in_flight_fail_when_the_connection_is_cut(amqp_url: str, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        await server_bus.serve(api.interface, handler)
        call = asyncio.create_task(bus.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=600))
        await handler.next_job()
        cut(bus)
        with pytest.raises(BusUnavailable):
            await soon(call)
        gate.open.set()
        # The next call waits for the new connection.
        assert await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=20) == Job(2)


async def test_unconfirmed_casts_are_sent_again(amqp_url: str, api: SampleAPI) -> None:
    handler = Handler()
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        await server_bus.serve(api.interface, handler)
        casts = [asyncio.create_task(bus.cast(api.target(), api.work, Job(n), context=CONTEXT)) for n in range(50)]
        await asyncio.sleep(0)  # all are on their way, none is confirmed
        cut(bus)
        await soon(asyncio.gather(*casts))
        seen: set[int] = set()
        while seen != set(range(50)):
            seen.add((await handler.next_job()).number)


async def test_both_queues_of_a_server_resume_after_a_cut(amqp_url: str, api: SampleAPI) -> None:
    handler = Handler()
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        await server_bus.serve(api.interface, handler, host="h")
        cut(server_bus)
        await server_bus.probe()  # waits for the new connection, on which everything is declared again
        await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
        await bus.cast(api.target("h"), api.work, Job(2), context=CONTEXT)
        assert {(await handler.next_job()).number, (await handler.next_job()).number} == {1, 2}


async def test_a_deleted_queue_is_made_again(amqp_url: str, api: SampleAPI) -> None:
    handler = Handler()
    async with amqp_bus(amqp_url) as bus, amqp_bus(amqp_url) as server_bus:
        await server_bus.serve(api.interface, handler)
        lost = server_bus._connection
        connection = await raw(amqp_url)
        channel = await connection.channel()
        await channel.request(commands.Queue.Delete(queue=PREFIX + api.topic))
        await connection.close()
        assert lost is not None
        await soon(lost.closed)  # the broker cancels the consumer, and the bus reconnects
        await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
        assert (await handler.next_job()).number == 1


async def test_a_call_that_nobody_takes_expires_in_its_queue(amqp_url: str, api: SampleAPI) -> None:
    """While no conductor runs, heartbeats of hosts do not pile up; nor are they dead letters."""
    async with amqp_bus(amqp_url) as bus:
        serving = await bus.serve(api.interface, Handler())
        await serving.stop()
        assert bus._connection is not None
        for number in range(3):
            with pytest.raises(CallTimeout):
                await bus.call(api.target(), api.ask, Job(number), context=CONTEXT, timeout=0.2)
        async with asyncio.timeout(20):
            while await bus._connection.depth(PREFIX + api.topic):
                await asyncio.sleep(0.01)
        await bus.cast(api.target(), api.work, Job(4), context=CONTEXT)  # what is no call does not expire
        handler = Handler()
        await bus.serve(api.interface, handler)
        assert (await handler.next_job()).number == 4
        assert (await bus.probe()).broker.dead_letters == 0


async def test_a_queue_without_a_leader_stops_no_other_one(rabbitmq: RabbitMQ, amqp_url: str, api: SampleAPI) -> None:
    """Its process in the broker stands still, as it waits for a majority of its replicas."""
    handler = Handler()
    async with amqp_bus(amqp_url, send_wait=2.0) as bus:
        await bus.serve(api.interface, handler, host="well")
        await bus.cast(api.target("stuck"), api.work, Job(0), context=CONTEXT)
        process = f"'{amqp_url.rpartition('/')[2]}_{PREFIX}{api.topic}.stuck'"
        await asyncio.to_thread(rabbitmq.eval, f"sys:suspend({process}).")
        try:
            casts = [bus.cast(api.target("stuck"), api.work, Job(n), context=CONTEXT) for n in range(1_100)]
            results = await soon(asyncio.gather(*casts, return_exceptions=True))
            assert all(isinstance(result, BusUnavailable) for result in results)
            await bus.cast(api.target("well"), api.work, Job(1), context=CONTEXT)
            assert (await handler.next_job()).number == 1
        finally:
            await asyncio.to_thread(rabbitmq.eval, f"sys:resume({process}).")
        async with asyncio.timeout(20):
            while True:
                try:
                    await bus.cast(api.target("stuck"), api.work, Job(2), context=CONTEXT)
                    break
                except BusUnavailable:
                    await asyncio.sleep(0.01)


async def test_a_message_that_the_broker_refuses_fails_alone(
    broker: RabbitMQ, api: SampleAPI, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(broker.eval, "application:set_env(rabbit, max_message_size, 100000).")
    try:
        handler = Handler()
        async with amqp_bus(broker.url) as bus, amqp_bus(broker.url) as server_bus:
            await server_bus.serve(api.interface, handler)
            jobs = [Job(n, ["x" * 200_000] if n == 10 else []) for n in range(20)]
            casts = [bus.cast(api.target(), api.work, job, context=CONTEXT) for job in jobs]
            results = await soon(asyncio.gather(*casts, return_exceptions=True))
            assert [isinstance(result, BusUnavailable) for result in results] == [n == 10 for n in range(20)]
            assert "message size" in str(results[10])
            seen: set[int] = set()
            while len(seen) < 19:
                seen.add((await handler.next_job()).number)
            assert "is lost" not in caplog.text, "the connection was given up for one message"
    finally:
        await asyncio.to_thread(broker.eval, "application:set_env(rabbit, max_message_size, 134217728).")


async def raw(url: str) -> Connection:
    """A connection of the test's own."""
    broker_url = parse(url)
    return await Connection.open(broker_url, broker_url.hosts[0], name="test", clock=SystemClock())


async def test_the_broker_refuses_a_false_sender(amqp_url: str, api: SampleAPI) -> None:
    connection = await raw(amqp_url)
    channel = await connection.channel()
    connection.user_id = b"\x05admin"
    channel.publish("", DEAD_QUEUE, b"who am I?")
    with pytest.raises(ChannelClosed, match="user_id"):
        await soon(channel.request(commands.Queue.Declare(queue=DEAD_QUEUE, passive=True)))
    await connection.close()


async def test_unreadable_messages_are_dead_letters(amqp_url: str, api: SampleAPI) -> None:
    async with amqp_bus(amqp_url) as bus:
        await bus.serve(api.interface, Handler())
        connection = await raw(amqp_url)
        channel = await connection.channel()
        channel.publish("", PREFIX + api.topic, b"not MessagePack")
        channel.publish("", PREFIX + api.topic, b"")
        async with asyncio.timeout(20):
            while (await bus.probe()).broker.dead_letters < 2:
                await asyncio.sleep(0)
        await connection.close()


async def test_replies_go_to_reply_queues_only(amqp_url: str, api: SampleAPI) -> None:
    """Nobody can make a server write into a work queue by naming it as the place for the answer."""
    victim = Handler()
    other = SampleAPI("victim")
    async with amqp_bus(amqp_url) as bus:
        await bus.serve(api.interface, Handler())
        await bus.serve(other.interface, victim)
        assert bus._connection is not None
        bus._connection.reply_to = bytes((len(f"{PREFIX}victim"),)) + f"{PREFIX}victim".encode()
        call = asyncio.create_task(bus.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=1))
        with pytest.raises(Exception, match="did not answer"):
            await soon(call)
        assert bus.stats().handled == {api.ask.label: 1}
        assert (await bus.probe()).broker.dead_letters == 0
        assert victim.seen.empty()


async def test_only_those_who_were_asked_may_answer(
    rabbitmq: RabbitMQ, amqp_url: str, api: SampleAPI, caplog: pytest.LogCaptureFixture
) -> None:
    vhost = amqp_url.rpartition("/")[2]
    hosts = [f"{name}-{vhost}" for name in ("asked", "other")]
    urls = [await asyncio.to_thread(rabbitmq.add_user, host, "secret", vhost) for host in hosts]
    gate = Gate()
    handler = Handler(gate)
    async with (
        amqp_bus(amqp_url, control_users=["guest"]) as service,
        amqp_bus(urls[0], control_users=["guest"]) as asked,
        amqp_bus(urls[1]) as other,
    ):
        await service.serve(api.interface, handler)
        await asked.serve(api.interface, handler, host=hosts[0], shared=False)
        for caller, target in ((asked, api.target()), (service, api.target(hosts[0]))):
            call = asyncio.create_task(caller.call(target, api.ask, Job(1), context=CONTEXT, timeout=60))
            await handler.next_job()
            [id] = caller._calls
            assert caller._connection is not None
            reply_queue = caller._connection.reply_to[1:].decode()
            await other._send_reply(reply_queue, encode(OutgoingReply(id, None, Job(666))))
            # The broker delivers what one connection sends to one queue in order: after this one, the first is there.
            await other._send_reply(reply_queue, b"unreadable")
            async with asyncio.timeout(20):
                while "cannot be read" not in caplog.text:
                    await asyncio.sleep(0)
            caplog.clear()
            gate.open.set()
            assert await soon(call) == Job(1)
            gate.open.clear()


async def test_a_host_that_floods_a_queue_does_not_delay_others(
    rabbitmq: RabbitMQ, amqp_url: str, api: SampleAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MOST_HELD", 10)
    vhost = amqp_url.rpartition("/")[2]
    url = await asyncio.to_thread(rabbitmq.add_user, f"flood-{vhost}", "secret", vhost)
    gate = Gate()

    async def slow(context: Context, job: Job) -> None:
        if context.sender != "guest":
            await gate(context, job)

    handler = Handler(slow)
    async with amqp_bus(amqp_url, control_users=["guest"]) as service, amqp_bus(url) as host:
        await service.serve(api.interface, handler, prefetch=20)
        for n in range(100):
            await host.cast(api.target(), api.work, Job(n), context=CONTEXT)
        assert await service.call(api.target(), api.ask, Job(1000), context=CONTEXT, timeout=20) == Job(1000)
        assert gate.most == 10
        assert f"flood-{vhost} sends more than 10 messages at once" in caplog.text
        gate.open.set()
        assert await host.call(api.target(), api.ask, Job(1001), context=CONTEXT, timeout=20) == Job(1001)


async def test_a_hosts_user_can_do_its_work_and_no_more(rabbitmq: RabbitMQ, amqp_url: str) -> None:
    vhost = amqp_url.rpartition("/")[2]
    user = f"host-{vhost}"
    host_url = await asyncio.to_thread(rabbitmq.add_user, user, "secret", vhost)
    rights = for_host(user, "one.example", "compute")
    patterns = ", ".join(f'<<"{pattern}">>' for pattern in (rights.configure, rights.write, rights.read))
    escaped = patterns.replace("\\", "\\\\")
    set_permissions = (
        f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"{vhost}">>, {escaped}, <<"tests">>).'
    )
    await asyncio.to_thread(rabbitmq.eval, set_permissions)
    compute, conductor = SampleAPI("compute"), SampleAPI("conductor", namespace="host")
    orders, reports = Handler(), Handler()
    async with amqp_bus(amqp_url) as service, amqp_bus(host_url) as host:
        await service.serve(conductor.interface, reports)
        await host.serve(compute.interface, orders, host="one.example", shared=False)
        await service.serve(compute.interface, Handler(), host="two.example", shared=False)

        answer = await service.call(compute.target("one.example"), compute.ask, Job(1), context=CONTEXT, timeout=20)
        assert answer == Job(1)
        await service.cast(compute.target("one.example"), compute.work, Job(2), context=CONTEXT)
        await host.cast(conductor.target(), conductor.work, Job(3), context=CONTEXT)
        assert (await soon(reports.seen.get()))[0].sender == user
        assert await host.call(conductor.target(), conductor.ask, Job(4), context=CONTEXT, timeout=20) == Job(4)
        assert [(await orders.next_job()).number for _ in range(2)] == [1, 2]

        with pytest.raises(BusUnavailable, match="ACCESS_REFUSED"):
            await host.serve(compute.interface, Handler(), host="two.example", shared=False)
        with pytest.raises(BusUnavailable, match="ACCESS_REFUSED"):
            await host.serve(conductor.interface, Handler())
        with pytest.raises(BusUnavailable, match="this broker user may not make it"):
            await host.cast(compute.target("three.example"), compute.work, Job(), context=CONTEXT)


async def test_a_wrong_password_is_a_clear_error(amqp_url: str) -> None:
    bus = AmqpBus(amqp_url.replace("guest:guest", "guest:secret"), clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable, match="ACCESS_REFUSED") as caught:
        await bus.start()
    assert "secret" not in str(caught.value)


async def test_an_unreachable_broker_is_a_clear_error() -> None:
    bus = AmqpBus("amqp://guest:guest@127.0.0.1:1/", clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable, match="cannot use the broker"):
        await bus.start()


@pytest.mark.slow
async def test_everything_resumes_when_the_broker_was_killed(broker: RabbitMQ, api: SampleAPI) -> None:
    handler = Handler()
    async with amqp_bus(broker.url, 60) as bus, amqp_bus(broker.url, 60) as server_bus:
        async with amqp_bus(broker.url, 0.1) as impatient:
            await server_bus.serve(api.interface, handler, host="h")
            await bus.cast(api.target("absent"), api.work, Job(1), context=CONTEXT)
            # RabbitMQ writes down a new queue's name half a second late; a crash before that would break the queue.
            await asyncio.to_thread(broker.eval, "lists:foreach(fun dets:sync/1, dets:all()).")
            await asyncio.to_thread(broker.kill)
            with pytest.raises(BusUnavailable):
                await impatient.cast(api.target(), api.work, Job(), context=CONTEXT)
            assert not impatient.stats().broker.connected
        waiting = asyncio.create_task(bus.cast(api.target("h"), api.work, Job(2), context=CONTEXT))
        await asyncio.to_thread(broker.restart)
        await asyncio.wait_for(waiting, 60)
        assert (await handler.next_job()).number == 2
        assert await bus.call(api.target("h"), api.ask, Job(3), context=CONTEXT, timeout=20) == Job(3)
        assert (await handler.next_job()).number == 3
        # What was confirmed before the crash is still there.
        await server_bus.serve(api.interface, handler, host="absent", shared=False)
        assert (await handler.next_job()).number == 1

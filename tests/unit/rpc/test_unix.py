"""The bus of another process of this machine, through its gate."""

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Interface
from micronova.rpc.errors import BusUnavailable
from micronova.rpc.guard import GuardedBus
from micronova.rpc.local import LocalBus
from micronova.rpc.unix import frames as f
from micronova.rpc.unix import gate as gates
from micronova.rpc.unix.bus import Connection, UnixBus
from micronova.rpc.unix.gate import BusGate
from tests.unit.rpc.bus_suite import *
from tests.unit.rpc.bus_suite import CONTEXT, Gate, Handler, Job, SampleAPI, soon

HOST = "host-1"


class Other:
    """The process with the local bus, as far as its clients can tell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.may_serve: Callable[[str], bool] = lambda _: True
        self.uid = os.geteuid()

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(str(self.path))
        self.listening.listen(16)
        self.listening.setblocking(False)

    async def start(self, *, listens: bool = False) -> None:
        if not listens:
            self.listen()
        self.bus = LocalBus(f"other-{random.random()}", clock=SystemClock(), random=random.Random(), name="cloud")
        await self.bus.start()
        self.gate = BusGate(self.bus, self.listening, sender=HOST, uid=self.uid, may_serve=lambda q: self.may_serve(q))
        await self.gate.start()

    async def stop(self) -> None:
        await self.gate.stop()
        await self.bus.stop()


@pytest_asyncio.fixture
async def other(tmp_path: Path) -> AsyncIterator[Other]:
    made = Other(tmp_path / "bus.sock")
    await made.start()
    yield made
    await soon(made.stop())


@pytest.fixture
def bus_url(other: Other) -> str:
    return f"unix://{other.path}"


@pytest.fixture
def sender() -> str:
    return HOST


async def test_both_processes_reach_each_other(other: Other, bus: Bus, api: SampleAPI) -> None:
    there, here = SampleAPI("there"), SampleAPI("here")
    seen = Handler()
    await other.bus.serve(there.interface, seen)
    await bus.serve(here.interface, Handler())
    assert await bus.call(there.target(), there.ask, Job(1), context=CONTEXT, timeout=20) == Job(1)
    assert (await seen.seen.get())[0].sender == HOST
    assert await other.bus.call(here.target(), here.ask, Job(2), context=CONTEXT, timeout=20) == Job(2)


async def test_a_gate_that_is_started_again_is_found(other: Other, bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await bus.serve(api.interface, handler)
    waiting = SampleAPI("waiting")
    held = Gate()
    asked = Handler(held)
    await other.bus.serve(waiting.interface, asked)
    call = asyncio.create_task(bus.call(waiting.target(), waiting.ask, Job(), context=CONTEXT, timeout=600))
    await asked.next_job()
    held.open.set()
    await other.stop()
    with contextlib.suppress(BusUnavailable):
        await soon(call)
    await other.start()
    cast = bus.cast(api.target(), api.work, Job(1), context=CONTEXT)  # it waits for the connection
    await soon(cast)
    assert (await handler.next_job()).number == 1


async def test_a_call_fails_at_once_when_the_other_process_ends(other: Other, bus: Bus, api: SampleAPI) -> None:
    held = Gate()
    asked = Handler(held)
    await other.bus.serve(api.interface, asked)
    call = asyncio.create_task(bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600))
    await asked.next_job()
    await other.gate.stop()
    with pytest.raises(BusUnavailable):
        await soon(call)
    held.open.set()


async def test_what_a_client_had_in_hand_goes_to_the_next_one(other: Other, bus: Bus, api: SampleAPI) -> None:
    killed = f.Stream(*await asyncio.open_unix_connection(other.path), f.decode_from_gate)
    await soon(killed.receive())
    killed.send(f.Serve(1, 1, [api.topic], prefetch=2))
    for n in range(4):
        await other.bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    got = [await soon(killed.receive()) for _ in range(3)]
    assert [type(frame) for frame in got].count(f.Deliver) == 2
    killed.close()
    handler = Handler()
    await bus.serve(api.interface, handler)
    assert sorted([(await handler.next_job()).number for _ in range(4)]) == [0, 1, 2, 3]


async def test_a_client_serves_only_what_it_may(other: Other, bus: Bus, api: SampleAPI) -> None:
    other.may_serve = "compute.host-1".__eq__
    compute = SampleAPI("compute")
    await bus.serve(compute.interface, Handler(), host=HOST, shared=False)
    for refused in (
        bus.serve(compute.interface, Handler(), host="host-2", shared=False),
        bus.serve(compute.interface, Handler(), host=HOST, shared=True),
        bus.serve(SampleAPI("conductor").interface, Handler()),
        bus.cast(api.target(), api.work, Job(), context=CONTEXT),  # there is no such queue yet
    ):
        with pytest.raises(BusUnavailable, match="may not"):
            await refused


async def test_a_client_gives_no_orders(other: Other, bus: Bus) -> None:
    served = GuardedBus(other.bus, frozenset({"cloud"}))
    orders = SampleAPI("conductor")
    reports = Interface("conductor", namespace="host", from_hosts=True)
    report = reports.method("ask", Job, Job)

    class Reports:
        async def ask(self, context: object, job: Job) -> Job:
            return job

    await served.serve(orders.interface, Handler())
    await served.serve(reports, Reports())
    with pytest.raises(Forbidden):
        await bus.call(orders.target(), orders.ask, Job(), context=CONTEXT, timeout=20)
    assert await bus.call(reports.target(), report, Job(3), context=CONTEXT, timeout=20) == Job(3)


async def test_other_users_are_not_let_in(tmp_path: Path) -> None:
    made = Other(tmp_path / "bus.sock")
    made.uid = os.geteuid() + 1
    await made.start()
    bus = connect(f"unix://{made.path}", clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable):
        await soon(bus.start())
    await made.stop()


async def test_no_gate_is_said_at_once(tmp_path: Path) -> None:
    bus = connect(f"unix://{tmp_path / 'none'}", clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable, match=r"cannot use the bus at .*/none: the cloud .* does not run"):
        await soon(bus.start())


async def test_a_process_that_takes_long_to_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket is there before it migrates its database; the gate answers afterwards."""
    monkeypatch.setattr("micronova.rpc.unix.bus.START_NOTICE", 0.01)
    made = Other(tmp_path / "bus.sock")
    made.listen()
    bus = connect(f"unix://{made.path}", clock=SystemClock(), random=random.Random())
    starting = asyncio.create_task(bus.start())
    while caplog.text.count("does not answer yet, which is waited for") < 3:
        await asyncio.wait({starting}, timeout=0.01)
        assert not starting.done()
    await made.start(listens=True)
    await soon(starting)
    assert (await bus.probe()).broker.connected
    await bus.stop()
    await made.stop()


async def test_a_message_that_is_too_large_is_refused(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    await other.bus.serve(api.interface, Handler())
    monkeypatch.setattr(f, "LARGEST", 10_000)
    with pytest.raises(BusUnavailable, match="larger"):
        await bus.call(api.target(), api.ask, Job(1, ["x" * 20_000]), context=CONTEXT, timeout=20)
    assert await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=20) == Job(2)


@pytest.mark.parametrize("sent", [struct.pack("!I", f.LARGEST + 1), struct.pack("!I", 3) + b"abc"])
async def test_who_does_not_keep_to_the_protocol_is_disconnected(other: Other, bus: Bus, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(other.path)
    writer.write(sent)
    await soon(reader.read())
    writer.close()
    assert (await bus.probe()).broker.connected


async def test_the_other_process_learns_that_this_one_is_ready_and_stops_it(other: Other, bus: Bus) -> None:
    assert isinstance(bus, UnixBus)
    told = asyncio.Event()
    bus.on_stop = told.set
    bus.announce_ready()
    await soon(other.gate.ready.wait())
    stopped = asyncio.create_task(other.gate.stop_clients(20))
    await soon(told.wait())
    await bus.stop()
    assert await soon(stopped)


async def test_what_is_no_gate_does_not_end_the_attempts(other: Other, bus: Bus, api: SampleAPI) -> None:
    await other.stop()
    other.path.unlink()
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("!I", 3) + b"abc")
        asked.set()
        writer.close()

    impostor = await asyncio.start_unix_server(answer, other.path)
    await soon(asked.wait())
    impostor.close()
    await other.start()
    handler = Handler()
    await other.bus.serve(api.interface, handler)
    await soon(bus.cast(api.target(), api.work, Job(1), context=CONTEXT))
    assert (await handler.next_job()).number == 1


async def test_a_flood_of_messages_is_refused(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gates, "MOST_MESSAGES", 10)
    held = Gate()

    async def slow(context: Context, job: Job) -> None:
        if context.sender == HOST:
            await held(context, job)

    handler = Handler(slow)
    await other.bus.serve(api.interface, handler)
    second = connect(f"unix://{other.path}", clock=SystemClock(), random=random.Random())
    await second.start()
    for n in range(5):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
        await second.cast(api.target(), api.work, Job(n), context=CONTEXT)
    for _ in range(20):  # the connections share the limit, and casts and calls do
        with pytest.raises(BusUnavailable, match=r"10 messages of host-1 .* not handled yet"):
            await bus.cast(api.target(), api.work, Job(), context=CONTEXT)
        with pytest.raises(BusUnavailable, match=r"10 messages of host-1 .* not handled yet"):
            await second.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600)
    assert caplog.text.count("host-1 floods the bus: 10 of its messages") == 1
    assert await other.bus.call(api.target(), api.ask, Job(99), context=CONTEXT, timeout=20) == Job(99)
    assert handler.seen.qsize() == 11
    held.open.set()
    while handler.seen.qsize():
        await handler.next_job()
    assert await bus.call(api.target(), api.ask, Job(100), context=CONTEXT, timeout=20) == Job(100)
    await second.stop()


async def test_messages_are_limited_by_their_bytes(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MOST_BYTES", 100_000)
    large = Job(1, ["x" * 40_000])
    await other.bus.serve(api.interface, Handler(), host="taken")  # and nobody takes those to HOST
    for _ in range(2):
        await bus.cast(api.target(HOST), api.work, large, context=CONTEXT)
    with pytest.raises(BusUnavailable, match="not handled yet"):
        await bus.cast(api.target("taken"), api.work, large, context=CONTEXT)
    await bus.delete_queue(api.interface, HOST)  # what is deleted is not held any more
    for _ in range(10):
        assert await bus.call(api.target("taken"), api.ask, large, context=CONTEXT, timeout=20) == large


async def test_connections_and_queues_are_limited(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = f.Stream(*await asyncio.open_unix_connection(other.path), f.decode_from_gate)
    await soon(stream.receive())
    stream.send(f.Serve(1, 1, [api.topic] * 1000, prefetch=2))
    refused = await soon(stream.receive())
    assert isinstance(refused, f.Done) and "may not serve so much" in refused.error
    monkeypatch.setattr(gates, "MOST_CLIENTS", 2)
    third = connect(f"unix://{other.path}", clock=SystemClock(), random=random.Random())
    with pytest.raises(BusUnavailable, match="closed the connection at once"):
        await soon(third.start())
    assert "a process of host-1 was refused at the bus: 2 are connected" in caplog.text
    stream.close()


async def test_a_message_that_is_too_large_for_a_client_does_not_stop_the_others(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler()
    await bus.serve(api.interface, handler)
    monkeypatch.setattr(f, "LARGEST", 10_000)
    await other.bus.cast(api.target(), api.work, Job(1, ["x" * 20_000]), context=CONTEXT)
    await other.bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    assert (await handler.next_job()).number == 2
    assert (await bus.probe()).broker.dead_letters == 1


async def test_a_process_that_is_ready_says_so_to_a_gate_that_is_started_again(other: Other, bus: Bus) -> None:
    assert isinstance(bus, UnixBus)
    await other.stop()
    bus.announce_ready()
    await other.start()
    await soon(other.gate.ready.wait())


async def test_messages_wait_for_a_handler_and_do_not_go_back_and_forth(
    other: Other, bus: Bus, api: SampleAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a connection that was lost still runs when the next connection delivers its message again."""
    assert isinstance(bus, UnixBus)
    delivered: asyncio.Queue[int] = asyncio.Queue()
    handle = UnixBus._handle

    def counted(self: UnixBus, connection: Connection, frame: f.Frame) -> None:
        if isinstance(frame, f.Deliver):
            delivered.put_nowait(frame.delivery)
        handle(self, connection, frame)

    monkeypatch.setattr(UnixBus, "_handle", counted)
    held = Gate()
    handler = Handler(held)
    await bus.serve(api.interface, handler, prefetch=1)
    await other.bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
    assert (await handler.next_job()).number == 1
    for _ in range(3):
        assert bus._connection is not None
        await soon(delivered.get())
        bus._connection.abort("test: the connection breaks, and both processes live")
        await soon(bus.probe())
    await soon(delivered.get())
    for _ in range(20):  # the gate has answered each of these after what it had to deliver
        await soon(bus.probe())
    assert delivered.empty()
    held.open.set()
    await other.bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    assert [(await handler.next_job()).number for _ in range(2)] == [1, 2], "once by each connection that delivered it"


async def test_messages_that_wait_are_counted(bus: Bus, api: SampleAPI) -> None:  # type: ignore[no-redef]
    """Not for a host: how many messages wait for others is not its business."""
    with pytest.raises(BusUnavailable, match="does not tell"):
        await bus.queue_lengths([api.topic])

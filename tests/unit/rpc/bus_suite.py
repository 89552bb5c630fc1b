"""What every transport must do. test_local.py and integration/rpc/test_amqp_suite.py run these functions on each.

A module that imports them gives the fixtures `bus_url` and `sender` (whom receivers see as the sender).
"""

import asyncio
import errno
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
import pytest_asyncio

from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.errors import NoValidHost, Unavailable
from micronova.rpc.bus import Bus, connect
from micronova.rpc.contract import Interface, Method
from micronova.rpc.errors import (
    BusUnavailable,
    CallTimeout,
    InvalidMessage,
    NoSuchMethod,
    RemoteError,
    VersionTooNew,
)
from tests.distort import DistortedBus, Distortion

T = TypeVar("T")
CONTEXT = Context(request_id="req-1", user_id="user", project_id="project", traceparent="00-trace")


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait for something that must happen, for at most 20 seconds."""
    return await asyncio.wait_for(awaitable, 20)


class Job(msgspec.Struct):
    """What the test messages carry."""

    number: int = 0
    tags: list[str] = []


class SampleAPI:
    """A topic with three methods, declared as a role's rpcapi.py declares its own."""

    def __init__(self, topic: str, namespace: str = "") -> None:
        self.topic = topic
        self.interface = Interface(topic, namespace=namespace, version="1.2")
        self.work = self.interface.method("work", Job)
        self.hurry = self.interface.method("hurry", Job, expires=0.1)
        self.ask = self.interface.method("ask", Job, Job)
        self.target = self.interface.target


class Handler:
    """Records what arrives; what it does with it is up to the test."""

    def __init__(self, act: Callable[[Context, Job], Coroutine[Any, Any, Any]] | None = None) -> None:
        self.seen: asyncio.Queue[tuple[Context, Job]] = asyncio.Queue()
        self._act = act

    async def work(self, context: Context, params: Job) -> None:
        """Take a cast."""
        await self._take(context, params)

    async def hurry(self, context: Context, params: Job) -> None:
        """Take a cast that expires."""
        await self._take(context, params)

    async def ask(self, context: Context, params: Job) -> Job:
        """Answer a call with what it carried, unless the test gives another answer."""
        answer = await self._take(context, params)
        return answer if isinstance(answer, Job) else params

    async def next_job(self) -> Job:
        """Wait for the next message."""
        return (await soon(self.seen.get()))[1]

    async def _take(self, context: Context, params: Job) -> Any:
        self.seen.put_nowait((context, params))
        return await self._act(context, params) if self._act else None


class Gate:
    """Holds handlers back until the test opens it."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.cancelled = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, context: Context, params: Job) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.inside -= 1


class MakeBus(Protocol):
    """Makes a started bus that is stopped after the test."""

    async def __call__(self, *, pins: dict[str, str] | None = None, send_wait: float = 5.0) -> Bus: ...


@pytest_asyncio.fixture
async def make_bus(bus_url: str) -> AsyncIterator[MakeBus]:
    made: list[Bus] = []

    async def make(*, pins: dict[str, str] | None = None, send_wait: float = 5.0) -> Bus:
        bus = connect(
            bus_url,
            clock=SystemClock(),
            random=random.Random(),
            pins=pins,
            name="tests",
            grace=5.0,
            send_wait=send_wait,
        )
        await bus.start()
        made.append(bus)
        return bus

    yield make
    for bus in reversed(made):
        await soon(bus.stop())


@pytest_asyncio.fixture
async def bus(make_bus: MakeBus) -> Bus:
    return await make_bus()


@pytest.fixture
def api() -> SampleAPI:
    return SampleAPI(f"sample-{uuid.uuid4().hex[:8]}")


async def test_call_brings_back_the_result(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    async def double(context: Context, job: Job) -> Job:
        return Job(job.number * 2, [*job.tags, "done"])

    await (await make_bus()).serve(api.interface, Handler(double))
    answer = await bus.call(api.target(), api.ask, Job(21, ["a"]), context=CONTEXT, timeout=20)
    assert answer == Job(42, ["a", "done"])


async def test_many_calls_at_once_find_their_own_answers(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    await (await make_bus()).serve(api.interface, Handler(), prefetch=7)
    answers = await asyncio.gather(
        *(bus.call(api.target(), api.ask, Job(n), context=CONTEXT, timeout=20) for n in range(200))
    )
    assert [answer.number for answer in answers] == list(range(200))


async def test_cast_arrives_with_its_context(make_bus: MakeBus, bus: Bus, api: SampleAPI, sender: str) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    context = msgspec.structs.replace(CONTEXT, sender="another", deadline=1.0)
    await bus.cast(api.target(), api.work, Job(1), context=context)
    seen, _ = await soon(handler.seen.get())
    # The sender is who the transport says it is; a cast outlives the deadline of the request it came from.
    assert seen == msgspec.structs.replace(CONTEXT, sender=sender)


async def test_a_deleted_queue_loses_its_messages_and_can_be_made_again(
    make_bus: MakeBus, bus: Bus, api: SampleAPI
) -> None:
    await bus.cast(api.target("h1"), api.work, Job(1), context=CONTEXT)
    for _ in range(2):  # the second time there is no such queue
        await bus.delete_queue(api.interface, "h1")
    await bus.cast(api.target("h1"), api.work, Job(2), context=CONTEXT)
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler, host="h1")
    assert (await handler.next_job()).number == 2


async def test_messages_that_wait_are_counted(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    await (await (await make_bus()).serve(api.interface, Handler())).stop()  # the queue stays
    for number in range(3):
        await bus.cast(api.target(), api.work, Job(number), context=CONTEXT)
    missing = f"{api.topic}-missing"
    async with asyncio.timeout(20):
        while (found := await bus.queue_lengths([missing, api.topic])) != {api.topic: 3}:
            assert missing not in found
    assert (await bus.probe()).broker.dead_letters == 0, (
        "the bus still works after it asked for a queue that is missing"
    )


async def test_casts_keep_their_order(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    for n in range(50):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    assert [(await handler.next_job()).number for _ in range(50)] == list(range(50))


async def test_large_messages_travel_whole(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    await (await make_bus()).serve(api.interface, Handler())
    job = Job(1, ["x" * 1000] * 700)
    assert await bus.call(api.target(), api.ask, job, context=CONTEXT, timeout=20) == job


async def test_a_host_gets_its_own_messages_and_a_share_of_the_topic(bus: Bus, api: SampleAPI) -> None:
    one, two = Handler(), Handler()
    await bus.serve(api.interface, one, host="one")
    await bus.serve(api.interface, two, host="two.example", shared=False)
    await bus.cast(api.target("two.example"), api.work, Job(2), context=CONTEXT)
    await bus.cast(api.target("one"), api.work, Job(1), context=CONTEXT)
    for n in range(10, 14):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    assert (await two.next_job()).number == 2
    assert sorted([(await one.next_job()).number for _ in range(5)]) == [1, 10, 11, 12, 13]
    assert two.seen.empty()


async def test_a_cast_waits_for_its_server(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    await bus.cast(api.target("later"), api.work, Job(1), context=CONTEXT)
    await bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler, host="later")
    assert {(await handler.next_job()).number, (await handler.next_job()).number} == {1, 2}


async def test_a_call_to_nowhere_fails_at_once(bus: Bus, api: SampleAPI) -> None:
    with pytest.raises(BusUnavailable):
        await bus.call(api.target("nowhere"), api.ask, Job(), context=CONTEXT, timeout=600)


async def test_servers_of_a_topic_share_its_messages(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gates = [Gate(), Gate()]
    handlers = [Handler(gate) for gate in gates]
    for handler in handlers:
        await (await make_bus()).serve(api.interface, handler, prefetch=1)
    for n in range(10):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    # Each takes one and is busy with it, so the other must have taken the other.
    numbers = [(await handler.next_job()).number for handler in handlers]
    for gate in gates:
        gate.open.set()
    while len(numbers) < 10:
        for handler in handlers:
            while not handler.seen.empty():
                numbers.append(handler.seen.get_nowait()[1].number)
        await asyncio.sleep(0)
    assert sorted(numbers) == list(range(10))


async def test_namespaces_of_a_topic_are_apart(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    tasks = SampleAPI(api.topic, namespace="compute_task")
    plain_handler, tasks_handler = Handler(), Handler()
    await (await make_bus()).serve(api.interface, plain_handler, host="h")
    await (await make_bus()).serve(tasks.interface, tasks_handler, host="h")
    for host in ("h", None):
        await bus.cast(api.target(host), api.work, Job(1), context=CONTEXT)
        await bus.cast(tasks.target(host), tasks.work, Job(2), context=CONTEXT)
    assert [(await plain_handler.next_job()).number for _ in range(2)] == [1, 1]
    assert [(await tasks_handler.next_job()).number for _ in range(2)] == [2, 2]


async def test_a_domain_error_arrives_as_itself(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    async def refuse(context: Context, job: Job) -> None:
        raise NoValidHost("no host fits", reasons={"RamFilter": 3}, seen={"not": "plain", "set": {1}})

    await (await make_bus()).serve(api.interface, Handler(refuse))
    with pytest.raises(NoValidHost) as caught:
        await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=20)
    assert caught.value.message == "no host fits"
    assert caught.value.details["reasons"] == {"RamFilter": 3}


async def test_an_unknown_error_arrives_as_remote_error(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    async def fail(context: Context, job: Job) -> None:
        if job.number:
            raise RemoteError("of_a_newer_version", "what is this?", {"n": job.number})
        raise KeyError("oops")

    await (await make_bus()).serve(api.interface, Handler(fail))
    with pytest.raises(RemoteError) as caught:
        await bus.call(api.target(), api.ask, Job(0), context=CONTEXT, timeout=20)
    assert (caught.value.code, caught.value.details) == ("unexpected", {"exception": "KeyError"})
    with pytest.raises(RemoteError) as caught:
        await bus.call(api.target(), api.ask, Job(7), context=CONTEXT, timeout=20)
    assert (caught.value.code, caught.value.details) == ("of_a_newer_version", {"n": 7})


@pytest.mark.parametrize(
    "lack",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RuntimeError("can't start new thread")],
    ids=["descriptors", "memory", "threads"],
)
async def test_a_lack_of_the_other_process_is_one_for_the_moment(
    make_bus: MakeBus, bus: Bus, api: SampleAPI, lack: Exception
) -> None:
    """A scheduler without descriptors must not end the builds that ask it."""

    async def fail(context: Context, job: Job) -> None:
        raise lack

    await (await make_bus()).serve(api.interface, Handler(fail))
    with pytest.raises(Unavailable, match="has run out of"):
        await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=20)


async def test_a_call_times_out_and_its_handler_is_cancelled(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gate = Gate()
    server_bus = await make_bus()
    await server_bus.serve(api.interface, Handler(gate))
    with pytest.raises(CallTimeout):
        await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=0.2)
    await soon(gate.cancelled.wait())
    assert bus.stats().pending_calls == 0
    # The server lives on.
    gate.open.set()
    assert await bus.call(api.target(), api.ask, Job(3), context=CONTEXT, timeout=20) == Job(3)
    assert server_bus.stats().expired == {api.ask.label: 1}


async def test_a_call_that_waits_too_long_is_not_run(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    await (await make_bus()).serve(api.interface, handler, prefetch=1)
    await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
    assert (await handler.next_job()).number == 1
    with pytest.raises(CallTimeout):
        await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=0.1)
    await asyncio.sleep(0.5)  # a broker counts from when it got the message, which is later
    gate.open.set()
    await bus.call(api.target(), api.ask, Job(3), context=CONTEXT, timeout=20)
    assert (await handler.next_job()).number == 3
    assert handler.seen.empty()
    assert (await bus.probe()).broker.dead_letters == 0, "nobody looks for a call that its caller gave up"


async def test_a_cast_that_waits_too_long_is_dropped(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    await (await (await make_bus()).serve(api.interface, Handler())).stop()  # the queue stays
    await bus.cast(api.target(), api.hurry, Job(1), context=CONTEXT)
    await bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    await asyncio.sleep(0.5)  # a broker counts from when it got the message, which is later
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    assert (await handler.next_job()).number == 2
    await bus.cast(api.target(), api.hurry, Job(3), context=CONTEXT)
    assert (await handler.next_job()).number == 3
    assert handler.seen.empty()
    assert (await bus.probe()).broker.dead_letters == 0, "nobody looks for it"


class WrongClock(SystemClock):
    """The clock of a machine that was set wrong."""

    def __init__(self, wrong: float) -> None:
        self._wrong = wrong

    def now(self) -> float:
        return super().now() + self._wrong


@pytest.mark.parametrize("wrong", [-30.0, 30.0])
async def test_clocks_of_caller_and_server_may_differ(bus_url: str, bus: Bus, api: SampleAPI, wrong: float) -> None:
    """Within the call, what it calls in turn has the time that is left, by whatever clock."""
    other = connect(bus_url, clock=WrongClock(wrong), random=random.Random(), name="tests", grace=5.0)
    inner = SampleAPI(f"{api.topic}-inner")
    gate = Gate()

    async def pass_on(context: Context, job: Job) -> Any:
        return await other.call(inner.target(), inner.ask, job, context=context, timeout=600)

    await other.start()
    try:
        await other.serve(api.interface, Handler(pass_on))
        await bus.serve(inner.interface, Handler(gate))
        with pytest.raises(CallTimeout):
            await bus.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=1.0)
        await soon(gate.cancelled.wait())
        gate.open.set()
        assert await bus.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=5.0) == Job(2)
    finally:
        await soon(other.stop())


async def test_a_deadline_covers_the_calls_made_on_its_behalf(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    inner_bus = await make_bus()
    deadlines: list[float] = []

    async def pass_on(context: Context, job: Job) -> Any:
        deadlines.append(context.deadline)
        if job.number:
            return None
        return await inner_bus.call(api.target(), api.ask, Job(1), context=context, timeout=600)

    await inner_bus.serve(api.interface, Handler(pass_on))
    await bus.call(api.target(), api.ask, Job(0), context=CONTEXT, timeout=20)
    # The way of the message comes on top, because no clock of one machine can measure it.
    assert deadlines[0] - 0.001 <= deadlines[1] < deadlines[0] + 20


async def test_no_call_is_made_when_its_deadline_has_passed(bus: Bus, api: SampleAPI) -> None:
    context = msgspec.structs.replace(CONTEXT, deadline=SystemClock().monotonic() - 1)
    with pytest.raises(CallTimeout):
        await bus.call(api.target(), api.ask, Job(), context=context, timeout=20)
    assert bus.stats().sent == {}


async def test_unknown_fields_are_ignored_and_missing_ones_have_defaults(
    make_bus: MakeBus, bus: Bus, api: SampleAPI
) -> None:
    class NewerJob(Job):
        colour: str = "red"

    newer = Interface(api.topic, version="1.2")
    newer_ask = newer.method("ask", NewerJob, NewerJob)
    await (await make_bus()).serve(api.interface, Handler())
    answer = await bus.call(newer.target(), newer_ask, NewerJob(5, colour="blue"), context=CONTEXT, timeout=20)
    assert answer == NewerJob(5, colour="red")


async def test_what_does_not_fit_the_type_is_refused(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    class OtherJob(msgspec.Struct):
        number: str

    other = Interface(api.topic)
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    with pytest.raises(InvalidMessage):
        await bus.call(other.target(), other.method("ask", OtherJob), OtherJob("x"), context=CONTEXT, timeout=20)
    assert handler.seen.empty()


async def test_a_newer_contract_than_the_servers_is_refused(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    newer = Interface(api.topic, version="1.3")
    ask = newer.method("ask", Job, Job, since="1.3")
    unknown = newer.method("unheard_of", Job, Job)
    await (await make_bus()).serve(api.interface, Handler())
    with pytest.raises(VersionTooNew):
        await bus.call(newer.target(), ask, Job(), context=CONTEXT, timeout=20)
    with pytest.raises(NoSuchMethod):
        await bus.call(newer.target(), unknown, Job(), context=CONTEXT, timeout=20)


async def test_made_up_names_and_versions_do_not_fill_the_statistics(
    make_bus: MakeBus, bus: Bus, api: SampleAPI
) -> None:
    server_bus = await make_bus()
    await server_bus.serve(api.interface, Handler())
    for n in range(5):
        made_up = Interface(api.topic).method(f"made_up_{n}", Job, Job)
        with pytest.raises(NoSuchMethod):
            await bus.call(api.target(), made_up, Job(), context=CONTEXT, timeout=20)
    assert server_bus.stats().failed == {f"{api.topic}.(unknown)": 5}
    odd = Interface(api.topic).method("ask", Job, Job, since="1.0")
    odd.since = "01.0_0"
    with pytest.raises(VersionTooNew):
        await bus.call(api.target(), odd, Job(), context=CONTEXT, timeout=20)


async def test_a_sender_cannot_write_lines_into_the_log(
    make_bus: MakeBus, bus: Bus, api: SampleAPI, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    made_up = Interface(api.topic).method("ask\nforged line", Job)
    for name in ("req-1\nforged line", "req-" + "x" * 1000):
        context = msgspec.structs.replace(CONTEXT, request_id=name)
        await bus.cast(api.target(), made_up, Job(), context=context)
        assert await bus.call(api.target(), api.ask, Job(), context=context, timeout=20) == Job()
        assert (await soon(handler.seen.get()))[0].request_id == ""
    assert "NoSuchMethod" in caplog.text and "\nforged" not in caplog.text


async def test_a_pinned_sender_does_not_send_newer_messages(make_bus: MakeBus, api: SampleAPI) -> None:
    newer = api.interface.method("newer", Job, since="1.1")
    pinned = await make_bus(pins={api.topic: "1.0"})
    assert pinned.can_send_version(api.interface, "1.0")
    assert not pinned.can_send_version(api.interface, "1.1")
    with pytest.raises(VersionTooNew):
        await pinned.cast(api.target(), newer, Job(), context=CONTEXT)
    await pinned.cast(api.target(), api.work, Job(), context=CONTEXT)
    free = await make_bus()
    assert free.can_send_version(api.interface, "1.2")
    assert not free.can_send_version(api.interface, "1.3")
    assert not free.can_send_version(api.interface, "2.0")


async def test_a_handler_must_keep_its_interfaces_promises(bus: Bus, api: SampleAPI) -> None:
    with pytest.raises(TypeError, match="no coroutine work"):
        await bus.serve(api.interface, object())


async def test_no_more_handlers_run_than_allowed(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    server = await (await make_bus()).serve(api.interface, handler, host="h", prefetch=3)
    for n in range(10):
        await bus.cast(api.target("h" if n % 2 else None), api.work, Job(n), context=CONTEXT)
    for _ in range(3):
        await handler.next_job()
    assert server.running == 3
    gate.open.set()
    for _ in range(7):
        await handler.next_job()
    assert gate.most == 3


async def test_stop_waits_for_running_handlers(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    server = await (await make_bus()).serve(api.interface, handler)
    call = asyncio.create_task(bus.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=20))
    await handler.next_job()
    stopping = asyncio.create_task(server.stop())
    await asyncio.wait([stopping], timeout=0.05)
    assert not stopping.done()
    # What comes now is for the next server.
    await bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    gate.open.set()
    await soon(stopping)
    assert await soon(call) == Job(1)
    next_handler = Handler()
    await bus.serve(api.interface, next_handler)
    assert (await next_handler.next_job()).number == 2
    assert handler.seen.empty()


async def test_a_message_whose_handler_did_not_finish_goes_to_the_next_server(
    make_bus: MakeBus, bus: Bus, api: SampleAPI
) -> None:
    gate = Gate()
    first, second = Handler(gate), Handler()
    server = await (await make_bus()).serve(api.interface, first, prefetch=1)
    await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
    await bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    await first.next_job()
    await soon(server.stop(grace=0))
    assert gate.cancelled.is_set()
    await bus.serve(api.interface, second)
    assert sorted([(await second.next_job()).number, (await second.next_job()).number]) == [1, 2]


async def test_a_cast_whose_handler_fails_is_a_dead_letter(
    make_bus: MakeBus, bus: Bus, api: SampleAPI, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(context: Context, job: Job) -> None:
        if job.number < 3:
            raise NoValidHost("not here")

    handler = Handler(fail)
    server_bus = await make_bus()
    await server_bus.serve(api.interface, handler)
    assert (await bus.probe()).broker.dead_letters == 0
    for n in range(4):
        await bus.cast(api.target(), api.work, Job(n), context=CONTEXT)
    for n in range(4):
        assert (await handler.next_job()).number == n
    async with asyncio.timeout(20):
        while (await bus.probe()).broker.dead_letters < 3:
            await asyncio.sleep(0)
    assert bus.stats().broker.dead_letters == 3
    assert server_bus.stats().failed == {api.work.label: 3}
    assert "req-1" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        OSError("no such file: \udcff"),
        NoValidHost("no such file: \udcff"),
        NoValidHost("none", text="\udcff"),
        NoValidHost("none", number=1 << 70),
        NoValidHost("none", keys={(1, 2): 3}),
    ],
)
async def test_an_error_that_cannot_be_encoded_arrives(
    make_bus: MakeBus, bus: Bus, api: SampleAPI, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "micronova.rpc.dispatch")  # pytest-xdist cannot send such a log

    async def fail(context: Context, job: Job) -> None:
        raise error

    await (await make_bus()).serve(api.interface, Handler(fail))
    with pytest.raises((NoValidHost, RemoteError), match=r"no such file|none"):
        await bus.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600)


async def test_nothing_is_shared_by_reference(bus: Bus, api: SampleAPI) -> None:
    kept: list[Job] = []

    async def change(context: Context, job: Job) -> Job:
        job.tags.append("changed by the handler")
        kept.append(job)
        return job

    await bus.serve(api.interface, Handler(change))
    job = Job(1, ["original"])
    answer = await bus.call(api.target(), api.ask, job, context=CONTEXT, timeout=20)
    assert job.tags == ["original"]
    answer.tags.clear()
    assert kept[0].tags == ["original", "changed by the handler"]


async def test_messages_are_counted(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    server_bus = await make_bus()
    handler = Handler()
    await server_bus.serve(api.interface, handler)
    await bus.cast(api.target(), api.work, Job(1), context=CONTEXT)
    await bus.cast(api.target(), api.work, Job(2), context=CONTEXT)
    for _ in range(2):
        await handler.next_job()
    await bus.call(api.target(), api.ask, Job(4), context=CONTEXT, timeout=20)
    stats = bus.stats()
    work, ask = f"{api.topic}.work", f"{api.topic}.ask"
    assert stats.sent == {("cast", work): 2, ("call", ask): 1}
    assert (stats.count(), stats.count(kind="cast"), stats.count(method=work)) == (3, 2, 2)
    assert stats.broker.connected
    assert server_bus.stats().sent == {("reply", ask): 1}
    assert server_bus.stats().handled == {work: 2, ask: 1}


async def test_stopping_a_bus_fails_its_calls(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    gate = Gate()
    handler = Handler(gate)
    await (await make_bus()).serve(api.interface, handler)
    caller = await make_bus()
    call = asyncio.create_task(caller.call(api.target(), api.ask, Job(), context=CONTEXT, timeout=600))
    await handler.next_job()
    await caller.stop()
    with pytest.raises(BusUnavailable):
        await soon(call)
    gate.open.set()
    with pytest.raises(BusUnavailable):
        await caller.cast(api.target(), api.work, Job(), context=CONTEXT)


def distorted(bus: Bus, distortion: Distortion) -> DistortedBus:
    """Wrap a bus with a seeded distortion."""
    return DistortedBus(bus, distortion, clock=SystemClock(), random=random.Random(1))


async def test_distortion_drops_casts(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    lossy = distorted(bus, Distortion(drop_casts=True))
    await lossy.cast(api.target(), api.work, Job(1), context=CONTEXT)
    assert await lossy.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=20) == Job(2)
    assert (await handler.next_job()).number == 2
    assert handler.seen.empty()
    assert lossy.dropped == {api.work.label: 1}


async def test_distortion_delivers_twice(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    doubling = distorted(bus, Distortion(twice=True))
    await doubling.cast(api.target(), api.work, Job(1), context=CONTEXT)
    assert await doubling.call(api.target(), api.ask, Job(1), context=CONTEXT, timeout=20) == Job(1)
    for _ in range(4):
        await handler.next_job()
    await doubling.arrived()
    assert handler.seen.empty()


async def test_distortion_reorders(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    slow = distorted(bus, Distortion(longest_delay=0.05))
    for n in range(20):
        await slow.cast(api.target(), api.work, Job(n), context=CONTEXT)
    await slow.arrived()
    numbers = [(await handler.next_job()).number for _ in range(20)]
    assert numbers != list(range(20))
    assert sorted(numbers) == list(range(20))


async def test_distortion_can_be_limited_to_some_methods(make_bus: MakeBus, bus: Bus, api: SampleAPI) -> None:
    def only_ask(method: Method[Any, Any]) -> bool:
        return method.name == "ask"

    handler = Handler()
    await (await make_bus()).serve(api.interface, handler)
    doubling = distorted(bus, Distortion(twice=True, drop_casts=True, applies=only_ask))
    await doubling.cast(api.target(), api.work, Job(1), context=CONTEXT)
    assert (await handler.next_job()).number == 1
    await doubling.call(api.target(), api.ask, Job(2), context=CONTEXT, timeout=20)
    assert [(await handler.next_job()).number for _ in range(2)] == [2, 2]
    assert handler.seen.empty()

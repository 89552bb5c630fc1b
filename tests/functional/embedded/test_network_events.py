"""Events of ports for compute: in batches, despite crashes and failures; on both databases."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.embedded.common import compute_events
from micronova.embedded.network.port_events import OUTBOX
from micronova.objects.clock import SystemClock
from tests.clocks import ManualClock
from tests.lock_recorder import LockRecorder
from tests.unit.embedded.network.world import ADMIN, SERVICE, Compute, World, pending_events, world

Start = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture(params=["sqlite", "postgresql"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Start a network service, again and again on the same database."""
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    schema = "e_" + request.node.name.split("[")[0][-40:] if url else None
    return lambda compute, **more: world(tmp_path, url, compute, schema=schema, **more)


@pytest.fixture
async def cloud(start: Start) -> AsyncIterator[World]:
    async with start(Compute(), clock=SystemClock()) as made:
        yield made


def told(cloud: World) -> Compute:
    assert cloud.compute is not None
    return cloud.compute


async def bound(cloud: World, network: Any, server: str, **fields: Any) -> Any:
    return await cloud.make(
        "port", SERVICE, network_id=network["id"], project_id="p1", device_id=server, device_owner="compute:nova",
        binding__host_id="h", **fields,
    )  # fmt: skip


async def settled(cloud: World) -> None:
    """Wait until the outbox is empty."""
    async with asyncio.timeout(10):
        while await cloud.database.read(pending_events):
            await asyncio.sleep(0.01)


async def test_a_bound_port_is_told_once(cloud: World) -> None:
    network, _ = await cloud.network()
    port = await bound(cloud, network, "s1")
    await told(cloud).wait_for(1)
    assert told(cloud).requests == [
        [{"name": "network-vif-plugged", "server_uuid": "s1", "status": "completed", "tag": port["id"]}]
    ]
    await cloud.change("port", port["id"], name="x")
    await cloud.change("port", port["id"], SERVICE, binding__host_id="h2")
    await settled(cloud)
    assert len(told(cloud).events) == 1


async def test_many_ports_are_told_in_few_requests(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/20")
    body = [{"network_id": network["id"], "project_id": "p1", "device_id": f"s{n}", "device_owner": "compute:nova",
             "binding:host_id": "h"} for n in range(100)]  # fmt: skip
    await asyncio.gather(*(cloud.call("POST", "/ports", {"ports": body[n::4]}, token=SERVICE) for n in range(4)))
    await told(cloud).wait_for(100)
    assert {server for _, server, _ in told(cloud).events} == {f"s{n}" for n in range(100)}
    assert len(told(cloud).requests) <= 4
    await settled(cloud)


async def test_what_else_is_told(cloud: World) -> None:
    await cloud.role.bootstrap()
    networks = {each["name"]: each["id"] for each in await cloud.list("network")}
    port = await bound(cloud, {"id": networks["private"]}, "s1")
    id = port["id"]
    await told(cloud).wait_for(1)
    floating = await cloud.make("floatingip", floating_network_id=networks["public"], port_id=id)
    await told(cloud).wait_for(2)
    await cloud.delete("floatingip", floating["id"])
    await told(cloud).wait_for(3)
    await cloud.change("port", id, SERVICE, fixed_ips=[{"ip_address": "10.0.0.99"}])
    await told(cloud).wait_for(4)
    await cloud.change("port", id, SERVICE, binding__host_id="", device_id="", device_owner="")
    await told(cloud).wait_for(5)
    await cloud.change("port", id, SERVICE, binding__host_id="h", device_id="s2", device_owner="compute:nova")
    await told(cloud).wait_for(6)
    await cloud.delete("port", id, ADMIN)
    await told(cloud).wait_for(7)
    assert told(cloud).events == [
        ("network-vif-plugged", "s1", id),
        ("network-changed", "s1", id),
        ("network-changed", "s1", id),
        ("network-changed", "s1", id),
        ("network-vif-unplugged", "s1", id),
        ("network-vif-plugged", "s2", id),
        ("network-vif-deleted", "s2", id),
    ]


async def test_ports_of_others_are_not_told(cloud: World) -> None:
    network, _ = await cloud.network()
    port = await cloud.make("port", SERVICE, network_id=network["id"], project_id="p1", binding__host_id="h")
    await cloud.delete("port", port["id"])
    # Users may set any device_id on their ports, but only compute binds them.
    forged = await cloud.make("port", network_id=network["id"], device_id="victim", device_owner="compute:nova")
    await cloud.change("port", forged["id"], fixed_ips=[{"ip_address": "10.1.0.99"}])
    await cloud.change("port", forged["id"], device_owner="")
    await cloud.delete("port", forged["id"])
    await bound(cloud, network, "s1")
    await told(cloud).wait_for(1)
    assert [server for _, server, _ in told(cloud).events] == ["s1"]


async def test_a_failed_request_leaves_nothing_to_tell(cloud: World) -> None:
    network, _ = await cloud.network("10.1.0.0/30")
    await bound(cloud, network, "s1")
    body = {"port": {"network_id": network["id"], "project_id": "p1", "device_id": "s2", "device_owner": "compute:x",
                     "binding:host_id": "h"}}  # fmt: skip
    assert (await cloud.call("POST", "/ports", body, token=SERVICE)).status == 409
    await settled(cloud)
    assert [server for _, server, _ in told(cloud).events] == ["s1"]


async def pass_time(cloud: World, count: int, step: float = 0.5) -> None:
    """Advance the clock, in steps of so many seconds, until compute has received so many different events."""
    assert isinstance(cloud.clock, ManualClock)
    async with asyncio.timeout(20):
        while len(set(told(cloud).events)) < count:
            await cloud.clock.jump(step)
            await asyncio.sleep(0.05)


async def run_dry(cloud: World, step: float) -> None:
    """Advance the clock, in steps of so many seconds, until the outbox is empty."""
    assert isinstance(cloud.clock, ManualClock)
    async with asyncio.timeout(30):
        while await cloud.database.read(pending_events):
            await cloud.clock.jump(step)


async def test_compute_is_told_when_it_is_back(start: Start) -> None:
    async with start(Compute()) as cloud:
        told(cloud).failures = 3
        network, _ = await cloud.network()
        port = await bound(cloud, network, "s1")
        await pass_time(cloud, 1)
        assert told(cloud).events == [("network-vif-plugged", "s1", port["id"])]
        assert told(cloud).failures == 0
        assert cloud.clock.now() - 1_800_000_000 < 30


async def test_a_server_without_a_host_is_told_later(start: Start) -> None:
    async with start(Compute()) as cloud:
        told(cloud).early = {"s1"}
        network, _ = await cloud.network()
        await bound(cloud, network, "s1")
        await bound(cloud, network, "s2")
        await pass_time(cloud, 1)
        assert [server for _, server, _ in told(cloud).events] == ["s2"]
        told(cloud).early = set()
        await pass_time(cloud, 2)
        assert [server for _, server, _ in told(cloud).events] == ["s2", "s1"]


async def test_what_a_crash_left_is_told_by_the_next_process(start: Start) -> None:
    clock = ManualClock()  # nothing is sent until it advances
    async with start(Compute(), clock=clock) as cloud:
        network, _ = await cloud.network()
        ports = [await bound(cloud, network, f"s{n}") for n in range(3)]
        assert told(cloud).events == []
        assert await cloud.database.read(pending_events) == 3
    async with start(Compute(), clock=clock) as cloud:
        await pass_time(cloud, 3)
        assert {tag for _, _, tag in told(cloud).events} == {port["id"] for port in ports}
        await run_dry(cloud, 0.5)


async def test_compute_is_told_after_a_long_outage(start: Start) -> None:
    async with start(Compute()) as cloud:
        told(cloud).failures = 10_000
        network, _ = await cloud.network()
        port = await bound(cloud, network, "s1")
        gone = await bound(cloud, network, "s2")
        await cloud.delete("port", gone["id"], SERVICE)
        async with asyncio.timeout(60):
            until = cloud.clock.now() + 12_000
            while told(cloud).failures >= 9_990 or cloud.clock.now() < until:  # until it has tried again many times
                await cloud.clock.jump(60)
                await asyncio.sleep(0.002)
        told(cloud).failures = 0
        # The next attempt may be MAX_OLD_RETRY_DELAY away. With such long steps an event may be sent twice.
        await pass_time(cloud, 2, step=5)
        expected = {("network-vif-deleted", "s2", gone["id"]), ("network-vif-plugged", "s1", port["id"])}
        assert set(told(cloud).events) == expected
        await run_dry(cloud, 1)


async def test_the_outbox_does_not_grow_with_changes_while_compute_is_away(start: Start) -> None:
    async with start(Compute()) as cloud:
        told(cloud).failures = 10_000
        network, _ = await cloud.network()
        port = await bound(cloud, network, "s1")
        for number in range(10, 60):
            await cloud.change("port", port["id"], SERVICE, fixed_ips=[{"ip_address": f"10.1.0.{number}"}])
        async with asyncio.timeout(20):
            while await cloud.database.read(pending_events) > 2:  # one plugged, one changed
                await cloud.clock.jump(5)
                await asyncio.sleep(0.002)
        told(cloud).failures = 0
        await run_dry(cloud, 1)
        names = [name for name, _, _ in told(cloud).events]
        assert sorted(names) == ["network-changed", "network-vif-plugged"]


async def test_an_event_that_is_not_true_any_more_is_not_sent_again(start: Start) -> None:
    async with start(Compute()) as cloud:
        told(cloud).failures = 1
        network, _ = await cloud.network()
        port = await bound(cloud, network, "s1")
        async with asyncio.timeout(20):
            while told(cloud).failures:
                await cloud.clock.jump(0.02)
                await asyncio.sleep(0.002)
        await cloud.change("port", port["id"], SERVICE, admin_state_up=False)
        await run_dry(cloud, 0.5)
        assert told(cloud).events == [("network-vif-unplugged", "s1", port["id"])]


async def test_the_number_of_events_is_limited(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compute_events, "MOST", 3)
    async with start(Compute()) as cloud:
        told(cloud).failures = 10_000
        network, _ = await cloud.network()
        for number in range(8):
            await bound(cloud, network, f"s{number}")
            cloud.clock.time += 1
        async with asyncio.timeout(20):
            while await cloud.database.read(pending_events) > 3 or "deleted the" not in caplog.text:
                await cloud.clock.jump(5)
                await asyncio.sleep(0.002)
        assert "deleted the 5 oldest events for compute" in caplog.text
        told(cloud).failures = 0
        await run_dry(cloud, 1)
        assert sorted(server for _, server, _ in told(cloud).events) == ["s5", "s6", "s7"]


async def test_without_compute_nothing_is_kept(start: Start) -> None:
    async with start(None) as cloud:
        network, _ = await cloud.network()
        await bound(cloud, network, "s1")
        assert await cloud.database.read(pending_events) == 0


class Stuck(Compute):
    """A compute API that answers only when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.asked = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.released.wait()
        await super().__call__(scope, receive, send)


class Slow(Stuck):
    """A compute API that must be released for each answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.released.wait()
        self.released.clear()
        await Compute.__call__(self, scope, receive, send)


async def _advance(clock: ManualClock, seconds: float) -> None:
    """Let time pass, and wait until two sweeps and the sender that holds its events are done with it."""
    await clock.jump(seconds)
    async with asyncio.timeout(30):
        while clock.sleepers < 3:
            await asyncio.sleep(0)


async def _hand_over(cloud: Any, clock: ManualClock, count: int) -> None:
    now = int(clock.now() * 1e6)
    new = [
        compute_events.Event(id=f"{n:04}", name="network-vif-deleted", server_id="s", tag=f"p{n}", created_at=now)
        for n in range(count)
    ]
    await cloud.database.write(cloud.role.events.put, new)
    cloud.role.events.hand_over(new)


async def _sent(cloud: Any) -> None:
    async with asyncio.timeout(30):
        while await cloud.database.read(pending_events):
            await asyncio.sleep(0)


async def test_events_are_queued_once_while_compute_hangs(start: Start) -> None:
    """Neither the process that sends them nor another one takes them again from the outbox."""
    clock = ManualClock()
    compute, other = Stuck(), Compute()
    async with start(compute, clock=clock) as one, start(other, clock=clock):
        await _hand_over(one, clock, 1000)
        await compute.asked.wait()
        for _ in range(30):  # a minute
            await _advance(clock, 2.0)
        compute.released.set()
        await _sent(one)
        assert len(compute.events) == 1000
        assert other.events == []


async def test_events_are_queued_once_while_compute_is_slow(start: Start) -> None:
    """Each answer comes before the events would have been held for longer, all of them after the first hold."""
    clock = ManualClock()
    compute, other = Slow(), Compute()
    async with start(compute, clock=clock) as one, start(other, clock=clock):
        await _hand_over(one, clock, 1000)
        for _ in range(5):  # batches
            await compute.asked.wait()
            compute.asked.clear()
            await _advance(clock, compute_events.RENEW * 0.9)
            compute.released.set()
        await _sent(one)
        assert len(compute.events) == 1000
        assert other.events == []


async def test_results_are_recorded_in_the_order_of_all_rows(tmp_path: Path) -> None:
    """Two processes may record results of the same events, which the one has sent and the other sends again."""
    async with world(tmp_path, None, Compute()) as cloud:
        recorder = LockRecorder(cloud.database)
        new = [
            compute_events.Event(
                id=f"{n}", name="network-vif-deleted", server_id="s", tag=f"p{n}", created_at=0, attempts=n
            )
            for n in range(4)
        ]
        await cloud.database.write(cloud.role.events.put, new)
        try:
            await cloud.database.write(OUTBOX.record_results, ["3"], [new[2], new[1], new[0]], 0)
        finally:
            recorder.close()
        [recorded] = [each for each in recorder.transactions if each.name == "Outbox.record_results"]
        assert [lock.key for lock in recorded.locked] == [("0",), ("1",), ("2",), ("3",)]


async def test_a_process_that_reaches_compute_again_takes_no_events_of_another(start: Start) -> None:
    """Those that another process was sending at this moment were sent twice."""
    async with start(Compute()) as cloud:
        write = cloud.database.write
        second, hold = 1_000_000, int(compute_events.HOLD * 1e6)
        now = int(cloud.clock.now() * 1e6)
        new = [
            compute_events.Event(id=f"{n}", name="network-vif-deleted", server_id="s", tag=f"p{n}", created_at=now)
            for n in range(2)
        ]
        await write(cloud.role.events.put, new)
        now += 2 * hold  # the process that put them has ended
        _, claimed = await write(OUTBOX.claim_due, now, hold)
        held, waits = sorted(claimed, key=lambda event: event.id)
        later = compute_events.Event(**{**msgspec.structs.asdict(waits), "attempts": 10})
        await write(OUTBOX.record_results, [], [later], now)  # compute did not take it: half a minute is to pass
        for seconds in (1, 8):  # in between, the process that sends the other one holds it for longer
            assert await write(OUTBOX.claim_due, now + seconds * second, hold) == (0, [])
            await write(OUTBOX.retry_all, now + seconds * second)
            _, taken = await write(OUTBOX.claim_due, now + seconds * second, hold)
            assert [event.id for event in taken] == ([waits.id] if seconds == 1 else [])
            await write(OUTBOX.renew, [held.id, waits.id], now + seconds * second, hold)
        await write(OUTBOX.record_results, [event.id for event in new], [], now)


async def test_events_that_are_not_true_any_more_make_no_pause(start: Start) -> None:
    """A full outbox is taken batch by batch, without the time of a sweep in between."""
    clock = ManualClock()
    async with start(Compute(), clock=clock) as cloud:
        now = int(clock.now() * 1e6)
        new = [
            compute_events.Event(id=f"{n:04}", name=name, server_id="s", tag=f"p{n}", created_at=now)
            for n, name in enumerate(["network-vif-plugged", *["network-vif-deleted"] * 399])  # no port is plugged
        ]
        await cloud.database.write(cloud.role.events.put, new)
        clock.time += compute_events.HOLD
        for pause in (
            compute_events.SWEEP,
            compute_events.WINDOW,
        ):  # the sweep sleeps, then the sender, as its batch is not full
            async with asyncio.timeout(30):
                while clock.sleepers < 1:
                    await asyncio.sleep(0)
            await clock.advance(pause)
        await _sent(cloud)
        assert len(told(cloud).events) == 399


async def test_a_process_keeps_few_events_in_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has no room for waits in the outbox until the hold ends."""
    monkeypatch.setattr(compute_events, "MOST_QUEUED", 300)
    clock = ManualClock()
    async with start(Compute(), clock=clock) as one:
        own = one.role.events
        now = int(clock.now() * 1e6)
        new = [
            compute_events.Event(id=f"{n:04}", name="network-vif-deleted", server_id="s", tag=f"p{n}", created_at=now)
            for n in range(1000)
        ]
        await one.database.write(own.put, new)
        own.hand_over(new)
        async with asyncio.timeout(30):
            while len(told(one).events) < 300:
                await clock.jump(0.02)
        assert await one.database.read(pending_events) >= 700
        async with asyncio.timeout(30):
            while await one.database.read(pending_events):
                await clock.jump(1.0)
        # With such long steps an event may be sent twice.
        assert len(set(told(one).events)) == 1000

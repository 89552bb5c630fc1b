"""Heartbeats of many hosts: what they cost the conductor, and what one host cannot do to the others."""

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy.util import await_only

from micronova.conductor import heartbeat_transaction, heartbeats
from micronova.conductor.host_users import MOST_IN_PROGRESS
from micronova.conductor.manager import ConductorManager
from micronova.conductor.rpcapi import (
    HEARTBEAT,
    HOST_KEYS,
    HOSTS,
    KEYS,
    PLUGGED_PORTS,
    PROGRESS,
    REPORT,
    START_GUESTS_AFTER_HOST_BOOT,
    HostKeysRequest,
    PluggedPorts,
    PluggedPortsRequest,
    ProbeAPI,
)
from micronova.db import departures, instance_actions, node_reports, nodes, operations, services
from micronova.db import instances as instances_of
from micronova.db.secrets import SecretBox, Secrets
from micronova.db.tables import instances
from micronova.db.tables import operations as table
from micronova.objects import states
from micronova.objects.clock import SystemClock, micros
from micronova.objects.context import Context
from micronova.objects.errors import Conflict, Invalid, NotSupported, StaleHeartbeat, Unavailable
from micronova.objects.host_keys import HostKeys
from micronova.objects.operations import BuildPayload
from micronova.objects.orders import (
    BootResult,
    GuestAtEpoch,
    GuestsOff,
    Heartbeat,
    HeartbeatReply,
    HostBeat,
    HostMetrics,
    NodeResources,
    PowerChange,
    Progress,
    RemovedGuest,
    Report,
    RunningOrder,
    WorkOrder,
)
from micronova.objects.service_names import COMPUTE
from micronova.objects.topology import MdevParent, NodeTopology
from micronova.rpc.bus import connect
from micronova.rpc.contract import Method
from micronova.rpc.errors import InvalidMessage
from tests.functional.cloud import Caller, CloudOptions, OneProcess, one_process, only_in_one_process
from tests.functional.servers.embedded_services import network

pytestmark = only_in_one_process("the hosts are silent, so that what is said in their name stands")
CLOUD = CloudOptions(
    hosts=2,
    roles=("network",),
    settings={
        "default": {"report_interval": 300.0, "service_down_time": 3600.0},
        "conductor": {"lease": 3600.0, "sweep_interval": 300.0},
    },
)

NUMBERS = itertools.count(micros(time.time() + 3600.0))  # higher than those of the agents, which learn them


@pytest_asyncio.fixture(loop_scope="module")
async def conductor(cloud: OneProcess) -> AsyncIterator[ConductorManager]:
    """Return the conductor."""
    yield next(role for role in cloud.process.started if isinstance(role, ConductorManager))


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def only_own_hosts(cloud: OneProcess) -> AsyncIterator[None]:
    """Stop the hosts that a test made up."""
    yield
    assert cloud.process.database is not None
    found = await cloud.process.database.read(services.list_, binary=COMPUTE)
    if made_up := [row.host for row in found if not row.host.startswith("fake")]:
        await _beat(cloud, *(HostBeat(host=host, stopping=True) for host in made_up))


@pytest_asyncio.fixture(loop_scope="module")
async def statements(cloud: OneProcess) -> AsyncIterator[list[str]]:
    """Return the statements that transactions run during the test."""
    found: list[str] = []
    assert cloud.process.database is not None
    await cloud.process.database.write(_trace, found.append)
    yield found
    await cloud.process.database.write(_trace, None)


def _trace(conn: sa.Connection, callback: Any) -> None:
    conn.connection.dbapi_connection.set_trace_callback(callback)  # type: ignore[union-attr]


def _node(host: str, node: str) -> NodeResources:
    return NodeResources(
        node=host,
        node_uuid=node,
        hypervisor_type="fake",
        hypervisor_version=1,
        vcpus=4,
        memory_mb=4096,
        local_gb=0,  # no server fits
    )


async def _beat(cloud: OneProcess, *hosts: HostBeat) -> HeartbeatReply:
    return await _numbered_beat(cloud, next(NUMBERS), *hosts)


async def _numbered_beat(cloud: OneProcess, number: int, *hosts: HostBeat) -> HeartbeatReply:
    assert cloud.process.bus is not None
    beat = Heartbeat(hosts=hosts, number=number)
    return await cloud.process.bus.call(HOSTS.target(), HEARTBEAT, beat, context=Context(), timeout=60.0)


@contextlib.asynccontextmanager
async def _busy(cloud: OneProcess) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Keep the database busy; return what waits until so many heartbeats have arrived at the conductor since then."""
    database, bus = cloud.process.database, cloud.process.bus
    assert database is not None and bus is not None
    busy, released = threading.Event(), threading.Event()

    def hold(conn: sa.Connection) -> None:
        busy.set()
        released.wait(60)

    holding = asyncio.create_task(database.write(hold))
    try:
        await asyncio.to_thread(busy.wait, 60)
        before = bus.stats().count("call", HEARTBEAT.label)

        async def arrived(number: int) -> None:
            while bus.stats().count("call", HEARTBEAT.label) < before + number:
                await asyncio.sleep(0)
            await ProbeAPI(bus).ping(30.0)

        yield arrived
    finally:
        released.set()
        await holding


async def test_a_heartbeat_that_arrives_late_is_refused(cloud: OneProcess, user: Caller) -> None:
    """An older power state does not win, nor does the last heartbeat of an agent stop the next one."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    assert host is not None and cloud.process.database is not None
    first, second, third = next(NUMBERS), next(NUMBERS), next(NUMBERS)
    stopped = HostBeat(host=host, power_changes=(PowerChange(id, 1, 4),))
    runs = HostBeat(host=host, power_changes=(PowerChange(id, 1, 1),))
    await _numbered_beat(cloud, second, runs)
    with pytest.raises(StaleHeartbeat) as refused:
        await _numbered_beat(cloud, first, stopped)
    assert refused.value.details["newest"] == second
    with pytest.raises(StaleHeartbeat):
        await _numbered_beat(cloud, first, HostBeat(host=host, stopping=True))
    assert (await user.show(id))["status"] == "ACTIVE"
    service = (await cloud.process.database.read(services.on_hosts, COMPUTE, [host]))[host]
    assert services.is_up(service, micros(cloud.process.clock.now()), 3600.0)
    await _numbered_beat(cloud, third, stopped)
    assert (await user.show(id))["status"] == "SHUTOFF"
    await _numbered_beat(cloud, third, stopped)  # delivered twice
    with pytest.raises(StaleHeartbeat):
        await _numbered_beat(cloud, second, runs)
    assert (await user.show(id))["status"] == "SHUTOFF"


async def test_a_late_heartbeat_does_not_fail_those_that_share_its_transaction(cloud: OneProcess) -> None:
    late, now = next(NUMBERS), next(NUMBERS)
    await _numbered_beat(cloud, now, HostBeat(host="punctual"))
    async with _busy(cloud) as arrived:
        sent = [asyncio.create_task(_beat(cloud, HostBeat(host=f"other-{number}"))) for number in range(4)]
        sent.insert(2, asyncio.create_task(_numbered_beat(cloud, late, HostBeat(host="punctual"))))
        await arrived(len(sent))
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [isinstance(answer, StaleHeartbeat) for answer in answers] == [False, False, True, False, False]
    assert isinstance(answers[4], HeartbeatReply)


async def test_late_heartbeats_make_no_transaction_of_their_own(cloud: OneProcess) -> None:
    """After a pause of a conductor, its queue has late heartbeats of many hosts."""
    database = cloud.process.database
    assert database is not None
    late, now = next(NUMBERS), next(NUMBERS)
    names = [f"paused-{number}" for number in range(100)]
    await asyncio.gather(*(_numbered_beat(cloud, now, HostBeat(host=name)) for name in names[:50]))
    for _ in range(2):
        before = database.statistics.by_function["HeartbeatTransaction.apply"]
        async with _busy(cloud) as arrived:
            sent = [asyncio.create_task(_numbered_beat(cloud, late, HostBeat(host=name))) for name in names]
            await arrived(len(sent))
        answers = await asyncio.gather(*sent, return_exceptions=True)
        assert [isinstance(answer, StaleHeartbeat) for answer in answers] == [True] * 50 + [False] * 50
        assert {answer.details["newest"] for answer in answers if isinstance(answer, StaleHeartbeat)} == {now}
        assert all(isinstance(answer, HeartbeatReply) for answer in answers[50:])
        assert database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 3


async def test_a_heartbeat_that_another_conductor_overtakes_is_not_held_against_its_sender(
    cloud: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender shared no transaction for a minute, as if it had sent something wrong."""
    database = cloud.process.database
    assert database is not None
    late, now = next(NUMBERS), next(NUMBERS)
    beats = [HostBeat(host=f"overtaken-{number}") for number in range(5)]
    for beat in beats:
        await _numbered_beat(cloud, now, beat)
        with monkeypatch.context() as meanwhile, pytest.raises(StaleHeartbeat):
            meanwhile.setattr(services, "newer_heartbeats", lambda *_: {})  # the newer one is not committed yet
            await _numbered_beat(cloud, late, beat)
    before = database.statistics.by_function["HeartbeatTransaction.apply"]
    async with _busy(cloud) as arrived:
        sent = [asyncio.create_task(_beat(cloud, beat)) for beat in beats]
        await arrived(len(sent))
    await asyncio.gather(*sent)
    # The first one may be taken before the others come.
    assert database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 2


async def test_a_heartbeat_whose_sender_gave_up_is_not_applied(cloud: OneProcess, conductor: ConductorManager) -> None:
    """Its agent has sent the next one, or will."""
    database = cloud.process.database
    assert database is not None
    handle = conductor._heartbeats.handle
    beats = {name: Heartbeat(hosts=(HostBeat(host=name),), number=next(NUMBERS)) for name in ("first", "gone", "twice")}
    async with _busy(cloud):
        handled = [asyncio.create_task(handle("agent", beats["first"]))]
        while not conductor._heartbeats.oldest_wait:  # the others wait for its transaction
            await asyncio.sleep(0)
        handled += [asyncio.create_task(handle("agent", beats[name])) for name in ("gone", "twice", "twice")]
        await asyncio.sleep(0)
        for each in handled[1:3]:  # one of the two deliveries still waits
            each.cancel()
        await asyncio.wait(handled[1:3])
    assert (await handled[3]).hosts[0].host == "twice"
    assert (await handled[0]).hosts[0].host == "first"
    known = await database.read(services.on_hosts, COMPUTE, list(beats))
    assert sorted(known) == ["first", "twice"]


async def test_of_two_waiting_heartbeats_the_newer_one_counts(cloud: OneProcess) -> None:
    late, now = next(NUMBERS), next(NUMBERS)
    async with _busy(cloud) as arrived:
        first = asyncio.create_task(_beat(cloud, HostBeat(host="before")))
        await arrived(1)
        newer = asyncio.create_task(_numbered_beat(cloud, now, HostBeat(host="reordered")))
        await arrived(2)
        with pytest.raises(StaleHeartbeat):
            await _numbered_beat(cloud, late, HostBeat(host="reordered"))
    await first
    assert (await newer).hosts[0].host == "reordered"


async def test_heartbeats_share_transactions(cloud: OneProcess) -> None:
    """Two hundred agents in processes of their own send one heartbeat each, at once."""
    assert cloud.process.database is not None
    before = cloud.process.database.statistics.by_function.get("HeartbeatTransaction.apply", 0)
    names = [f"crowd-{number}" for number in range(200)]
    replies = await asyncio.gather(*(_beat(cloud, HostBeat(host=name)) for name in names))
    assert [reply.hosts[0].host for reply in replies] == names
    assert all(reply.hosts[0].resend_nodes for reply in replies)
    assert cloud.process.database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 3
    known = await cloud.process.database.read(services.on_hosts, COMPUTE, names)
    assert sorted(known) == sorted(names)


async def test_the_statements_do_not_depend_on_the_number_of_guests(
    cloud: OneProcess, user: Caller, statements: list[str]
) -> None:
    """The first heartbeat of a host names all its guests."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    unknown = [PowerChange(f"{number:08}-0000-0000-0000-000000000000", 1, 4) for number in range(4_000)]
    statements.clear()
    await _beat(cloud, HostBeat(host=host, power_changes=(PowerChange(id, 99, 1), *unknown)))
    assert len(statements) < 20, statements
    await _beat(cloud, HostBeat(host=host, power_changes=(PowerChange(id, 1, 4), *unknown)))
    assert (await user.show(id))["status"] == "SHUTOFF"


async def test_the_statements_do_not_depend_on_the_number_of_power_changes(
    cloud: OneProcess, user: Caller, statements: list[str]
) -> None:
    """A host loses its power, or all guests of a process that simulates many hosts stop."""
    id = (await user.boot())["id"]
    host, database = await user.host_of(id), cloud.process.database
    assert host is not None and database is not None
    copies = [f"{number:08}-1111-0000-0000-000000000000" for number in range(2_000)]
    await database.write(_copy, id, copies)
    try:
        states = {copy: (4, 3, 7, 1)[number % 4] for number, copy in enumerate(copies)}  # stopped, paused, …, the same
        states[copies[0]] = 6  # panicked
        statements.clear()
        await _beat(cloud, HostBeat(host=host, power_changes=tuple(PowerChange(*each) for each in _at_epoch_1(states))))
        assert len(statements) < 50, len(statements)
        found = {
            row.uuid: (row.vm_state, row.power_state)
            for row in await database.read(instances_of.states_of, [*copies, id])
        }
        after = {4: "stopped", 3: "paused", 7: "suspended", 1: "active", 6: "error"}
        assert found == {id: ("active", 1)} | {copy: (after[state], state) for copy, state in states.items()}
        for copy, expected in (
            (copies[0], ("stop", "Error", "Error")), (copies[1], ("pause", None, "Success")),
            (copies[4], ("stop", None, "Success")), (copies[3], None),
        ):  # fmt: skip
            actions = await database.read(instance_actions.list_for, copy)
            if expected is None:
                assert not actions
                continue
            [action] = actions or ()
            [event] = await database.read(instance_actions.events, copy, action.request_id)
            assert (action.action, action.message, event.result) == expected
            assert (event.host, event.sequence, action.user_id) == (host, 1, None)
            assert action.finish_time == event.finish_time == action.start_time
    finally:
        await database.write(_delete, copies)


def _at_epoch_1(states: dict[str, int]) -> list[tuple[str, int, int]]:
    return [(uuid, 1, state) for uuid, state in states.items()]


def _copy(conn: sa.Connection, id: str, copies: list[str]) -> None:
    row = dict(conn.execute(sa.select(instances).where(instances.c.uuid == id)).mappings().one())
    conn.execute(instances.insert(), [{**row, "uuid": copy, "epoch": 1} for copy in copies])


def _delete(conn: sa.Connection, copies: list[str]) -> None:
    conn.execute(instances.delete().where(instances.c.uuid.in_(copies)))


@pytest.mark.parametrize("entry", ["power_changes", "nodes", "devices"])
async def test_a_transaction_is_told_little(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """After an outage each host names all its guests, and a stolen one may name many nodes and devices."""
    database = cloud.process.database
    assert database is not None
    monkeypatch.setattr(heartbeats, "MOST_ENTRIES", 10)
    before = database.statistics.by_function["HeartbeatTransaction.apply"]
    guests = tuple(PowerChange(f"{number:08}-0000-0000-0000-000000000000", 1, 4) for number in range(6))
    async with _busy(cloud) as arrived:
        beats = [
            HostBeat(host=f"loaded-{entry}-{number}", power_changes=guests)
            if entry == "power_changes"
            else HostBeat(host=f"loaded-{entry}-{number}", nodes=_nodes(f"{entry}-{number}", entry))
            for number in range(5)
        ]
        sent = [asyncio.create_task(_beat(cloud, each)) for each in beats]
        await arrived(len(sent))
    await asyncio.gather(*sent)
    assert database.statistics.by_function["HeartbeatTransaction.apply"] - before == len(beats)


def _nodes(name: str, entry: str) -> tuple[NodeResources, ...]:
    """Return six nodes, or a node with six devices."""
    mdevs = tuple(MdevParent(name=f"gpu{number}", mdev_type="t", total=1) for number in range(6))
    return tuple(
        NodeResources(
            node=f"{name}-{number}",
            node_uuid=str(uuid5(NAMESPACE_DNS, f"{name}-{number}")),
            hypervisor_type="fake",
            hypervisor_version=1,
            vcpus=0,
            memory_mb=0,
            local_gb=0,
            topology=NodeTopology(mdevs=mdevs) if entry == "devices" else None,
        )
        for number in range(6 if entry == "nodes" else 1)
    )


@pytest.mark.parametrize("entry", ["running_orders", "removed_guests", "power_changes", "boots"])
async def test_a_heartbeat_with_very_long_lists_is_refused(cloud: OneProcess, entry: str) -> None:
    """Of more guests and orders than a host has; those of other hosts are answered meanwhile."""
    kinds: dict[str, Callable[[str], Any]] = {
        "running_orders": lambda id: RunningOrder(id, 1),
        "removed_guests": lambda id: RemovedGuest(id, 1),
        "power_changes": lambda id: PowerChange(id, 1, 1),
        "boots": lambda id: BootResult(instance_uuid=id, epoch=1),
    }
    ids = [f"{number:08}-0000-0000-0000-000000000000" for number in range(100_000)]
    database = cloud.process.database
    assert database is not None
    before = database.statistics.by_function["HeartbeatTransaction.apply"]
    entries: Any = {entry: tuple(map(kinds[entry], ids))}
    with pytest.raises(InvalidMessage, match="length <= 5000"):
        await _beat(cloud, HostBeat(host="evil", **entries))
    assert database.statistics.by_function["HeartbeatTransaction.apply"] == before
    entries = {entry: entries[entry][:5000]}
    evil, other = await asyncio.gather(
        _beat(cloud, HostBeat(host="evil", **entries)), _beat(cloud, HostBeat(host="good"))
    )
    assert evil.hosts[0].departures == () and other.hosts[0].host == "good"


@pytest.mark.parametrize("entry", ["removed_guests", "power_changes", "boots"])
async def test_a_heartbeat_locks_no_servers_of_other_hosts(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """A stolen host that names them again and again would delay all work on them."""
    id = (await user.boot(networks="none"))["id"]
    kinds: dict[str, Any] = {
        "removed_guests": RemovedGuest(id, 99),
        "power_changes": PowerChange(id, 99, 4),
        "boots": BootResult(instance_uuid=id, epoch=99),
    }
    locked: list[str] = []
    lock_many = instances_of.lock_many

    def noted(conn: sa.Connection, uuids: Iterable[str]) -> Any:
        locked.extend(found := list(uuids))
        return lock_many(conn, found)

    monkeypatch.setattr(instances_of, "lock_many", noted)
    entries: Any = {entry: (kinds[entry],)}
    await _beat(cloud, HostBeat(host="evil", **entries))
    assert locked == []


async def test_heartbeats_with_long_lists_wait_behind_the_others(
    cloud: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "MOST_ENTRIES", 10)
    monkeypatch.setattr(heartbeats, "WINDOW", 0.0)
    named = tuple(RemovedGuest(f"{number:08}-0000-0000-0000-000000000000", 1) for number in range(11))
    answered: list[str] = []

    async def beat(sent: HostBeat) -> None:
        await _beat(cloud, sent)
        answered.append(sent.host)

    async with _busy(cloud) as arrived:
        large = [HostBeat(host=f"large-{number}", removed_guests=named) for number in range(20)]
        sent = [asyncio.create_task(beat(each)) for each in (*large, HostBeat(host="small"))]
        await arrived(len(sent))
    await asyncio.gather(*sent)
    # The first one was taken before the others came.
    assert answered.index("small") <= 2, answered


async def test_the_statements_do_not_depend_on_the_number_of_removed_guests(
    cloud: OneProcess, statements: list[str]
) -> None:
    database = cloud.process.database
    assert database is not None
    counts = []
    await _beat(cloud, HostBeat(host="emptied"))
    for number in (1, 200):
        gone = [f"{each:08}-1111-0000-0000-000000000000" for each in range(number)]
        for uuid in gone:
            await database.write(departures.record, "emptied", uuid, 3, 0)
        kept = f"{number:08}-2222-0000-0000-000000000000"
        await database.write(departures.record, "emptied", kept, 3, 0)
        statements.clear()
        # Of the last one, the host has removed an older guest only.
        removed = (*(RemovedGuest(uuid, 3) for uuid in gone), RemovedGuest(kept, 2))
        reply = await _beat(cloud, HostBeat(host="emptied", removed_guests=removed))
        counts.append(len([each for each in statements if each.startswith(("SELECT", "DELETE", "UPDATE"))]))
        assert [each.instance_uuid for each in reply.hosts[0].departures] == [kept]
        await _beat(cloud, HostBeat(host="emptied", removed_guests=(RemovedGuest(kept, 4),)))
        assert await database.read(departures.of_hosts, ["emptied"]) == []
    assert counts[0] == counts[1], counts


async def test_a_host_has_a_limited_number_of_nodes(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each heartbeat names other ones."""
    monkeypatch.setattr(node_reports, "MOST_NODES", 3)
    for number in range(4):
        node = msgspec.structs.replace(_node(f"made-up-{number}", f"bbbb{number:032}"))
        sent = _beat(cloud, HostBeat(host="many-nodes", nodes=(node,)))
        if number < 3:
            await sent
        else:
            with pytest.raises(Conflict, match="may have 3"):
                await sent


async def test_a_node_that_is_refused_does_not_stop_its_host(
    cloud: OneProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """A host whose driver had one node with a taken or an unusual name counted as down."""
    database = cloud.process.database
    assert database is not None
    caplog.set_level("WARNING", heartbeats.__name__)
    await _beat(cloud, HostBeat(host="first", nodes=(_node("shelf-1", f"cccc{0:032}"),)))
    taken, unusual = _node("shelf-1", f"cccc{1:032}"), _node("shelf:2", f"cccc{2:032}")
    good = _node("second", f"cccc{3:032}")
    for _ in range(2):
        reply = await _beat(cloud, HostBeat(host="second", nodes=(taken, good, unusual)))
        assert reply.hosts[0].resend_nodes  # the name may be free later
    assert list((await database.read(services.on_hosts, "nova-compute", ["second"])).keys()) == ["second"]
    found = {node.uuid for node in await database.read(nodes.list_)}
    assert good.node_uuid in found and found.isdisjoint({taken.node_uuid, unusual.node_uuid})
    told = [line for line in caplog.messages if "not recorded" in line]
    assert len(told) == 2 and "another node or resource provider has this name" in "".join(told)
    reply = await _beat(cloud, HostBeat(host="second", nodes=(good,)))
    assert not reply.hosts[0].resend_nodes


async def test_a_host_cannot_hide_what_another_one_says_of_its_guests(cloud: OneProcess, user: Caller) -> None:
    """One transaction has a heartbeat of the guest's host between two of hosts that name the same guest."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    assert host is not None
    liars = [HostBeat(host=f"liar-{number}", power_changes=(PowerChange(id, 1, 1),)) for number in range(2)]
    await _beat(cloud, liars[0], HostBeat(host=host, power_changes=(PowerChange(id, 1, 4),)), liars[1])
    assert (await user.show(id))["status"] == "SHUTOFF"


@pytest.mark.parametrize(
    ("meanwhile", "status", "again"),
    [
        (
            {"task_state": states.POWERING_OFF, "epoch": instances.c.epoch + 1},
            "ACTIVE",
            True,
        ),  # it may fail, and leave the guest as it is
        ({"task_state": states.ATTACHING_INTERFACE, "epoch": instances.c.epoch + 1}, "SHUTOFF", False),
        (
            {"epoch": instances.c.epoch + 1},
            "ACTIVE",
            True,
        ),  # an action has ended meanwhile
        ({"host": "elsewhere"}, "ACTIVE", False),
        ({"epoch": 0}, "ACTIVE", False),
    ],
)
async def test_a_power_change_is_compared_with_the_locked_server(
    cloud: OneProcess,
    user: Caller,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: dict[str, Any],
    status: str,
    again: bool,
) -> None:
    """On PostgreSQL another transaction may commit between the comparison and the lock; this one does as if."""
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    assert host is not None
    lock = heartbeat_transaction._lock

    def lock_after_another_one(conn: sa.Connection, *args: Any) -> None:
        conn.execute(sa.update(instances).where(instances.c.uuid == id).values(meanwhile))
        lock(conn, *args)

    with monkeypatch.context() as raced:
        raced.setattr(heartbeat_transaction, "_lock", lock_after_another_one)
        reply = await _beat(cloud, HostBeat(host=host, power_changes=(PowerChange(id, 1, 4),)))
    assert (await user.show(id))["status"] == status
    assert reply.hosts[0].repeat_power == ((id,) if again else ())
    actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert ("stop" in {each["action"] for each in actions}) == (status == "SHUTOFF")
    back = sa.update(instances).where(instances.c.uuid == id).values(host=host, epoch=2, task_state=None)
    assert cloud.process.database is not None
    await cloud.process.database.write(lambda conn: conn.execute(back))


async def test_an_action_that_is_accepted_during_a_heartbeat_is_not_overwritten(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dataclasses.replace(CLOUD, settings={**CLOUD.settings, "database": {"connection": database_url}})
    lock = heartbeat_transaction._lock
    async with one_process(tmp_path, options) as cloud:
        user = cloud.caller()
        id = (await user.boot())["id"]
        host = await user.host_of(id)
        assert host is not None

        def lock_after_an_action(conn: sa.Connection, *args: Any) -> None:
            await_only(user.act(id, "os-stop"))  # another transaction, which commits
            lock(conn, *args)

        async with cloud.faults({"operation": "power_off", "kind": "delay", "delay": 2.0}):
            with monkeypatch.context() as raced:
                raced.setattr(heartbeat_transaction, "_lock", lock_after_an_action)
                await _beat(cloud, HostBeat(host=host, power_changes=(PowerChange(id, 1, 3),)))
            await user.wait_for(id, "SHUTOFF", task=None)
        actions = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
        assert {each["action"] for each in actions} == {"create", "stop"}


async def test_a_host_that_reports_the_node_of_another_one_fails_alone(cloud: OneProcess) -> None:
    assert cloud.process.database is not None
    await _beat(cloud, HostBeat(host="owner", nodes=(_node("owner", "a" * 36),)))
    beats = [
        HostBeat(host=f"honest-{number}", nodes=(_node(f"honest-{number}", f"{number:036}"),)) for number in range(5)
    ]
    for _ in range(2):
        thief = HostBeat(host="thief", nodes=(_node("thief", "a" * 36),))
        *replies, refused = await asyncio.gather(
            *(_beat(cloud, beat) for beat in (*beats, thief)), return_exceptions=True
        )
        assert not any(isinstance(reply, BaseException) for reply in replies), replies
        assert isinstance(refused, Exception) and "belongs to host owner" in str(refused)
    with_nodes = await cloud.process.database.read(nodes.hosts_with_nodes, [beat.host for beat in beats])
    assert with_nodes == {beat.host for beat in beats}


async def test_a_host_tells_metrics_of_its_own_nodes_only(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, str]] = []

    def announce(context: Any, make: Callable[[], Any]) -> None:
        if (made := make()).event == "metrics.update":
            data = made.payload["nova_object.data"]
            told.append((data["host"], data["nodename"], data["host_ip"]))

    def measured(node: str) -> HostMetrics:
        return HostMetrics(node=node, host_ip="192.0.2.66", source="fake", taken_at=0, values={"cpu.percent": 1})

    of = [msgspec.structs.replace(_node(host, f"{host:0>36}"), host_ip="192.0.2.1") for host in ("robbed", "robber")]
    await _beat(cloud, *(HostBeat(host=node.node, nodes=(node,)) for node in of))
    monkeypatch.setattr(cloud.process.notifier, "announce", announce)
    await _beat(cloud, HostBeat(host="robber", metrics=measured("robbed")))
    await _beat(cloud, HostBeat(host="robber", metrics=measured("robber")))
    assert told == [("robber", "robber", "192.0.2.1")]


async def test_a_heartbeat_that_names_a_host_twice_is_refused(cloud: OneProcess) -> None:
    """Else a host could send any number of heartbeats that do not replace one another."""
    for hosts in (("twice", "twice"), ("twice", "other", "twice"), ()):
        with pytest.raises(Invalid, match="each host once"):
            await _beat(cloud, *(HostBeat(host=host) for host in hosts))


async def test_refused_heartbeats_wait_behind_the_others(cloud: OneProcess) -> None:
    database = cloud.process.database
    assert database is not None
    await _beat(cloud, HostBeat(host="owner", nodes=(_node("owner", "a" * 36),)))
    thieves = [HostBeat(host=f"robber-{number}", nodes=(_node(f"robber-{number}", "a" * 36),)) for number in range(30)]
    await asyncio.gather(*(_beat(cloud, beat) for beat in thieves), return_exceptions=True)

    answered: list[str] = []

    async def beat(sent: HostBeat) -> None:
        try:
            await _beat(cloud, sent)
        except Conflict:
            answered.append("refused")
        else:
            answered.append("accepted")

    async with _busy(cloud) as arrived:
        sent = [asyncio.create_task(beat(each)) for each in (*thieves, HostBeat(host="patient"))]
        await arrived(len(sent))
    await asyncio.gather(*sent)
    assert answered.count("refused") == len(thieves)
    # The first one was taken before the others came.
    assert answered.index("accepted") <= 5, answered


async def test_a_refused_sender_does_not_share_again_after_a_good_heartbeat(cloud: OneProcess) -> None:
    """A host that sends a good and a bad heartbeat in turn makes no transaction of others fail."""
    database = cloud.process.database
    assert database is not None
    await _beat(cloud, HostBeat(host="owner", nodes=(_node("owner", "a" * 36),)))
    bad = HostBeat(host="moody", nodes=(_node("moody", "a" * 36),))
    with pytest.raises(Conflict):
        await _beat(cloud, bad)
    await _beat(cloud, HostBeat(host="moody"))
    before = database.statistics.by_function["HeartbeatTransaction.apply"]
    async with _busy(cloud) as arrived:
        others = [HostBeat(host=f"steady-{number}") for number in range(20)]
        sent = [asyncio.create_task(_beat(cloud, each)) for each in (*others, bad)]
        await arrived(len(sent))
    *replies, refused = await asyncio.gather(*sent, return_exceptions=True)
    assert all(isinstance(reply, HeartbeatReply) for reply in replies), replies
    assert isinstance(refused, Conflict)
    assert database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 3


async def test_one_bad_heartbeat_makes_few_transactions(cloud: OneProcess) -> None:
    """The first bad heartbeat of a host shares a transaction with many others."""
    database = cloud.process.database
    assert database is not None
    await _beat(cloud, HostBeat(host="owner", nodes=(_node("owner", "a" * 36),)))
    before = database.statistics.by_function["HeartbeatTransaction.apply"]
    beats = [HostBeat(host=f"many-{number}") for number in range(128)]
    beats.insert(64, HostBeat(host="novice", nodes=(_node("novice", "a" * 36),)))
    async with _busy(cloud) as arrived:
        sent = [asyncio.create_task(_beat(cloud, each)) for each in beats]
        await arrived(len(sent))
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert [isinstance(each, HeartbeatReply) for each in answers].count(False) == 1
    assert database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 25


async def test_a_conductor_remembers_few_senders_of_refused_heartbeats(
    cloud: OneProcess, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "MOST_REFUSED", 3)
    monkeypatch.setattr(conductor._heartbeats, "_refused", {})
    await _beat(cloud, HostBeat(host="owner", nodes=(_node("owner", "a" * 36),)))
    for number in range(6):
        with pytest.raises(Conflict):
            await _beat(cloud, HostBeat(host=f"bad-{number}", nodes=(_node(f"bad-{number}", "a" * 36),)))
    assert [hosts for _, hosts in conductor._heartbeats._refused] == [("bad-3",), ("bad-4",), ("bad-5",)]


async def test_a_flood_does_not_delay_the_proof_of_health(cloud: OneProcess) -> None:
    """A host sends hundreds of heartbeats while the database is busy; the conductor's ping passes them."""
    database = cloud.process.database
    assert database is not None
    async with _busy(cloud) as arrived:
        flood = [
            asyncio.create_task(_beat(cloud, HostBeat(host="flood", removed_guests=(RemovedGuest("x", number),))))
            for number in range(1_000)
        ]
        await arrived(len(flood))  # a ping passes them
    before = database.statistics.by_function.get("HeartbeatTransaction.apply", 0)
    answers = await asyncio.gather(*flood, return_exceptions=True)
    assert isinstance(answers[-1], HeartbeatReply)
    assert database.statistics.by_function["HeartbeatTransaction.apply"] - before <= 3


@pytest.mark.parametrize("kind", ["report", "start_guests_after_host_boot", "plugged_ports"])
async def test_a_host_has_few_messages_in_progress(
    cloud: OneProcess, user: Caller, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What one host sends while the database or the network service is slow leaves room for other hosts."""
    networks, bus = conductor._dependencies.network_client, cloud.process.bus
    assert networks is not None and bus is not None
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    assert host is not None
    answers = asyncio.Event()

    async def slow(instance: str, host: str) -> frozenset[str]:
        await answers.wait()
        return frozenset()

    monkeypatch.setattr(networks, "plugged_ports", slow)

    async def send(kind: str, host: str) -> object:
        method, params = _message(kind, host, id)
        return await bus.call(HOSTS.target(), method, params, context=Context(), timeout=60.0)

    # A message of each kind is refused at once, whatever the kind of those that are in progress.
    async with _busy(cloud):
        before = bus.stats().count("call", f"conductor.{kind}")
        sent = [asyncio.create_task(send(kind, host)) for _ in range(MOST_IN_PROGRESS)]
        while bus.stats().count("call", f"conductor.{kind}") < before + len(sent):
            await asyncio.sleep(0)
        await ProbeAPI(bus).ping(30.0)
        for other in ("report", "start_guests_after_host_boot", "plugged_ports"):
            with pytest.raises(Unavailable, match=f"messages of host {host} are in progress"):
                await send(other, host)
        assert await send("plugged_ports", "somebody-else") == PluggedPorts(())
        answers.set()
    await asyncio.gather(*sent)
    await send(kind, host)


async def test_a_host_has_few_requests_for_keys_in_progress(
    cloud: OneProcess, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stolen host floods the interface with requests in its own name and in that of others."""
    refresh, answers = conductor._host_users.refresh, asyncio.Event()

    async def slow() -> None:
        await answers.wait()
        await refresh()

    monkeypatch.setattr(conductor._host_users, "refresh", slow)
    senders = {
        name: connect(f"local://{cloud.process.keys.cloud_id}", clock=SystemClock(), random=Random(), name=name)
        for name in ("stolen", "honest")
    }
    for bus in senders.values():
        await bus.start()

    async def send(sender: str, host: str) -> HostKeys:
        params = HostKeysRequest(host)
        return await senders[sender].call(KEYS.target(), HOST_KEYS, params, context=Context(), timeout=20.0)

    flood = [asyncio.create_task(send("stolen", f"name-{number}")) for number in range(MOST_IN_PROGRESS)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="messages of host stolen are in progress"):
        await send("stolen", "stolen")
    honest = asyncio.create_task(send("honest", "honest"))
    answers.set()
    assert (await honest).ticket
    await asyncio.gather(*flood)
    for bus in senders.values():
        await bus.stop()


def _message(kind: str, host: str, instance: str) -> tuple[Method[Any, Any], object]:
    if kind == "report":
        report = Report(operation_id="none", epoch=1, instance_uuid=instance, host=host, outcome="done", power_state=1)
        return REPORT, report
    if kind == "start_guests_after_host_boot":
        return START_GUESTS_AFTER_HOST_BOOT, GuestsOff(host=host, guests=(GuestAtEpoch("none", 1),))
    return PLUGGED_PORTS, PluggedPortsRequest(host=host, instance_uuid=instance, ports=())


async def test_a_heartbeat_that_waits_for_the_database_is_an_outage(
    cloud: OneProcess, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for a row that a lost machine has locked: hosts seem down, while the conductor's own row is free."""
    health = conductor.engine.health
    proved, noticed = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(health, "proved", proved.set)
    monkeypatch.setattr(health, "outage_noticed", noticed.set)
    monkeypatch.setattr(conductor, "_longest_interval", 0.0)
    monkeypatch.setattr(conductor, "_report_interval", 0.0)
    database = cloud.process.database
    assert database is not None
    write, entered, leave = database.write, asyncio.Event(), asyncio.Event()

    async def one_row_is_locked(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fn == conductor._heartbeats._transaction.apply:
            entered.set()
            await leave.wait()
        return await write(fn, *args, **kwargs)

    monkeypatch.setattr(database, "write", one_row_is_locked)
    beating = asyncio.create_task(_beat(cloud, HostBeat(host="behind")))
    await entered.wait()
    proofs = asyncio.create_task(conductor._beat_forever())
    try:
        await asyncio.wait_for(noticed.wait(), 60)
        assert not proved.is_set()
        leave.set()
        await beating
        await asyncio.wait_for(proved.wait(), 60)
    finally:
        leave.set()
        proofs.cancel()


async def test_a_heartbeat_waits_for_no_other_service(
    cloud: OneProcess, user: Caller, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has lost an order that waits for its ports, and the network service does not answer."""
    networks = conductor._dependencies.network_client
    assert networks is not None
    async with _orders_lost(conductor, monkeypatch) as lost:
        id = await user.create(networks=[{"uuid": (await network(user))["id"]}])
        await lost.wait_for(id)
    host = await user.host_of(id)
    assert host is not None and cloud.process.database is not None
    await cloud.process.database.write(_sent_long_ago_before_the_port_was_plugged, id)
    monkeypatch.setattr(networks, "network_info", _no_answer)
    reply = await _beat(cloud, HostBeat(host=host))
    assert [order.instance.uuid for order in reply.hosts[0].orders] == [id]


async def test_a_reply_has_as_many_orders_as_fit(
    cloud: OneProcess, user: Caller, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that is too large would never arrive, and with it no order at all."""
    host = "fake-1"
    async with _orders_lost(conductor, monkeypatch) as lost:
        ids = [
            await user.admin.create(networks="none", availability_zone=f"nova:{host}", user_data="A" * 8_000)
            for _ in range(3)
        ]
        for id in ids:
            await lost.wait_for(id)
    assert cloud.process.database is not None
    for id in ids:
        await cloud.process.database.write(_sent_long_ago, id)
    monkeypatch.setattr(heartbeats, "MOST_ORDERS", 20_000)
    sent: list[RunningOrder] = []
    for expected in (2, 1):
        reply = await _beat(cloud, HostBeat(host=host, running_orders=tuple(sent)))
        orders = reply.hosts[0].orders
        assert len(orders) == expected
        sent += [RunningOrder(order.operation_id, order.epoch) for order in orders]
    assert len({order.operation_id for order in sent}) == 3


@pytest.mark.parametrize("damaged", ["secrets", "payload"])
async def test_an_order_that_cannot_be_made_does_not_silence_its_host(
    cloud: OneProcess, user: Caller, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """A conductor may have another secret key than the one that recorded an operation. Its hosts are alive."""
    host = "fake-1"
    async with _orders_lost(conductor, monkeypatch) as lost:
        ids = [await user.admin.create(networks="none", availability_zone=f"nova:{host}") for _ in range(2)]
        for id in ids:
            await lost.wait_for(id)
    assert cloud.process.database is not None
    for id in ids:
        await cloud.process.database.write(_sent_long_ago, id)
    [row] = await cloud.read(sa.select(table).where(table.c.instance_uuid == ids[0]))
    mine = table.update().where(table.c.id == row.id)
    foreign = SecretBox(bytes(32)).seal(Secrets(admin_password="hush"), row.id)
    wrong = {"secrets": foreign} if damaged == "secrets" else {"payload": b"\xc1"}
    await cloud.process.database.write(lambda conn: conn.execute(mine.values(**wrong)))
    [reply] = (await _beat(cloud, HostBeat(host=host))).hosts
    assert [order.instance.uuid for order in reply.orders] == [ids[1]]
    right = {"secrets": row.secrets, "payload": row.payload}
    await cloud.process.database.write(lambda conn: conn.execute(mine.values(**right)))


@pytest.mark.parametrize("newer", [{"kind": "teleport"}, {"version": 99}], ids=["kind", "version"])
async def test_what_only_newer_conductors_know_is_left_to_them(
    cloud: OneProcess, user: Caller, conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch, newer: dict[str, Any]
) -> None:
    """During an upgrade an old conductor answers heartbeats of hosts whose orders newer ones have made."""
    host = "fake-1"
    async with _orders_lost(conductor, monkeypatch) as lost:
        id = await user.admin.create(networks="none", availability_zone=f"nova:{host}")
        await lost.wait_for(id)
    assert cloud.process.database is not None and cloud.process.bus is not None
    await cloud.process.database.write(_sent_long_ago, id)
    [row] = await cloud.read(sa.select(table).where(table.c.instance_uuid == id))
    mine = table.c.id == row.id
    await cloud.process.database.write(lambda conn: conn.execute(table.update().where(mine).values(**newer)))
    [reply] = (await _beat(cloud, HostBeat(host=host))).hosts
    assert (reply.orders, reply.drop) == ((), ())
    about: dict[str, Any] = {"operation_id": row.id, "epoch": row.epoch, "instance_uuid": id, "host": host}
    messages: list[tuple[Method[Any, Any], object]] = [
        (REPORT, Report(**about, outcome="done")),
        (PROGRESS, Progress(**about, task_state=states.SPAWNING)),
    ]
    for method, message in messages:
        with pytest.raises(NotSupported, match="too old"):
            await cloud.process.bus.call(HOSTS.target(), method, message, context=Context(), timeout=60.0)
    old = {"kind": row.kind, "version": row.version}
    await cloud.process.database.write(lambda conn: conn.execute(table.update().where(mine).values(**old)))
    [reply] = (await _beat(cloud, HostBeat(host=host))).hosts
    assert [order.operation_id for order in reply.orders] == [row.id]


def _sent_long_ago(conn: sa.Connection, id: str) -> None:
    conn.execute(instances.update().where(instances.c.uuid == id).values(updated_at=0))


async def _no_answer(uuid: str) -> None:
    await asyncio.Event().wait()


def _sent_long_ago_before_the_port_was_plugged(conn: sa.Connection, id: str) -> None:
    conn.execute(instances.update().where(instances.c.uuid == id).values(updated_at=0))
    [operation] = operations.open_of(conn, id)
    payload = msgspec.msgpack.decode(operation["payload"], type=BuildPayload)
    payload.wait_for_plugs = [instances_of.get(conn, id)["network_info"][0]["port_id"]]  # type: ignore[index]
    conn.execute(table.update().where(table.c.id == operation["id"]).values(payload=payload.encode()))


class _LostOrders:
    """Orders that were lost on their way to a host. A server is spawning some time before its order is sent."""

    def __init__(self) -> None:
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def lose(self, context: Context, order: WorkOrder) -> None:
        """Lose an order."""
        self._events[order.instance.uuid].set()

    async def wait_for(self, id: str) -> None:
        """Wait until an order for this server is lost."""
        await asyncio.wait_for(self._events[id].wait(), 60)


@contextlib.asynccontextmanager
async def _orders_lost(conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_LostOrders]:
    lost = _LostOrders()
    with monkeypatch.context() as patch:
        patch.setattr(conductor._dependencies.compute, "send_order", lost.lose)
        yield lost


async def test_too_many_heartbeats_are_logged_once(
    conductor: ConductorManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conductor, "_longest_interval", 0.001)
    monkeypatch.setattr(conductor, "_report_interval", 0.001)
    monkeypatch.setattr(conductor._heartbeats, "interval", 0.0)
    for _ in range(2):
        monkeypatch.setattr(conductor, "_fleet_counted_at", float("-inf"))
        await conductor._count_fleet()
    [line] = [line for line in caplog.messages if "heartbeats per second" in line]
    assert line.endswith("set default.service_down_time and conductor.lease to 1 or more")


async def test_hosts_that_are_back_are_logged_once(cloud: OneProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Only hosts that restarted guests were logged."""
    caplog.set_level("INFO", heartbeats.__name__)
    await _beat(cloud, HostBeat(host="returns"))
    await _beat(cloud, HostBeat(host="returns"))
    assert "is back" not in caplog.text
    assert cloud.process.database is not None
    hour_ago = micros(cloud.process.clock.now() - 3600.0 - 90.0)
    await cloud.process.database.write(services.heartbeat, COMPUTE, ["returns"], hour_ago)
    for _ in range(3):
        await _beat(cloud, HostBeat(host="returns"))
    assert [line for line in caplog.messages if "is back" in line] == [
        "host returns is back after it was down for 90 s"
    ]
    many = [HostBeat(host=f"many{number}") for number in range(30)]
    await _beat(cloud, *many)
    await _beat(cloud, *(msgspec.structs.replace(each, stopping=True) for each in many))
    caplog.clear()
    await _beat(cloud, *many)
    [line] = [line for line in caplog.messages if "back" in line]
    assert line.startswith("30 hosts are back")

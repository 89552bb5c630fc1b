"""Budgets of transactions and messages: what one request costs until its operation has ended.

Periodic work (heartbeats, sweeps, the scheduler's refresh) is recognised by its name and not counted.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from micronova.rpc.bus import Bus
from micronova.rpc.envelope import CALL, REPLY
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

pytestmark = only_in_one_process("counts the transactions and messages of the cloud's process")
# Periodic work is rare in this cloud.
SETTINGS = {
    "default": {"report_interval": 300.0, "service_down_time": 3600.0},
    "conductor": {"lease": 600.0, "sweep_interval": 300.0},
}
CLOUD = CloudOptions(settings=SETTINGS)


class Cost:
    """Transactions by function, and messages by kind and method."""

    def __init__(self) -> None:
        self.transactions: Counter[str] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.writes = 0
        self.reads = 0


@contextlib.asynccontextmanager
async def counted(cloud: Cloud) -> AsyncIterator[Cost]:
    """Count what the cloud does meanwhile, once nothing is left to do of what was before."""
    database, bus = cloud.process.database, cloud.process.bus
    assert database is not None and bus is not None
    await cloud.settled()
    await _answered(cloud, bus)
    before = (database.statistics.writes, database.statistics.reads, Counter(database.statistics.by_function))
    sent = Counter(bus.stats().sent)
    cost = Cost()
    yield cost
    await _answered(cloud, bus)
    cost.writes = database.statistics.writes - before[0]
    cost.transactions = Counter(database.statistics.by_function) - before[2]
    looked = cost.transactions.pop("Cloud.read.<locals>.<lambda>", 0)  # of this test, which waits for the end
    cost.reads = database.statistics.reads - before[1] - looked
    cost.messages = Counter(bus.stats().sent) - sent


async def _answered(cloud: Cloud, bus: Bus) -> None:
    """Wait until each call has its reply: a report ends its operation before it is answered."""

    async def probe() -> bool | None:
        sent = bus.stats().sent
        calls = [method for kind, method in sent if kind == CALL]
        return all(sent[CALL, method] == sent.get((REPLY, method)) for method in calls) or None

    await cloud.until(probe, "an answer to each call")


async def test_a_boot(cloud: Cloud, user: Caller) -> None:
    await user.boot()  # the first server of a project creates rows that later ones use
    async with counted(cloud) as cost:
        await user.create()
        await cloud.settled()
    assert cost.writes == 5, cost.transactions
    assert sum(cost.messages.values()) == 6, cost.messages
    # The request, the operation, and two of the scheduler: whether anything changed, and the amounts that the last
    # server changed.
    assert cost.reads == 4, cost.transactions


async def test_fifty_in_one_request(cloud: Cloud, user: Caller) -> None:
    """They are accepted, leased, claimed and dispatched together; only the reports are separate."""
    async with counted(cloud) as cost:
        await user.post("/servers", user.body(min_count=50, max_count=50))
        await cloud.settled()
    assert cost.writes == 4 + 50, cost.transactions
    assert sum(cost.messages.values()) == 3 + 3 * 50, cost.messages


async def test_a_delete(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    async with counted(cloud) as cost:
        await user.delete(f"/servers/{id}")
        await cloud.settled()
    assert cost.writes == 4, cost.transactions
    assert sum(cost.messages.values()) == 4, cost.messages
    assert cost.reads == 2, cost.transactions


async def test_a_reschedule_costs_one_more_decision_claim_and_dispatch(cloud: Cloud, user: Caller) -> None:
    name = user.project
    rule = {"operation": "spawn", "kind": "fail", "name": name, "count": 1}
    async with cloud.faults(rule):
        async with counted(cloud) as cost:
            await user.create(name=name)
            await cloud.settled()
    assert cost.writes == 5 + 3, cost.transactions
    assert sum(cost.messages.values()) == 6 + 5, cost.messages


@pytest.mark.parametrize(
    ("path", "reads"),
    [
        ("/servers", 1), ("/servers/detail", 1), ("/servers?limit=1", 1), ("/servers/{id}", 1),
        ("/servers/{id}/metadata", 1), ("/servers/{id}/tags", 1), ("/servers/{id}/ips", 1),
        ("/servers/{id}/os-instance-actions", 2),
    ],
)  # fmt: skip
async def test_reading(cloud: Cloud, user: Caller, path: str, reads: int) -> None:
    [id, *_] = await user.boot_many(3)
    async with counted(cloud) as cost:
        await user.get(path.replace("{id}", id))
    assert (cost.writes, cost.reads) == (0, reads), cost.transactions
    assert not cost.messages


async def test_an_admin_also_sees_whether_hosts_are_up(cloud: Cloud, user: Caller) -> None:
    ids, hosts = await user.boot_many(8), set()
    for path in (*(f"/servers/{id}" for id in ids), "/servers/detail"):
        async with counted(cloud) as cost:
            shown = await user.admin.get(path)
        assert (cost.writes, cost.reads) == (0, 1), cost.transactions
        listed = shown["servers"] if "servers" in shown else [shown["server"]]
        assert {each["host_status"] for each in listed} == {"UP"}
        hosts |= {each["OS-EXT-SRV-ATTR:host"] for each in listed}
    assert len(hosts) > 1


async def test_a_refusal_writes_nothing(cloud: Cloud, user: Caller) -> None:
    async with counted(cloud) as cost:
        await user.refused(400, "POST", "/servers", user.body(flavorRef="no-such"))
        await user.refused(400, "POST", "/servers", user.body(name=""))
    assert cost.writes == 0, cost.transactions
    assert not cost.messages

"""The order in which transactions lock rows, recorded while servers are created, changed, moved off hosts and deleted.

Two transactions that lock the same rows in different orders wait for each other. So all of them lock tables in one
order, and the rows of a table in the order of their keys.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.functional.cloud import CloudOptions, OneProcess
from tests.lock_recorder import LockRecorder, Transaction

pytestmark = pytest.mark.asyncio(loop_scope="module")
# As ARCHITECTURE.md has it.
ORDER = (
    "instances", "operations", "server_groups", "server_group_hosts", "compute_nodes", "inventories", "quota_usages",
    "services",
)  # fmt: skip


class RecordedCloud(OneProcess):
    """A cloud whose locks are recorded from its first transaction on."""

    recorder: LockRecorder

    async def start(self) -> None:
        open_database = self.process.open_database

        async def recorded(name: str) -> Any:
            database = await open_database(name)
            if name == "compute":
                self.recorder = LockRecorder(database)
            return database

        self.process.open_database = recorded  # type: ignore[method-assign]
        await super().start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transactions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Transaction]]:
    """Return all transactions of a run of the main flows."""
    cloud = RecordedCloud(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=3))
    await cloud.start()
    try:
        await _live(cloud)
        await cloud.assert_clean()
    finally:
        await cloud.stop()
        cloud.recorder.close()
    yield cloud.recorder.transactions


async def _live(cloud: RecordedCloud) -> None:
    user = cloud.caller()
    group = (await user.post("/os-server-groups", {"server_group": {"name": "g", "policy": "soft-affinity"}}, 200))[
        "server_group"
    ]["id"]
    ids = await user.boot_many(6)
    ids += [await user.create({"group": group}) for _ in range(4)]
    await asyncio.gather(*(user.wait_for(id, "ACTIVE") for id in ids))
    async with cloud.faults({"operation": "spawn", "kind": "fail", "count": 1}):
        await user.boot()
    first, *rest = ids
    for action in ("os-stop", "os-start", "pause", "unpause", "lock", "unlock"):
        await user.act(first, action)
        await cloud.settled()
    await user.act(first, "reboot", {"type": "HARD"})
    await cloud.settled()
    await user.put(f"/servers/{first}", {"server": {"name": "new"}})
    await user.put(f"/servers/{first}/tags", {"tags": ["a"]})
    await user.post(f"/servers/{first}/metadata", {"metadata": {"a": "b"}}, 200)
    await asyncio.gather(*(user.act(id, "os-stop") for id in rest))
    await cloud.settled()
    building = await user.create()
    await user.delete(f"/servers/{building}")
    await user.gone(building)
    await asyncio.gather(*(user.delete(f"/servers/{id}") for id in ids))
    await asyncio.gather(*(user.gone(id) for id in ids))
    await cloud.delete_all()


async def test_statements_lock_rows_in_the_order_of_their_keys(transactions: list[Transaction]) -> None:
    wrong = {each for transaction in transactions for each in transaction.unordered}
    assert "\n".join(sorted(wrong)) == ""


async def test_transactions_lock_the_rows_of_a_table_in_the_order_of_their_keys(
    transactions: list[Transaction],
) -> None:
    wrong = set()
    for transaction in transactions:
        for table in ORDER:
            keys = [lock.key for lock in transaction.locked if lock.table == table]
            if keys != sorted(keys):
                wrong.add(f"{transaction.name}: {table}")
    assert "\n".join(sorted(wrong)) == ""


async def test_all_transactions_lock_tables_in_one_order(transactions: list[Transaction]) -> None:
    wrong = set()
    for transaction in transactions:
        tables = [lock.table for lock in transaction.locked if lock.instance is None]
        if len(set(tables)) > 1:
            wrong |= {f"{transaction.name}: {table} has no place" for table in set(tables) - set(ORDER)}
            placed = [table for table in tables if table in ORDER]
            wrong |= {
                f"{transaction.name}: {second} after {first}"
                for first, second in itertools.pairwise(placed)
                if ORDER.index(first) > ORDER.index(second)
            }
    assert "\n".join(sorted(wrong)) == ""


async def test_what_belongs_to_an_instance_is_changed_under_its_lock(transactions: list[Transaction]) -> None:
    """So these tables need no place in the order."""
    wrong = set()
    for transaction in transactions:
        held = {lock.key[0] for lock in transaction.inserted if lock.table == "instances"}
        for lock in transaction.locked:
            if lock.table == "instances":
                held.add(lock.key[0])
            elif lock.instance is not None and lock.instance not in held:
                wrong.add(f"{transaction.name}: {lock.table}")
    assert "\n".join(sorted(wrong)) == ""


async def test_the_recorder_sees_what_it_should(transactions: list[Transaction]) -> None:
    assert {lock.table for transaction in transactions for lock in transaction.locked} >= set(ORDER)

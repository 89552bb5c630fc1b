"""The order in which the transactions of the volume service lock rows, recorded while volumes are used."""

import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.lock_recorder import LockRecorder, Transaction
from tests.unit.embedded.volume.world import ADMIN, BOB, SERVICE, World, world

# As ARCHITECTURE.md has it.
ORDER = ("operations", "volumes", "snapshots", "backups", "attachments", "transfers", "volume_types", "quota_usages")


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def transactions(cloud: World) -> list[Transaction]:
    """Use and delete volumes in all ways; return the transactions."""
    recorder = LockRecorder(cloud.database)
    for name in ("a", "b"):
        await cloud.do("POST", "/types", {"volume_type": {"name": name}}, token=ADMIN)
    volume, other = await cloud.create(volume_type="a"), await cloud.create(volume_type="b")
    path = f"/volumes/{volume['id']}"
    for target in ("b", "a"):  # one before the other, and after it
        assert (await cloud.act(volume["id"], "os-retype", new_type=target)).status == 202
    for _ in range(3):
        snapshot = await cloud.snapshot(volume["id"])
    assert (await cloud.act(volume["id"], "os-extend", new_size=2)).status == 202
    await cloud.until(path, "available")
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]["id"]
    await cloud.until(f"/backups/{backup}", "available")
    await cloud.do("POST", f"/backups/{backup}/restore", {"restore": {"volume_id": volume["id"]}})
    await cloud.until(path, "available")
    await cloud.do("DELETE", f"/snapshots/{snapshot['id']}")
    await cloud.until(f"/snapshots/{snapshot['id']}", "")
    body = {"attachment": {"volume_uuid": volume["id"], "instance_uuid": str(uuid.uuid4())}}
    attachment = (await cloud.do("POST", "/attachments", body))["attachment"]["id"]
    await cloud.do("POST", f"/attachments/{attachment}/action", {"os-complete": {}})
    await cloud.do("DELETE", f"/attachments/{attachment}", token=SERVICE)
    offer = (await cloud.do("POST", "/volume-transfers", {"transfer": {"volume_id": volume["id"]}}))["transfer"]
    accept = {"accept": {"auth_key": offer["auth_key"]}}
    await cloud.do("POST", f"/volume-transfers/{offer['id']}/accept", accept, token=BOB)
    await cloud.do("DELETE", f"{path}?cascade=true", token=BOB)
    await cloud.until(path, "")
    await cloud.do("DELETE", f"/volumes/{other['id']}")
    await cloud.until(f"/volumes/{other['id']}", "")
    return recorder.transactions


async def test_transactions_lock_tables_and_rows_in_one_order(cloud: World) -> None:
    wrong, seen = set(), set()
    for transaction in await transactions(cloud):
        locked = [lock for lock in transaction.locked if lock.table in ORDER]
        seen |= {lock.table for lock in locked}
        wrong |= {
            f"{transaction.name}: {second.table} {second.key} after {first.table} {first.key}"
            for first, second in itertools.pairwise(locked)
            if ORDER.index(first.table) > ORDER.index(second.table)
            or (first.table == second.table == "quota_usages" and first.key > second.key)
        }
    assert seen >= {"operations", "volumes", "snapshots", "quota_usages"}
    assert "\n".join(sorted(wrong)) == ""

"""Each guest runs as a user of its own: who breaks out of one guest's QEMU reaches nothing of the others."""

import pytest

from tests.e2e.cloud import RealCloud
from tests.e2e.guest_view import process_of, reach

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


async def test_x(cloud: RealCloud) -> None:
    one, other = await cloud.tenant("10.88.0.0/24"), await cloud.tenant("10.89.0.0/24")
    a, b = await one.boot("a", config_drive=True), await other.boot("b", config_drive=True)
    await a.ready()
    await b.ready()
    mine, theirs = process_of(a.id), process_of(b.id)
    from pathlib import Path
    print(Path(f"/proc/{mine.pid}/cgroup").read_text(), Path(f"/proc/{mine.pid}/limits").read_text())
    for p in Path("/sys/fs/cgroup").glob("*/micronova-*/machine/*"): print(p, (p/"memory.limit_in_bytes").read_text() if (p/"memory.limit_in_bytes").exists() else "", (p/"cpu.shares").read_text() if (p/"cpu.shares").exists() else "")
    print(mine.uid, mine.gid, theirs.uid, mine.status["Groups"])
    for path, rights in reach(mine).items():
        print(path.replace(a.id, "A").replace(b.id, "B"), rights)
    await one.clear()
    await other.clear()

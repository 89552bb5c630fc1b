"""Each guest runs as a user of its own: who breaks out of one guest's QEMU reaches nothing of the others."""

import json
import os
from pathlib import Path

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.virt.libvirt.daemon.cgroups import DaemonGroup, hierarchies
from micronova.virt.libvirt.daemon.private import GUEST_PROCESSES
from micronova.virt.libvirt.storage.guest_users import guest_ids
from tests.e2e.cloud import RealCloud
from tests.e2e.guest_view import Process, process_of, reach

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

SEEN_AS = "/var/lib/libvirt"


async def test_two_tenants(cloud: RealCloud) -> None:
    one, other = await cloud.tenant("10.88.0.0/24"), await cloud.tenant("10.89.0.0/24")
    ada, ben = await one.boot("ada", config_drive=True), await other.boot("ben", config_drive=True)
    try:
        await ada.ready()
        await ben.ready()
        mine, theirs = process_of(ada.id), process_of(ben.id)
        assert {mine.uid, theirs.uid} < set(_ids(cloud)) and mine.uid != theirs.uid
        assert mine.status["Groups"] == str(mine.gid), "no further groups"
        assert int(mine.status["CapEff"], 16) == 0

        _reaches_only_its_own(mine, ada.id, ben.id)
        # A guest that is saved and one that is off have files, too.
        await ben.act("suspend", status="SUSPENDED")
        _reaches_only_its_own(mine, ada.id, ben.id)
        await ben.act("resume", status="ACTIVE")
        assert process_of(ben.id).uid == theirs.uid
        await ben.act("os-stop", status="SHUTOFF")
        _reaches_only_its_own(mine, ada.id, ben.id)

        _has_limits(cloud, mine, ada.id)
        await ada.act("reboot", {"type": "HARD"}, status="ACTIVE")
        assert process_of(ada.id).uid == mine.uid
        await ada.ready(2)
    finally:
        await one.clear()
        await other.clear()


async def test_a_deleted_guests_user_is_free_again(cloud: RealCloud) -> None:
    tenant = await cloud.tenant("10.90.0.0/24", router=False)
    try:
        first, second = await tenant.boot("first", networks="none"), await tenant.boot("second", networks="none")
        await first.wait("ACTIVE")
        await second.wait("ACTIVE")
        users = {process_of(first.id).uid, process_of(second.id).uid}
        freed = process_of(first.id).uid
        await first.delete()
        third = await tenant.boot("third", networks="none")
        await third.wait("ACTIVE")
        assert process_of(third.id).uid == freed and len(users) == 2
    finally:
        await tenant.clear()


def _ids(cloud: RealCloud) -> range:
    cloud_id = json.loads((cloud.directory / "keys.json").read_text())["cloud_id"]
    return guest_ids(LibvirtSettings().guest_uids, cloud_id)


def _reaches_only_its_own(guest: Process, own: str, other: str) -> None:
    found = reach(guest)
    folder = f"{SEEN_AS}/instances/{own}"
    used = {path.removeprefix(folder): rights for path, rights in found.items() if path.startswith(folder)}
    assert used == {"/disk": {"read", "write"}, "/disk.base": {"read"}, "/disk.config": {"read"}}
    for path, rights in found.items():
        assert other[:8] not in path, (path, rights)
        if own[:8] not in path:
            # It may list some directories of libvirt's that are the same whoever the guests are.
            assert rights == {"list"} and not path.startswith(f"{SEEN_AS}/base"), (path, rights)
            shown = Path(f"/proc/{guest.pid}/root{path}")
            assert not [name for name in os.listdir(shown) if other[:8] in name], path
    # Nor does it create anything outside of the directory that libvirt made for it.
    assert not [path for path, rights in found.items() if "write" in rights and own[:8] not in path]


def _has_limits(cloud: RealCloud, guest: Process, uuid: str) -> None:
    limits = Path(f"/proc/{guest.pid}/limits").read_text()
    [processes] = [line.split() for line in limits.splitlines() if line.startswith("Max processes")]
    assert processes[2:4] == [str(GUEST_PROCESSES)] * 2
    if not hierarchies():
        return
    assert DaemonGroup(cloud.directory / "libvirt").exists()
    [group] = {
        line.rpartition(":")[2]
        for line in Path(f"/proc/{guest.pid}/cgroup").read_text().splitlines()
        if "memory" in line.split(":")[1] or line.startswith("0::/micronova-")
    }
    assert f"instance-{uuid}" in group and group.startswith("/micronova-")
    seen: dict[str, int] = {}
    for hierarchy in hierarchies():
        place = Path(f"{hierarchy.path}{group}")
        while not place.name.endswith("libvirt-qemu"):
            place = place.parent
        for name in ("memory.limit_in_bytes", "memory.max", "cpu.shares", "cpu.weight"):
            if (place / name).exists():
                seen[name] = int((place / name).read_text())
    memory = seen.get("memory.limit_in_bytes") or seen["memory.max"]
    assert 128 << 20 < memory < 4 << 30, seen
    assert 100 in (seen.get("cpu.shares"), seen.get("cpu.weight")), "the weight of one vCPU"

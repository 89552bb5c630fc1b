"""Volumes of a guest that writes to them, while the processes that serve and change them are killed at any moment."""

import asyncio
import hashlib
import os
import random
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from micronova.exporter import daemon
from micronova.http.client import Answer
from micronova.objects.errors import Unavailable
from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.guests import Guest, until
from tests.e2e.test_cloud_restart import kill
from tests.e2e.test_trust import owner_and_parent, process_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

SEED = int(os.environ.get("E2E_SEED", "11"))
CYCLES = 5  # of attach, snapshot, detach and delete of a volume, and a process is killed during each
LONGEST_WAITS = {"attach": 0.6, "snapshot": 0.3, "detach": 1.0, "delete": 0.3}
"""Seconds from the begin of a change to the kill: about as long as the change takes."""
SETTINGS = """
[default]
report_interval = 1.0
service_down_time = 15.0
[conductor]
lease = 10.0
sweep_interval = 1.0
"""
VOLUMES = "/volume/v3/volumes"
SNAPSHOTS = "/volume/v3/snapshots"
BLOCK = 4096
# Writes block after block to each volume, and counts in /tmp/n/SERIAL those that are on the disk. It opens the device
# before it reads the serial number: another volume that gets the same name meanwhile is not written to.
# The names are quoted: without a volume, the pattern stands for itself.
WRITER = r"""
mkdir -p /tmp/n
while [ ! -e /tmp/stop ]; do
  for path in /sys/block/vd[b-z]; do
    name=${path##*/}
    [ -b "/dev/$name" ] && (
      exec 3<>"/dev/$name" || exit
      serial=$(cat "$path/serial" 2>/dev/null)
      [ ${#serial} = 20 ] || exit
      i=$(cat /tmp/n/$serial 2>/dev/null || echo 0)
      text="block $i of $serial"
      sum=$(echo "$text" | md5sum | cut -c 1-32)
      [ ${#sum} = 32 ] && echo "$text $sum" >/tmp/block &&
        dd if=/tmp/block bs=4096 seek=$i conv=sync,notrunc,fsync >&3 &&
        echo $((i+1)) >/tmp/new && mv /tmp/new /tmp/n/$serial
    ) 2>/dev/null
  done
done
"""
_TEXT = re.compile(rb"(block (\d+) of (\S{20})) ([0-9a-f]{32})\n\0*")


def blocks(file: Path, volume_id: str) -> int:
    """Return how many blocks a file has; fail if one is damaged, or is missing between others."""
    number = 0
    with file.open("rb") as stream:
        while (content := stream.read(BLOCK)).strip(b"\0"):
            found = _TEXT.fullmatch(content)
            assert found is not None, (file, number, content[:100])
            assert (int(found[2]), found[3].decode()) == (number, volume_id[:20]), (file, number, content[:100])
            assert hashlib.md5(found[1] + b"\n").hexdigest() == found[4].decode(), (file, number, content[:100])
            number += 1
        while content := stream.read(1 << 20):
            assert not content.strip(b"\0"), f"{file} has data after its first {number} blocks"
            if stream.tell() > 64 << 20:  # the writer gets never so far
                break
    return number


@dataclass
class Story:
    """A guest with volumes, and the processes that are killed."""

    cloud: RealCloud
    guest: Guest
    random: random.Random
    kept: str = ""  # the volume that stays attached
    killed: list[str] = field(default_factory=list)
    away: bool = False  # the cloud was killed and does not answer yet
    unfinished: int = 0  # changes that had not ended when a process was killed

    @property
    def attachments(self) -> str:
        return f"{self.guest.path}/os-volume_attachments"

    def file(self, volume_id: str) -> Path:
        return self.cloud.directory / "volumes" / "volumes" / volume_id

    # --- requests, whose answer may be lost ------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: object = None) -> Answer | None:
        """Return the answer to a request of the owner; None if the cloud gives none."""
        try:
            answer = await self.guest.tenant.person.request(method, path, body)
        except Unavailable:
            return None
        except RuntimeError:  # the client was closed with the cloud
            if not self.away:
                raise
            return None
        return None if answer.status >= 500 else answer

    async def status(self, path: str, noun: str) -> str:
        """Return the status of a resource; "" without a resource, "unknown" without an answer."""
        answer = await self.ask("GET", path)
        if answer is None:
            return "unknown"
        return "" if answer.status == 404 else str(answer.json()[noun]["status"])

    async def listed(self, volume_id: str) -> bool | None:
        """Return whether the server has the volume; None without an answer."""
        answer = await self.ask("GET", self.attachments)
        if answer is None or answer.status != 200:
            return None
        return volume_id in [each["volumeId"] for each in answer.json()["volumeAttachments"]]

    # --- changes: each asks again until what it wants has come ---------------------------------------------------

    async def attach(self, volume_id: str) -> None:
        async def attached() -> bool:
            status, listed = await self.status(f"{VOLUMES}/{volume_id}", "volume"), await self.listed(volume_id)
            if status == "available" and listed is False:
                await self.ask("POST", self.attachments, {"volumeAttachment": {"volumeId": volume_id}})
            return status == "in-use" and listed is True

        await until(attached, lambda: f"volume {volume_id} to be attached: {self.cloud.log[-5000:]}")

    async def detach(self, volume_id: str) -> None:
        async def detached() -> bool:
            status, listed = await self.status(f"{VOLUMES}/{volume_id}", "volume"), await self.listed(volume_id)
            if status == "in-use" and listed:
                await self.ask("DELETE", f"{self.attachments}/{volume_id}")
            return status == "available" and listed is False

        await until(detached, lambda: f"volume {volume_id} to be detached: {self.cloud.log[-5000:]}")

    async def snapshot(self, volume_id: str) -> None:
        """Make a snapshot; it has what the guest had written before, and nothing is missing in between."""
        before = await asyncio.to_thread(blocks, self.file(volume_id), volume_id)
        made = ""

        async def available() -> bool:
            nonlocal made
            if not made:
                found = await self.ask("GET", f"{SNAPSHOTS}?volume_id={volume_id}")
                if found is not None and not (snapshots := found.json()["snapshots"]):
                    await self.ask("POST", SNAPSHOTS, {"snapshot": {"volume_id": volume_id}})
                elif found is not None:
                    [made] = [each["id"] for each in snapshots]
                return False
            status = await self.status(f"{SNAPSHOTS}/{made}", "snapshot")
            assert status != "error", self.cloud.log[-5000:]
            return status == "available"

        await until(available, lambda: f"a snapshot of volume {volume_id}: {self.cloud.log[-5000:]}")
        file = self.cloud.directory / "volumes" / "snapshots" / made
        assert before <= await asyncio.to_thread(blocks, file, volume_id)

    async def delete(self, volume_id: str) -> None:
        async def gone() -> bool:
            status = await self.status(f"{VOLUMES}/{volume_id}", "volume")
            assert status != "error_deleting", self.cloud.log[-5000:]
            if status == "available":
                await self.ask("DELETE", f"{VOLUMES}/{volume_id}?cascade=true")
            return status == ""

        await until(gone, lambda: f"volume {volume_id} to be gone: {self.cloud.log[-5000:]}")

    async def create(self) -> str:
        volume_id: str = (await self.guest.tenant.person.make(VOLUMES, "volume", size=1))["id"]

        async def available() -> bool:
            return await self.status(f"{VOLUMES}/{volume_id}", "volume") == "available"

        await until(available, "the volume to be available")
        return volume_id

    # --- what is killed ------------------------------------------------------------------------------------------

    async def kill(self, what: str, volume_id: str) -> None:
        """Kill a process of the cloud. Its root process replaces it, but not that of the cloud, which starts anew."""
        self.killed.append(what)
        if what == "cloud":
            self.away = True
            await kill(self.cloud)
            await self.cloud.up()
            self.away = False
        elif what == "daemon":
            await self._kill_daemon(volume_id)
        else:
            os.kill(await self._process(f"micronova.cli.{what}"), signal.SIGKILL)

    async def _process(self, module: str) -> int:
        """Return a process, as soon as it runs."""
        found: list[int] = []

        async def runs() -> bool:
            try:
                found[:] = [process_of(self.cloud, module)]
            except ValueError:  # it was killed before and does not run yet
                return False
            return owner_and_parent(found[0]) is not None

        await until(runs, lambda: f"{module} to run: {self.cloud.log[-5000:]}")
        return found[0]

    async def _kill_daemon(self, volume_id: str) -> None:
        """Kill the storage daemon of a volume; that of the volume that is always attached if this one has none."""
        found: dict[str, int] = {}

        async def serves() -> bool:
            for id, each in daemon.find(self.cloud.prefix):
                each.forget()
                found[id] = each.pid
            return self.kept in found

        await until(serves, lambda: f"the daemon of volume {self.kept} to run: {self.cloud.log[-5000:]}")
        os.kill(found.get(volume_id, found[self.kept]), signal.SIGKILL)

    async def interrupted(self, what: str, change: str, volume_id: str) -> None:
        """Make a change, and kill a process meanwhile."""
        make: Callable[[str], Coroutine[None, None, None]] = getattr(self, change)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(make(volume_id))
            await asyncio.sleep(self.random.uniform(0.0, LONGEST_WAITS[change]))  # the moment
            self.unfinished += not task.done()
            await self.kill(what, volume_id)


async def _acknowledged(guest: Guest) -> dict[str, int]:
    """Return how many blocks are on the disk, as the guest knows, by the volumes' serial numbers."""
    lines = (await guest.ssh("cd /tmp/n && grep -H . *")).splitlines()
    return {serial: int(number) for serial, number in (line.split(":") for line in lines)}


async def test_nothing_is_lost_when_processes_are_killed_at_any_moment(can_run_guests: None) -> None:
    chance = random.Random(SEED)
    # Each of them is killed during each of the four changes. The cloud takes longest to start.
    replaced = ["daemon", "exporter", "agent"]
    plans = [chance.sample([*replaced, "cloud", chance.choice(replaced)], CYCLES) for _ in range(4)]
    async with real_cloud(RealCloud(SETTINGS)) as cloud:
        tenant = await cloud.tenant("10.88.0.0/24")
        guest = await tenant.boot("wanda")
        await guest.ready()
        life = await guest.ssh("cat /proc/sys/kernel/random/boot_id")
        await guest.ssh(f"cat >/tmp/writer <<'END'\n{WRITER}END\nsetsid sh /tmp/writer </dev/null >/dev/null 2>&1 &")
        story = Story(cloud, guest, chance)
        story.kept = await story.create()
        await story.attach(story.kept)
        written = {}
        for to_attach, to_snapshot, to_detach, to_delete in zip(*plans, strict=True):
            volume_id = await story.create()
            await story.interrupted(to_attach, "attach", volume_id)

            async def begun(volume_id: str = volume_id) -> bool:
                return blocks(story.file(volume_id), volume_id) > 1  # the guest knows of the first

            await until(begun, lambda: f"the guest to write: {cloud.log[-5000:]}")
            await story.interrupted(to_snapshot, "snapshot", volume_id)
            await story.interrupted(to_detach, "detach", volume_id)
            written[volume_id] = blocks(story.file(volume_id), volume_id)
            await story.interrupted(to_delete, "delete", volume_id)
        assert len(story.killed) == 20 and story.unfinished > 5

        await guest.ssh("touch /tmp/stop")
        acknowledged = await _acknowledged(guest)
        assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") == life
        assert "error, dev vdb" not in await guest.ssh("dmesg"), "the volume that stays attached has had no I/O error"
        await story.detach(story.kept)
        written[story.kept] = blocks(story.file(story.kept), story.kept)
        assert acknowledged.keys() == {id[:20] for id in written}
        for id, number in written.items():
            assert acknowledged[id[:20]] <= number, (id, acknowledged, written)
        await story.delete(story.kept)
        await cloud.wait_clean()
        assert not [*daemon.find(cloud.prefix)]
        for name in ("volumes", "snapshots"):
            assert not [*(cloud.directory / "volumes" / name).iterdir()]
        await tenant.clear()

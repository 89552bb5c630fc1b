"""Volumes of servers in a whole cloud: attached by the API, seen inside the guest, and given back."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.guests import Guest, run, until
from tests.people import Person

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

VOLUMES = "/volume/v3/volumes"


async def status_is(person: Person, volume_id: str, wanted: str) -> None:
    async def reached() -> bool:
        found = (await person.do("GET", f"{VOLUMES}/{volume_id}"))["volume"]["status"]
        return bool(found == wanted)

    await until(reached, f"the volume to be {wanted}")


async def test_a_volume_is_attached_extended_swapped_and_detached(can_run_guests: None) -> None:
    async with real_cloud(RealCloud()) as cloud:
        tenant = await cloud.tenant("10.86.0.0/24")
        person = tenant.person
        volume_id = (await person.do("POST", VOLUMES, {"volume": {"size": 1}}))["volume"]["id"]
        guest = await tenant.boot("vera")
        await guest.ready()
        await status_is(person, volume_id, "available")
        attachments = f"{guest.path}/os-volume_attachments"
        await person.do("POST", attachments, {"volumeAttachment": {"volumeId": volume_id}})
        await status_is(person, volume_id, "in-use")
        await guest.ssh(
            "while [ ! -b /dev/vdb ]; do sleep 0.2; done; echo kept | dd of=/dev/vdb bs=512 conv=sync; sync"
        )
        assert (await guest.ssh("cat /sys/block/vdb/serial")).strip() == volume_id[:20]
        newest = {"openstack-api-version": "volume 3.71"}
        await person.do("POST", f"{VOLUMES}/{volume_id}/action", {"os-extend": {"new_size": 2}}, newest)
        await guest.ssh("while [ $(cat /sys/block/vdb/size) != 4194304 ]; do sleep 0.2; done")
        await guest.ssh("echo late | dd of=/dev/vdb bs=512 seek=4194303 conv=sync; sync")
        await status_is(person, volume_id, "in-use")
        # Another volume takes its place while the guest writes.
        other = (await person.do("POST", VOLUMES, {"volume": {"size": 2}}))["volume"]["id"]
        await status_is(person, other, "available")
        digest = await guest.ssh("head -c 4194304 /dev/urandom >/tmp/data; md5sum /tmp/data | cut -c 1-32")
        await guest.ssh("dd if=/tmp/data of=/dev/vdb bs=65536 seek=16 conv=notrunc; sync")
        writing = asyncio.ensure_future(
            guest.ssh(
                "i=0; while [ $i -lt 40 ]; do echo mark-$i | dd of=/dev/vdb bs=4096 seek=$((20000+i)) "
                "conv=notrunc,sync oflag=direct 2>/dev/null; i=$((i+1)); done; sync"
            )
        )
        await cloud.admin.do("PUT", f"{attachments}/{volume_id}", {"volumeAttachment": {"volumeId": other}})
        await status_is(person, volume_id, "available")
        await status_is(person, other, "in-use")
        await writing
        assert await guest.ssh("dd if=/dev/vdb bs=65536 skip=16 count=64 | md5sum | cut -c 1-32") == digest
        await person.do("DELETE", f"{attachments}/{other}")
        await status_is(person, other, "available")
        with (cloud.directory / "volumes" / "volumes" / other).open("rb") as stream:
            assert stream.read(4) == b"kept"
            for number in range(40):
                stream.seek((20000 + number) * 4096)
                assert stream.read(8).startswith(f"mark-{number}\n".encode())
            stream.seek(16 * 65536)
            assert hashlib.md5(stream.read(4194304)).hexdigest() == digest.strip()
            stream.seek(-512, 2)
            assert stream.read(4) == b"late"
        await guest.delete()
        for each in (volume_id, other):
            await person.do("DELETE", f"{VOLUMES}/{each}")
        await tenant.clear()


SECTOR = 1 << 20  # at which the guest writes: 512 MiB from the begin of its disk, far behind the image


async def _written(guest: Guest) -> str:
    """Return what the guest has written to its root disk."""
    return await guest.ssh(f"dd if=/dev/vda bs=512 skip={SECTOR} count=1 2>/dev/null | tr -d '\\0'")


async def test_a_guest_on_a_volume_is_copied_shelved_and_rebuilt(can_run_guests: None) -> None:
    async with real_cloud(RealCloud()) as cloud:
        tenant = await cloud.tenant("10.87.0.0/24")
        person = tenant.person
        root = {
            "boot_index": 0, "uuid": cloud.image, "source_type": "image", "destination_type": "volume",
            "volume_size": 1, "delete_on_termination": True,
        }  # fmt: skip
        guest = await tenant.boot("rhea", imageRef="", block_device_mapping_v2=[root])
        await guest.ready()
        [held] = (await guest.show())["os-extended-volumes:volumes_attached"]
        await guest.ssh(f"echo kept | dd of=/dev/vda bs=512 seek={SECTOR} conv=notrunc 2>/dev/null; sync")
        image = (await person.do("POST", f"{guest.path}/action", {"createImage": {"name": "copy"}}))["image_id"]
        await guest.act("shelve", status="SHELVED_OFFLOADED")
        await status_is(person, held["id"], "reserved")
        await guest.act("unshelve", status="ACTIVE")
        await guest.ready()
        assert await _written(guest) == "kept\n"
        await guest.act("rebuild", {"imageRef": cloud.image}, status="ACTIVE")
        await guest.ready()
        assert await _written(guest) == "", "the volume has the image again"
        assert (await guest.show())["os-extended-volumes:volumes_attached"] == [held]
        copy = await tenant.boot("copy", imageRef=image)
        await copy.ready()
        assert await _written(copy) == "kept\n", "the image has what was written before it was made"
        await tenant.clear()
        await cloud.wait_clean()


# Makes files named by a number and the digest of what is in them, each on the disk before the next one; old ones are
# removed. Every file is written under another name at first, so that the file system changes what it knows of files.
FILES = 300
FILE_WRITER = rf"""
i=0
while [ ! -e /tmp/stop ]; do
  head -c $((4000 + i % 7 * 9000)) /dev/urandom >/tmp/file
  sum=$(md5sum </tmp/file | cut -c 1-32)
  cp /tmp/file /mnt/new && mv /mnt/new /mnt/$i-$sum && sync && echo $i >/tmp/number && mv /tmp/number /tmp/written
  rm -f /mnt/$((i - {FILES}))-*
  i=$((i + 1))
done
"""
CHECK_FILES = r"""
cd /mnt && for file in [0-9]*-*; do
  [ "$(md5sum <$file | cut -c 1-32)" = ${file#*-} ] && echo ${file%-*} || echo damaged-$file
done
"""


async def _file_writer(guest: Guest, volume_id: str) -> None:
    """Mount a volume in its guest, and let the guest write files to it."""
    await guest.ssh("while [ ! -b /dev/vdb ]; do sleep 0.2; done")
    assert (await guest.ssh("cat /sys/block/vdb/serial")).strip() == volume_id[:20]
    await guest.ssh("while read m; do insmod $m; done </etc/guest/modules-ext4; mount -t ext4 /dev/vdb /mnt")
    await guest.ssh(f"cat >/tmp/writer <<'END'\n{FILE_WRITER}END\nsetsid sh /tmp/writer </dev/null >/dev/null 2>&1 &")


async def _written_files(guest: Guest, more_than: int) -> int:
    """Return the number of the last file that is on the disk, as soon as it is larger."""
    found = -1

    async def enough() -> bool:
        nonlocal found
        found = int(await guest.ssh("cat /tmp/written 2>/dev/null || echo -1"))
        return found > more_than

    await until(enough, lambda: f"the guest to write more than {more_than} files")
    return found


async def _clean(file: Path) -> None:
    """Assert that a file system that nobody uses has no errors, after its journal was read if it was in use."""
    read = await run("e2fsck", "-p", str(file))
    assert read.returncode in (0, 1) and "UNEXPECTED" not in read.stdout, read.stdout
    checked = await run("e2fsck", "-f", "-n", str(file))
    assert checked.returncode == 0, checked.stdout


async def test_a_snapshot_under_io_is_a_clean_file_system(can_run_guests: None) -> None:
    async with real_cloud(RealCloud()) as cloud:
        tenant = await cloud.tenant("10.89.0.0/24")
        person = tenant.person
        newest = {"openstack-api-version": "volume 3.71"}
        files = cloud.directory / "volumes" / "volumes"
        volume_id = (await person.make(VOLUMES, "volume", size=1))["id"]
        await status_is(person, volume_id, "available")
        made = await run("mkfs.ext4", "-q", "-E", "nodiscard", str(files / volume_id))
        assert made.returncode == 0, made.stderr
        guest = await tenant.boot("jana")
        await guest.ready()
        attachments = f"{guest.path}/os-volume_attachments"
        await person.do("POST", attachments, {"volumeAttachment": {"volumeId": volume_id}})
        await status_is(person, volume_id, "in-use")
        await _file_writer(guest, volume_id)
        snapshots, moments = [], []
        last = -1
        for _ in range(3):
            before = await _written_files(guest, last + 5)
            body = {"snapshot": {"volume_id": volume_id, "force": True}}
            snapshot_id = (await person.do("POST", "/volume/v3/snapshots", body))["snapshot"]["id"]

            async def available(snapshot_id: str = snapshot_id) -> bool:
                shown = (await person.do("GET", f"/volume/v3/snapshots/{snapshot_id}"))["snapshot"]
                assert shown["status"] in ("creating", "available")
                return bool(shown["status"] == "available")

            await until(available, "the snapshot to be made")
            last = await _written_files(guest, before)
            snapshots.append(snapshot_id)
            moments.append((before, last))
        await guest.ssh("touch /tmp/stop; until umount /mnt 2>/dev/null; do sleep 0.2; done")
        await person.do("DELETE", f"{attachments}/{volume_id}")
        await status_is(person, volume_id, "available")

        # New volumes of the first two, and the volume as it was at the third.
        restored = [
            (await person.make(VOLUMES, "volume", size=1, snapshot_id=snapshot_id))["id"]
            for snapshot_id in snapshots[:2]
        ]
        await person.do("POST", f"{VOLUMES}/{volume_id}/action", {"revert": {"snapshot_id": snapshots[2]}}, newest)
        restored.append(volume_id)
        for each, (before, after) in zip(restored, moments, strict=True):
            await status_is(person, each, "available")
            copy = cloud.directory / "copy"
            await run("cp", "--sparse=always", str(files / each), str(copy))
            await _clean(copy)  # as after a loss of power
            await person.do("POST", attachments, {"volumeAttachment": {"volumeId": each}})
            await status_is(person, each, "in-use")
            await guest.ssh("while [ ! -b /dev/vdb ]; do sleep 0.2; done; mount -t ext4 /dev/vdb /mnt")
            found = (await guest.ssh(CHECK_FILES)).split()
            await guest.ssh("umount /mnt")
            numbers = {int(number) for number in found}  # fails at one that is damaged
            assert numbers >= set(range(max(0, after - FILES + 2), before + 1)), (sorted(numbers), before, after)
            await person.do("DELETE", f"{attachments}/{each}")
            await status_is(person, each, "available")
            await _clean(files / each)
        await guest.delete()
        await tenant.clear()

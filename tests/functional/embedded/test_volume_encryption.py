"""Encrypted volumes: their files, their keys, and what is copied from them."""

import asyncio
import base64
import json
import os
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.volume.api import row_actions
from micronova.embedded.volume.api import volumes as volume_api
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.backend.keys import KeyBox, SealedKey
from micronova.embedded.volume.backend.luks import BadCipher, Cipher, cipher_of, header_size
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.store import key_queries
from micronova.embedded.volume.tables import backups, snapshots, usages, volumes
from micronova.objects.errors import MicronovaError
from tests.unit.embedded.volume.world import ADMIN, ALICE, BOB, SECRET_KEY, SERVICE, World, world

GIB = 1 << 30
NEXT_KEY = bytes(range(32, 64))  # which SECRET_KEY is changed to
ENCRYPTION = {"provider": "luks", "control_location": "front-end", "cipher": "aes-xts-plain64", "key_size": 256}


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        await add_type(made, "LUKS", **ENCRYPTION)
        yield made


async def add_type(cloud: World, name: str, **encryption: Any) -> str:
    made = (await cloud.do("POST", "/types", {"volume_type": {"name": name}}, token=ADMIN))["volume_type"]["id"]
    await cloud.do("POST", f"/types/{made}/encryption", {"encryption": encryption}, token=ADMIN)
    return str(made)


async def key_of(cloud: World, volume_id: str) -> str:
    found = await cloud.do("GET", f"/volumes/{volume_id}/encryption_key", token=SERVICE)
    return str(found["encryption_key"]["passphrase"])


def opened(path: Path, key: str) -> tuple[str, ...]:
    """The arguments by which QEMU's tools open an encrypted file."""
    secret = path.parent.parent / "key"
    secret.write_text(key)
    image = f"driver=luks,key-secret=k,file.driver=file,file.filename={path}"
    return ("--object", f"secret,id=k,file={secret}", "--image-opts", image)


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def content(cloud: World, kind: str, id: str, key: str, size: int = 1 << 20) -> bytes:
    """The first bytes of what a guest would read."""
    out = cloud.directory.parent / "plain"
    out.unlink(missing_ok=True)
    secret = cloud.directory.parent / "key"
    secret.write_text(key)
    below = f"file.driver=luks,file.key-secret=k,file.file.driver=file,file.file.filename={cloud.directory / kind / id}"
    given = ("--object", f"secret,id=k,file={secret}", "--image-opts", f"driver=raw,size={size},{below}")
    await run("qemu-img", "convert", *given, "-O", "raw", str(out))
    return out.read_bytes()


def begin(path: Path) -> bytes:
    """The first bytes of a file, behind which images and tests write nothing."""
    with path.open("rb") as stream:
        return stream.read(8 << 20)


async def write(cloud: World, volume_id: str, byte: int) -> None:
    """Write the first MiB of a volume as a guest would."""
    path, key = cloud.directory / "volumes" / volume_id, await key_of(cloud, volume_id)
    await run("qemu-io", *opened(path, key), "-c", f"write -P {byte} 0 1M")


async def virtual_size(cloud: World, kind: str, id: str, key: str) -> int:
    found = json.loads(await run("qemu-img", "info", "--output=json", *opened(cloud.directory / kind / id, key)))
    return int(found["virtual-size"])


async def test_an_encrypted_volume_has_a_key_and_its_whole_size(cloud: World) -> None:
    volume = await cloud.create(size=2, volume_type="LUKS")
    assert volume["encrypted"] is True
    shown = await cloud.do("GET", f"/volumes/{volume['id']}/encryption")
    assert shown == {**ENCRYPTION, "encryption_key_id": volume["encryption_key_id"]}
    assert await cloud.do("GET", f"/volumes/{volume['id']}/encryption/cipher") == {"cipher": "aes-xts-plain64"}
    key = await key_of(cloud, volume["id"])
    assert len(bytes.fromhex(key)) == 32
    assert await virtual_size(cloud, "volumes", volume["id"], key) == 2 * GIB
    path = cloud.directory / "volumes" / volume["id"]
    assert path.stat().st_size == 2 * GIB + header_size(path)
    assert path.stat().st_blocks * 512 < 1 << 20
    [row] = await cloud.database.read(lambda conn: conn.execute(sa.select(volumes.c.sealed_key)).all())
    assert key.encode() not in row.sealed_key and bytes.fromhex(key) not in row.sealed_key
    old = await cloud.do("GET", f"/volumes/{volume['id']}", minor=63)
    assert "encryption_key_id" not in old["volume"]


async def test_only_the_service_user_reads_keys(cloud: World) -> None:
    volume = await cloud.create(volume_type="LUKS")
    plain = await cloud.create()
    path = f"/volumes/{volume['id']}/encryption_key"
    assert [(await cloud.call("GET", path, token=who)).status for who in (ALICE, ADMIN, BOB, SERVICE)] == [
        403, 403, 404, 200
    ]  # fmt: skip
    assert (await cloud.call("GET", f"/volumes/{volume['id']}/encryption", token=BOB)).status == 404
    assert await cloud.do("GET", f"/volumes/{plain['id']}/encryption") == {"encryption_key_id": None}
    assert (await cloud.call("GET", f"/volumes/{plain['id']}/encryption_key", token=SERVICE)).status == 404


async def test_what_is_copied_is_read_with_its_own_key(cloud: World) -> None:
    """A snapshot, a clone, a volume of a snapshot, a backup, and a volume of a backup."""
    volume = await cloud.create(volume_type="LUKS")
    await write(cloud, volume["id"], 0x41)
    assert b"A" * 64 not in begin(cloud.directory / "volumes" / volume["id"])
    snapshot = await cloud.snapshot(volume["id"])
    clone = await cloud.create(source_volid=volume["id"], size=2)
    of_snapshot = await cloud.create(snapshot_id=snapshot["id"], size=3)
    body = {"backup": {"volume_id": volume["id"]}}
    backup = (await cloud.do("POST", "/backups", body))["backup"]["id"]
    shown = await cloud.until(f"/backups/{backup}", "available")
    await cloud.do("DELETE", f"/snapshots/{snapshot['id']}")
    await cloud.until(f"/snapshots/{snapshot['id']}", "")
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    restored = (await cloud.do("POST", f"/backups/{backup}/restore", {"restore": {}}))["restore"]["volume_id"]
    restored = await cloud.until(f"/volumes/{restored}", "available")
    copies = [clone, of_snapshot, restored, await cloud.create(backup_id=backup, size=1)]
    for copy in copies:
        key = await key_of(cloud, copy["id"])
        assert await content(cloud, "volumes", copy["id"], key) == b"A" * (1 << 20)
        assert await virtual_size(cloud, "volumes", copy["id"], key) == copy["size"] * GIB
        assert copy["volume_type"] == "LUKS"
    ids = [each["encryption_key_id"] for each in (volume, shown, *copies)]
    assert len(set(ids)) == len(ids)


async def test_a_volume_is_reverted_and_restored_with_the_key_of_its_data(cloud: World) -> None:
    volume, other = await cloud.create(volume_type="LUKS"), await cloud.create(volume_type="LUKS")
    await write(cloud, volume["id"], 0x41)
    await write(cloud, other["id"], 0x42)
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": other["id"]}}))["backup"]["id"]
    await cloud.until(f"/backups/{backup}", "available")
    snapshot = await cloud.snapshot(volume["id"])
    first = await key_of(cloud, volume["id"])
    await cloud.do("POST", f"/backups/{backup}/restore", {"restore": {"volume_id": volume["id"]}})
    after = await cloud.until(f"/volumes/{volume['id']}", "available")
    key = await key_of(cloud, volume["id"])
    assert key == await key_of(cloud, other["id"]) != first
    assert after["encryption_key_id"] != volume["encryption_key_id"]
    assert await content(cloud, "volumes", volume["id"], key) == b"B" * (1 << 20)
    assert (await cloud.act(volume["id"], "revert", snapshot_id=snapshot["id"])).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert await key_of(cloud, volume["id"]) == first
    assert await content(cloud, "volumes", volume["id"], first) == b"A" * (1 << 20)


async def rotate(cloud: World) -> KeyBox:
    """Encrypt all keys anew, as `micronova key rotate` does; return what opens them from then on."""
    both, place = KeyBox(NEXT_KEY, [SECRET_KEY]), ""
    while True:
        place, _, _, _ = await cloud.database.write(key_queries.reseal, both, place)
        if not place:
            return KeyBox(NEXT_KEY)


async def stored_key(cloud: World, table: sa.Table, id: str) -> SealedKey:
    found = sa.select(table.c.encryption_key_id, table.c.sealed_key).where(table.c.id == id)
    row = await cloud.database.read(lambda conn: conn.execute(found).one())
    return SealedKey(id=row.encryption_key_id, sealed=row.sealed_key)


async def test_a_copy_that_ends_after_the_key_was_changed_keeps_the_new_one(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revert takes long; the key that it has read at its begin is not the one that the row has at its end."""
    volume = await cloud.create(volume_type="LUKS")
    key = await key_of(cloud, volume["id"])
    snapshot = await cloud.snapshot(volume["id"])
    replace, reached, opened = Files.replace_by_copy, asyncio.Event(), asyncio.Event()

    async def held(self: Files, *args: Any) -> None:
        reached.set()
        await opened.wait()
        await replace(self, *args)

    monkeypatch.setattr(Files, "replace_by_copy", held)
    assert (await cloud.act(volume["id"], "revert", snapshot_id=snapshot["id"])).status == 202
    await asyncio.wait_for(reached.wait(), 10)
    after = await rotate(cloud)
    opened.set()
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert after.open(await stored_key(cloud, volumes, volume["id"])) == key


async def test_a_snapshot_that_is_taken_while_the_key_is_changed_has_the_new_one(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = await cloud.create(volume_type="LUKS")
    key = await key_of(cloud, volume["id"])
    record_operation, rotated = Core.record_operation, list[KeyBox]()

    async def late(self: Core, *args: Any, **kwargs: Any) -> Any:
        if not rotated:  # the request has read the volume
            rotated.append(await rotate(cloud))
            monkeypatch.setattr(self, "keys", KeyBox(NEXT_KEY, [SECRET_KEY]))
        return await record_operation(self, *args, **kwargs)

    monkeypatch.setattr(Core, "record_operation", late)
    snapshot = await cloud.snapshot(volume["id"])
    assert rotated[0].open(await stored_key(cloud, snapshots, snapshot["id"])) == key


@pytest.mark.parametrize("disk_format", ["raw", "qcow2"])
async def test_an_image_is_written_through_the_encryption(cloud: World, disk_format: str, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) + bytes(1 << 20) + b"end" * 1000
    data += bytes(-len(data) % 512)
    (tmp_path / "raw").write_bytes(data)
    await run("qemu-img", "convert", "-O", disk_format, str(tmp_path / "raw"), str(tmp_path / "image"))
    image = cloud.images.add((tmp_path / "image").read_bytes(), disk_format=disk_format)
    volume = await cloud.create(volume_type="LUKS", imageRef=image)
    key, path = await key_of(cloud, volume["id"]), cloud.directory / "volumes" / volume["id"]
    assert await content(cloud, "volumes", volume["id"], key, len(data)) == data
    assert data[:4096] not in begin(path)
    assert cloud.files() == [volume["id"]]
    body = {"image_id": image}
    assert (await cloud.act(volume["id"], "os-reimage", **body)).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "available")
    assert await content(cloud, "volumes", volume["id"], key) == data[: 1 << 20]


async def test_a_larger_volume_keeps_its_data(cloud: World) -> None:
    volume = await cloud.create(volume_type="LUKS")
    await write(cloud, volume["id"], 0x41)
    assert (await cloud.act(volume["id"], "os-extend", new_size=4)).status == 202
    await cloud.until(f"/volumes/{volume['id']}", "available")
    key = await key_of(cloud, volume["id"])
    assert await virtual_size(cloud, "volumes", volume["id"], key) == 4 * GIB
    assert await content(cloud, "volumes", volume["id"], key) == b"A" * (1 << 20)


async def test_types_that_encrypt_in_another_way_are_refused(cloud: World) -> None:
    await add_type(cloud, "LUKS2", **ENCRYPTION | {"provider": "luks2"})
    await add_type(cloud, "same", **ENCRYPTION)
    volume, plain = await cloud.create(volume_type="LUKS"), await cloud.create()
    for source, wanted in ((volume, "__DEFAULT__"), (volume, "LUKS2"), (plain, "LUKS")):
        body = {"volume": {"source_volid": source["id"], "volume_type": wanted}}
        assert (await cloud.call("POST", "/volumes", body)).status == 400, (source, wanted)
        retype = await cloud.act(source["id"], "os-retype", new_type=wanted)
        assert retype.status == 400
    await cloud.create(source_volid=volume["id"], volume_type="same")
    assert (await cloud.act(volume["id"], "os-retype", new_type="same")).status == 202
    assert (await cloud.create(volume_type="LUKS2"))["encrypted"]
    upload = await cloud.act(volume["id"], "os-volume_upload_image", image_name="i")
    assert upload.status == 400 and "encrypted" in upload.body.decode()
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]["id"]
    await cloud.until(f"/backups/{backup}", "available")
    body = {"restore": {"volume_id": plain["id"]}}
    assert (await cloud.call("POST", f"/backups/{backup}/restore", body)).status == 400


@pytest.mark.parametrize(
    "changes",
    [{"control_location": "back-end"}, {"provider": "plain"}, {"cipher": "rot-13-plain"}, {"key_size": 100}],
)
async def test_an_encryption_that_qemu_cannot_do_is_refused(cloud: World, changes: dict[str, Any]) -> None:
    await add_type(cloud, "odd", **ENCRYPTION | changes)
    answer = await cloud.call("POST", "/volumes", {"volume": {"size": 1, "volume_type": "odd"}})
    assert answer.status == 400 and "odd" in answer.body.decode()


async def test_a_type_has_one_encryption(cloud: World) -> None:
    made = await add_type(cloud, "one", **ENCRYPTION)
    answer = await cloud.call("POST", f"/types/{made}/encryption", {"encryption": ENCRYPTION}, token=ADMIN)
    assert answer.status == 400 and "already exists" in answer.body.decode()


async def test_an_encrypted_volume_is_transferred_since_3_70(cloud: World) -> None:
    volume = await cloud.create(volume_type="LUKS")
    body = {"transfer": {"volume_id": volume["id"]}}
    assert (await cloud.call("POST", "/volume-transfers", body, minor=69)).status == 400
    made = (await cloud.do("POST", "/volume-transfers", body, minor=70))["transfer"]
    accept = {"accept": {"auth_key": made["auth_key"]}}
    await cloud.do("POST", f"/volume-transfers/{made['id']}/accept", accept, token=BOB)
    assert (await cloud.do("GET", f"/volumes/{volume['id']}", token=BOB))["volume"]["encrypted"]


async def test_the_record_of_a_backup_has_its_key_for_this_cloud_only(cloud: World) -> None:
    volume = await cloud.create(volume_type="LUKS")
    await write(cloud, volume["id"], 0x43)
    backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]["id"]
    await cloud.until(f"/backups/{backup}", "available")
    record = (await cloud.do("GET", f"/backups/{backup}/export_record", token=ADMIN))["backup-record"]
    fields = json.loads(base64.b64decode(record["backup_url"]))
    assert await key_of(cloud, volume["id"]) not in str(fields)
    await cloud.database.write(lambda conn: conn.execute(backups.delete()))
    await cloud.database.write(lambda conn: conn.execute(usages.delete().where(sa.literal(True))))
    lost = base64.b64encode(json.dumps(fields | {"sealed_key": base64.b64encode(bytes(40)).decode()}).encode()).decode()
    body = {"backup-record": record | {"backup_url": lost}}
    assert (await cloud.call("POST", "/backups/import_record", body, token=ADMIN)).status == 400
    await cloud.do("POST", "/backups/import_record", {"backup-record": record}, token=ADMIN)
    await cloud.until(f"/backups/{backup}", "available")
    restored = await cloud.do("POST", f"/backups/{backup}/restore", {"restore": {}}, token=ADMIN)
    found = await cloud.until(f"/volumes/{restored['restore']['volume_id']}", "available")
    assert await content(cloud, "volumes", found["id"], await key_of(cloud, found["id"])) == b"C" * (1 << 20)


async def test_without_keys_there_are_no_encrypted_volumes(tmp_path: Path) -> None:
    async with world(tmp_path, keys=None, luks=None) as cloud:
        await add_type(cloud, "LUKS", **ENCRYPTION)
        answer = await cloud.call("POST", "/volumes", {"volume": {"size": 1, "volume_type": "LUKS"}})
        assert answer.status == 400 and "encrypted" in answer.body.decode()


def test_a_key_is_read_with_the_same_secret_key_and_id_only() -> None:
    box = KeyBox(SECRET_KEY)
    key = box.make("one", 256)
    assert box.open(box.copy("two", key)) == box.open(key)
    for found, other in ((key, KeyBox(bytes(32))), (type(key)(id="two", sealed=key.sealed), box)):
        with pytest.raises(MicronovaError, match="cannot be read"):
            other.open(found)


def test_ciphers_have_the_names_of_dm_crypt() -> None:
    assert cipher_of(None, None) == cipher_of("aes-xts-plain64", 512) == Cipher("aes-256", "xts", "plain64")
    assert cipher_of("serpent-cbc-essiv:sha256", 128) == Cipher("serpent-128", "cbc", "essiv", "sha256")
    for bad in ("aes", "aes-gcm-plain64", "aes-xts-random"):
        with pytest.raises(BadCipher):
            cipher_of(bad, 256)


async def test_a_host_that_writes_the_header_does_not_choose_the_size_of_the_file(cloud: World) -> None:
    """The host of a guest has the whole file. A header that claims 2 TiB would be room that no quota counts."""
    volume = (await cloud.create(size=1, volume_type="LUKS"))["id"]
    path = cloud.directory / "volumes" / volume
    with path.open("r+b") as file:
        file.seek(104)
        file.write(struct.pack(">I", 2**32 - 1))
    before = path.stat().st_size
    await cloud.act(volume, "os-extend", new_size=2)
    await cloud.until(f"/volumes/{volume}", "error_extending")
    assert path.stat().st_size == before


def _encrypts_meanwhile(cloud: World, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, type_id: str) -> None:
    """Let an administrator encrypt a type after the next request has read how it is encrypted."""
    original = getattr(module, name)

    async def read(*args: Any) -> Any:
        found = await original(*args)
        monkeypatch.setattr(module, name, original)
        await cloud.do("POST", f"/types/{type_id}/encryption", {"encryption": ENCRYPTION}, token=ADMIN)
        return found

    monkeypatch.setattr(module, name, read)


async def test_no_volume_in_the_clear_is_of_a_type_that_is_encrypted_meanwhile(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"volume_type": {"name": "later"}}
    later = (await cloud.do("POST", "/types", body, token=ADMIN))["volume_type"]["id"]
    _encrypts_meanwhile(cloud, monkeypatch, volume_api, "load_cipher", later)
    assert (await cloud.create(volume_type="later"))["encrypted"] is True


async def test_no_volume_in_the_clear_gets_a_type_that_is_encrypted_meanwhile(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"volume_type": {"name": "later"}}
    later = (await cloud.do("POST", "/types", body, token=ADMIN))["volume_type"]["id"]
    volume = await cloud.create()
    _encrypts_meanwhile(cloud, monkeypatch, row_actions, "check_same_encryption", later)
    answer = await cloud.act(volume["id"], "os-retype", new_type="later", migration_policy="never")
    assert answer.status == 400
    shown = (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]
    assert (shown["volume_type"], shown["encrypted"]) == (volume["volume_type"], False)


def _header(sectors: int) -> bytes:
    return b"LUKS\xba\xbe\x00\x01" + bytes(96) + struct.pack(">I", sectors)


@pytest.mark.parametrize(
    "header",
    [b"", b"LUKS\xba\xbe\x00\x02" + bytes(200), bytes(512), *(_header(each) for each in (0, 1 << 14, 2**32 - 1))],
)
def test_a_file_that_is_none_of_an_encrypted_volume_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(header)
    with pytest.raises(OSError, match="encrypted"):
        header_size(path)
    path.write_bytes(_header(4096))
    assert header_size(path) == 2 << 20

"""`micronova key rotate`, and two keys that are valid at a time."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.cli.state import StateDirectory
from micronova.db.secrets import SecretBox, Secrets
from micronova.db.tables import operations
from micronova.embedded.identity.blobs import BlobBox
from micronova.embedded.identity.tables import credentials
from micronova.http.host_keys import HostKeyring, sign_metadata
from micronova.http.tickets import Tickets
from micronova.objects.errors import MicronovaError, Unauthorized
from tests.functional.full_cloud import FullCloud

OLD, NEW = b"o" * 32, b"n" * 32
pytestmark = pytest.mark.asyncio


async def _rotate(*arguments: str, code: int = 0) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, main, ["key", "rotate", *arguments])
    assert done.exit_code == code, done.output
    return done.output


async def test_what_another_key_has_sealed_is_read_and_sealed_anew() -> None:
    sealed = SecretBox(OLD).seal(Secrets(admin_password="hush"), "op")
    both = SecretBox(NEW, [OLD])
    assert both.open(sealed, "op").admin_password == "hush"
    fresh = both.reseal(sealed, "op")
    assert fresh is not None and both.reseal(fresh, "op") is None
    assert SecretBox(NEW).open(fresh, "op").admin_password == "hush"
    with pytest.raises(MicronovaError, match="another secret key"):
        SecretBox(OLD).open(fresh, "op")
    blob = BlobBox(OLD).seal("secret", "id")
    again = BlobBox(NEW, [OLD]).reseal(blob, "id")
    assert again is not None and BlobBox(NEW).open(again, "id") == "secret"


async def test_tickets_of_both_keys_are_accepted() -> None:
    old, both, new = Tickets(OLD), Tickets(NEW, [OLD]), Tickets(NEW)
    both.verify(old.issue("image", 100), "image", 1)
    new.verify(both.issue("image", 100), "image", 1)
    with pytest.raises(Unauthorized):
        new.verify(old.issue("image", 100), "image", 1)
    keys = HostKeyring(OLD).issue("compute-1", 1)
    keyring = HostKeyring(NEW, [OLD])
    assert keyring.host_of(keys.ticket, 1) == "compute-1"
    signed = sign_metadata(keys.metadata_key, "compute-1", "i", "p", "a")
    known = keyring.metadata_keys("compute-1", keys.expires_at)
    assert signed in [sign_metadata(each, "compute-1", "i", "p", "a") for each in known]


async def test_a_cloud_gets_a_new_key(tmp_path: Path) -> None:
    """What users have stored can be read afterwards; the old key opens nothing any more."""
    cloud = FullCloud(tmp_path)
    await cloud.start()
    old = StateDirectory(tmp_path).keys().secret_key
    try:
        admin = cloud.admin
        me = (await admin.do("GET", "/identity/v3/auth/tokens", headers={"X-Subject-Token": str(admin.token)}))["token"]
        body = {"tenant_id": me["project"]["id"]}
        made = (await admin.do("POST", f"/identity/v3/users/{me['user']['id']}/credentials/OS-EC2", body))["credential"]
        volume = await _encrypted_volume(cloud)
        waiting = SecretBox(bytes.fromhex(old)).seal(Secrets(admin_password="hush"), "waiting")
        assert cloud.process.database is not None
        await cloud.process.database.write(_add_operation, waiting)
    finally:
        await cloud.stop()
    counted = json.loads(await _rotate("--dir", str(tmp_path), "--json"))
    assert counted == {
        "waiting operations with secrets": [1, 1],
        "keys of volumes of servers": [1, 1],
        "credentials of users": [1, 1],
        "keys of volumes, snapshots and backups": [2, 2],
        "unreadable": [],
    }
    keys = StateDirectory(tmp_path).keys()
    assert keys.secret_key != old and keys.other_secret_keys == []
    again = FullCloud(tmp_path)
    await again.start()
    try:
        assert again.process.database is not None
        [sealed] = await again.process.database.read(
            lambda conn: list(
                conn.execute(sa.select(operations.c.secrets).where(operations.c.id == "waiting")).scalars()
            )
        )
        assert again.process.secret_box().open(sealed, "waiting").admin_password == "hush"
        path = f"/identity/v3/users/{me['user']['id']}/credentials/OS-EC2/{made['access']}"
        assert (await again.admin.do("GET", path))["credential"]["secret"] == made["secret"]
        [blob] = await again.process._databases["identity"].read(
            lambda conn: list(conn.execute(sa.select(credentials.c.id, credentials.c.blob)))
        )
        with pytest.raises(MicronovaError):
            BlobBox(bytes.fromhex(old)).open(blob.blob, blob.id)
        project = (await again.admin.do("GET", "/identity/v3/auth/projects"))["projects"][0]["id"]
        clone = {"volume": {"size": 1, "source_volid": volume}}
        made = (await again.admin.do("POST", f"/volume/v3/{project}/volumes", clone))["volume"]["id"]
        await _until(again, project, made, "available")
        [server] = (await again.admin.do("GET", "/compute/v2.1/servers"))["servers"]
        await again.admin.do("POST", f"/compute/v2.1/servers/{server['id']}/action", {"reboot": {"type": "HARD"}})
        await again.until(partial(_is_active, again, server["id"]), "the server to run with its volume")
    finally:
        await again.stop()


async def test_the_key_of_a_process_that_runs_is_not_changed(tmp_path: Path) -> None:
    """`micronova run` has no control socket. It would go on to seal with a key that is forgotten."""
    cloud = FullCloud(tmp_path)
    await cloud.start()
    place = StateDirectory(tmp_path)
    before = place.keys()
    try:
        assert place.running_pid() is None
        assert "A process uses the keys" in await _rotate("--dir", str(tmp_path), code=1)
        assert place.keys() == before
    finally:
        await cloud.stop()
    with place.unused_secret_key(), pytest.raises(MicronovaError, match="is being changed"):
        await FullCloud(tmp_path).start()
    await _rotate("--dir", str(tmp_path))
    assert place.keys().secret_key != before.secret_key


async def test_changes_of_the_keys_wait_for_each_other(tmp_path: Path) -> None:
    """One that reads the file before another writes it would bring the keys back that it has read."""
    place = StateDirectory(tmp_path)
    place.create()
    first = place.keys()
    with place._changed_keys() as keys:
        other = asyncio.create_task(asyncio.to_thread(place.rotate_token_key, 1.0, 2.0, 3600.0))
        done, _ = await asyncio.wait({other}, timeout=0.2)
        assert not done
        keys.secret_key = NEW.hex()
    await other
    after = place.keys()
    assert after.secret_key == NEW.hex() and len(after.newer_token_keys) == len(first.newer_token_keys) + 1


async def test_what_no_key_opens_is_named_and_stops_nothing(tmp_path: Path) -> None:
    cloud = FullCloud(tmp_path)
    await cloud.start()
    old = bytes.fromhex(StateDirectory(tmp_path).keys().secret_key)
    try:
        assert cloud.process.database is not None
        for id, key in (("a-lost", NEW), ("b-kept", old), ("c-lost", NEW)):
            await cloud.process.database.write(
                _add_operation, SecretBox(key).seal(Secrets(admin_password="hush"), id), id
            )
        me = (
            await cloud.admin.do("GET", "/identity/v3/auth/tokens", headers={"X-Subject-Token": str(cloud.admin.token)})
        )["token"]
        path = f"/identity/v3/users/{me['user']['id']}/credentials/OS-EC2"
        await cloud.admin.do("POST", path, {"tenant_id": me["project"]["id"]})
        lost = await cloud.process._databases["identity"].write(_seal_credential, BlobBox(NEW))
    finally:
        await cloud.stop()
    said = await _rotate("--dir", str(tmp_path), code=1)
    assert "3 waiting operations with secrets, of which 1 had another key" in said
    assert "3 cannot be opened" in said and "operation a-lost" in said and f"credential {lost}" in said
    keys = StateDirectory(tmp_path).keys()
    assert bytes.fromhex(keys.secret_key) != old and keys.other_secret_keys == []
    said = await _rotate("--dir", str(tmp_path), "--json", code=1)
    assert json.loads(said)["unreadable"] == ["operation a-lost", "operation c-lost", f"credential {lost}"]


async def _encrypted_volume(cloud: FullCloud) -> str:
    """Give a server an encrypted volume, which has a snapshot."""
    admin = cloud.admin
    project = (await admin.do("GET", "/identity/v3/auth/projects"))["projects"][0]["id"]
    base = f"/volume/v3/{project}"
    kind = (await admin.do("POST", f"{base}/types", {"volume_type": {"name": "luks"}}))["volume_type"]["id"]
    encryption = {"provider": "luks", "control_location": "front-end", "cipher": "aes-xts-plain64", "key_size": 256}
    await admin.do("POST", f"{base}/types/{kind}/encryption", {"encryption": encryption})
    made = (await admin.do("POST", f"{base}/volumes", {"volume": {"size": 1, "volume_type": "luks"}}))["volume"]["id"]
    await _until(cloud, project, made, "available")
    await admin.do("POST", f"{base}/snapshots", {"snapshot": {"volume_id": made}})
    [image] = (await admin.do("GET", "/image/v2/images"))["images"]
    [flavor] = (await admin.do("GET", "/compute/v2.1/flavors?limit=1"))["flavors"]
    wanted = {"name": "s", "imageRef": image["id"], "flavorRef": flavor["id"], "networks": "none"}
    server = (await admin.do("POST", "/compute/v2.1/servers", {"server": wanted}))["server"]["id"]
    await cloud.until(partial(_is_active, cloud, server), "the server to be built")
    path = f"/compute/v2.1/servers/{server}/os-volume_attachments"
    await admin.do("POST", path, {"volumeAttachment": {"volumeId": made}})
    await _until(cloud, project, made, "in-use")
    return str(made)


async def _until(cloud: FullCloud, project: str, volume: str, status: str) -> None:
    async def reached() -> bool | None:
        found = (await cloud.admin.do("GET", f"/volume/v3/{project}/volumes/{volume}"))["volume"]["status"]
        assert found != "error"
        return True if found == status else None

    await cloud.until(reached, f"the volume to be {status}")


async def _is_active(cloud: FullCloud, server: str) -> bool | None:
    found = (await cloud.admin.do("GET", f"/compute/v2.1/servers/{server}"))["server"]
    assert found["status"] != "ERROR", found["fault"]
    return True if found["status"] == "ACTIVE" and found["OS-EXT-STS:task_state"] is None else None


def _seal_credential(conn: sa.Connection, box: BlobBox) -> str:
    id = str(conn.execute(sa.select(credentials.c.id)).scalar_one())
    conn.execute(credentials.update().values(blob=box.seal("secret", id)))
    return id


def _add_operation(conn: sa.Connection, secrets: bytes, id: str = "waiting") -> None:
    row: dict[str, Any] = {
        "id": id, "kind": "build", "version": 999, "step": "x", "instance_uuid": "i", "secrets": secrets,
        "context": b"", "payload": b"", "created_at": 1, "deadline": 1 << 60, "lease_until": 0, "leases": 0, "epoch": 1,
        "finished_at": None, "batch_id": "b",
    }  # fmt: skip
    conn.execute(operations.insert().values({name: each for name, each in row.items() if name in operations.c}))


async def test_a_cloud_that_does_not_exist(tmp_path: Path) -> None:
    assert "There is no cloud" in await _rotate("--dir", str(tmp_path / "none"), code=1)

"""ETags of metadata, encryption of types, records of backups, hosts, and frozen services."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.volume.tables import backups, usages
from tests.unit.embedded.volume.world import ADMIN, ALICE, World, world

ENCRYPTION = {"provider": "luks", "control_location": "front-end", "cipher": "aes-xts-plain64", "key_size": 256}


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def send(cloud: World, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str | None]:
    """Send a request with headers; return the status and the ETag."""
    sent = {"x-auth-token": ALICE, "openstack-api-version": "volume 3.15", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    answer = await cloud._transport.request(method, f"/v3{path}", {**sent, **headers}, data)
    return answer.status, answer.headers.get("etag")


async def test_metadata_that_has_changed_is_not_overwritten(cloud: World) -> None:
    volume = await cloud.create(metadata={"a": "1"})
    path = f"/volumes/{volume['id']}/metadata"
    _, first = await send(cloud, "GET", path)
    assert first is not None
    assert await send(cloud, "GET", path, **{"openstack-api-version": "volume 3.14"}) == (200, None)
    match = {"if-match": first}
    assert (await send(cloud, "PUT", f"{path}/a", {"meta": {"a": "2"}}, **match))[0] == 200
    for method, to, body in (
        ("PUT", path, {"metadata": {"b": "1"}}),
        ("PUT", f"{path}/a", {"meta": {"a": "3"}}),
    ):
        assert (await send(cloud, method, to, body, **match))[0] == 412
        assert (await send(cloud, method, to, body, **match, **{"openstack-api-version": "volume 3.14"}))[0] == 200
    _, now = await send(cloud, "GET", path)
    assert now not in (None, first)
    assert (await send(cloud, "PUT", path, {"metadata": {}}, **{"if-match": f'"x", {now}'}))[0] == 200
    assert (await send(cloud, "PUT", path, {"metadata": {"c": "1"}}, **{"if-match": "*"}))[0] == 200
    assert (await cloud.do("GET", path))["metadata"] == {"c": "1"}


async def test_encryption_of_types(cloud: World) -> None:
    type_ = (await cloud.do("POST", "/types", {"volume_type": {"name": "luks"}}, token=ADMIN))["volume_type"]
    path = f"/types/{type_['id']}/encryption"
    assert await cloud.do("GET", path, token=ADMIN) == {}
    assert (await cloud.call("GET", path)).status == 403
    made = (await cloud.do("POST", path, {"encryption": ENCRYPTION}, token=ADMIN))["encryption"]
    assert made == {**ENCRYPTION, "volume_type_id": type_["id"], "encryption_id": made["encryption_id"]}
    assert (await cloud.call("POST", path, {"encryption": ENCRYPTION}, token=ADMIN)).status == 400
    shown = await cloud.do("GET", path, token=ADMIN)
    assert {name: shown[name] for name in ENCRYPTION} == ENCRYPTION
    assert await cloud.do("GET", f"{path}/cipher", token=ADMIN) == {"cipher": "aes-xts-plain64"}
    assert (await cloud.call("GET", f"{path}/zork", token=ADMIN)).status == 404
    one = f"{path}/{shown['encryption_id']}"
    await cloud.do("PUT", one, {"encryption": {"key_size": "512"}}, token=ADMIN)
    assert (await cloud.do("GET", path, token=ADMIN))["key_size"] == 512
    assert (await cloud.call("DELETE", f"{path}/{uuid.uuid4()}", token=ADMIN)).status == 404
    await cloud.do("DELETE", one, token=ADMIN)
    volume = await cloud.create(volume_type="luks")
    assert (await cloud.call("POST", path, {"encryption": ENCRYPTION}, token=ADMIN)).status == 400
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    await cloud.do("POST", path, {"encryption": ENCRYPTION}, token=ADMIN)
    await cloud.do("DELETE", f"/types/{type_['id']}", token=ADMIN)
    assert (await cloud.call("GET", path, token=ADMIN)).status == 404


async def backup_of(cloud: World, content: bytes) -> dict[str, Any]:
    volume = await cloud.create(metadata={"k": "v"})
    with (cloud.directory / "volumes" / volume["id"]).open("r+b") as stream:
        stream.write(content)
    made: dict[str, Any] = await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"], "name": "b"}})
    return await cloud.until(f"/backups/{made['backup']['id']}", "available")


def changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    found = json.loads(base64.b64decode(record["backup_url"])) | fields
    return {**record, "backup_url": base64.b64encode(json.dumps(found).encode()).decode()}


async def test_a_backup_is_found_again_by_its_record(cloud: World) -> None:
    """After its row is lost, and a second time under another id; each can be deleted without the other."""
    backup = await backup_of(cloud, b"precious")
    path = f"/backups/{backup['id']}"
    assert (await cloud.call("GET", f"{path}/export_record")).status == 403
    record = (await cloud.do("GET", f"{path}/export_record", token=ADMIN))["backup-record"]
    await cloud.database.write(lambda conn: conn.execute(backups.delete()))
    await cloud.database.write(lambda conn: conn.execute(usages.delete().where(sa.literal(True))))
    again = (await cloud.do("POST", "/backups/import_record", {"backup-record": record}, token=ADMIN))["backup"]
    assert again["id"] == backup["id"]
    assert (await cloud.call("POST", "/backups/import_record", {"backup-record": record}, token=ADMIN)).status == 400
    shown = await cloud.until(path, "available")
    assert (shown["name"], shown["size"], shown["volume_id"]) == ("b", 1, backup["volume_id"])
    other = {"backup-record": changed(record, id=str(uuid.uuid4()))}
    copy = (await cloud.do("POST", "/backups/import_record", other, token=ADMIN))["backup"]
    await cloud.until(f"/backups/{copy['id']}", "available")
    await cloud.do("DELETE", path, token=ADMIN)
    await cloud.until(path, "")
    restored = (await cloud.do("POST", f"/backups/{copy['id']}/restore", {"restore": {}}, token=ADMIN))["restore"]
    await cloud.until(f"/volumes/{restored['volume_id']}", "available")
    with (cloud.directory / "volumes" / restored["volume_id"]).open("rb") as stream:
        assert stream.read(9) == b"precious\0"
    quota = (await cloud.do("GET", "/os-quota-sets/p0?usage=true", token=ADMIN))["quota_set"]
    assert (quota["backups"]["in_use"], quota["backup_gigabytes"]["in_use"]) == (1, 1)


async def test_records_that_lead_nowhere(cloud: World) -> None:
    backup = await backup_of(cloud, b"x")
    record = (await cloud.do("GET", f"/backups/{backup['id']}/export_record", token=ADMIN))["backup-record"]
    fields = ({"file": str(uuid.uuid4())}, {"size": 2})
    for each in fields:
        wrong = changed(record, id=str(uuid.uuid4()), **each)
        made = (await cloud.do("POST", "/backups/import_record", {"backup-record": wrong}, token=ADMIN))["backup"]
        async with asyncio.timeout(20):
            while True:
                shown = (await cloud.do("GET", f"/backups/{made['id']}", token=ADMIN))["backup"]
                if shown["status"] == "error":
                    break
                await asyncio.sleep(0.005)
        assert "not found" in shown["fail_reason"]
    assert cloud.files("backups") == [backup["id"]]
    for wrong in (
        {**record, "backup_service": "swift"},
        {**record, "backup_url": "!"},
        {**record, "backup_url": "bm90IGEgcmVjb3Jk"},
        changed(record, id="../../etc/passwd"),
        changed(record, file="../volumes/x"),
        changed(record, size=-1),
        changed(record, size=2**63),
    ):
        assert (await cloud.call("POST", "/backups/import_record", {"backup-record": wrong}, token=ADMIN)).status == 400
    for status in ("error", "available"):
        action = {"os-reset_status": {"status": status}}
        await cloud.do("POST", f"/backups/{backup['id']}/action", action, token=ADMIN)
        found = await cloud.call("GET", f"/backups/{backup['id']}/export_record", token=ADMIN)
        assert found.status == (400 if status == "error" else 200)


async def test_hosts(cloud: World) -> None:
    volume = await cloud.create(size=3)
    await cloud.snapshot(volume["id"])
    hosts = (await cloud.do("GET", "/os-hosts", token=ADMIN))["hosts"]
    assert {each["host_name"] for each in hosts} == {"here", "here@files"}
    shown = [each["resource"] for each in (await cloud.do("GET", "/os-hosts/here@files", token=ADMIN))["host"]]
    numbers = {"volume_count": "1", "total_volume_gb": "3", "snapshot_count": "1", "total_snapshot_gb": "3"}
    assert shown == [{"host": "here@files", "project": project, **numbers} for project in ("(total)", "p1")]
    for path in ("/os-hosts/elsewhere", "/os-hosts/here"):
        assert (await cloud.call("GET", path, token=ADMIN)).status == 404
    for status, kept in (("disable", "disabled"), ("enable", "enabled")):
        answer = await cloud.do("PUT", "/os-hosts/here@files", {"status": status}, token=ADMIN)
        assert answer == {"host": "here@files", "status": kept}
    assert (await cloud.call("PUT", "/os-hosts/here@files", {"status": "x"}, token=ADMIN)).status == 400
    assert (await cloud.call("GET", "/os-hosts")).status == 403


async def test_a_frozen_service_keeps_what_it_has(cloud: World) -> None:
    volume = await cloud.create()
    host = {"host": "here@files"}
    await cloud.do("PUT", "/os-services/freeze", host, token=ADMIN)
    [frozen] = [
        each["frozen"] for each in (await cloud.do("GET", "/os-services?binary=cinder-volume", token=ADMIN))["services"]
    ]
    assert frozen is True
    for method, path, body in (
        ("POST", "/volumes", {"volume": {"size": 1}}),
        ("POST", "/snapshots", {"snapshot": {"volume_id": volume["id"]}}),
        ("POST", "/backups", {"backup": {"volume_id": volume["id"]}}),
        ("POST", f"/volumes/{volume['id']}/action", {"os-extend": {"new_size": 2}}),
        ("DELETE", f"/volumes/{volume['id']}", None),
    ):
        refused = await cloud.call(method, path, body)
        assert refused.status == 400
        assert "frozen" in refused.body.decode()
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "available"
    await cloud.do("PUT", "/os-services/thaw", host, token=ADMIN)
    await cloud.do("DELETE", f"/volumes/{volume['id']}")
    await cloud.until(f"/volumes/{volume['id']}", "")
    assert (await cloud.call("PUT", "/os-services/freeze", {"host": "elsewhere"}, token=ADMIN)).status == 400
    assert (await cloud.call("PUT", "/os-services/freeze", host)).status == 403

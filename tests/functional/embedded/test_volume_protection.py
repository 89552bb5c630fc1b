"""What the volume service protects: what projects share, what a tenant can use up, and guests that use a volume."""

import asyncio
import errno
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from micronova.embedded.volume.backend.exports import Export, SimulatedExports
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.store import attachment_queries, connection_queries, message_queries
from micronova.embedded.volume.tables import attachments
from micronova.objects.errors import Unavailable
from tests.unit.embedded.volume.world import ADMIN, ALICE, BOB, World, world

SERVICE = "nova@services/service"


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url, make_exports=lambda files: SimulatedExports(files.root)) as made:
        yield made


async def attach(cloud: World, volume_id: str, *, connected: bool = True) -> str:
    body: dict[str, Any] = {"volume_uuid": volume_id, "instance_uuid": str(uuid.uuid4())}
    if connected:
        body["connector"] = {"host": "compute"}
    return str((await cloud.do("POST", "/attachments", {"attachment": body}))["attachment"]["id"])


async def private_type(cloud: World, name: str = "gold", **specs: str) -> str:
    fields = {"name": name, "os-volume-type-access:is_public": False, "extra_specs": specs}
    return str((await cloud.do("POST", "/types", {"volume_type": fields}, token=ADMIN))["volume_type"]["id"])


async def transfer(cloud: World, volume_id: str) -> tuple[str, dict[str, Any]]:
    made = (await cloud.do("POST", "/volume-transfers", {"transfer": {"volume_id": volume_id}}))["transfer"]
    return f"/volume-transfers/{made['id']}/accept", {"accept": {"auth_key": made["auth_key"]}}


@pytest.mark.parametrize("legacy", [False, True])
async def test_only_compute_ends_an_attachment_that_a_server_uses(cloud: World, legacy: bool) -> None:
    """Else a guest would go on to write to a volume that the next server has (bug 2004555 of Cinder)."""
    volume = await cloud.create()
    attachment = await attach(cloud, volume["id"])
    await cloud.do("POST", f"/attachments/{attachment}/action", {"os-complete": {}})
    method, path, body = "DELETE", f"/attachments/{attachment}", None
    if legacy:
        method, path, body = "POST", f"/volumes/{volume['id']}/action", {"os-detach": {"attachment_id": attachment}}
    refused = await cloud.call(method, path, body)
    assert refused.status == 409
    assert "detach it there" in refused.body.decode()
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["status"] == "in-use"
    await cloud.do(method, path, body, token=SERVICE)
    await cloud.until(f"/volumes/{volume['id']}", "available")


async def test_a_service_token_beside_the_users(cloud: World) -> None:
    volume = await cloud.create()
    path = f"/v3/attachments/{await attach(cloud, volume['id'])}"
    headers = {"openstack-api-version": "volume 3.71", "x-auth-token": ALICE}
    for token, status in ((BOB, 409), (SERVICE, 200)):
        answer = await cloud._transport.request("DELETE", path, {**headers, "x-service-token": token}, None)
        assert answer.status == status


async def test_a_user_ends_what_no_server_uses(cloud: World) -> None:
    volume = await cloud.create()
    await cloud.do("DELETE", f"/attachments/{await attach(cloud, volume['id'], connected=False)}")
    await cloud.until(f"/volumes/{volume['id']}", "available")


async def test_a_volume_has_a_limited_number_of_attachments(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment_queries, "MOST_ATTACHMENTS", 3)
    fields = {"name": "shared", "extra_specs": {"multiattach": "<is> True"}}
    await cloud.do("POST", "/types", {"volume_type": fields}, token=ADMIN)
    volume = await cloud.create(volume_type="shared")
    for _ in range(3):
        await attach(cloud, volume["id"])
    body = {"attachment": {"volume_uuid": volume["id"], "instance_uuid": str(uuid.uuid4())}}
    assert (await cloud.call("POST", "/attachments", body)).status == 413


async def test_image_metadata_does_not_grow_without_end(cloud: World) -> None:
    volume = await cloud.create()
    for begin, status in ((0, 200), (100, 413), (0, 200)):
        items = {f"key{number}": "v" for number in range(begin, begin + 100)}
        assert (await cloud.act(volume["id"], "os-set_image_metadata", metadata=items)).status == status


async def test_messages_do_not_grow_without_end(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queries, "MOST_MESSAGES", 3)
    body = {"binary": "cinder-volume", "host": "here@files"}
    await cloud.do("PUT", "/os-services/disable", body, token=ADMIN)
    failed = []
    for token in (BOB, *[ALICE] * 5):
        volume = await cloud.create(token=token, wait=None)
        failed.append(volume["id"])
        async with asyncio.timeout(20):
            while (await cloud.do("GET", f"/volumes/{volume['id']}", token=token))["volume"]["status"] != "error":
                await asyncio.sleep(0.005)
    for token, kept in ((ALICE, failed[:2:-1]), (BOB, failed[:1])):
        told = (await cloud.do("GET", "/messages", token=token))["messages"]
        assert [each["resource_uuid"] for each in told] == kept


@pytest.mark.parametrize("query", [
    "name=" + "," * 5000,
    "&".join(f"status=s{number}" for number in range(900)),
    "created_at=" + ",".join(["gt:2026-01-01T00:00:00"] * 1500),
    "metadata=" + quote(str({f"k{number}": "v" for number in range(2000)})),
])  # fmt: skip
async def test_a_query_string_has_a_limited_number_of_values(cloud: World, query: str) -> None:
    for path in ("/volumes", "/volumes/detail", "/volumes/summary", "/snapshots", "/backups"):
        answer = await cloud.call("GET", f"{path}?{query}")
        assert answer.status == 400, (path, answer)
        assert "values" in answer.body.decode()


async def test_a_transfer_does_not_give_a_type_away(cloud: World) -> None:
    type_id = await private_type(cloud)
    await cloud.do("POST", f"/types/{type_id}/action", {"addProjectAccess": {"project": "p1"}}, token=ADMIN)
    volume = await cloud.create(volume_type="gold")
    path, key = await transfer(cloud, volume["id"])
    assert (await cloud.call("POST", path, key, token=BOB)).status == 400
    await cloud.do("POST", f"/types/{type_id}/action", {"addProjectAccess": {"project": "p2"}}, token=ADMIN)
    await cloud.do("POST", path, key, token=BOB)
    assert (await cloud.do("GET", f"/volumes/{volume['id']}", token=BOB))["volume"]["volume_type"] == "gold"


async def test_a_transfer_keeps_the_size_limit_of_the_new_project(cloud: World) -> None:
    await cloud.do("PUT", "/os-quota-sets/p2", {"quota_set": {"per_volume_gigabytes": 1}}, token=ADMIN)
    volume = await cloud.create(size=2)
    path, key = await transfer(cloud, volume["id"])
    assert (await cloud.call("POST", path, key, token=BOB)).status == 413


async def test_a_transfer_takes_only_snapshots_that_are_available(cloud: World) -> None:
    volume = await cloud.create()
    snapshot = await cloud.snapshot(volume["id"])
    action = f"/snapshots/{snapshot['id']}/action"
    path, key = await transfer(cloud, volume["id"])
    await cloud.do("POST", action, {"os-reset_status": {"status": "error"}}, token=ADMIN)
    assert (await cloud.call("POST", path, key, token=BOB)).status == 400
    await cloud.do("POST", action, {"os-reset_status": {"status": "available"}}, token=ADMIN)
    await cloud.do("POST", path, key, token=BOB)
    assert (await cloud.do("GET", "/snapshots", token=BOB))["snapshots"][0]["id"] == snapshot["id"]


async def test_a_transfer_takes_a_snapshot_from_who_is_about_to_delete_it(
    cloud: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = await cloud.create()
    snapshot = f"/snapshots/{(await cloud.snapshot(volume['id']))['id']}"
    path, key = await transfer(cloud, volume["id"])
    record = Core.record_operation

    async def late(self: Core, *args: Any, **kwargs: Any) -> Any:  # the request has read the snapshot
        monkeypatch.undo()
        await cloud.do("POST", path, key, token=BOB)
        return await record(self, *args, **kwargs)

    monkeypatch.setattr(Core, "record_operation", late)
    assert (await cloud.call("DELETE", snapshot)).status == 404
    assert (await cloud.do("GET", snapshot, token=BOB))["snapshot"]["status"] == "available"


async def test_a_retype_asks_what_a_create_asks(cloud: World) -> None:
    volume = await cloud.create()
    await cloud.do(
        "POST",
        "/types",
        {"volume_type": {"name": "elsewhere", "extra_specs": {"volume_backend_name": "x"}}},
        token=ADMIN,
    )
    refused = await cloud.act(volume["id"], "os-retype", new_type="elsewhere")
    assert refused.status == 400
    assert "extra specs" in refused.body.decode()
    await private_type(cloud)
    assert (await cloud.act(volume["id"], "os-retype", new_type="gold")).status == 400
    assert (await cloud.do("GET", f"/volumes/{volume['id']}"))["volume"]["volume_type"] == "__DEFAULT__"


async def test_ids_that_no_row_can_have_are_refused(cloud: World) -> None:
    for path, body in (
        (f"/os-quota-sets/{'x' * 300}", {"quota_set": {"volumes": 1}}),
        (f"/os-quota-class-sets/{'x' * 300}", {"quota_class_set": {"volumes": 1}}),
        (f"/default-types/{'x' * 300}", {"default_type": {"volume_type": "__DEFAULT__"}}),
    ):
        assert (await cloud.call("PUT", path, body, token=ADMIN)).status == 400


async def test_an_image_of_a_volume_has_the_properties_of_the_volumes_image(cloud: World) -> None:
    image = cloud.images.add(b"x", hw_firmware_type="uefi", os_glance_import_task="x", img_signature="s", min_ram=64)
    volume = await cloud.create(imageRef=image)
    made = await cloud.act(volume["id"], "os-volume_upload_image", image_name="copy")
    document = cloud.images.documents[made.json()["os-volume_upload_image"]["image_id"]]
    assert document["hw_firmware_type"] == "uefi"
    assert not {"os_glance_import_task", "img_signature", "image_id", "min_ram"} & document.keys()
    assert document["id"] != image


async def test_types_with_an_extra_spec_are_found_on_later_pages(cloud: World) -> None:
    for name, specs in (("a", {}), ("b", {"multiattach": "<is> True"}), ("c", {})):
        await cloud.do("POST", "/types", {"volume_type": {"name": name, "extra_specs": specs}}, token=ADMIN)
        cloud.clock.time += 1
    found, path = [], "/types?limit=1&extra_specs=" + quote("{'multiattach': '<is> True'}")
    while path:
        page = await cloud.do("GET", path)
        found += [each["name"] for each in page["volume_types"]]
        path = page["volume_type_links"][0]["href"].partition("/v3")[2] if "volume_type_links" in page else ""
    assert found == ["b"]


class CountedExports(SimulatedExports):
    """Exports that nobody connects to, and that know what is served."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.now: set[str] = set()
        self.broken: set[str] = set()

    async def serve(self, export: Export) -> None:
        if export.volume_id in self.broken:
            raise Unavailable("its storage daemon ends at once")
        self.now.add(export.volume_id)

    async def stop_serving(self, volume_id: str) -> None:
        self.now.discard(volume_id)

    async def served(self) -> set[str]:
        return set(self.now)


@pytest.mark.parametrize("how", ["delete", "revert", "restore"])
async def test_a_file_that_goes_is_not_served(tmp_path: Path, how: str) -> None:
    """A volume that is served has a process, and its file stays on the disk: no quota counts those of deleted ones."""
    made: list[CountedExports] = []

    def exports(files: Files) -> CountedExports:
        made.append(CountedExports(files.root))
        return made[0]

    async with world(tmp_path, make_exports=exports) as cloud:
        volume = await cloud.create()
        path = f"/volumes/{volume['id']}"
        snapshot = await cloud.snapshot(volume["id"]) if how == "revert" else {"id": None}
        backup: dict[str, Any] = {"id": None}
        if how == "restore":
            backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]
            await cloud.until(f"/backups/{backup['id']}", "available")
        answer = await cloud.act(volume["id"], "os-initialize_connection", connector={"host": "compute"})
        assert answer.status == 200 and made[0].now == {volume["id"]}
        if how == "delete":
            await cloud.do("DELETE", path)
            await cloud.until(path, "")
        elif how == "revert":
            assert (await cloud.act(volume["id"], "revert", snapshot_id=snapshot["id"])).status == 202
            await cloud.until(path, "available")
        else:
            await cloud.do("POST", f"/backups/{backup['id']}/restore", {"restore": {"volume_id": volume["id"]}})
            await cloud.until(path, "available")
        assert made[0].now == set()


@pytest.mark.parametrize("how", ["revert", "restore"])
async def test_the_file_of_an_attached_volume_is_not_replaced(tmp_path: Path, how: str) -> None:
    """The guest would go on to write to the old one, which is lost; an administrator may have set the status."""
    async with world(tmp_path, make_exports=lambda files: SimulatedExports(files.root)) as cloud:
        volume = await cloud.create()
        snapshot = await cloud.snapshot(volume["id"])
        backup = (await cloud.do("POST", "/backups", {"backup": {"volume_id": volume["id"]}}))["backup"]
        await cloud.until(f"/backups/{backup['id']}", "available")
        await attach(cloud, volume["id"])
        await cloud.act(volume["id"], "os-reset_status", token=ADMIN, status="available")
        if how == "revert":
            answer = await cloud.act(volume["id"], "revert", snapshot_id=snapshot["id"])
        else:
            body = {"restore": {"volume_id": volume["id"]}}
            answer = await cloud.call("POST", f"/backups/{backup['id']}/restore", body)
        assert answer.status in (400, 409) and "attached" in answer.body.decode(), answer


async def test_a_volume_that_cannot_be_served_does_not_keep_others(tmp_path: Path) -> None:
    """After a restart all are served but this one, which is tried again."""
    made: list[CountedExports] = []

    def exports(files: Files) -> CountedExports:
        made.append(CountedExports(files.root))
        return made[0]

    async def until_served(wanted: set[str]) -> None:
        async with asyncio.timeout(20):
            while made[0].now != wanted:
                await asyncio.sleep(0.005)

    async with world(tmp_path, make_exports=exports) as cloud:
        ids = {(await cloud.create())["id"] for _ in range(3)}
        for each in ids:
            await attach(cloud, each)
        await cloud.role.export_manager.stop()
        for broken in ids:
            made[0].now, made[0].broken = set(), {broken}
            await cloud.role.export_manager.start()
            await until_served(ids - {broken})
            made[0].broken = set()
            await until_served(ids)
            await cloud.role.export_manager.stop()


async def test_a_connection_without_an_attachment_outlives_a_restart(tmp_path: Path) -> None:
    """One by os-initialize_connection, of a volume that os-attach has attached; it ends when both hosts end theirs."""
    made: list[CountedExports] = []

    def exports(files: Files) -> CountedExports:
        made.append(CountedExports(files.root))
        return made[0]

    async with world(tmp_path, make_exports=exports) as cloud:
        volume = (await cloud.create())["id"]
        for host in ("one", "two"):
            answer = await cloud.act(volume, "os-initialize_connection", connector={"host": host})
            assert answer.status == 200
        attached = await cloud.act(volume, "os-attach", mountpoint="/dev/vdb", instance_uuid=str(uuid.uuid4()))
        assert attached.status == 202
        await cloud.role.export_manager.stop()
        made[0].now = set()  # another exporter
        await cloud.role.export_manager.start()
        async with asyncio.timeout(20):
            while made[0].now != {volume}:
                await asyncio.sleep(0.005)
        for host, left in (("two", {volume}), ("one", set())):
            await cloud.act(volume, "os-terminate_connection", connector={"host": host})
            assert made[0].now == left
        await cloud.act(volume, "os-initialize_connection", connector={"host": "one"})
        assert (await cloud.act(volume, "os-detach")).status == 202
        assert made[0].now == set()


async def test_a_volume_has_a_limited_number_of_connections(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_queries, "MOST_CONNECTIONS", 2)
    volume = (await cloud.create())["id"]
    for host, status in (("a", 200), ("b", 200), ("b", 200), ("c", 413)):
        answer = await cloud.act(volume, "os-initialize_connection", connector={"host": host})
        assert answer.status == status, host


async def test_quotas_do_not_name_the_private_types_of_others(cloud: World) -> None:
    gold = await private_type(cloud, "gold")
    await private_type(cloud, "secret")
    await cloud.do("POST", f"/types/{gold}/action", {"addProjectAccess": {"project": "p1"}}, token=ADMIN)
    for path in ("/os-quota-sets/p1", "/os-quota-sets/p1?usage=true", "/os-quota-sets/p1/defaults"):
        own = (await cloud.do("GET", path))["quota_set"]
        assert "volumes_gold" in own and "volumes___DEFAULT__" in own and not any("secret" in name for name in own)
        assert "volumes_secret" in (await cloud.do("GET", path, token=ADMIN))["quota_set"]
    other = (await cloud.do("GET", "/os-quota-sets/p2", token=BOB))["quota_set"]
    assert not any("gold" in name or "secret" in name for name in other)
    limits = {"quota_set": {"volumes_secret": 5}}
    assert (await cloud.do("PUT", "/os-quota-sets/p1", limits, token=ADMIN))["quota_set"]["volumes_secret"] == 5


async def test_what_a_connector_says_is_not_kept(cloud: World) -> None:
    """Each show of a volume reads all its attachments: users must not decide how large these are."""
    volume, large = (await cloud.create())["id"], "x" * 100_000
    attachment = await attach(cloud, volume)
    body = {"attachment": {"connector": {"host": "compute", "mountpoint": f"/dev/{large}", "wwpns": [large[:9_000]]}}}
    assert (await cloud.do("PUT", f"/attachments/{attachment}", body))["attachment"]["status"] == "attaching"
    [row] = await cloud.database.read(lambda conn: conn.execute(sa.select(attachments)).all())
    assert len(str(tuple(row))) < 4_000


async def test_a_server_has_one_reservation_of_a_volume(cloud: World) -> None:
    """Compute asks again if the answer was lost; the first one must not stay for ever."""
    volume = await cloud.create()
    server = str(uuid.uuid4())
    wanted = {"attachment": {"volume_uuid": volume["id"], "instance_uuid": server}}
    first, again = [(await cloud.do("POST", "/attachments", wanted))["attachment"]["id"] for _ in range(2)]
    assert first == again
    other = {"attachment": {**wanted["attachment"], "instance_uuid": str(uuid.uuid4())}}
    assert (await cloud.call("POST", "/attachments", other)).status == 400
    await cloud.do("PUT", f"/attachments/{first}", {"attachment": {"connector": {"host": "a"}}})
    moved = (await cloud.do("POST", "/attachments", wanted))["attachment"]["id"]  # it moves to another host
    assert moved != first
    for each in (moved, first):
        await cloud.do("DELETE", f"/attachments/{each}", token=SERVICE)
    await cloud.until(f"/volumes/{volume['id']}", "available")


class BusyExports(SimulatedExports):
    """Exports of an exporter that is started again on a machine that lacks something for a moment."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.lacks: list[OSError] = []
        self.ended, self.serving = asyncio.Event(), asyncio.Event()

    async def serve(self, export: Export) -> None:
        if self.lacks:
            raise self.lacks.pop()
        self.serving.set()

    async def wait_for_end(self) -> None:
        await self.ended.wait()
        self.ended.clear()


async def test_a_lack_for_the_moment_does_not_leave_guests_without_their_volume(tmp_path: Path) -> None:
    exports = BusyExports(tmp_path)
    async with world(tmp_path, make_exports=lambda files: exports) as cloud:
        await attach(cloud, (await cloud.create())["id"])
        exports.lacks.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        exports.serving.clear()
        exports.ended.set()
        async with asyncio.timeout(60):
            await exports.serving.wait()
        assert exports.lacks == []

"""Images of servers when something dies or lies: what was begun ends, and no image is left without data."""

import asyncio
import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit, run_repair
from micronova.clients.image.client import ImageClient
from micronova.conductor.operations import create_image
from micronova.conductor.rpcapi import HOSTS, PROGRESS, HostConductorAPI
from micronova.db.tables import operations
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Progress
from micronova.servers import images as server_images
from micronova.servers.actions import ServerActions
from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import call, image
from tests.functional.servers.killable_host import KillableHost, killable_host
from tests.functional.servers.test_server_images import becomes, boot, image_gone, last_action, shown, snapshot
from tests.functional.servers.test_shelve import images_of

__all__ = ["killable_host"]

pytestmark = only_in_one_process("kills hosts and the API, and watches the notifier, of the cloud's process")
CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 2.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
BACKUP = {"name": "b", "backup_type": "daily", "rotation": 1}


# --- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_a_host_that_dies_makes_the_image_when_it_is_back(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, step: str
) -> None:
    await killable_host.start({"operation": step, "kind": "hang"})
    server = await boot(user)
    assert await user.host_of(server) == killable_host.name
    made = await snapshot(user, server)
    await user.wait_for(server, "ACTIVE", task="image_pending_upload" if step == "snapshot" else "image_uploading")
    await killable_host.kill()
    await killable_host.wait_until_down()
    assert (await user.show(server))["OS-EXT-STS:task_state"] is not None
    await killable_host.start()
    await becomes(user, made, "active")
    await user.wait_for(server, "ACTIVE")
    await cloud.assert_clean()


@pytest.mark.parametrize("action", ["createImage", "createBackup"])
async def test_a_report_that_dies_with_its_host_is_not_missed(
    cloud: OneProcess, user: Caller, killable_host: KillableHost, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is complete: the conductor sees that without the host, and deletes older backups."""
    await killable_host.start()
    server = await boot(user)
    older = (await user.act(server, "createBackup", BACKUP))["image_id"]
    await user.wait_for(server, "ACTIVE")
    uploaded = asyncio.Event()

    async def report(self: HostConductorAPI, report: Any, context: Any) -> None:
        uploaded.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(HostConductorAPI, "report", report)
    made = (await user.act(server, action, BACKUP if action == "createBackup" else {"name": "i"}))["image_id"]
    await uploaded.wait()
    await killable_host.kill()
    await user.wait_for(server, "ACTIVE")
    assert (await shown(user, made))["status"] == "active"
    assert ((await call(user, "GET", f"/image/v2/images/{older}")).status == 404) == (action == "createBackup")
    assert (await last_action(user, server))[1] is None
    monkeypatch.undo()
    await killable_host.start()


async def test_a_host_that_cannot_make_images(
    cloud: OneProcess, user: Caller, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {"snapshot"})
    name = f"unable-{uuid.uuid4().hex[:6]}"
    host = KillableHost(cloud, name, tmp_path_factory.mktemp(name), memory_mb=1 << 24, vcpus=4096, local_gb=1 << 20)
    await host.start()
    try:
        server = await boot(user)
        assert await user.host_of(server) == name
        for body in ({"createImage": {"name": "i"}}, {"createBackup": BACKUP}):
            assert "not able to" in await user.refused(501, "POST", f"/servers/{server}/action", body)
        assert (await user.show(server))["OS-EXT-STS:task_state"] is None
        await cloud.delete_all()
        await cloud.assert_clean()
    finally:
        await host.stop()


async def test_a_host_reports_progress_of_its_own_operation_only(cloud: OneProcess, user: Caller) -> None:
    victim, server = await boot(user), await boot(user, name=user.project)
    bus = cloud.process.bus
    assert bus is not None

    async def told(**changes: Any) -> bool:
        [operation] = await cloud.open_operations()
        known = {
            "operation_id": operation.id, "epoch": operation.epoch, "instance_uuid": server,
            "host": operation.owner.removeprefix("host:"), "task_state": "image_uploading",
        }  # fmt: skip
        progress = Progress(**(known | changes))
        reply = await bus.call(HOSTS.target(), PROGRESS, progress, context=Context(), timeout=10.0)
        assert (reply.upload_url is not None) == (reply.accepted and progress.task_state == "image_uploading")
        return reply.accepted

    async def task(id: str) -> Any:
        return (await user.show(id))["OS-EXT-STS:task_state"]

    async with cloud.faults({"operation": "snapshot", "kind": "hang", "name": user.project}):
        made = await snapshot(user, server)
        await user.wait_for(server, "ACTIVE", task="image_pending_upload")
        home = await user.host_of(server)
        [other] = [host for host in cloud.hosts if host != home]
        for wrong in ({"instance_uuid": victim}, {"epoch": 1}, {"host": other}, {"operation_id": victim}):
            assert not await told(**wrong)
            assert (await task(server), await task(victim)) == ("image_pending_upload", None)
        for state in ("deleting", "image_snapshot", "image_pending_upload", "image_backup", "spawning"):
            assert await told(task_state=state), "it is its operation"
            assert await task(server) == "image_pending_upload", "but goes only on, through its own states"
        assert await told()
        assert await task(server) == "image_uploading"
        await user.delete(f"/servers/{server}")
        await user.gone(server)
    await image_gone(user, made)


# --- deadlines and services ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_a_deadline_deletes_the_image(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    server = await boot(user, name=user.project)
    record = ServerActions.check_and_record

    def soon(self: ServerActions, *args: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._recorder, "_timeout", 1.0)
            return record(self, *args, **named)

    monkeypatch.setattr(ServerActions, "check_and_record", soon)
    async with cloud.faults({"operation": step, "kind": "hang", "name": user.project}):
        made = await snapshot(user, server)
        await image_gone(user, made)
        await user.wait_for(server, "ACTIVE")
        await cloud.settled()
    assert (await last_action(user, server))[1] == "Error"
    await cloud.assert_clean()


async def test_an_image_service_that_is_away_keeps_no_server_busy(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await boot(user, name=user.project)

    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("The image service is away.")

    async with cloud.faults({"operation": "snapshot", "kind": "fail", "name": user.project}):
        with monkeypatch.context() as context:
            context.setattr(ImageClient, "_manage", away)
            made = await snapshot(user, server)
            await user.wait_for(server, "ACTIVE")
            [operation] = await cloud.open_operations()
            assert operation.step == "cleanup"
            await user.act(server, "os-stop")  # it does not wait for the image
            await user.wait_for(server, "SHUTOFF")
            assert (await shown(user, made))["status"] == "queued"
            await user.delete(f"/servers/{server}")  # neither does it
            await user.gone(server)
            assert (await user.get("/limits"))["limits"]["absolute"]["totalInstancesUsed"] == 0
        await image_gone(user, made)
    await cloud.assert_clean()


async def test_a_shelved_server_is_deleted_while_the_image_service_is_away(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner gets the quota back, and the image is deleted later."""
    server = await boot(user)
    await user.act(server, "shelve")
    await user.wait_for(server, "SHELVED_OFFLOADED")
    [made] = await images_of(user, server)

    async def away(*_: Any, **__: Any) -> None:
        raise Unavailable("The image service is away.")

    with monkeypatch.context() as context:
        context.setattr(ImageClient, "_manage", away)
        await user.delete(f"/servers/{server}")
        await user.gone(server)
        assert (await user.get("/limits"))["limits"]["absolute"]["totalInstancesUsed"] == 0
        assert [row.kind for row in await cloud.open_operations()] == ["discard_image"]
    await image_gone(user, made["id"])
    await cloud.assert_clean()


@pytest.mark.parametrize(("action", "created"), [("createImage", True), ("createImage", False), ("shelve", False)])
async def test_an_api_that_dies_before_it_has_an_answer(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, action: str, created: bool
) -> None:
    """Whether or not the image was created: in the end there is none without data, and the server is free.

    A shelve without an image does not switch the guest off.
    """
    for module in (server_images, create_image):
        monkeypatch.setattr(module, "IMAGE_CREATION_TIME", 1.0)
    server = await boot(user, name=user.project)
    create = ImageClient.create
    asked = asyncio.Event()

    async def dies(self: ImageClient, document: Any, *args: Any, **named: Any) -> None:
        if created:
            await create(self, document, *args, **named)
        asked.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(ImageClient, "create", dies)
    request = asyncio.create_task(user.request("POST", f"/servers/{server}/action", {action: {"name": "i"}}))
    await asked.wait()
    task = "shelving" if action == "shelve" else "image_snapshot_pending"
    assert (await user.show(server))["OS-EXT-STS:task_state"] == task
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await user.wait_for(server, "ACTIVE")
    monkeypatch.setattr(ImageClient, "create", create)
    await cloud.assert_clean()
    assert (await last_action(user, server))[1] == (None if created else "Error")


@pytest.mark.parametrize("late", [True, False])
async def test_a_server_that_is_deleted_before_its_image_is_created(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    server = await boot(user)
    create = ImageClient.create
    made: list[str] = []
    go_on = asyncio.Event()

    async def waits(self: ImageClient, document: Any, *args: Any, **named: Any) -> None:
        made.append(document["id"])
        if not late:
            await create(self, document, *args, **named)
        await user.delete(f"/servers/{server}")
        await go_on.wait()
        if late:
            await create(self, document, *args, **named)

    monkeypatch.setattr(ImageClient, "create", waits)
    request = asyncio.create_task(user.request("POST", f"/servers/{server}/action", {"createImage": {"name": "i"}}))

    async def deleting() -> bool | None:
        kinds = {row.kind for row in await cloud.open_operations()}
        return True if "delete" in kinds or not kinds else None

    await cloud.until(deleting, "the delete")
    go_on.set()
    assert (await request).status in (409, 404)
    monkeypatch.undo()
    await user.gone(server)
    await image_gone(user, made[0])
    await cloud.assert_clean()


async def test_without_an_image_service_nothing_is_made(user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await boot(user)
    monkeypatch.setattr(ImageClient, "takes_uploads", False)
    for body in ({"createImage": {"name": "i"}}, {"createBackup": BACKUP}):
        await user.refused(501, "POST", f"/servers/{server}/action", body)


async def test_the_audit_finds_an_image_without_data(cloud: OneProcess, user: Caller) -> None:
    server = await boot(user, name=user.project)
    async with cloud.faults({"operation": "snapshot", "kind": "fail", "name": user.project}):
        made = await snapshot(user, server)
        await image_gone(user, made)
    await cloud.assert_clean()
    left = await image(user, upload=False)
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(sa.update(operations).where(operations.c.id == made).values(id=left))
    )
    [found] = await run_audit(cloud.process)
    assert (found["kind"], found["subject"]) == ("image", left)
    assert await run_repair(cloud.process, found["repairs"][0]) == f"deleted image {left}"
    assert await run_repair(cloud.process, found["repairs"][0]) == ""
    await cloud.assert_clean()


# --- notifications ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "value"), [("createImage", {"name": "i"}), ("createBackup", BACKUP)])
async def test_notifications_name_the_image(
    cloud: OneProcess, user: Caller, monkeypatch: pytest.MonkeyPatch, action: str, value: dict[str, Any]
) -> None:
    server = await boot(user)
    sent: list[tuple[str, str | None, Any]] = []

    def instance(
        event: str, row: Any, *, context: Any, fault: Any = None, details: Any = None, sender: Any = None
    ) -> None:
        sent.append((event, row["task_state"], details))

    monkeypatch.setattr(cloud.process.notifier, "instance", instance)
    made = (await user.act(server, action, value))["image_id"]
    await user.wait_for(server, "ACTIVE")
    await cloud.settled()

    async def both() -> bool | None:
        return True if len(sent) == 2 else None

    await cloud.until(both, "the notifications")
    details = {"snapshot_image_id": made}
    pending = "image_snapshot_pending" if action == "createImage" else "image_backup"
    assert sent == [("snapshot.start", pending, details), ("snapshot.end", None, details)]

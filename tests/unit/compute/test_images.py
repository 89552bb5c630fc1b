"""Images of guests: what the host tells meanwhile, how many it makes at once, and what becomes of an upload."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from micronova.http.image_uploads import ImageUploads
from micronova.objects.errors import OperationFailed, Unavailable
from micronova.objects.image import ImageMeta
from micronova.objects.orders import HostReply, ProgressReply
from tests.clocks import settle
from tests.unit.compute.agent_harness import AgentHarness, order


class Uploads(ImageUploads):
    """Keeps what is uploaded."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, bytes] = {}
        self.error: Exception | None = None

    async def put(self, url: str, chunks: AsyncGenerator[bytes, None], size: int) -> None:
        data = b"".join([chunk async for chunk in chunks])
        assert len(data) == size
        if self.error is not None:
            raise self.error
        self.received[url] = data


@pytest.fixture
def uploads(harness: AgentHarness) -> Uploads:
    made = Uploads()
    for agent in harness.manager._agents.values():
        agent.host.uploads = made
    harness.conductor.judge_progress = lambda progress: ProgressReply(
        accepted=True, upload_url="http://image?ticket=t" if progress.task_state == "image_uploading" else None
    )
    return made


def test_urls_of_images_have_the_name_that_older_versions_read() -> None:
    for message in (order(image_url="http://image"), ProgressReply(accepted=True, upload_url="http://image")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message))["image_ticket"] == "http://image"


@pytest.mark.parametrize("kind", ["create_image", "create_backup"])
async def test_the_disk_is_copied_and_uploaded(harness: AgentHarness, uploads: Uploads, kind: str) -> None:
    await harness.carry_out(order())
    asked = order(kind, epoch=3)
    report = await harness.carry_out(asked)
    assert (report.outcome, report.epoch, report.power_state) == ("done", 3, None)
    told = harness.conductor.progresses
    assert [each.task_state for each in told] == ["image_uploading"], "nobody could have seen that a copy was awaited"
    assert {(each.operation_id, each.epoch, each.host) for each in told} == {(asked.operation_id, 3, "host-1")}
    [(url, data)] = uploads.received.items()
    assert url == "http://image?ticket=t&disk_format=qcow2&container_format=bare"
    assert data.startswith(b"QFI\xfb")


async def test_the_conductor_is_asked_until_it_answers(harness: AgentHarness, uploads: Uploads) -> None:
    await harness.carry_out(order())
    harness.conductor.unavailable = True
    await harness.send(order("create_image", epoch=3))
    await harness.clock.advance(5)
    assert not uploads.received
    harness.conductor.unavailable = False
    await harness.clock.advance(20)
    assert (await harness.conductor.next_report()).outcome == "done"


async def test_a_host_that_has_lost_the_operation_uploads_nothing(harness: AgentHarness, uploads: Uploads) -> None:
    await harness.carry_out(order())
    harness.conductor.judge_progress = lambda _: ProgressReply(accepted=False)
    assert (await harness.carry_out(order("create_image", epoch=3))).outcome == "error"
    assert not uploads.received


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("busy"), "unavailable"), (OperationFailed("too large"), "operation_failed")]
)
async def test_an_upload_that_is_refused(harness: AgentHarness, uploads: Uploads, error: Exception, code: str) -> None:
    await harness.carry_out(order())
    uploads.error = error
    report = await harness.carry_out(order("create_image", epoch=3))
    assert (report.outcome, report.error_code, report.message) == ("error", code, str(error))
    assert report.temporary == (code == "unavailable")


async def test_without_a_ticket_nothing_is_uploaded(harness: AgentHarness, uploads: Uploads) -> None:
    await harness.carry_out(order())
    harness.conductor.judge_progress = lambda _: ProgressReply(accepted=True)
    report = await harness.carry_out(order("create_image", epoch=3))
    assert (report.outcome, report.error_code) == ("error", "not_supported")


async def test_only_some_images_are_made_at_once(harness: AgentHarness, uploads: Uploads) -> None:
    most = harness.settings.max_concurrent_snapshots
    numbers = range(most + 2)
    for number in numbers:
        await harness.carry_out(order(uuid=f"i-{number}"))
    await harness.rules({"operation": "snapshot", "kind": "delay", "delay": 10})
    for number in numbers:
        project = f"p-{number}"
        await harness.send(order("create_image", uuid=f"i-{number}", epoch=3, instance_project_id=project))
    assert harness.driver.fault_rules()[0]["hits"] == most
    await harness.clock.advance(10)
    assert harness.driver.fault_rules()[0]["hits"] == len(numbers)
    await harness.clock.advance(10)
    assert len(uploads.received) == 1 and harness.running_operations() == []


async def test_images_of_one_project_do_not_keep_others_waiting(harness: AgentHarness, uploads: Uploads) -> None:
    """Its uploads may last for hours."""
    most = harness.settings.max_concurrent_snapshots
    many = [f"many-{number}" for number in range(2 * most)]
    for uuid in (*many, "other"):
        await harness.carry_out(order(uuid=uuid))
    await harness.rules({"operation": "snapshot", "kind": "hang", "name": "^server-many"})
    for uuid in many:
        await harness.send(order("create_image", uuid=uuid, epoch=3, instance_project_id="many"))
    assert harness.driver.fault_rules()[0]["hits"] == most - 1
    report = await harness.carry_out(order("create_image", uuid="other", epoch=3, instance_project_id="other"))
    assert (report.instance_uuid, report.outcome) == ("other", "done")


async def test_an_order_that_is_dropped_stops_the_upload(harness: AgentHarness, uploads: Uploads) -> None:
    await harness.carry_out(order())
    await harness.rules({"operation": "upload", "kind": "hang"})
    asked = order("create_image", epoch=3)
    await harness.send(asked)
    await harness.beat()
    await harness.beat(reply=HostReply(host="host-1", drop=(asked.operation_id,)))
    await settle()
    assert harness.running_operations() == [] and not uploads.received


# --- the upload itself -----------------------------------------------------------------------------------------------


async def _chunks(*parts: bytes | Exception) -> AsyncGenerator[bytes, None]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


class Application:
    """An image service of this process that reads what it is sent and answers as it is told."""

    def __init__(self, status: int = 204, *, reads: bool = True) -> None:
        self.status = status
        self.reads = reads
        self.scope: dict[str, Any] = {}
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        for _ in itertools.count() if self.reads else ():
            event = await receive()
            self.body += event.get("body", b"")
            if not event.get("more_body"):
                break
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"message": "why"}'})


def _uploads(application: Application) -> ImageUploads:
    return ImageUploads(here=lambda: "http://here/image", application=application)


async def test_the_service_of_this_process_gets_the_image_without_a_socket() -> None:
    service = Application()
    await _uploads(service).put("http://here/image/v2/images/i/file?ticket=t", _chunks(b"ab", b"c"), 3)
    assert service.body == b"abc"
    assert (service.scope["path"], service.scope["query_string"]) == ("/v2/images/i/file", b"ticket=t")
    assert (b"content-length", b"3") in service.scope["headers"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, OperationFailed),
        (401, OperationFailed),
        (404, OperationFailed),
        (413, OperationFailed),
        (409, Unavailable),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
@pytest.mark.parametrize("reads", [True, False])
async def test_answers_of_the_service(status: int, error: type[Exception], reads: bool) -> None:
    with pytest.raises(error, match=f"{status}.*why"):
        await _uploads(Application(status, reads=reads)).put("http://here/image/x", _chunks(b"a"), 1)


async def test_an_error_of_the_copy_is_not_taken_for_one_of_the_service() -> None:
    with pytest.raises(ZeroDivisionError):
        await _uploads(Application(500)).put("http://here/image/x", _chunks(b"a", ZeroDivisionError()), 2)


async def test_a_service_that_does_not_answer() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await ImageUploads().put("http://127.0.0.1:1/image/x", _chunks(b"a"), 1)


async def test_a_service_that_takes_it_later_by_http() -> None:
    """A 413 with Retry-After passes: the project has other uploads under way."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="413"):
            await ImageUploads().put(f"http://127.0.0.1:{port}/image/x", _chunks(b"a"), 1)


async def test_a_unix_socket_that_nobody_has_named_is_not_used() -> None:
    with pytest.raises(OperationFailed, match="does not know"):
        await ImageUploads("http+unix://%2Frun%2Fmine").put("http+unix://%2Frun%2Fother/image/x", _chunks(b"a"), 1)


async def test_no_image_waits_for_a_guest_that_is_shelved_and_does_not_shut_down() -> None:
    harness = AgentHarness(max_concurrent_snapshots=1)
    await harness.start()
    harness.manager._agents["host-1"].host.uploads = Uploads()
    harness.conductor.judge_progress = lambda progress: ProgressReply(accepted=True, upload_url="http://image?ticket=t")
    for uuid in ("i-1", "i-2"):
        await harness.carry_out(order(uuid=uuid))
    await harness.rules({"operation": "shutdown", "kind": "hang"})
    slow = ImageMeta(id="image-1", properties={"os_shutdown_timeout": "3000"})
    shelve = order("shelve", uuid="i-1", epoch=3, instance_image=slow)
    await harness.send(shelve)
    await harness.send(order("create_image", uuid="i-2", epoch=3))
    report = await asyncio.wait_for(harness.conductor.reports.get(), 2)
    assert (report.instance_uuid, report.outcome) == ("i-2", "done")
    assert harness.running_operations() == [shelve.operation_id]
    await harness.clock.advance(3000)
    assert (await harness.conductor.next_report()).outcome == "done"
    await harness.close()

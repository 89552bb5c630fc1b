"""The next start cleans up after a crash at any point of an upload or a delete."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.embedded.image import queries
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import ACTIVE, SAVING
from micronova.embedded.image.store import Store
from micronova.embedded.image.sweep import sweep
from micronova.http.tickets import Tickets, upload_subject
from tests.unit.embedded.image.world import KEY, OCTETS, World, world


@pytest.fixture(params=["sqlite", "postgresql"])
async def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    async with world(tmp_path, url) as made:
        yield made


async def clean_up(cloud: World) -> int:
    store = Store(cloud.directory)
    try:
        return await sweep(Core(cloud.database, cloud.clock), store)
    finally:
        await store.stop()


async def begin_upload(cloud: World, image_id: str, upload_id: str) -> bool:
    """Do to the row of an image what an upload does at its begin; return whether the image was queued."""
    image = await cloud.database.read(queries.get, image_id, "")
    assert image is not None
    return await cloud.database.write(queries.begin_upload, image, upload_id, SAVING, 1)


@pytest.mark.parametrize("step", ["opened", "begun", "written", "published", "finished"])
async def test_a_crash_after_each_step_of_an_upload(cloud: World, step: str) -> None:
    image_id = (await cloud.create())["id"]
    keep = await cloud.create(name="keep", data=b"keep me")
    store, database = cloud.role._store, cloud.database
    upload = await store.open_upload(image_id, str(uuid.uuid4()))
    for at in ("opened", "begun", "written", "published", "finished"):
        if at == "begun":
            assert await begin_upload(cloud, image_id, upload.id)
        elif at == "written":
            upload.write([b"data"])
        elif at == "published":
            upload.publish()
        elif at == "finished":
            assert await database.write(
                queries.finish_upload, image_id, upload.id, ACTIVE, upload.summary(None), None, 1
            )
        if at == step:
            break
    held = await cloud.show(image_id)
    assert await clean_up(cloud) == 0  # the upload still runs
    assert await cloud.show(image_id) == held
    upload.close()  # as at the end of a process
    assert await clean_up(cloud) == (0 if step == "finished" else 1)
    assert await clean_up(cloud) == 0
    shown = await cloud.show(image_id)
    if step == "finished":
        assert shown["status"] == "active"
        assert (await cloud.call("GET", f"/v2/images/{image_id}/file")).body == b"data"
    else:
        assert shown["status"] == "queued"
        assert cloud.files == [keep["id"]]
        assert (await cloud.upload(image_id, b"again")).status == 204
    assert (await cloud.call("GET", f"/v2/images/{keep['id']}/file")).body == b"keep me"


async def test_a_crash_between_deleting_the_row_and_the_file(cloud: World) -> None:
    image_id = (await cloud.create(data=b"data"))["id"]
    image = await cloud.database.read(queries.get, image_id, "p1")
    assert image is not None
    await cloud.database.write(queries.delete, image, 1)
    assert cloud.files == [image_id]
    assert await clean_up(cloud) == 1
    assert cloud.files == []


async def test_a_file_without_data_in_the_row_is_removed_under_a_lock(cloud: World) -> None:
    image_id = (await cloud.create())["id"]
    (cloud.directory / image_id).write_bytes(b"left over")
    (cloud.directory / "README").write_bytes(b"not ours")
    assert await clean_up(cloud) == 1
    assert cloud.files == ["README"]
    assert (await cloud.show(image_id))["status"] == "queued"


async def test_staged_data_is_kept(cloud: World) -> None:
    image = await cloud.create()
    path = f"/v2/images/{image['id']}"
    assert (await cloud.call("PUT", f"{path}/stage", b"staged", headers=OCTETS)).status == 204
    assert await clean_up(cloud) == 0
    assert (await cloud.call("POST", f"{path}/import", {"method": {"name": "glance-direct"}})).status == 202
    assert (await cloud.call("GET", f"{path}/file")).body == b"staged"


async def test_a_dead_upload_does_not_prevent_the_next(cloud: World) -> None:
    """Another process has died; the image can be used without a restart."""
    image_id = (await cloud.create())["id"]
    assert await begin_upload(cloud, image_id, str(uuid.uuid4()))
    assert (await cloud.upload(image_id, b"data")).status == 204
    assert (await cloud.show(image_id))["status"] == "active"


async def test_a_dead_upload_does_not_prevent_that_of_a_host(cloud: World) -> None:
    image_id = (await cloud.create())["id"]
    assert await begin_upload(cloud, image_id, str(uuid.uuid4()))
    ticket = Tickets(KEY).issue(upload_subject(image_id, "host1"), cloud.clock.time + 60)
    path = f"/v2/images/{image_id}/file?host=host1&ticket={ticket}"
    assert (await cloud.call("PUT", path, b"data", headers=OCTETS, token=None)).status == 204
    assert (await cloud.show(image_id))["status"] == "active"
    assert cloud.files == [image_id]


async def test_concurrent_sweeps_and_uploads(cloud: World) -> None:
    images = [await cloud.create(name=str(n)) for n in range(8)]
    for image in images[:4]:
        await begin_upload(cloud, image["id"], str(uuid.uuid4()))
    mended, answers = await asyncio.gather(
        asyncio.gather(*(clean_up(cloud) for _ in range(4))),
        asyncio.gather(*(cloud.upload(image["id"], image["name"].encode() * 1_500_000) for image in images[4:])),
    )
    assert [answer.status for answer in answers] == [204] * 4
    assert sum(mended) == 4
    assert await cloud.names("status=queued&sort=name:asc") == ["0", "1", "2", "3"]
    assert cloud.files == sorted(image["id"] for image in images[4:])


async def test_a_commit_with_a_lost_answer_keeps_the_data(cloud: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after the commit: the image is active, so its file must exist."""
    image_id = (await cloud.create())["id"]
    write = cloud.database.write

    async def breaking(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = await write(fn, *args, **kwargs)
        if fn is queries.finish_upload:
            raise ConnectionResetError("after the commit")
        return result

    monkeypatch.setattr(cloud.database, "write", breaking)
    assert (await cloud.upload(image_id, b"data")).status == 503
    monkeypatch.undo()
    assert (await cloud.show(image_id))["status"] == "active"
    assert (await cloud.call("GET", f"/v2/images/{image_id}/file")).body == b"data"
    assert await clean_up(cloud) == 0


async def test_a_killed_process(tmp_path: Path) -> None:
    """kill -9 in the middle of an upload; the next start finds a queued image and no file."""
    script = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from tests.unit.embedded.image.world import OCTETS, world

        async def endless(image_id):
            yield b"x" * 3_000_000
            print(image_id, flush=True)
            await asyncio.Event().wait()

        async def main():
            async with world(Path(sys.argv[1])) as cloud:
                image = await cloud.create()
                file = f"/v2/images/{image['id']}/file"
                await cloud.stream("PUT", file, endless(image["id"]), headers=OCTETS)

        asyncio.run(main())
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    image_id = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    process.stdout.close()
    [part] = list((tmp_path / "images").iterdir())
    assert part.name.startswith(image_id) and part.stat().st_size == 3_000_000
    async with world(tmp_path) as cloud:
        assert (await cloud.show(image_id))["status"] == "queued"
        assert cloud.files == []
        assert (await cloud.upload(image_id, b"data")).status == 204

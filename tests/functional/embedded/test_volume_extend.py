"""Volumes that are extended while servers use them: compute is told, whatever dies; on both databases."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.common.compute_events import HOLD
from micronova.embedded.volume.backend.exports import SimulatedExports
from micronova.embedded.volume.backend.files import Files, Interrupted
from micronova.embedded.volume.tables import events
from micronova.http.client import ASGITransport, ServiceClient
from micronova.objects.clock import micros
from micronova.objects.errors import Unavailable
from tests.unit.embedded.network.world import Compute, token
from tests.unit.embedded.volume.world import ADMIN, READER, World, world

SERVICE = "nova@service/service"


class Exports(SimulatedExports):
    """Exports that note the sizes that they are told."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sizes: list[tuple[str, int]] = []
        self.away = 0  # how many of the next calls fail

    async def resize(self, volume_id: str, size: int) -> None:
        if self.away:
            self.away -= 1
            raise Unavailable("The exporter does not answer.")
        self.sizes.append((volume_id, size))


class Extended:
    """A volume service with the compute and the exports that it tells."""

    def __init__(self, cloud: World, compute: Compute, exports: Exports) -> None:
        self.cloud = cloud
        self.compute = compute
        self.exports = exports

    async def attached(self, *servers: str, **fields: Any) -> str:
        """Create a volume that servers use; return its id."""
        volume = await self.cloud.create(**fields)
        for server in servers:
            await self.attach(volume["id"], server)
        return str(volume["id"])

    async def attach(self, volume_id: str, server: str) -> str:
        """Attach a volume to a server; return the attachment."""
        body = {"attachment": {"volume_uuid": volume_id, "instance_uuid": server, "connector": {"host": "h"}}}
        made = (await self.cloud.do("POST", "/attachments", body, token=SERVICE))["attachment"]["id"]
        await self.cloud.do("POST", f"/attachments/{made}/action", {"os-complete": None}, token=SERVICE)
        return str(made)

    async def extend(self, volume_id: str, size: int, *, minor: int = 42, as_: str | None = None) -> int:
        """Ask for a size; return the status of the answer."""
        more = {} if as_ is None else {"token": as_}
        body = {"os-extend": {"new_size": size}}
        return (await self.cloud.call("POST", f"/volumes/{volume_id}/action", body, minor=minor, **more)).status


@pytest.fixture(params=["sqlite", "postgresql"])
async def found(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Extended]:
    url = request.getfixturevalue("module_database_url") if request.param == "postgresql" else None
    compute, exports = Compute(), Exports(tmp_path)
    client = ServiceClient(ASGITransport(compute), token, prefix="/v2.1")
    async with world(tmp_path, url, make_exports=lambda files: exports, compute=client) as made:
        yield Extended(made, compute, exports)


async def test_an_attached_volume_grows(found: Extended) -> None:
    server = str(uuid.uuid4())
    volume = await found.attached(server)
    assert await found.extend(volume, 3, minor=41) == 400
    assert await found.extend(volume, 3, as_=READER) == 403
    assert await found.extend(volume, 1) == 400
    assert await found.extend(volume, 3) == 202
    shown = await found.cloud.until(f"/volumes/{volume}", "in-use")
    assert shown["size"] == 3
    assert (found.cloud.directory / "volumes" / volume).stat().st_size == 3 << 30
    assert found.exports.sizes == [(volume, 3 << 30)]
    await found.compute.wait_for(1)
    assert found.compute.requests == [
        [{"name": "volume-extended", "server_uuid": server, "status": "completed", "tag": volume}]
    ]
    usage = (await found.cloud.do("GET", "/os-quota-sets/p1?usage=true"))["quota_set"]
    assert usage["gigabytes"]["in_use"] == 3


async def test_every_server_is_told(found: Extended) -> None:
    servers = sorted(str(uuid.uuid4()) for _ in range(3))
    body = {"volume_type": {"name": "shared", "extra_specs": {"multiattach": "<is> True"}}}
    await found.cloud.do("POST", "/types", body, token=ADMIN)
    volume = await found.attached(*servers, volume_type="shared")
    assert await found.extend(volume, 2) == 202
    await found.compute.wait_for(3)
    assert found.compute.events == [("volume-extended", server, volume) for server in servers]


async def test_the_quota_and_the_limit_hold(found: Extended) -> None:
    volume = await found.attached(str(uuid.uuid4()))
    body = {"quota_set": {"gigabytes": 5, "per_volume_gigabytes": 4}}
    await found.cloud.do("PUT", "/os-quota-sets/p1", body, token=ADMIN)
    assert await found.extend(volume, 5) == 413
    await found.cloud.create(size=4)
    assert await found.extend(volume, 2) == 413
    assert (await found.cloud.do("GET", f"/volumes/{volume}"))["volume"]["status"] == "in-use"
    assert found.compute.events == []


async def test_a_volume_that_is_not_attached_is_told_nobody(found: Extended) -> None:
    volume = (await found.cloud.create())["id"]
    assert await found.extend(volume, 2) == 202
    await found.cloud.until(f"/volumes/{volume}", "available")
    host = await found.attached()
    assert (await found.cloud.act(host, "os-attach", host_name="h", mountpoint="/dev/vdb")).status == 202
    assert await found.extend(host, 2) == 202
    await found.cloud.until(f"/volumes/{host}", "in-use")
    server = str(uuid.uuid4())
    assert await found.extend(await found.attached(server), 2) == 202
    await found.compute.wait_for(1)
    assert [told for _, told, _ in found.compute.events] == [server]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", ["grow", "resize", "record"])
async def test_a_death_at_each_step(found: Extended, monkeypatch: pytest.MonkeyPatch, where: str, done: bool) -> None:
    server = str(uuid.uuid4())
    volume = await found.attached(server)
    engine = found.cloud.role.engine
    owner, name = {
        "grow": (Files, "grow"),
        "resize": (Exports, "resize"),
        "record": (type(engine), "_finish"),
    }[where]
    original, reached = getattr(owner, name), asyncio.Event()

    async def dying(self: Any, *arguments: Any) -> Any:
        if done:
            await original(self, *arguments)
        reached.set()
        raise Interrupted

    monkeypatch.setattr(owner, name, dying)
    if where == "record":  # a process that dies after the commit hands nothing over
        monkeypatch.setattr(found.cloud.role.core.events, "hand_over", lambda events: None)
    assert await found.extend(volume, 2) == 202
    await asyncio.wait_for(reached.wait(), 10)
    monkeypatch.undo()
    await engine.stop()
    await engine.start()
    shown = await found.cloud.until(f"/volumes/{volume}", "in-use")
    assert shown["size"] == 2
    found.cloud.clock.time += 30  # the hold of the process that is gone ends
    await found.compute.wait_for(1)
    assert found.compute.events == [("volume-extended", server, volume)]
    usage = (await found.cloud.do("GET", "/os-quota-sets/p1?usage=true"))["quota_set"]
    assert usage["gigabytes"]["in_use"] == 2


async def test_an_exporter_that_is_away_only_delays(found: Extended) -> None:
    volume = await found.attached(str(uuid.uuid4()))
    found.exports.away = 1
    assert await found.extend(volume, 2) == 202
    async with asyncio.timeout(20):
        while found.exports.away:
            await asyncio.sleep(0.01)
    found.cloud.clock.time += 60
    await found.cloud.role.engine.sweep()
    await found.cloud.until(f"/volumes/{volume}", "in-use")
    assert found.exports.sizes == [(volume, 2 << 30)]


def _not_answered(conn: sa.Connection) -> bool:
    """Return whether there are events that compute has not refused yet: a refused one is due sooner."""
    first_hold = events.c.not_before - events.c.created_at >= micros(HOLD)
    return conn.execute(sa.select(events.c.id).where(first_hold)).first() is not None


async def test_compute_is_told_until_the_server_can_be(found: Extended) -> None:
    """A suspended server answers 422. One that has given the volume back is not told any more."""
    server, leaving = str(uuid.uuid4()), str(uuid.uuid4())
    found.compute.early = {server, leaving}
    volume = await found.attached(server)
    other = await found.attached()
    attachment = await found.attach(other, leaving)
    for each in (volume, other):
        assert await found.extend(each, 2) == 202
        await found.cloud.until(f"/volumes/{each}", "in-use")
    async with asyncio.timeout(10):
        while await found.cloud.database.read(_not_answered):
            await asyncio.sleep(0.01)
    await found.cloud.do("DELETE", f"/attachments/{attachment}", token=SERVICE)
    found.compute.early = set()
    found.cloud.clock.time += 60
    await found.compute.wait_for(1)
    assert found.compute.events == [("volume-extended", server, volume)]


@pytest.mark.parametrize("work", ["extend", "upload", "backup"])
async def test_a_volume_that_is_given_back_meanwhile(
    found: Extended, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """The status stays until the work ends, and then says that no server has the volume."""
    volume = await found.attached()
    attachment = await found.attach(volume, str(uuid.uuid4()))
    owner, name, during = {
        "extend": (Files, "grow", "extending"),
        "upload": (type(found.cloud.images), "upload", "uploading"),
        "backup": (Files, "create_copy", "backing-up"),
    }[work]
    original, reached, goes_on = getattr(owner, name), asyncio.Event(), asyncio.Event()

    async def held(self: Any, *arguments: Any) -> Any:
        reached.set()
        await goes_on.wait()
        if work == "upload":  # without the data
            self.documents[arguments[0]]["status"] = "active"
            return None
        return await original(self, *arguments)

    monkeypatch.setattr(owner, name, held)
    if work == "extend":
        assert await found.extend(volume, 2) == 202
    elif work == "upload":
        asked = await found.cloud.act(volume, "os-volume_upload_image", image_name="x", force=True)
        assert asked.status == 202
    else:
        await found.cloud.do("POST", "/backups", {"backup": {"volume_id": volume, "force": True}})
    await asyncio.wait_for(reached.wait(), 10)
    assert (await found.cloud.act(volume, "os-begin_detaching")).status == 400
    await found.cloud.do("DELETE", f"/attachments/{attachment}", token=SERVICE)
    assert (await found.cloud.do("GET", f"/volumes/{volume}"))["volume"]["status"] == during
    assert (await found.cloud.call("DELETE", f"/volumes/{volume}")).status == 400
    goes_on.set()
    await found.cloud.until(f"/volumes/{volume}", "available")
    assert found.compute.events == []

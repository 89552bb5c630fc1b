"""A volume service for a test, called over HTTP without a socket, with an image service that is a dictionary."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from micronova.cli import volume_tools
from micronova.cli.volume_tools import QemuLuks
from micronova.db.engine import Database, open_database
from micronova.embedded.volume.backend.keys import KeyBox
from micronova.embedded.volume.service import VolumeService
from micronova.http.client import Answer, ASGITransport
from micronova.objects.errors import NotFound
from micronova.policies.enforcer import Enforcer
from micronova.policies.volume import RULES
from tests.clocks import HeldClock
from tests.unit.embedded.tokens import Tokens

ALICE, BOB = "alice@p1", "bob@p2"  # of two projects
READER = "rita@p1/reader"
ADMIN = "root@p0/admin,member,reader"
SERVICE = "nova@services/service"
SECRET_KEY = bytes(range(32))
NEWEST = 71
TIMEOUT = 60.0


class FakeImages:
    """An image service with the images that a test gives it."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.data: dict[str, bytes] = {}
        self.owners: dict[str, str] = {}
        self.hold: asyncio.Event | None = None  # a download waits for it after its first chunk

    def add(self, data: bytes, owner: str = ALICE, **fields: Any) -> str:
        """Add an image and return its id."""
        image_id = str(uuid.uuid4())
        document = {
            "id": image_id, "name": "an image", "status": "active", "disk_format": "raw", "container_format": "bare",
            "min_disk": 0, "min_ram": 0, "size": len(data), "virtual_size": None, "checksum": "0" * 32, "tags": [],
        }  # fmt: skip
        self.documents[image_id] = {**document, **fields}
        self.data[image_id] = data
        self.owners[image_id] = owner
        return image_id

    async def show(self, image_id: str, token: str) -> Mapping[str, Any]:
        if self.owners.get(image_id) != token:
            raise NotFound(f"There is no image {image_id}.")
        return self.documents[image_id]

    async def show_as_service(self, image_id: str) -> Mapping[str, Any]:
        if image_id not in self.documents:
            raise NotFound(f"There is no image {image_id}.")
        return self.documents[image_id]

    async def named(self, name: str, token: str) -> list[Mapping[str, Any]]:
        return [each for id, each in self.documents.items() if each["name"] == name and self.owners[id] == token]

    async def download(self, image_id: str) -> AsyncIterator[bytes]:
        if image_id not in self.data:
            raise NotFound("gone")
        data = self.data[image_id]
        for begin in range(0, len(data), 1 << 20):
            yield data[begin : begin + (1 << 20)]
            if self.hold is not None:
                await self.hold.wait()

    async def convert(self, source: Path, source_format: str, target: Path, size: int) -> None:
        await volume_tools.convert(source, source_format, target, size)

    async def create(self, document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
        self.documents[document["id"]] = {"status": "queued", "size": None, "checksum": None, **document}
        self.owners[document["id"]] = token
        return self.documents[document["id"]]

    async def status(self, image_id: str) -> str | None:
        return self.documents[image_id]["status"] if image_id in self.documents else None

    async def upload(self, image_id: str, chunks: AsyncGenerator[bytes, None], size: int) -> None:
        self.data[image_id] = b"".join([chunk async for chunk in chunks])
        self.documents[image_id] |= {"status": "active", "size": size}


class World:
    """A running volume service."""

    def __init__(self, database: Database, directory: Path, **options: Any) -> None:
        self.database = database
        self.directory = directory / "volumes"
        self.clock = HeldClock()
        self.images = FakeImages()
        given: dict[str, Any] = {"keys": KeyBox(SECRET_KEY), "luks": QemuLuks(), "machine": "here", **options}
        self.role = VolumeService(database, self.directory, Enforcer(RULES), Tokens(), self.clock, self.images, **given)
        self._transport = ASGITransport(self.role.app, "cloud")

    def files(self, kind: str = "volumes") -> list[str]:
        """The names of all files of a kind."""
        return sorted(path.name for path in (self.directory / kind).iterdir())

    async def call(
        self, method: str, path: str, body: Any = None, *, token: str | None = ALICE, minor: int | None = NEWEST
    ) -> Answer:
        """Send a request to a path below /v3, or to one that begins with //."""
        headers = {} if minor is None else {"openstack-api-version": f"volume 3.{minor}"}
        if token is not None:
            headers["x-auth-token"] = token
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None:
            headers["content-type"] = "application/json"
        url = path[1:] if path.startswith("//") else f"/v3{path}"
        return await self._transport.request(method, url, headers, data)

    async def do(self, method: str, path: str, body: Any = None, *, token: str = ALICE, minor: int = NEWEST) -> Any:
        """Send a request that must succeed; return its body."""
        answer = await self.call(method, path, body, token=token, minor=minor)
        assert 200 <= answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer.json() if answer.body else None

    async def create(self, *, token: str = ALICE, wait: str | None = "available", **fields: Any) -> dict[str, Any]:
        """Create a volume and wait until it has a status."""
        self.clock.time += 1  # the newest comes first in lists
        if not {"size", "source_volid", "snapshot_id"} & fields.keys():
            fields["size"] = 1
        volume: dict[str, Any] = (await self.do("POST", "/volumes", {"volume": fields}, token=token))["volume"]
        return volume if wait is None else await self.until(f"/volumes/{volume['id']}", wait)

    async def snapshot(self, volume_id: str, *, token: str = ALICE, **fields: Any) -> dict[str, Any]:
        """Create a snapshot and wait until it is available."""
        self.clock.time += 1
        body = {"snapshot": {"volume_id": volume_id, **fields}}
        made = (await self.do("POST", "/snapshots", body, token=token))["snapshot"]
        return await self.until(f"/snapshots/{made['id']}", "available")

    async def act(self, volume_id: str, action: str, *, token: str = ALICE, **fields: Any) -> Answer:
        """Do an action with a volume."""
        return await self.call("POST", f"/volumes/{volume_id}/action", {action: fields}, token=token)

    async def until(self, path: str, status: str) -> dict[str, Any]:
        """Wait until what is at a path has a status, or is gone (""); return it."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                answer = await self.call("GET", path, token=ADMIN)
                if answer.status == 404 and not status:
                    return {}
                assert answer.status == 200, answer
                [shown] = answer.json().values()
                if shown["status"] == status:
                    return dict(shown)
                assert shown["status"] != "error", shown
                await asyncio.sleep(0.005)

    async def names(self, query: str = "", *, token: str = ALICE, minor: int = NEWEST) -> list[str]:
        """List the names of volumes, in the order of the list."""
        found = await self.do("GET", f"/volumes?{query}", token=token, minor=minor)
        return [volume["name"] for volume in found["volumes"]]


@contextlib.asynccontextmanager
async def world(directory: Path, url: str | None = None, **options: Any) -> AsyncIterator[World]:
    """Start a volume service on a directory, on SQLite or in a new schema of the PostgreSQL database."""
    schema = f"volume_{uuid.uuid4().hex}" if url else None
    database = open_database(url or f"sqlite:///{directory}/volume.db", schema=schema)
    made = World(database, directory, schema=schema, **options)
    await made.role.start()
    try:
        yield made
    finally:
        await made.role.stop()
        await database.close()

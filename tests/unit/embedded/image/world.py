"""An image service for a test, called over HTTP without a socket."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from micronova.db.engine import Database, open_database
from micronova.embedded.image.data import accept_all
from micronova.embedded.image.service import ImageService
from micronova.http.client import Answer
from micronova.policies.enforcer import Enforcer
from micronova.policies.image import RULES
from tests.clocks import SetClock
from tests.unit.embedded.tokens import Tokens

KEY = b"the key of image tickets, shared"
OCTETS = {"content-type": "application/octet-stream"}
PATCH = {"content-type": "application/openstack-images-v2.1-json-patch"}
PATCH_20 = {"content-type": "application/openstack-images-v2.0-json-patch"}

ALICE, BOB, CAROL = "alice@p1", "bob@p2", "carol@p3"  # of three projects
READER = "rita@p1/reader"
ADMIN = "root@p0/admin,member,reader"


class World:
    """A running image service."""

    def __init__(self, database: Database, directory: Path, **settings: Any) -> None:
        self.database = database
        self.directory = directory / "images"
        self.clock = SetClock()
        settings.setdefault("check", accept_all)  # most tests upload data without a format
        self.role = ImageService(database, self.directory, Enforcer(RULES), Tokens(), self.clock, [KEY], **settings)
        self.app = self.role.service.app

    @property
    def files(self) -> list[str]:
        """The names of all files in the store."""
        return sorted(path.name for path in self.directory.iterdir())

    async def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        token: str | None = ALICE,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request with a body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"content-length": str(len(data)), "content-type": "application/json", **(headers or {})}
        return await self.stream(method, url, [data], token=token, headers=sent)

    async def stream(
        self,
        method: str,
        url: str,
        parts: Iterable[bytes] | AsyncIterator[bytes],
        *,
        token: str | None = ALICE,
        headers: Mapping[str, str] | None = None,
        disconnect: bool = False,
    ) -> Answer:
        """Send a request with a body in parts; with `disconnect`, the client disconnects instead of ending the body."""
        path, _, query = url.partition("?")
        sent = dict(headers or {})
        if token is not None:
            sent["x-auth-token"] = token
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"cloud"), *((k.encode(), v.encode()) for k, v in sent.items())],
            "client": ("client", 1),
            "server": ("cloud", 80),
        }
        events = _events(parts, disconnect)
        status = 0
        answered: dict[str, str] = {}
        received: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return await anext(events)

        async def send(event: Any) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                answered.update((k.decode().lower(), v.decode()) for k, v in event["headers"])
            else:
                received.append(event.get("body", b""))

        await self.app(scope, receive, send)
        return Answer(status, answered, b"".join(received))

    async def create(self, *, token: str = ALICE, data: bytes | None = None, **fields: Any) -> dict[str, Any]:
        """Create an image, with data if it is given."""
        given = {"name": "image", "disk_format": "raw", "container_format": "bare", **fields}
        answer = await self.call("POST", "/v2/images", given, token=token)
        assert answer.status == 201, answer
        image: dict[str, Any] = answer.json()
        if data is not None:
            answer = await self.upload(image["id"], data, token=token)
            assert answer.status == 204, answer
        return image

    async def upload(self, image_id: str, data: bytes, *, token: str = ALICE) -> Answer:
        """Upload an image's data."""
        return await self.call("PUT", f"/v2/images/{image_id}/file", data, token=token, headers=OCTETS)

    async def show(self, image_id: str, *, token: str = ALICE) -> dict[str, Any]:
        """Show an image."""
        answer = await self.call("GET", f"/v2/images/{image_id}", token=token)
        assert answer.status == 200, answer
        return dict(answer.json())

    async def names(self, query: str = "", *, token: str = ALICE) -> list[str]:
        """List the names of images, in the order of the list."""
        answer = await self.call("GET", f"/v2/images?{query}", token=token)
        assert answer.status == 200, answer
        return [image["name"] for image in answer.json()["images"]]

    async def patch(self, image_id: str, *operations: Any, token: str = ALICE, **headers: str) -> Answer:
        """Change an image."""
        return await self.call(
            "PATCH", f"/v2/images/{image_id}", list(operations), token=token, headers={**PATCH, **headers}
        )


async def _events(parts: Any, disconnect: bool) -> AsyncIterator[dict[str, Any]]:
    if hasattr(parts, "__aiter__"):
        async for part in parts:
            yield {"type": "http.request", "body": part, "more_body": True}
    else:
        for part in parts:
            yield {"type": "http.request", "body": part, "more_body": True}
    if not disconnect:
        yield {"type": "http.request", "body": b"", "more_body": False}
    while True:
        yield {"type": "http.disconnect"}


@contextlib.asynccontextmanager
async def world(directory: Path, url: str | None = None, **settings: Any) -> AsyncIterator[World]:
    """Start an image service on an empty directory, on SQLite or in a new schema of the PostgreSQL database."""
    schema = f"image_{uuid.uuid4().hex}" if url else None
    database = open_database(url or f"sqlite:///{directory}/image.db", schema=schema)
    made = World(database, directory, schema=schema, **settings)
    await made.role.start()
    try:
        yield made
    finally:
        await made.role.stop()
        await database.close()

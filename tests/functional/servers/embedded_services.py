"""Images and networks of a cloud in one process, made by users through the APIs of the embedded services."""

import uuid
from typing import Any

import msgspec

from micronova.http.client import Answer
from tests.functional.cloud import Caller


async def call(user: Caller, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """Send a request to any service of the cloud."""
    sent = {"x-auth-token": user.token, "content-type": "application/json", **(headers or {})}
    data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    return await user.cloud.transport.request(method, path, sent, data)


async def ok(user: Caller, method: str, path: str, body: Any = None) -> Any:
    answer = await call(user, method, path, body)
    assert answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:300]!r}"
    return answer.json()


# --- networks ------------------------------------------------------------------------------------------------------


async def make(user: Caller, kind: str, **fields: Any) -> dict[str, Any]:
    """Create a network, subnet, port or security group."""
    path = f"/network/v2.0/{kind.replace('_', '-')}s"
    return dict((await ok(user, "POST", path, {kind: fields}))[kind])


async def network(user: Caller, name: str = "", cidr: str = "10.7.0.0/24", **fields: Any) -> dict[str, Any]:
    """Create a network with one subnet."""
    made = await make(user, "network", name=name or f"net-{uuid.uuid4().hex[:6]}", **fields)
    await make(user, "subnet", network_id=made["id"], ip_version=4, cidr=cidr)
    return made


async def ports_of(user: Caller, server: str) -> list[dict[str, Any]]:
    """Return the ports of a server at the network service."""
    return list((await ok(user.admin, "GET", f"/network/v2.0/ports?device_id={server}"))["ports"])


async def ports_left(user: Caller) -> list[dict[str, Any]]:
    """Return the ports of the project that belong to servers."""
    listed = (await ok(user.admin, "GET", f"/network/v2.0/ports?project_id={user.project}"))["ports"]
    return [port for port in listed if port["device_owner"].startswith("compute:")]


# --- images --------------------------------------------------------------------------------------------------------


async def image(user: Caller, size: int = 1024, upload: bool = True, **fields: Any) -> str:
    """Create an image of this size in bytes; return its id."""
    wanted = {"name": "i", "disk_format": "raw", "container_format": "bare", **fields}
    made = await ok(user, "POST", "/image/v2/images", wanted)
    if upload:
        kind = {"content-type": "application/octet-stream"}
        answer = await call(user, "PUT", f"/image/v2/images/{made['id']}/file", bytes(size), kind)
        assert answer.status == 204, answer.body
    return str(made["id"])

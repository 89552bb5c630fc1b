"""Many clients at once that ask for more than the capacity or the quota; on any cloud."""

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from micronova.http.client import Answer

IMAGE = "11111111-1111-4111-8111-111111111111"
REQUESTS_AT_ONCE = 50

Send = Callable[[str, str, dict[str, str], bytes | None], Awaitable[Answer]]


class Client:
    """A client of the compute API."""

    def __init__(self, send: Send, project: str) -> None:
        self._send = send
        self.project = project

    async def __call__(self, method: str, path: str, body: Any = None, *, admin: bool = False) -> Answer:
        user = "admin" if admin else "user"
        headers = {"x-auth-token": f"{user}:{self.project}", "openstack-api-version": "compute 2.100",
                   "content-type": "application/json"}  # fmt: skip
        data = None if body is None else msgspec.json.encode(body)
        return await self._send(method, f"/compute/v2.1{path}", headers, data)


def _server(name: str, flavor: str = "1") -> dict[str, Any]:
    return {"server": {"name": name, "imageRef": IMAGE, "flavorRef": flavor, "networks": "none"}}


async def fill(client: Client, requests: int, *, patience: float, flavor: str = "1") -> list[dict[str, Any]]:
    """Send this many create requests at once; return the servers when all are ACTIVE or ERROR."""
    limit = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def create(number: int) -> int:
        async with limit:
            return (await client("POST", "/servers", _server(f"race-{number}", flavor))).status

    statuses = collections.Counter(await asyncio.gather(*(create(number) for number in range(requests))))
    assert statuses == {202: requests}
    deadline = time.monotonic() + patience
    while True:
        servers = (await client("GET", "/servers/detail?limit=1000", admin=True)).json()["servers"]
        open_ones = [s for s in servers if s["OS-EXT-STS:task_state"] or s["status"] not in ("ACTIVE", "ERROR")]
        if len(servers) == requests and not open_ones:
            return list(servers)
        assert time.monotonic() < deadline, f"{len(open_ones)} of {len(servers)} are not done: {open_ones[:2]}"
        await asyncio.sleep(0.1)  # other processes do not notify this one


async def race_for_quota(client: Client, requests: int, quota: int) -> None:
    """Send more requests at once than the quota allows: exactly as many as it allows are accepted."""
    limits = {"quota_set": {"instances": quota}}
    assert (await client("PUT", f"/os-quota-sets/{client.project}", limits, admin=True)).status == 200
    answers = await asyncio.gather(*(client("POST", "/servers", _server("q")) for _ in range(requests)))
    assert collections.Counter(answer.status for answer in answers) == {202: quota, 403: requests - quota}
    for answer in answers:
        if answer.status == 403:
            assert "Quota exceeded for instances" in answer.json()["forbidden"]["message"]
    assert len((await client("GET", "/servers")).json()["servers"]) == quota
    used = (await client("GET", "/limits")).json()["limits"]["absolute"]
    assert (used["totalInstancesUsed"], used["maxTotalInstances"]) == (quota, quota)

"""The expiry of console URLs, with a clock that the test controls."""

import asyncio

import sqlalchemy as sa

from micronova.db import instances
from micronova.db.tables import console_tokens as table
from micronova.objects.clock import SystemClock, micros
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.consoles import ConsoleClient, closed, console_client, link, read_until, token_of

__all__ = ["console_client"]


class Hurried(SystemClock):
    """The clock of the machine, which can be advanced; sleepers wake up accordingly."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._moved = asyncio.Event()

    def now(self) -> float:
        return super().now() + self._ahead

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._moved.wait(), left)
            except TimeoutError:
                return

    def forward(self, seconds: float) -> None:
        self._ahead += seconds
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


CLOCK = Hurried()
pytestmark = only_in_one_process("turns the clock")
CLOUD = CloudOptions(
    hosts=2,
    roles=("console",),
    clock=CLOCK,
    settings={"consoleauth": {"token_ttl": 100.0, "enforce_session_timeout": True}},
)


async def test_a_token_expires(cloud: Cloud, user: Caller, console_client: ConsoleClient) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    CLOCK.forward(99)
    async with console_client.socket(token) as socket:
        await read_until(socket, b"login: ")
        CLOCK.forward(2)
        assert await console_client.refused(token) == 403
        status, said = await console_client.session(token)
        assert status == 404 and "expired: ask for a new one" in said["error"]
        assert "expired" in await closed(socket)  # because of enforce_session_timeout
    await user.admin.refused(404, "GET", f"/os-console-auth-tokens/{token}")


async def test_without_a_proxy_of_ones_own_there_is_no_spice_direct(user: Caller) -> None:
    id = (await user.boot())["id"]
    body = {"remote_console": {"protocol": "spice", "type": "spice-direct"}}
    said = await user.refused(400, "POST", f"/servers/{id}/remote-consoles", body)
    assert "Unavailable console type spice-direct: this cloud has novnc, spice-html5 and serial" in said


async def test_expired_tokens_are_deleted(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    await link(user, id)
    CLOCK.forward(101)

    async def forgotten() -> bool | None:
        rows = await cloud.read(sa.select(table).where(table.c.instance_uuid == id))
        return None if rows else True

    await cloud.until(forgotten, "the conductor to forget the token")


async def test_the_token_of_a_server_that_left_its_host_is_refused(
    cloud: Cloud, user: Caller, console_client: ConsoleClient
) -> None:
    id = (await user.boot())["id"]
    token = token_of(await link(user, id))
    async with console_client.socket(token) as socket:
        await read_until(socket, b"login: ")
        host = await user.host_of(id)
        await _move(cloud, id, "elsewhere")
        assert await console_client.refused(token) == 403
        CLOCK.forward(20)  # the proxy checks periodically
        assert "not on its host" in await closed(socket)
        await _move(cloud, id, host)


async def _move(cloud: Cloud, id: str, host: str) -> None:
    database = cloud.process.database
    assert database is not None
    await database.write(instances.update, id, micros(CLOCK.now()), {"host": host})

"""Copying bytes: a side that accepts no more data counts as gone after a while."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from micronova.conductor.rpcapi import ConsoleAuthAPI
from micronova.console.bridge import carry
from micronova.console.sessions import Session, Sessions
from micronova.objects.clock import SystemClock
from micronova.objects.console import ConsoleEndpoint, ConsoleGrant
from micronova.rpc.bus import connect

GRANT = ConsoleGrant(instance_uuid="u", name="n", host="h", protocol="serial", endpoint=ConsoleEndpoint(), lifetime=0.0)


class Browser:
    """A WebSocket as ASGI presents it."""

    def __init__(self) -> None:
        self.typed: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.shown: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    def type(self, data: bytes) -> None:
        self.typed.put_nowait({"type": "websocket.receive", "bytes": data})

    async def send(self, event: dict[str, Any]) -> None:
        await self.reads.wait()
        self.shown.append(event)


class Guest:
    """A console that does only what it is told to."""

    async def __aenter__(self) -> "Guest":
        arrived: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        # A small limit: what is not read fills up soon.
        self._server = await asyncio.start_server(lambda _, writer: arrived.set_result(writer), "127.0.0.1", 0, limit=1)
        self.reader, self.writer = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        self.end = await arrived
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        self.end.close()
        self._server.close()


class WrongClock(SystemClock):
    """The clock of a proxy's machine that is half a minute ahead of the database."""

    def now(self) -> float:
        return super().now() + 30.0


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    clock = SystemClock()
    bus = connect("local://bridge", clock=clock, random=random.Random(1), name="test")
    await bus.start()
    yield Sessions(ConsoleAuthAPI(bus), clock)
    await bus.stop()


async def test_a_guest_that_takes_nothing_is_given_up(sessions: Sessions) -> None:
    browser = Browser()
    async with Guest() as guest:
        browser.type(bytes(50_000_000))
        await carry(sessions, Session(GRANT), browser.typed.get, browser.send, guest.reader, guest.writer, stall=0.2)
    assert browser.shown[-1]["type"] == "websocket.close"
    assert "does not take" in browser.shown[-1]["reason"]


async def test_a_browser_that_takes_nothing_is_given_up(sessions: Sessions) -> None:
    browser = Browser()
    browser.reads.clear()
    async with Guest() as guest:
        guest.end.write(b"x")
        await carry(sessions, Session(GRANT), browser.typed.get, browser.send, guest.reader, guest.writer, stall=0.2)
    assert browser.shown == []


async def test_a_guest_that_hangs_up_is_told(sessions: Sessions) -> None:
    browser = Browser()
    async with Guest() as guest:
        guest.end.write(b"bye")
        guest.end.close()
        await carry(sessions, Session(GRANT), browser.typed.get, browser.send, guest.reader, guest.writer)
    assert browser.shown[0] == {"type": "websocket.send", "bytes": b"bye"}
    assert "closed its console" in browser.shown[1]["reason"]


async def test_a_session_lasts_as_long_as_granted_if_the_clock_is_wrong() -> None:
    clock = WrongClock()
    bus = connect("local://bridge", clock=clock, random=random.Random(1), name="test")
    await bus.start()
    sessions = Sessions(ConsoleAuthAPI(bus), clock, enforce_timeout=True)
    lasts = msgspec.structs.replace(GRANT, lifetime=600.0)
    watch = asyncio.create_task(sessions.watch(Session(lasts)))
    assert "has expired" in await sessions.watch(Session(GRANT))
    assert not watch.done()
    watch.cancel()
    await bus.stop()

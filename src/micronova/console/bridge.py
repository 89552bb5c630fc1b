"""Copies bytes between a WebSocket and a guest's console, as fast as the slower side."""

import asyncio
import contextlib

from micronova.console.sessions import Session, Sessions
from micronova.http.asgi import Receive, Send

CHUNK = 65_536
STALL = 60.0
"""Seconds after which a side that accepts no data counts as gone; while data waits, a disconnect is not noticed."""
LONGEST_REASON = 120  # bytes of a close frame that its reason may have


async def carry(
    sessions: Sessions,
    session: Session,
    receive: Receive,
    send: Send,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    stall: float = STALL,
) -> None:
    """Copy bytes until a side disconnects or the session must end; tell the browser why, unless it disconnected."""
    tasks = [
        asyncio.create_task(work, name=f"console of {session.grant.instance_uuid}")
        for work in (
            _from_browser(receive, writer, stall),
            _from_guest(reader, send, stall),
            session.ended(),
            sessions.watch(session),
        )
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        reasons = [task.result() for task in done]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if all(reasons):
        with contextlib.suppress(OSError):  # it may have disconnected
            await send({"type": "websocket.close", "code": 1000, "reason": reasons[0][:LONGEST_REASON]})


async def _from_browser(receive: Receive, writer: asyncio.StreamWriter, stall: float) -> str:
    """Return "" when the browser disconnects, or why the guest accepts no more data."""
    try:
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return ""
            data = event.get("bytes")
            writer.write(event["text"].encode() if data is None else data)
            async with asyncio.timeout(stall):
                await writer.drain()
    except TimeoutError:
        return "The server does not take what is typed."
    except OSError:
        return "The server has closed its console."


async def _from_guest(reader: asyncio.StreamReader, send: Send, stall: float) -> str:
    """Return why the guest sends no more data, or "" when the browser does not accept it."""
    try:
        while data := await reader.read(CHUNK):
            async with asyncio.timeout(stall):
                await send({"type": "websocket.send", "bytes": data})
    except TimeoutError:
        return ""
    except OSError:
        pass
    return "The server has closed its console."

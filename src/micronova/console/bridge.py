"""Carrying bytes between a WebSocket and a guest's console, as fast as the slower of both."""

import asyncio
import contextlib

from micronova.console.sessions import Session, Sessions
from micronova.http.mount import Receive, Send

CHUNK = 65_536
STALL = 60.0
"""Seconds after which a side that takes nothing more is given up: behind it nothing is seen, not even a hanging up."""
LONGEST_REASON = 120  # bytes of a close frame that are left for words


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
    """Carry bytes until one side hangs up or the session must end; tell the browser why if it was not its doing."""
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
        with contextlib.suppress(OSError):  # it may have gone meanwhile
            await send({"type": "websocket.close", "code": 1000, "reason": reasons[0][:LONGEST_REASON]})


async def _from_browser(receive: Receive, writer: asyncio.StreamWriter, stall: float) -> str:
    """Return "" when the browser hangs up, or why the guest's end does not take any more."""
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
    """Return why the guest shows nothing more, or "" when the browser does not take it."""
    try:
        while data := await reader.read(CHUNK):
            async with asyncio.timeout(stall):
                await send({"type": "websocket.send", "bytes": data})
    except TimeoutError:
        return ""
    except OSError:
        pass
    return "The server has closed its console."

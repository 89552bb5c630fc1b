"""oslo.messaging as a listener, in a throw-away environment."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.peers import peer

OSLO = "oslo.messaging==18.3.1"
PATIENCE = 30.0


class Listener:
    """The notifications that a real listener has received so far."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self._more = asyncio.Event()

    def of(self, event: str, instance: str = "") -> list[dict[str, Any]]:
        """Return the notifications of an event, of one instance if it is given."""
        return [
            each for each in self.received if each["event_type"] == event and instance in json.dumps(each["payload"])
        ]

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until it has received enough."""
        async with asyncio.timeout(PATIENCE):
            while not enough():
                self._more.clear()
                await self._more.wait()

    async def read(self, lines: asyncio.StreamReader) -> None:
        """Read what the listener prints."""
        async for line in lines:
            self.received.append(json.loads(line))
            self._more.set()


@asynccontextmanager
async def listening(url: str, exchange: str = "nova") -> AsyncIterator[Listener]:
    """Listen at a broker with oslo.messaging."""
    python = (await asyncio.to_thread(peer, "oslo", OSLO)) / "bin" / "python"
    script = Path(__file__).with_name("listen.py")
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-W",
        "ignore",
        str(script),
        url.replace("amqp://", "rabbit://", 1),
        exchange,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stdin is not None and process.stdout is not None
    reader: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(PATIENCE):
            assert await process.stdout.readline() == b"ready\n"
        listener = Listener()
        reader = asyncio.create_task(listener.read(process.stdout))
        yield listener
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if reader is not None:
            reader.cancel()

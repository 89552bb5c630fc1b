"""The monitor of a storage daemon: commands and events of QMP on a Unix socket."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any, Final

ANSWER_SECONDS: Final = 60.0
_LONGEST_LINE: Final = 4 << 20


class QMPError(Exception):
    """The daemon refused a command."""


class QMPClosed(Exception):
    """The daemon has ended, or does not answer."""


class QMP:
    """A connection to the monitor of one daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._waiting: dict[Callable[[dict[str, Any]], bool], asyncio.Future[dict[str, Any]]] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, path: str) -> "QMP":
        """Connect, and return when the daemon has answered; raise QMPClosed."""
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=_LONGEST_LINE)
        except OSError as error:
            raise QMPClosed(str(error)) from error
        made = cls(reader, writer)
        try:
            if not await reader.readline():
                raise QMPClosed("it closed the connection")
            made._task = asyncio.get_running_loop().create_task(made._read(), name="qmp")
            await made.do("qmp_capabilities")
        except OSError as error:
            await made.close()
            raise QMPClosed(str(error)) from error
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def do(self, command: str, **arguments: Any) -> Any:
        """Run a command, whose arguments have underscores in the place of hyphens; raise QMPError or QMPClosed."""
        number = next(self._numbers)
        named = {name.replace("_", "-"): value for name, value in arguments.items()}
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            raise QMPClosed("it has ended")
        self._answers[number] = answer
        try:
            self._writer.write(json.dumps({"execute": command, "arguments": named, "id": number}).encode())
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except (OSError, TimeoutError) as error:
            raise QMPClosed(str(error) or f"it did not answer {command} in time") from error
        finally:
            self._answers.pop(number, None)

    def event(self, matches: Callable[[dict[str, Any]], bool]) -> "asyncio.Future[dict[str, Any]]":
        """Return what will be the next event that matches. Whoever does not wait for it cancels it."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[matches] = future
        future.add_done_callback(lambda _: self._waiting.pop(matches, None))
        if self._task is None or self._task.done():
            future.set_exception(QMPClosed("it has ended"))
        return future

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "event" in message:
                    for matches, future in list(self._waiting.items()):
                        if not future.done() and matches(message):
                            future.set_result(message)
                    continue
                answer = self._answers.get(message.get("id"))
                if answer is None or answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(QMPError(message["error"].get("desc", "it failed")))
                else:
                    answer.set_result(message.get("return"))
        except (OSError, ValueError):
            pass
        finally:
            for future in [*self._answers.values(), *self._waiting.values()]:
                if not future.done():
                    future.set_exception(QMPClosed("it has ended"))
                    future.exception()  # who waits gets it; nobody has to

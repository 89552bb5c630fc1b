"""A proxy in front of PostgreSQL that cuts connections while they commit."""

import asyncio
import contextlib
import enum
from types import TracebackType
from typing import Self

from sqlalchemy.engine import make_url

_NO_TLS = 80877103  # the request code of a client that asks for TLS
_DONE = b"Z\x00\x00\x00\x05I"  # ReadyForQuery, outside a transaction


class Loss(enum.Enum):
    """What becomes of a COMMIT."""

    NOTHING = "it is passed on, and so is its answer"
    ANSWER = "it happens; the client's connection is cut instead of the answer"
    REQUEST = "it never reaches the server; both connections are cut"
    SILENCE = "it never reaches the server, whose connection stays open; the client's is cut"
    HUSH = "it happens; all connections go silent, and none is cut; the next commits and new connections are fine"


class LossyProxy:
    """Listens on a free port of the loopback; `loss` says what becomes of the commits from now on."""

    def __init__(self, url: str) -> None:
        self._server_url = make_url(url)
        self.loss = Loss.NOTHING
        self.lost = 0  # commits
        self._hushed = 0  # how often all connections went silent
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        """The URL of the database through this proxy."""
        port = self._listener.sockets[0].getsockname()[1]
        return self._server_url.set(port=port).render_as_string(hide_password=False)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self._listener.close()
        for writer in self._silent:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        client = (reader, writer)
        server = await asyncio.open_connection(self._server_url.host, self._server_url.port)
        answers = asyncio.ensure_future(_copy(server[0], writer))
        keep = False
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await _greet(client, server[1])
                keep = await self._pass_on(client, server, answers)
        finally:
            answers.cancel()
            writer.close()
            if keep:
                self._silent.append(server[1])
            else:
                server[1].close()

    async def _pass_on(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        answers: "asyncio.Future[None]",
    ) -> bool:
        """Pass messages on until a commit is lost; return whether the server's connection is to be kept."""
        born = self._hushed
        while True:
            head = await client[0].readexactly(5)
            message = head + await client[0].readexactly(int.from_bytes(head[1:]) - 4)
            if born < self._hushed:
                continue
            loss = self.loss if head[:1] == b"Q" and message[5:].startswith(b"COMMIT") else Loss.NOTHING
            if loss is Loss.NOTHING:
                server[1].write(message)
                continue
            self.lost += 1
            if loss in (Loss.ANSWER, Loss.HUSH):
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)
                server[1].write(message)
                await server[0].readuntil(_DONE)
            if loss is Loss.HUSH:
                self._hushed += 1
                self.loss = Loss.NOTHING
                continue
            return loss is Loss.SILENCE


async def _greet(client: tuple[asyncio.StreamReader, asyncio.StreamWriter], server: asyncio.StreamWriter) -> None:
    """Pass the first message on, without TLS."""
    while True:
        head = await client[0].readexactly(4)
        message = head + await client[0].readexactly(int.from_bytes(head) - 4)
        if int.from_bytes(message[4:8]) != _NO_TLS:
            server.write(message)
            return
        client[1].write(b"N")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

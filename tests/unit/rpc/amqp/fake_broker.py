"""A peer on a socket that speaks as much AMQP as a bus needs to connect and publish; the test decides what it does."""

import asyncio
from typing import Self

import pamqp.frame
from pamqp import body, commands, header
from pamqp.base import Frame

HEADER_SIZE = 7

ANSWERS: dict[type, Frame] = {
    commands.Connection.StartOk: commands.Connection.Tune(2047, 131_072, 20),
    commands.Connection.Open: commands.Connection.OpenOk(),
    commands.Connection.Close: commands.Connection.CloseOk(),
    commands.Channel.Open: commands.Channel.OpenOk(),
    commands.Channel.Close: commands.Channel.CloseOk(),
    commands.Confirm.Select: commands.Confirm.SelectOk(),
    commands.Exchange.Declare: commands.Exchange.DeclareOk(),
    commands.Queue.Declare: commands.Queue.DeclareOk("queue", 0, 0),
    commands.Queue.Bind: commands.Queue.BindOk(),
    commands.Basic.Qos: commands.Basic.QosOk(),
    commands.Basic.Consume: commands.Basic.ConsumeOk("1"),
    commands.Basic.Cancel: commands.Basic.CancelOk("1"),
}


class Peer:
    """The broker's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.published = 0
        self.expiration = ""
        """Of the last message, in milliseconds."""
        self.channel = 0
        """On which the last message was published."""
        self.closed_by_client = False
        """Whether the client closed the connection as the protocol asks."""
        self.reading = asyncio.Event()
        self.reading.set()
        self._reader, self._writer = reader, writer
        self._arrived = asyncio.Condition()

    async def run(self) -> None:
        """Answer until the client disconnects."""
        await self._reader.readexactly(8)
        self.send(commands.Connection.Start(server_properties={}))
        while True:
            await self.reading.wait()
            start = await self._reader.readexactly(HEADER_SIZE)
            rest = await self._reader.readexactly(int.from_bytes(start[3:]) + 1)
            await self.reading.wait()
            _, channel, frame = pamqp.frame.unmarshal(start + rest)
            if isinstance(frame, commands.Basic.Publish):
                async with self._arrived:
                    self.published += 1
                    self.channel = channel
                    self._arrived.notify_all()
            elif isinstance(frame, header.ContentHeader):
                self.expiration = frame.properties.expiration or ""
            elif not isinstance(frame, body.ContentBody) and type(frame) in ANSWERS:
                self.closed_by_client |= isinstance(frame, commands.Connection.Close)
                self.send(ANSWERS[type(frame)], channel)

    def send(self, frame: Frame, channel: int = 0) -> None:
        """Send a method."""
        self._writer.write(pamqp.frame.marshal(frame, channel))

    def block(self) -> None:
        """Announce that no messages are accepted."""
        self.send(commands.Connection.Blocked("low on memory"))

    def unblock(self) -> None:
        """Announce that messages are accepted again."""
        self.send(commands.Connection.Unblocked())

    def confirm(self, tag: int) -> None:
        """Confirm all messages up to this one."""
        self.send(commands.Basic.Ack(tag, multiple=True), self.channel)

    async def until_published(self, number: int) -> None:
        """Wait until so many messages have arrived in all."""
        async with asyncio.timeout(20), self._arrived:
            await self._arrived.wait_for(lambda: self.published >= number)

    def close(self) -> None:
        """Drop the connection."""
        self._writer.transport.abort()


class FakeBroker:
    """Listens on loopback; use it as an asynchronous context manager."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self.peers: list[Peer] = []
        self._server: asyncio.Server

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"amqp://guest:guest@127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    @property
    def publishing(self) -> Peer:
        """The connection on which the newest client publishes: the first of the two that it opens."""
        return self.peers[-2]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for peer in self.peers:
            peer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            await peer.run()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

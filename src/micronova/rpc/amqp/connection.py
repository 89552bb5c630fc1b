"""One AMQP 0-9-1 connection: framing, handshake, channels, heartbeats, flow control. It knows nothing of the bus.

Each frame is handled where it is received, without a task or a queue between socket and callback. Everything written
within one turn of the event loop is sent with one system call. `make bench-bus` compares the cost with aio-pika's.

Two things stop publishing: a full write buffer (the broker reads more slowly than we write), and the broker's
Connection.Blocked (it is short of memory or disk space). The broker then reads nothing more from a connection that
publishes, not even acknowledgements. So consume on another connection than the one that publishes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import ssl
from itertools import count
from typing import cast

import pamqp.frame
from pamqp import commands
from pamqp.base import Frame

from micronova.objects.clock import Clock
from micronova.objects.errors import resource_exhausted
from micronova.rpc.amqp import frames
from micronova.rpc.amqp.channel import Channel
from micronova.rpc.amqp.url import BrokerUrl
from micronova.rpc.errors import ConnectionLost, WrongSettings

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 20
FRAME_MAX = 131_072
FLUSH_SIZE = 65_536
"""Bytes written in one turn of the event loop after which they are sent at once, so that the transport can pause us."""
HANDSHAKE_SECONDS = 10.0
WHAT_TO_DO = {
    403: "correct user and password in transport_url",
    530: "correct the vhost in transport_url, or run `rabbitmqctl add_vhost` and `rabbitmqctl set_permissions`",
}
"""By the code with which the broker ends the handshake."""


class Connection(asyncio.Protocol):
    """A connection to a broker; make it with open()."""

    def __init__(self, url: BrokerUrl, name: str, clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.user_id = frames.shortstr(url.user)
        self.frame_max = FRAME_MAX
        self.closed: asyncio.Future[str] = loop.create_future()
        """Done with the reason once the connection is closed or lost."""
        self.blocked_since: float | None = None
        """When the broker announced that it accepts no messages (wall-clock time); None while it accepts them."""
        self.blocked_reason = ""
        self.server_version: tuple[int, ...] = ()
        """The version of the broker as it says itself; empty if it does not."""
        self._loop = loop
        self._url = url
        self._name = name
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._outgoing: list[bytes] = []
        self._outgoing_size = 0
        self._buffer_full = False
        self._channels: dict[int, Channel] = {}
        self._opened: asyncio.Future[None] = loop.create_future()
        self._heartbeats: asyncio.Task[None] | None = None
        self._last_received = 0.0

    @classmethod
    async def open(cls, url: BrokerUrl, host: tuple[str, int], *, name: str, clock: Clock) -> Connection:
        """Connect and log in; raise ConnectionLost or WrongSettings, with what to do about it."""
        connection = cls(url, name, clock)
        try:
            tls = url.ssl_context()
        except OSError as error:
            files = ", ".join((url.tls or {}).values())
            raise WrongSettings(f"a file that transport_url names cannot be used ({files}): {error}") from error
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await connection._loop.create_connection(lambda: connection, *host, ssl=tls)
                await connection._opened
        except (OSError, UnicodeError) as error:
            connection.abort()
            # A name that is unknown may be known later: that of a container, for example.
            wrong = isinstance(error, UnicodeError | ssl.SSLCertVerificationError)
            raise (WrongSettings if wrong else ConnectionLost)(_explain(error)) from error
        except BaseException as error:
            connection.abort()
            if lack := resource_exhausted(error):  # resolving a name needs a thread
                raise ConnectionLost(str(lack)) from error
            raise
        return connection

    async def channel(self) -> Channel:
        """Open a channel."""
        channel = Channel(self, next(number for number in count(1) if number not in self._channels))
        self._channels[channel.number] = channel
        await channel.request(commands.Channel.Open())
        return channel

    async def close(self) -> None:
        """Close the connection as the protocol asks, or at once if the broker does not read from it."""
        if not self.accepts_messages:
            self.abort("closed")
        elif not self.closed.done():
            close = commands.Connection.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
            self.write(pamqp.frame.marshal(close, 0))
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await asyncio.shield(self.closed)
            except TimeoutError:
                self.abort()

    @property
    def accepts_messages(self) -> bool:
        """Whether messages may be published now: the broker has not blocked us and the write buffer is not full."""
        return self.blocked_since is None and not self._buffer_full

    def abort(self, reason: str = "the connection was aborted") -> None:
        """Disconnect at once, without telling the broker."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def forget(self, number: int) -> None:
        """Remove a closed channel."""
        self._channels.pop(number, None)

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the event loop, together with all others of this turn."""
        if self.closed.done():
            raise ConnectionLost(self.closed.result())
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._outgoing_size += len(data)
        if self._outgoing_size > FLUSH_SIZE:
            self._flush()

    def _flush(self) -> None:
        if not self._outgoing:
            return
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        self._outgoing_size = 0
        if self._transport is not None and not self.closed.done():
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Stop publishing: the write buffer is full, because the broker reads more slowly than we write."""
        self._buffer_full = True

    def resume_writing(self) -> None:
        """Publish again."""
        self._buffer_full = False
        self._resume_publishing()

    def _resume_publishing(self) -> None:
        for channel in list(self._channels.values()):
            channel.resume_publishing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(b"AMQP\x00\x00\x09\x01")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests and publishes that wait on this connection."""
        if exc is None and not self._opened.done():
            self._end("it closed the connection before the login: it may accept only TLS (amqps://), or be no broker")
        else:
            self._end(str(exc) if exc else "the broker closed the connection")

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames; keep the rest until more comes."""
        self._last_received = self._clock.monotonic()
        if self._buffer:
            data = self._buffer + data
        position, available = 0, len(data)
        try:
            while available - position >= frames.OVERHEAD:
                kind, number, size = frames.frame_start.unpack_from(data, position)
                start = position + 7
                end = start + size
                if end >= available:
                    break
                if data[end] != frames.END:
                    raise ValueError("a frame does not end with the frame-end byte")
                position = end + 1
                if number:
                    self._on_channel_frame(kind, number, data, start, end)
                elif kind == frames.METHOD:
                    self._on_method(cast(Frame, pamqp.frame.unmarshal(data[start - 7 : end + 1])[2]))
        except Exception as error:
            log.exception("data from the broker cannot be parsed; the connection is aborted")
            self.abort(f"protocol error: {error}")
            return
        self._buffer = data[position:]

    def _on_channel_frame(self, kind: int, number: int, data: bytes, start: int, end: int) -> None:
        channel = self._channels.get(number)
        if channel is None:
            return  # the channel was closed, and the broker did not know it yet
        if kind == frames.BODY:
            channel.on_body(data[start:end])
        elif kind == frames.HEADER:
            channel.on_header(data, start)
        elif kind == frames.METHOD:
            channel.on_method(data, start, end)

    def _on_method(self, frame: Frame) -> None:
        if isinstance(frame, commands.Connection.Start):
            said = str((frame.server_properties or {}).get("version", ""))
            self.server_version = tuple(int(part) for part in re.findall(r"\d+", said)[:3])
            self._reply(
                commands.Connection.StartOk(
                    client_properties={
                        "product": "micronova",
                        "connection_name": self._name,
                        "capabilities": {
                            "authentication_failure_close": True,
                            "basic.nack": True,
                            "connection.blocked": True,
                            "consumer_cancel_notify": True,
                            "publisher_confirms": True,
                        },
                    },
                    mechanism="PLAIN",
                    response=f"\0{self._url.user}\0{self._url.password}",
                )
            )
        elif isinstance(frame, commands.Connection.Tune):
            self.frame_max = min(frame.frame_max or FRAME_MAX, FRAME_MAX)
            heartbeat = min(frame.heartbeat or HEARTBEAT_SECONDS, HEARTBEAT_SECONDS)
            self._reply(commands.Connection.TuneOk(frame.channel_max or 0, self.frame_max, heartbeat))
            self._reply(commands.Connection.Open(self._url.vhost))
            self._heartbeats = self._loop.create_task(self._send_heartbeats(heartbeat), name="amqp-heartbeat")
        elif isinstance(frame, commands.Connection.OpenOk):
            if not self._opened.done():
                self._opened.set_result(None)
        elif isinstance(frame, commands.Connection.Close):
            self._reply(commands.Connection.CloseOk())
            self._flush()
            if self._transport is not None:
                self._transport.close()
            reason = frame.reply_text or "the broker closed the connection"
            if not self._opened.done() and frame.reply_code in WHAT_TO_DO:
                reason = f"{reason.rstrip('.')}: {WHAT_TO_DO[frame.reply_code]}"
                self._opened.set_exception(WrongSettings(reason))
                self._opened.exception()  # marks it as retrieved
            self._end(reason)
        elif isinstance(frame, commands.Connection.CloseOk):
            if self._transport is not None:
                self._transport.close()
            self._end("closed")
        elif isinstance(frame, commands.Connection.Blocked):
            self.blocked_reason = frame.reason or "no reason given"
            if self.blocked_since is None:
                self.blocked_since = self._clock.now()
            log.warning(
                "the broker accepts no messages (%s); publishing waits until it has memory and disk space again",
                self.blocked_reason,
            )
        elif isinstance(frame, commands.Connection.Unblocked):
            self.blocked_since, self.blocked_reason = None, ""
            log.warning("the broker accepts messages again")
            self._resume_publishing()

    def _reply(self, frame: Frame) -> None:
        self.write(pamqp.frame.marshal(frame, 0))

    async def _send_heartbeats(self, seconds: float) -> None:
        try:
            while not self.closed.done():
                await self._clock.sleep(seconds / 2)
                if self._clock.monotonic() - self._last_received > seconds * 2:
                    self.abort(f"nothing was received from the broker for {seconds * 2} seconds")
                else:
                    self.write(frames.HEARTBEAT_FRAME)
        except Exception as error:  # nobody would notice any more that the broker is silent
            self.abort(f"a heartbeat could not be sent: {error}")

    def _end(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        error = ConnectionLost(reason)
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        for channel in list(self._channels.values()):
            channel.lost(error)
        self._channels.clear()
        if self._heartbeats is not None:
            self._heartbeats.cancel()


def _explain(error: OSError | UnicodeError) -> str:
    """Return why no connection could be opened, and what to do about it."""
    said = str(error)
    # asyncio joins the errors of several addresses of one name into the text of one without a number.
    refused, unreachable = (
        any(getattr(error, "errno", None) == number or f"[Errno {number}]" in said for number in numbers)
        for numbers in ((errno.ECONNREFUSED,), (errno.EHOSTUNREACH, errno.ENETUNREACH))
    )
    if isinstance(error, TimeoutError):
        seconds = f"{HANDSHAKE_SECONDS:.0f} seconds"
        return f"it does not answer within {seconds}: correct transport_url, or look for a firewall between"
    if isinstance(error, UnicodeError):
        return f"its name is not valid: correct transport_url ({said})"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved: correct transport_url or the name service ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: name its CA in transport_url, ?cafile=FILE ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS cannot be used with it: correct the port in transport_url, or use amqp:// ({error.reason or said})"
    if refused:
        return "nothing accepts connections there: start RabbitMQ, or correct transport_url"
    if unreachable:
        return f"no route leads there: correct transport_url or the network ({said})"
    return said

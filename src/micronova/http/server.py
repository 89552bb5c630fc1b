"""The HTTP server: uvicorn in our event loop, with limits on what a client may send and how slowly."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from micronova.http.addresses import client_network
from micronova.http.asgi import App
from micronova.http.proxies import TrustedProxies
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

LOG_EVERY: Final = 10.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What clients may take of a server."""

    connections: int = 4096
    per_client: int = 512  # connections of one address, or of one IPv6 /64 network; trusted proxies have no such limit
    timeout: float = 60.0  # seconds for the headers of a request, and that a client may leave an answer unread
    proxies: TrustedProxies = field(default_factory=TrustedProxies)


class Connections:
    """The open connections of a server, by the address of the client; those of an IPv6 client by its /64 network."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: Counter[str] = Counter()
        self._total = 0
        self._refused = 0  # since the last line in the log
        self._silent_until = 0.0

    def open(self, address: str) -> int:
        """Count a connection and return 0; return the status of the refusal if there are too many."""
        if self._total >= self.limits.connections:
            return 503
        client = client_network(address)
        if self._open[client] >= self.limits.per_client and address not in self.limits.proxies:
            return 429
        self._open[client] += 1
        self._total += 1
        return 0

    def note_refusal(self, address: str, status: int) -> None:
        """Log that a connection is refused, at most once in LOG_EVERY seconds."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            return
        self._silent_until = now + LOG_EVERY
        who = f"{address} has {self.limits.per_client}" if status == 429 else f"there are {self.limits.connections}"
        log.warning("refused connections: %s in %g s; %s connections", self._refused, LOG_EVERY, who)
        self._refused = 0

    def close(self, address: str) -> None:
        """Count a connection no longer."""
        self._total -= 1
        client = client_network(address)
        self._open[client] -= 1
        if self._open[client] <= 0:
            del self._open[client]


class _Protocol(HttpToolsProtocol):
    """HTTP with limits on the request line and headers, which uvicorn would wait for and buffer without limit."""

    peers: Connections  # of the server; a subclass sets it
    longest_head = 65_536  # bytes; checked only while the end of the headers is missing

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None  # runs while the client does not read
    _counted = ""  # the address under which this connection is counted
    _refused = False
    _in_head = False
    _read = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many, or start the timer for the first request."""
        super().connection_made(transport)
        if not self._counted and (status := self.count(self.client[0] if self.client else "local")):
            self._refused = True
            self._give_up(status)
            return
        self._timer = self.loop.call_later(self.peers.limits.timeout, self._give_up, 408)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer()
        self._stop_unread()
        self.uncount()
        super().connection_lost(exc)

    def count(self, address: str) -> int:
        """Count the connection and return 0; log the refusal and return its status if there are too many."""
        status = self.peers.open(address)
        if status:
            self.peers.note_refusal(address, status)
        else:
            self._counted = address
        return status

    def uncount(self) -> None:
        """Count the connection no longer, if it is counted."""
        if self._counted:
            self.peers.close(self._counted)
            self._counted = ""

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to the WebSocket protocol, which counts it from now on."""
        self.uncount()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read its answer, which would keep it in memory."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.peers.limits.timeout, self._abandon)

    def resume_writing(self) -> None:
        """Stop that timer."""
        super().resume_writing()
        self._stop_unread()

    def _abandon(self) -> None:
        log.debug("closed a connection of %s: it did not read its answer", self._counted)
        self.transport.abort()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """Start the timer if the headers are incomplete; usually they arrive in one piece and need none."""
        if self._refused:
            return
        super().data_received(data)
        if self._in_head:
            self._read += len(data)
            if self._read > self.longest_head:
                self._give_up(431)
            elif self._timer is None:
                self._timer = self.loop.call_later(self.peers.limits.timeout, self._give_up, 408)

    def on_message_begin(self) -> None:
        """Count the bytes of the headers that begin here."""
        super().on_message_begin()
        self._in_head, self._read = True, 0

    def on_headers_complete(self) -> None:
        """Stop the timer; each service limits the time for the body itself."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, status: int) -> None:
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            retry = b"retry-after: 5\r\n" if status in (429, 503) else b""
            head = b"HTTP/1.1 %d \r\nconnection: close\r\ncontent-length: 0\r\n" % status
            self.transport.write(head + retry + b"\r\n")
        self.transport.close()


class HTTPServer:
    """uvicorn in our event loop, without signal handlers and without an access log."""

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        *,
        certificate: str | None = None,
        key: str | None = None,
        limits: Limits | None = None,
        websockets: bool = False,
    ) -> None:
        self._socket = sock
        peers = Connections(limits or Limits())
        check_certificate(certificate, key)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=type("_Protocol", (_Protocol,), {"peers": peers}),
                ws=_websocket_protocol(peers) if websockets else "none",  # type: ignore[arg-type]
                ws_max_size=_LARGEST_MESSAGE,
                ws_per_message_deflate=False,  # screens are compressed already, keystrokes are small
                log_level="warning",  # at "info" it logs the query strings of WebSockets, which contain tokens
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise MicronovaError("The HTTP server stopped while it was starting.")
            await asyncio.sleep(0.005)

    def use_certificate(self, certificate: str, key: str) -> None:
        """Show this certificate to those who connect from now on; raise MicronovaError if it cannot be used."""
        context = self._server.config.ssl
        if context is not None:
            check_certificate(certificate, key)
            context.load_cert_chain(certificate, key)

    async def stop(self) -> None:
        """Stop accepting connections, finish the requests that are running, and close the socket."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        self._socket.close()


_LARGEST_MESSAGE = 1_048_576  # bytes that a browser may send at once


def _websocket_protocol(peers: Connections) -> Callable[..., asyncio.BaseProtocol]:
    """Return what makes the WebSocket protocol of a connection; it is imported when a client first needs it."""

    def make(*args: Any, **kwargs: Any) -> asyncio.BaseProtocol:
        from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

        class Protocol(WebSocketsSansIOProtocol):
            _counted = ""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                address = self.client[0] if self.client else "local"
                if not peers.open(address):
                    self._counted = address

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                if self._counted:
                    peers.close(self._counted)

        return Protocol(*args, **kwargs)

    return make


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise a MicronovaError of one line where uvicorn would show a traceback."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise MicronovaError("TLS needs both a certificate (api.tls_certificate) and its key (api.tls_key).")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise MicronovaError(f"Cannot use the certificate {certificate} with the key {key}: {reason}.") from None


class _TLSListener:
    """Accepts connections and counts each before its TLS handshake, which has a time limit.

    The event loop's own server tells the protocol of a connection only when the handshake is complete: a client that
    begins none would be counted nowhere.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, make: Callable[[], _Protocol]) -> None:
        self._socket = sock
        self._context = context
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections and end the handshakes."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._socket.fileno())
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept connections: %s; trying again in %g s", error.strerror, _ACCEPT_AGAIN)
                self._loop.remove_reader(self._socket.fileno())
                self._pause = self._loop.call_later(_ACCEPT_AGAIN, self._listen)
                return
            protocol = self._make()
            if protocol.count(str(peer[0]) if peer else "local"):
                sock.close()
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._handshake(sock, protocol), name="TLS handshake")
            self._handshakes.add(task)
            task.add_done_callback(partial(self._handshake_ended, protocol))

    async def _handshake(self, sock: socket.socket, protocol: _Protocol) -> None:
        await self._loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=protocol.peers.limits.timeout
        )

    def _handshake_ended(self, protocol: _Protocol, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if task.cancelled():
            protocol.uncount()
        elif error := task.exception():
            protocol.uncount()
            if isinstance(error, OSError):  # also errors of TLS and the time limit: the client's doing
                log.debug("a TLS handshake failed: %s", error)
            else:
                log.error("a TLS handshake failed", exc_info=error)


_ACCEPT_AT_ONCE = 100  # connections, before other work of the event loop has its turn
_ACCEPT_AGAIN = 1.0  # seconds


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._tls: list[_TLSListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; with TLS by our own listener."""
        config = self.config
        if config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup([])

        def make() -> _Protocol:
            made = config.http_protocol_class(
                config=config,  # type: ignore[call-arg]
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            assert isinstance(made, _Protocol)
            return made

        for sock in sockets or ():
            self._tls.append(_TLSListener(sock, config.ssl, make))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, finish the requests that are running, and close the connections."""
        for listener in self._tls:
            listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the command line handles signals."""
        yield

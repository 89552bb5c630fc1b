"""The connection to libvirt: calls in bounded threads, with time-outs; re-made when it is lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.virt.libvirt.events import GuestEvent, start_event_loop, subscribe
from micronova.virt.libvirt.library import has_code, is_error, load, translated
from micronova.virt.libvirt.pool import Overdue, Pool

log = logging.getLogger(__name__)

T = TypeVar("T")

READERS = 4
WORKERS = 8
KEEPALIVE = (5, 3)
"""A probe every so many seconds; a libvirtd that misses so many in a row is gone, and calls to it fail."""
RETRY_PAUSE = 1.0
RETRY_PAUSE_MAX = 15.0

_LOST = ("VIR_ERR_RPC", "VIR_ERR_NO_CONNECT", "VIR_ERR_INVALID_CONN", "VIR_ERR_AUTH_UNAVAILABLE")


class Connection:
    """One libvirt, for as long as the agent runs."""

    def __init__(
        self,
        uri: str,
        clock: Clock,
        *,
        on_event: Callable[[GuestEvent], None],
        on_restored: Callable[[], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
        timeout: float = 60.0,
        explain: Callable[[str, Exception], str] | None = None,
    ) -> None:
        self.uri = uri
        self._clock = clock
        self._on_event = on_event
        self._on_restored = on_restored  # there is a new connection: what happened meanwhile has to be found out
        self._prepare = prepare  # what has to be there before connecting makes sense
        self._timeout = timeout
        self._explain = explain or _say  # why there is no connection at an address
        self._readers = Pool("libvirt", READERS)
        self._workers = Pool("libvirt-work", WORKERS)
        self._lock = asyncio.Lock()
        self._connection: Any = None
        self._generation = 0
        self._mender: asyncio.Task[None] | None = None
        self._closed = False
        self._overdue: dict[str, set[asyncio.Future[Any]]] = {}  # by guest

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect; raise in one line if that cannot be."""
        load()
        start_event_loop()
        await self._ensure()

    async def close(self) -> None:
        """Let go of libvirt."""
        self._closed = True
        if self._mender is not None:
            self._mender.cancel()
            await asyncio.gather(self._mender, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await self._readers.run(_close, connection, timeout=5.0)
            except MicronovaError as error:
                log.warning("libvirt was not closed: %s", error)
        self._readers.close()
        self._workers.close()

    async def read(self, function: Callable[[Any], T], what: str = "be asked", *, timeout: float | None = None) -> T:
        """Ask something; a connection that turns out to be lost is re-made, once."""
        try:
            return await self._call(self._readers, function, what, timeout)
        except ConnectionLost:
            return await self._call(self._readers, function, what, timeout)

    async def work(self, guest: str, function: Callable[[Any], T], what: str, *, timeout: float | None = None) -> T:
        """Change a guest. It is done at most once: what a lost connection left undone is the caller's affair.

        A call that did not return in time may have its effect any time later: nothing else is done to the guest
        before it has ended, or a guest could appear after it was removed.
        """
        await self._settle(guest, timeout or self._timeout)
        try:
            return await self._call(self._workers, function, what, timeout)
        except Overdue as error:
            self._overdue.setdefault(guest, set()).add(error.call)
            raise

    async def _call(self, pool: Pool, function: Callable[[Any], T], what: str, timeout: float | None) -> T:
        connection = self._connection or await self._ensure()
        generation = self._generation
        try:
            return await pool.run(function, connection, timeout=timeout or self._timeout)
        except Exception as error:
            if isinstance(error, MicronovaError):
                raise
            if is_error(error) and await self._is_lost(error, connection):
                self._lost(generation, str(error))
                raise ConnectionLost(f"The connection to libvirt was lost, it could not {what}.") from error
            if is_error(error):
                log.warning("libvirt could not %s: %s", what, error)
            raise translated(error, what) from error

    async def _settle(self, guest: str, timeout: float) -> None:
        calls = self._overdue.get(guest)
        if not calls:
            return
        _, pending = await asyncio.wait(calls, timeout=timeout)
        if pending:
            self._overdue[guest] = pending
            raise Unavailable("An earlier call for the guest hangs in libvirt.")
        self._overdue.pop(guest, None)

    async def _is_lost(self, error: Exception, connection: Any) -> bool:
        if has_code(error, *_LOST):
            return True
        # Whether it is alive is known without asking the daemon.
        return not await self._readers.run(_alive, connection, timeout=5.0)

    async def _ensure(self) -> Any:
        async with self._lock:
            if self._connection is not None:
                return self._connection
            if self._closed:
                raise Unavailable("The driver was closed.")
            if self._prepare is not None:
                await self._prepare()
            loop = asyncio.get_running_loop()
            self._generation += 1
            generation = self._generation

            def lost(_connection: Any, reason: int, _context: Any) -> None:
                try:
                    loop.call_soon_threadsafe(self._lost, generation, f"closed, reason {reason}")
                except RuntimeError:  # the loop is closed
                    pass

            try:
                self._connection = await self._readers.run(
                    _open, self.uri, loop, self._on_event, lost, timeout=self._timeout
                )
            except Exception as error:
                if isinstance(error, MicronovaError):
                    raise
                raise Unavailable(self._explain(self.uri, error)) from error
            log.info("connected to libvirt at %s", self.uri)
            if generation > 1:
                self._on_restored()
            return self._connection

    def _lost(self, generation: int, reason: str) -> None:
        if self._closed or generation != self._generation or self._connection is None:
            return
        log.warning("the connection to libvirt was lost: %s", reason)
        self._connection = None
        if self._mender is None or self._mender.done():
            self._mender = asyncio.get_running_loop().create_task(self._mend())

    async def _mend(self) -> None:
        """Connect again even if nobody asks: events are to come in."""
        pause = RETRY_PAUSE
        while not self._closed and self._connection is None:
            try:
                await self._ensure()
            except Exception as error:  # whatever it is, it is tried again
                log.warning("libvirt cannot be reached: %s", error)
                await self._clock.sleep(pause)
                pause = min(pause * 2, RETRY_PAUSE_MAX)


class ConnectionLost(Unavailable):
    """The connection broke during a call; what the call had done by then is unknown."""


def _say(uri: str, error: Exception) -> str:
    return f"Libvirt at {uri} cannot be reached: {error}"


def _open(uri: str, loop: asyncio.AbstractEventLoop, handler: Callable[[GuestEvent], None], lost: Any) -> Any:
    connection = load().open(uri)
    try:
        subscribe(connection, loop, handler)
        _unless_unsupported(connection.registerCloseCallback, lost, None)
        _unless_unsupported(connection.setKeepAlive, *KEEPALIVE)
    except Exception:
        connection.close()
        raise
    return connection


def _unless_unsupported(function: Callable[..., Any], *args: Any) -> None:
    """Do what connections through a daemon know; a local one knows no such thing and needs none."""
    try:
        function(*args)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_SUPPORT"):
            raise


def _close(connection: Any) -> None:
    try:
        connection.unregisterCloseCallback()
    except Exception as error:
        if not is_error(error):
            raise
    connection.close()


def _alive(connection: Any) -> bool:
    return bool(connection.isAlive() == 1)

"""The connection to libvirt: calls run in bounded threads with timeouts, and a lost connection is made again.

Calls that last as long as a guest wants, or as its memory is large, run in lanes of their own. Tenants decide how many
of them there are, and the calls for other guests must not wait for them. They also have a connection of their own,
because libvirtd reads no request of a connection that has too many unanswered ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.events import GuestEvent, start_event_loop, subscribe
from micronova.virt.libvirt.client.library import has_code, is_error, is_lost, load, translated
from micronova.virt.libvirt.client.threads import ThreadPool

log = logging.getLogger(__name__)

T = TypeVar("T")

READERS = 4
Lane = Literal["work", "agent", "shutdown", "freeze", "memory"]
LANES: Final[dict[Lane, int]] = {"work": 8, "agent": 4, "shutdown": 4, "freeze": 6, "memory": 4}
"""The threads of each lane.

`work` is what libvirt does by itself. `agent` has requests to guests' agents. `shutdown` and `freeze` wait for agents,
too, but no password waits for guests that are to be switched off, and no guest that is to be thawed for the passwords
of others. `memory` is saved and restored. One project does not take all threads of `agent` and `memory`: `SLOW_CALLS`
of `compute/host.py`.
"""
KEEPALIVE = (5, 3)
"""Seconds between probes, and how many in a row libvirtd may miss before calls to it fail."""
RETRY_PAUSE = 1.0
RETRY_PAUSE_MAX = 15.0


class Connection:
    """The connection to one libvirt, for as long as the agent runs."""

    def __init__(
        self,
        uri: str,
        clock: Clock,
        *,
        on_event: Callable[[GuestEvent], None],
        on_restored: Callable[[], None],
        on_failed: Callable[[str], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
        timeout: float = 60.0,
        explain: Callable[[str, Exception], str] | None = None,
    ) -> None:
        self.uri = uri
        self._clock = clock
        self._on_event = on_event
        self._on_restored = on_restored  # called after a reconnect: events in between are lost
        self._on_failed = on_failed  # called if the first attempt to reconnect fails
        self._prepare = prepare  # awaited before each attempt to connect
        self._timeout = timeout
        self._explain = explain or _unreachable  # makes the error message when connecting fails
        self._readers = ThreadPool("libvirt", READERS)
        self._lanes = {lane: ThreadPool(f"libvirt-{lane}", size) for lane, size in LANES.items()}
        self._lock = asyncio.Lock()
        self._connection: Connect | None = None
        self._slow: tuple[int, Connect] | None = None  # for the other lanes, of this generation of the first one
        self._generation = 0
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False
        self._overdue: dict[str, set[asyncio.Future[Any]]] = {}  # by guest

    @property
    def connected(self) -> bool:
        """Whether there is a connection that is not known to be lost."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect; raise an error with a one-line message if that fails."""
        load()
        start_event_loop()
        await self._ensure()

    async def close(self) -> None:
        """Close the connection."""
        self._closed = True
        await end_tasks(self._reconnecting)
        connection, self._connection = self._connection, None
        slow, self._slow = self._slow, None
        for each in (connection, None if slow is None else slow[1]):
            if each is not None:
                try:
                    await self._readers.run(_close, each, timeout=5.0)
                except MicronovaError as error:
                    log.warning("the connection to libvirt could not be closed: %s", error)
        self._readers.close()
        for lane in self._lanes.values():
            lane.close()

    async def read(
        self, function: Callable[[Connect], T], what: str = "be asked", *, timeout: float | None = None
    ) -> T:
        """Make a call that changes nothing. If the connection is lost, connect again and repeat the call once."""
        try:
            return await self._call(self._readers, function, what, timeout)
        except ConnectionLost:
            return await self._call(self._readers, function, what, timeout)

    async def change(
        self,
        guest: str,
        function: Callable[[Connect], T],
        what: str,
        *,
        timeout: float | None = None,
        lane: Lane = "work",
    ) -> T:
        """Make a call that changes a guest. It is made at most once; the caller handles a connection that is lost.

        A call that did not return in time, or before its caller had to go, may have its effect later. So no other call
        for the guest is made before it has ended: otherwise a guest could appear after it was removed.
        """
        await self._await_overdue(guest, timeout or self._timeout)

        def note(call: asyncio.Future[Any]) -> None:
            self._overdue.setdefault(guest, set()).add(call)

        return await self._call(self._lanes[lane], function, what, timeout, slow=lane != "work", on_overdue=note)

    async def _call(
        self,
        pool: ThreadPool,
        function: Callable[[Connect], T],
        what: str,
        timeout: float | None,
        *,
        slow: bool = False,
        on_overdue: Callable[[asyncio.Future[Any]], None] | None = None,
    ) -> T:
        connection = self._connection or await self._ensure()
        if slow:
            connection = await self._ensure_slow()
        generation = self._generation
        try:
            return await pool.run(function, connection, timeout=timeout or self._timeout, on_overdue=on_overdue)
        except Exception as error:
            if isinstance(error, MicronovaError):
                raise
            if is_error(error) and await self._readers.run(is_lost, error, connection, timeout=5.0):
                if slow:
                    self._slow = None  # the other one tells of its own loss
                else:
                    self._lost(generation, str(error))
                raise ConnectionLost(f"The connection to libvirt was lost, it could not {what}.") from error
            if is_error(error):
                log.warning("libvirt could not %s: %s", what, error)
            raise translated(error, what) from error

    async def _await_overdue(self, guest: str, timeout: float) -> None:
        calls = self._overdue.get(guest)
        if not calls:
            return
        _, pending = await asyncio.wait(calls, timeout=timeout)
        if pending:
            self._overdue[guest] = pending
            raise Unavailable("An earlier call for the guest hangs in libvirt.")
        self._overdue.pop(guest, None)

    async def _ensure(self) -> Connect:
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

            def lost(_connection: Connect, reason: int, _context: object) -> None:
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

    async def _ensure_slow(self) -> Connect:
        async with self._lock:
            if self._slow is None or self._slow[0] != self._generation:
                generation = self._generation
                try:
                    opened = await self._readers.run(_open_slow, self.uri, timeout=self._timeout)
                except Exception as error:
                    if isinstance(error, MicronovaError):
                        raise
                    raise Unavailable(self._explain(self.uri, error)) from error
                self._slow = generation, opened
            return self._slow[1]

    def _lost(self, generation: int, reason: str) -> None:
        if self._closed or generation != self._generation or self._connection is None:
            return
        log.warning("the connection to libvirt was lost: %s", reason)
        self._connection = None
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = keep_running(self._reconnect, name="libvirt-reconnect", clock=self._clock)

    async def _reconnect(self) -> None:
        """Connect again even when there is no call to make: events must come in."""
        pause = RETRY_PAUSE
        while not self._closed and self._connection is None:
            try:
                await self._ensure()
            except Exception as error:
                log.warning("cannot reconnect to libvirt, trying again in %g s: %s", pause, error)
                if pause == RETRY_PAUSE:
                    self._on_failed(str(error))
                await self._clock.sleep(pause)
                pause = min(pause * 2, RETRY_PAUSE_MAX)


class ConnectionLost(Unavailable):
    """The connection was lost during a call, which may or may not have had its effect."""


def _unreachable(uri: str, error: Exception) -> str:
    return f"Libvirt at {uri} cannot be reached: {error}"


def _open(
    uri: str,
    loop: asyncio.AbstractEventLoop,
    handler: Callable[[GuestEvent], None],
    lost: Callable[[Connect, int, object], None],
) -> Connect:
    connection: Connect = load().open(uri)
    try:
        subscribe(connection, loop, handler)
        _unless_unsupported(connection.registerCloseCallback, lost, None)
        _unless_unsupported(connection.setKeepAlive, *KEEPALIVE)
    except Exception:
        connection.close()
        raise
    return connection


def _open_slow(uri: str) -> Connect:
    connection: Connect = load().open(uri)
    try:
        _unless_unsupported(connection.setKeepAlive, *KEEPALIVE)
    except Exception:
        connection.close()
        raise
    return connection


def _unless_unsupported(function: Callable[..., Any], *args: Any) -> None:
    """Call a function that connections through a daemon support; a local connection does not, and needs none of it."""
    try:
        function(*args)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_SUPPORT"):
            raise


def _close(connection: Connect) -> None:
    try:
        connection.unregisterCloseCallback()
    except Exception as error:
        if not is_error(error):
            raise
    connection.close()

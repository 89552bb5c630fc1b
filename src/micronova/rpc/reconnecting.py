"""What the buses with a connection share: they connect again for as long as they run, and senders wait for that.

While there is no connection, casts and new calls wait for it for at most `send_wait` seconds, then they raise
BusUnavailable. Calls that wait for an answer when the connection is lost raise it at once: their answers cannot arrive
any more, and only the caller knows whether a second call is harmless.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Generic, Protocol, TypeVar

from micronova.objects.background import keep_running
from micronova.objects.clock import Clock
from micronova.rpc.base import BaseBus, fail
from micronova.rpc.bus import BrokerState
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher
from micronova.rpc.errors import BusRefused, BusUnavailable, ConnectionLost, WrongSettings
from micronova.rpc.server import Delivery, Server

log = logging.getLogger(__name__)

FIRST_DELAY = 0.1
"""Seconds until the first attempt to connect again; twice as long for each further one, up to the bus's limit."""


class Connection(Protocol):
    """What a bus has while it is connected."""

    closed: asyncio.Future[str]
    """Done with the reason once it is closed or lost."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        ...

    def abort(self, reason: str, /) -> None:
        """Disconnect at once."""
        ...

    async def close(self) -> None:
        """Disconnect, and release what belongs to the connection."""
        ...


C = TypeVar("C", bound=Connection)
C_contra = TypeVar("C_contra", bound=Connection, contravariant=True)


class HeldDelivery(Delivery, Protocol):
    """A message that came by a connection."""

    @property
    def is_lost(self) -> bool:
        """Whether its connection is lost: it is delivered again by the next one."""
        ...


class AttachedServer(Server, Generic[C_contra]):
    """A server that gets its messages by a connection.

    More messages may come than handlers are free: those of a lost connection still run when the next one delivers, and
    the broker's limit is one for each queue. So messages wait here. If they were returned, they would come again at
    once.
    """

    def __init__(self, dispatcher: Dispatcher, deadlines: Deadlines, prefetch: int, grace: float) -> None:
        super().__init__(dispatcher, deadlines, prefetch, grace)
        self._backlog: deque[HeldDelivery] = deque()

    @abc.abstractmethod
    async def attach(self, connection: C_contra) -> None:
        """Receive by a connection, unless it does so already; raise ConnectionLost, or BusUnavailable if refused."""

    def receive(self, delivery: HeldDelivery) -> None:
        """Handle a message, or keep it until a handler is free; give it back if the server stops."""
        if self._stopping:
            delivery.give_back()
        elif self.can_take:
            self.take(delivery)
        else:
            self._backlog.append(delivery)

    def _next(self) -> None:
        while self._backlog and self.can_take:
            delivery = self._backlog.popleft()
            if delivery.is_lost:
                self._let_go(delivery)
            else:
                self.take(delivery)

    def _forget_backlog(self) -> None:
        """Drop the messages of the last connection, before the next one delivers them again."""
        while self._backlog:
            self._let_go(self._backlog.pop())

    def _return_backlog(self) -> None:
        """Give the messages back that wait, in their order."""
        while self._backlog:
            delivery = self._backlog.pop()
            self._let_go(delivery)
            delivery.give_back()

    def _let_go(self, delivery: Delivery) -> None:
        """Do what is due when a message is not held any more."""


class ReconnectingBus(BaseBus, Generic[C]):
    """A bus that opens a new connection whenever one is lost, and attaches its servers to it."""

    def __init__(
        self,
        *,
        peer: str,
        longest_delay: float,
        send_wait: float,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None,
        name: str,
        grace: float,
        control_users: frozenset[str] = frozenset(),
    ) -> None:
        """`peer` names the other end in errors; `longest_delay` is the limit of seconds between two attempts."""
        super().__init__(clock=clock, random=random, pins=pins, name=name, grace=grace, control_users=control_users)
        self._peer = peer
        self._longest_delay = longest_delay
        self._send_wait = send_wait
        self._connection: C | None = None
        self._connected_at = 0.0
        self._waiters: set[asyncio.Future[C]] = set()
        self._servers: list[AttachedServer[C]] = []
        self._reconnecting: asyncio.Task[None] | None = None
        self._dead_letters = 0
        self._probe_error = ""

    async def start(self) -> None:
        """Connect; raise BusRefused if the settings are wrong, else BusUnavailable if that fails."""
        try:
            await self._connect()
        except ConnectionLost as error:
            kind = BusRefused if isinstance(error, WrongSettings) else BusUnavailable
            raise kind(f"cannot use {self._peer}: {error}") from error
        self._reconnecting = keep_running(self._stay_connected, name="rpc-reconnect", clock=self._clock)

    async def stop(self) -> None:
        """Stop the servers, fail pending calls, disconnect."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._servers.clear()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait([self._reconnecting])
            self._reconnecting = None
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self._fail_all("the bus was stopped")
        for waiter in self._waiters:
            fail(waiter, BusUnavailable("the bus was stopped"))
        self._deadlines.close()

    @abc.abstractmethod
    async def _open(self) -> C:
        """Open a connection; raise ConnectionLost."""

    def _give_up_at(self) -> float:
        """Return the time until which what is sent now may wait."""
        return self._clock.monotonic() + self._send_wait

    async def _attach(self, server: AttachedServer[C]) -> None:
        """Attach a server to this connection and to all that follow; raise BusUnavailable."""
        give_up = self._give_up_at()
        while True:
            connection = await self._wait_for_connection(give_up)
            try:
                await server.attach(connection)
            except ConnectionLost:
                continue
            self._servers.append(server)
            return

    async def _wait_for_connection(self, give_up: float) -> C:
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        if self._reconnecting is None:
            raise BusUnavailable("the bus is not started")
        waiter: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        unavailable = BusUnavailable(f"there is no connection to {self._peer}")
        timer = self._deadlines.after(give_up - self._clock.monotonic(), lambda: fail(waiter, unavailable))
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    async def _stay_connected(self) -> None:
        while True:
            if self._connection is not None:
                reason = await asyncio.shield(self._connection.closed)
                log.warning("the connection to %s is lost: %s; the bus tries to connect again", self._peer, reason)
                self._connection = None
                self._fail_all(f"the connection to {self._peer} was lost: {reason}")
            await self._reconnect()
            log.warning("the connection to %s is back", self._peer)

    async def _reconnect(self) -> None:
        delay = FIRST_DELAY
        said = ""
        while True:
            # Jitter: the clients of a restarted broker must not all connect at the same moment.
            await self._clock.sleep(delay * self._random.uniform(0.5, 1.0))
            try:
                await self._connect()
                return
            except Exception as error:  # whatever it is, a process without a bus must not stay so
                expected = isinstance(error, ConnectionLost | BusUnavailable)
                if repr(error) != said:
                    said = repr(error)
                    log.warning("%s still cannot be used: %s", self._peer, error, exc_info=not expected)
            delay = min(delay * 2, self._longest_delay)

    async def _connect(self) -> None:
        connection = await self._open()
        try:
            for server in list(self._servers):
                await server.attach(connection)
        except BaseException as error:
            connection.abort(str(error) or "it could not be prepared")
            raise
        self._connection, self._connected_at = connection, self._clock.now()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(connection)

    def _broker_state(self) -> BrokerState:
        connected = self._connection is not None and self._connection.is_open
        return BrokerState(
            connected_since=self._connected_at if connected else None,
            dead_letters=self._dead_letters,
            probe_error=self._probe_error,
        )

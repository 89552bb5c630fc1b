"""The bus through RabbitMQ: one session per process at a time.

A cast whose confirmation was lost with the connection, or with the channel because the broker refused another message,
is sent again, so it may arrive twice. The sender of a cast that raises BusUnavailable need not retry: the sweep of the
database finds the work.

The limit `send_wait` of reconnecting.py also holds while the broker does not accept messages, because it is short of
memory or disk space, or reads more slowly than we write, or has not confirmed earlier messages. Once it has blocked us
for longer than `send_wait`, sending raises BusUnavailable without waiting. Consuming, acknowledging and heartbeats
continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from micronova.objects.clock import Clock
from micronova.rpc.amqp.channel import Channel, ChannelClosed, Received, Refused, Unroutable
from micronova.rpc.amqp.server import AmqpServer
from micronova.rpc.amqp.session import DEAD_QUEUE, PREFIX, Session
from micronova.rpc.amqp.url import parse
from micronova.rpc.base import fail
from micronova.rpc.bus import DEFAULT_PREFETCH, BrokerState, BusStats
from micronova.rpc.contract import Interface, queue_name
from micronova.rpc.dispatch import Dispatcher
from micronova.rpc.errors import BusUnavailable, ConnectionLost, WrongSettings
from micronova.rpc.reconnecting import ReconnectingBus
from micronova.rpc.server import Server

log = logging.getLogger(__name__)

LONGEST_DELAY = 10.0
PROBE_SECONDS = 1.0
PROBE_KEY = PREFIX + "probe"
"""No queue has this name: the broker confirms the message and drops it."""


class AmqpBus(ReconnectingBus[Session]):
    """This process's end of a bus that runs through a broker."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None = None,
        name: str = "",
        grace: float = 10.0,
        send_wait: float = 5.0,
        control_users: frozenset[str] = frozenset(),
    ) -> None:
        self._url = parse(url)
        super().__init__(
            peer=f"the broker at {self._url}",
            longest_delay=LONGEST_DELAY,
            send_wait=send_wait,
            clock=clock,
            random=random,
            pins=pins,
            name=name or self._url.user,
            grace=grace,
            control_users=control_users,
        )
        self._next_host = random.randrange(len(self._url.hosts))

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Handle an interface's messages."""
        server = AmqpServer(
            Dispatcher(interface, handler, self._clock, self._deadlines, self._counters),
            self._deadlines,
            prefetch,
            self._grace,
            host=host,
            shared=shared,
            control_users=self._control_users,
            send_reply=self._send_reply,
        )
        await self._attach(server)
        return server

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host; its user's own rights suffice only for its own queue."""
        name = PREFIX + queue_name(interface.topic, interface.namespace, host)
        session = await self._wait_for_connection(self._give_up_at())
        try:
            await session.delete_queue(name)
        except (ChannelClosed, ConnectionLost) as error:
            raise BusUnavailable(f"the queue {name} cannot be deleted: {error}") from error

    async def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Ask the broker how many messages wait in each of these queues that exists."""
        session = await self._wait_for_connection(self._give_up_at())
        found = {}
        for name in queues:
            try:
                found[name] = await session.depth(PREFIX + name)
            except ChannelClosed:
                continue  # there is no such queue yet
            except (ConnectionLost, Refused) as error:
                raise BusUnavailable(f"the broker does not tell how many messages wait: {error}") from error
        return found

    async def probe(self) -> BusStats:
        """Ask the broker for its dead letters and whether it accepts messages, then return the statistics."""
        self._probe_error = ""
        try:
            session = await self._wait_for_connection(self._give_up_at())
            self._dead_letters = await session.depth(DEAD_QUEUE)
            channel = await session.confirmed_channel()
            if channel.can_publish and channel.has_room(PROBE_KEY):
                # The broker announces that it blocks a connection only when that connection publishes.
                confirmation = channel.publish("", PROBE_KEY, b"")
                assert confirmation is not None
                await asyncio.wait([confirmation], timeout=PROBE_SECONDS)
                if confirmation.done():
                    confirmation.result()
                elif session.publishing.blocked_since is None:
                    raise BusUnavailable(f"it did not confirm a message within {PROBE_SECONDS:g} s")
        except (BusUnavailable, ConnectionLost, ChannelClosed, Refused) as error:
            self._probe_error = str(error)
            log.warning("the broker at %s cannot be asked for its state: %s", self._url, error)
        return self.stats()

    async def _send(self, queue: str, body: bytes, message_id: str, expires: float | None) -> None:
        name = PREFIX + queue
        give_up = self._give_up_at()
        alone = False
        while True:
            session = await self._wait_for_connection(give_up)
            try:
                if alone:
                    async with session.channel_alone() as channel:
                        await self._publish(session, channel, name, body, message_id, give_up, expires)
                else:
                    channel = await session.confirmed_channel()
                    await self._publish(session, channel, name, body, message_id, give_up, expires)
            except Unroutable:
                try:
                    await session.ensure_work_queue(name)
                except ChannelClosed as error:
                    raise BusUnavailable(
                        f"there is no queue {name}, and this broker user may not make it: {error}"
                    ) from error
                except ConnectionLost:
                    continue
            except ChannelClosed as error:
                if alone:
                    raise BusUnavailable(f"the broker refused a message to {name}: {error}") from error
                alone = True  # it may be another message of the channel that the broker refused
            except ConnectionLost:
                continue
            else:
                return

    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        deadline = self._clock.monotonic() + left
        give_up = min(self._give_up_at(), deadline)
        while True:
            session = await self._wait_for_connection(give_up)
            try:
                if not session.unconfirmed.can_publish:
                    await self._wait_to_publish(session, session.unconfirmed, give_up)
                session.unconfirmed.publish(
                    "",
                    PREFIX + queue,
                    body,
                    message_id=call_id,
                    reply_to=session.reply_to,
                    mandatory=True,
                    expires=deadline - self._clock.monotonic(),  # less than left, if it waited for a connection
                )
            except ChannelClosed as error:
                raise BusUnavailable(f"the broker refused a call to {queue}: {error}") from error
            except ConnectionLost:
                continue
            else:
                return

    async def _send_reply(self, queue: str, body: bytes) -> None:
        session = self._connection
        try:
            if session is None:
                raise ConnectionLost("there is no connection")
            if not session.unconfirmed.can_publish:
                await self._wait_to_publish(session, session.unconfirmed, self._give_up_at())
            session.unconfirmed.publish("", queue, body)
        except (BusUnavailable, ConnectionLost, ChannelClosed) as error:
            log.warning("a reply to %s was dropped, its caller will time out: %s", queue, error)

    async def _publish(
        self,
        session: Session,
        channel: Channel,
        queue: str,
        body: bytes,
        message_id: str,
        give_up: float,
        expires: float | None,
    ) -> None:
        while True:
            if not channel.has_room(queue):
                await self._wait_for_room(channel, queue, give_up)
            if not channel.can_publish:
                await self._wait_to_publish(session, channel, give_up)
            if channel.has_room(queue):
                break
        confirmation = channel.publish(
            "", queue, body, message_id=message_id, mandatory=True, persistent=True, expires=expires
        )
        assert confirmation is not None
        timer = self._deadlines.after(
            give_up - self._clock.monotonic(),
            lambda: fail(confirmation, Refused("not confirmed in time")),
        )
        try:
            await confirmation
        except Refused as error:
            reason = self._blocked_reason(session) or error
            raise BusUnavailable(f"the broker did not accept a message to {queue}: {reason}") from error
        finally:
            timer.cancel()

    async def _wait_for_room(self, channel: Channel, queue: str, give_up: float) -> None:
        try:
            async with asyncio.timeout(give_up - self._clock.monotonic()):
                await channel.wait_for_room(queue)
        except TimeoutError:
            raise BusUnavailable(
                f"the broker at {self._url} confirms no messages to {queue}: most replicas of the queue may be down"
            ) from None

    async def _wait_to_publish(self, session: Session, channel: Channel, give_up: float) -> None:
        """Wait until the channel may publish; raise BusUnavailable if it may not in time, or ConnectionLost."""
        blocked_since = session.publishing.blocked_since
        if blocked_since is None or self._clock.now() - blocked_since < self._send_wait:
            try:
                async with asyncio.timeout(give_up - self._clock.monotonic()):
                    return await channel.wait_to_publish()
            except TimeoutError:
                pass
        reason = self._blocked_reason(session) or "it has not read or confirmed what was sent before"
        raise BusUnavailable(f"the broker at {self._url} accepts no messages now: {reason}")

    def _blocked_reason(self, session: Session) -> str:
        connection = session.publishing
        if connection.blocked_since is None:
            return ""
        seconds = self._clock.now() - connection.blocked_since
        return f"it has blocked this connection for {seconds:.0f} seconds ({connection.blocked_reason})"

    async def _open(self) -> Session:
        failed = []
        kind: type[ConnectionLost] = ConnectionLost
        for _ in self._url.hosts:
            host, port = self._url.hosts[self._next_host]
            self._next_host = (self._next_host + 1) % len(self._url.hosts)  # also after a success, for the next time
            try:
                return await self._open_at((host, port))
            except ConnectionLost as error:
                failed.append(f"{host}:{port}: {error}" if len(self._url.hosts) > 1 else str(error))
                if isinstance(error, WrongSettings):
                    kind = WrongSettings
        raise kind("; ".join(failed))

    async def _open_at(self, host: tuple[str, int]) -> Session:
        try:
            return await Session.open(
                self._url,
                host,
                name=self.name,
                clock=self._clock,
                token=self._next_id(),
                on_reply=self._on_reply,
                on_unroutable=self._on_unroutable,
                is_host=bool(self._control_users) and self._url.user not in self._control_users,
            )
        except ChannelClosed as error:
            raise ConnectionLost(str(error)) from error

    def _on_reply(self, received: Received) -> None:
        self._receive_reply(received.body, received.properties.user_id)

    def _on_unroutable(self, call_id: str) -> None:
        self._fail(call_id, BusUnavailable("no server has declared the queue that the call was sent to"))

    def _broker_state(self) -> BrokerState:
        state = super()._broker_state()
        if self._connection is None or not state.connected:
            return state
        publishing = self._connection.publishing
        return replace(state, blocked_since=publishing.blocked_since, blocked_reason=publishing.blocked_reason)

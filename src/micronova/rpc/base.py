"""The sending half of the bus, shared by all transports: envelopes, calls and their replies, deadlines, counters."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgspec

from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.rpc.bus import BrokerState, BusStats
from micronova.rpc.contract import Interface, Method, P, R, Target, is_compatible, parse_version, queue_name
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Counters
from micronova.rpc.envelope import (
    CALL,
    CAST,
    OutgoingRequest,
    Reply,
    decode_reply,
    encode,
)
from micronova.rpc.errors import (
    BusUnavailable,
    CallTimeout,
    InvalidMessage,
    RpcError,
    VersionTooNew,
    from_body,
)

NO_LIMIT = 0.0
log = logging.getLogger(__name__)

PENDING_CALLS_LIMIT = 10_000
"""How many calls of one process may wait for their answers; more of them raise BusUnavailable."""


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Set an exception on a future that is not done yet."""
    if not future.done():
        future.set_exception(error)


class PendingCall(NamedTuple):
    """A call that waits for its answer."""

    answer: asyncio.Future[Reply]
    host: str | None
    """The host that was asked, which may answer beside the control users."""


class BaseBus(abc.ABC):
    """Sends messages and matches replies to calls; a subclass, the transport, moves the bytes."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None,
        name: str,
        grace: float,
        control_users: frozenset[str] = frozenset(),
    ) -> None:
        """Answers are accepted of the control users and of the host that was asked; without control users, of all."""
        self.name = name
        self._clock = clock
        self._random = random
        self._pins = dict(pins or {})
        for pin in self._pins.values():
            parse_version(pin)
        self._grace = grace
        self._deadlines = Deadlines(clock)
        self._counters = Counters()
        self._control_users = control_users
        self._calls: dict[str, PendingCall] = {}

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message and return once it is queued."""
        message_id = self._next_id()
        body = self._encode(message_id, CAST, method, params, context, method.expires or NO_LIMIT)
        queue = queue_name(target.topic, method.interface.namespace, target.host)
        await self._send(queue, body, message_id, method.expires)
        self._counters.sent[CAST, method.label] += 1

    async def call(
        self,
        target: Target,
        method: Method[P, R],
        params: P,
        *,
        context: Context,
        timeout: float,
    ) -> R:
        """Send a message and return its answer."""
        if len(self._calls) >= PENDING_CALLS_LIMIT:
            raise BusUnavailable(f"{PENDING_CALLS_LIMIT} calls of this process wait for their answers already")
        left = min(timeout, context.deadline - self._clock.monotonic()) if context.deadline else timeout
        if left <= 0:
            raise CallTimeout(f"the deadline passed before {method.label} was called")
        call_id = self._next_id()
        body = self._encode(call_id, CALL, method, params, context, left)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = PendingCall(answer, target.host)
        timer = self._deadlines.after(left, partial(self._time_out, call_id, method.label, target))
        try:
            await self._send_call(
                queue_name(target.topic, method.interface.namespace, target.host),
                body,
                call_id,
                left,
            )
            self._counters.sent[CALL, method.label] += 1
            reply = await answer
        finally:
            timer.cancel()
            del self._calls[call_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # marks it as retrieved: asyncio logs it otherwise if sending failed first
        if reply.error is not None:
            raise from_body(reply.error)
        try:
            result: R = method.decode_result(reply.payload)
        except msgspec.DecodeError as error:
            raise InvalidMessage(f"the answer of {method.label}: {error}") from error
        return result

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Return whether messages of this contract version may be sent."""
        pin = self._pins.get(interface.topic, version)
        return is_compatible(version, interface.version) and is_compatible(version, pin)

    def stats(self) -> BusStats:
        """Return the counters and what is known of the broker, without asking it."""
        counters = self._counters
        return BusStats(
            sent=dict(counters.sent),
            handled=dict(counters.handled),
            failed=dict(counters.failed),
            expired=dict(counters.expired),
            pending_calls=len(self._calls),
            broker=self._broker_state(),
        )

    def _encode(
        self,
        message_id: str,
        kind: str,
        method: Method[P, Any],
        params: P,
        context: Context,
        left: float,
    ) -> bytes:
        interface = method.interface
        if interface.topic in self._pins and not self.can_send_version(interface, method.since):
            raise VersionTooNew(
                f"{method.label} needs contract {method.since}, "
                f"but this side is pinned to {self._pins[interface.topic]}"
            )
        if context.deadline:  # a time of this process's clock, which says nothing to the receiver
            context = msgspec.structs.replace(context, deadline=0.0)
        return encode(
            OutgoingRequest(
                message_id,
                kind,
                method.name,
                interface.namespace,
                method.since,
                context,
                params,
                left,
            )
        )

    def _next_id(self) -> str:
        # Random, because whoever receives one call could otherwise forge the answers to the next ones.
        return f"{self._random.getrandbits(128):032x}"

    def _receive_reply(self, body: bytes, sender: str) -> None:
        """Give an answer to its caller; the transport has verified the sender."""
        try:
            reply = decode_reply(body)
        except msgspec.DecodeError as error:  # any host may write to a queue of replies
            log.warning("a message in the queue of replies cannot be read and is dropped: %s", error)
            return
        call = self._calls.get(reply.id)
        if call is None or call.answer.done():
            return  # it is late, or the second one
        if self._control_users and sender not in self._control_users and sender != call.host:
            log.warning(
                "%s may not answer a call to %s: its answer is dropped", sender, call.host or "a control service"
            )
            return
        call.answer.set_result(reply)

    def _time_out(self, call_id: str, label: str, target: Target) -> None:
        state = self._broker_state()
        blocked = f"; the broker accepts no messages now: {state.blocked_reason}" if state.blocked else ""
        self._fail(call_id, CallTimeout(f"{label} on {target.host or target.topic} did not answer in time{blocked}"))

    def _fail(self, call_id: str, error: RpcError) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            fail(call.answer, error)

    def _fail_all(self, reason: str) -> None:
        for call_id in list(self._calls):
            self._fail(call_id, BusUnavailable(reason))

    @abc.abstractmethod
    async def _send(self, queue: str, body: bytes, message_id: str, expires: float | None) -> None:
        """Put a message into a work queue, where it may wait for so many seconds; create the queue if it is missing."""

    @abc.abstractmethod
    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        """Put a call into a work queue within the time left; raise BusUnavailable if the queue does not exist."""

    @abc.abstractmethod
    def _broker_state(self) -> BrokerState:
        """Return what is known of the broker."""

"""What the transports share: envelopes out, replies in, deadlines of calls, pins, counters."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import count
from random import Random
from typing import Any

import msgspec

from micronova.objects.clock import Clock
from micronova.rpc.bus import BusStats
from micronova.rpc.contract import (
    Context,
    Interface,
    Method,
    P,
    R,
    Target,
    address,
    fits,
    parse_version,
)
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Counters
from micronova.rpc.envelope import (
    CALL,
    CAST,
    FANOUT,
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

WITHOUT_DEADLINE = 0.0


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Let whoever waits for a future know that it will not come, unless it came already."""
    if not future.done():
        future.set_exception(error)


class BaseBus(abc.ABC):
    """The sending half of a bus; a transport adds how bytes travel."""

    def __init__(
        self,
        *,
        clock: Clock,
        random: Random,
        pins: Mapping[str, str] | None,
        name: str,
        grace: float,
    ) -> None:
        self.name = name
        self._clock = clock
        self._random = random
        self._pins = dict(pins or {})
        for pin in self._pins.values():
            parse_version(pin)
        self._grace = grace
        self._deadlines = Deadlines(clock)
        self._counters = Counters()
        self._calls: dict[str, asyncio.Future[Reply]] = {}
        # Ids need only be unique among the calls in flight of this process; the prefix tells processes apart in logs.
        self._id_prefix = f"{random.getrandbits(48):012x}-"
        self._id_counter = count(1)

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message and return once it is safely queued."""
        message_id = self._next_id()
        body = self._encode(message_id, CAST, method, params, context, WITHOUT_DEADLINE)
        await self._send(address(target.topic, method.interface.namespace, target.host), body, message_id)
        self._counters.sent[CAST, method.label] += 1

    async def fanout(self, topic: str, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message to every server of a topic."""
        message_id = self._next_id()
        body = self._encode(message_id, FANOUT, method, params, context, WITHOUT_DEADLINE)
        await self._send_to_all(address(topic, method.interface.namespace), body, message_id)
        self._counters.sent[FANOUT, method.label] += 1

    async def call(
        self,
        target: Target,
        method: Method[P, R],
        params: P,
        *,
        context: Context,
        timeout: float,
    ) -> R:
        """Send a message and wait for its answer."""
        now = self._clock.now()
        left = min(timeout, context.deadline - now) if context.deadline else timeout
        if left <= 0:
            raise CallTimeout(f"no time was left to call {method.label}")
        call_id = self._next_id()
        body = self._encode(call_id, CALL, method, params, context, now + left)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        timeout_error = partial(
            CallTimeout,
            f"{method.label} on {target.host or target.topic} did not answer in time",
        )
        timer = self._deadlines.after(left, lambda: self._fail(call_id, timeout_error()))
        try:
            await self._send_call(
                address(target.topic, method.interface.namespace, target.host),
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
                answer.exception()  # seen, even if sending failed first: asyncio would complain otherwise
        if reply.error is not None:
            raise from_body(reply.error)
        try:
            result: R = method.decode_result(reply.payload)
        except msgspec.DecodeError as error:
            raise InvalidMessage(f"the answer of {method.label}: {error}") from error
        return result

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Say whether messages of this contract version may be sent."""
        return fits(version, interface.version) and fits(version, self._pins.get(interface.topic, version))

    def stats(self) -> BusStats:
        """Say what happened so far."""
        counters = self._counters
        return BusStats(
            sent=dict(counters.sent),
            handled=dict(counters.handled),
            failed=dict(counters.failed),
            expired=dict(counters.expired),
            dead_letters=self._dead_letters(),
            connected=self._connected(),
            pending_calls=len(self._calls),
        )

    def _encode(
        self,
        message_id: str,
        kind: str,
        method: Method[P, Any],
        params: P,
        context: Context,
        deadline: float,
    ) -> bytes:
        interface = method.interface
        if interface.topic in self._pins and not self.can_send_version(interface, method.since):
            raise VersionTooNew(
                f"{method.label} needs contract {method.since}, "
                f"but this side is pinned to {self._pins[interface.topic]}"
            )
        if context.deadline != deadline:
            context = msgspec.structs.replace(context, deadline=deadline)
        return encode(
            OutgoingRequest(
                message_id,
                kind,
                method.name,
                interface.namespace,
                method.since,
                context,
                params,
            )
        )

    def _next_id(self) -> str:
        return f"{self._id_prefix}{next(self._id_counter):x}"

    def _receive_reply(self, body: bytes) -> None:
        reply = decode_reply(body)
        answer = self._calls.get(reply.id)
        if answer is not None and not answer.done():  # else it came too late, or twice
            answer.set_result(reply)

    def _fail(self, call_id: str, error: RpcError) -> None:
        answer = self._calls.get(call_id)
        if answer is not None:
            fail(answer, error)

    def _fail_all(self, reason: str) -> None:
        for call_id in list(self._calls):
            self._fail(call_id, BusUnavailable(reason))

    @abc.abstractmethod
    async def _send(self, queue: str, body: bytes, message_id: str) -> None:
        """Put a message into a work queue, which is made if it is missing."""

    @abc.abstractmethod
    async def _send_call(self, queue: str, body: bytes, call_id: str, left: float) -> None:
        """Put a call into a work queue that exists, within the time left."""

    @abc.abstractmethod
    async def _send_to_all(self, place: str, body: bytes, message_id: str) -> None:
        """Give a message to every server of a place."""

    @abc.abstractmethod
    def _dead_letters(self) -> int: ...

    @abc.abstractmethod
    def _connected(self) -> bool: ...

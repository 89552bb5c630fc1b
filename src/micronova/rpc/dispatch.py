"""Decodes a received message, runs its handler and encodes the reply; the same for every transport.

If a handler raises, the caller of a call gets the exception. A cast is logged and becomes a dead letter at once,
because the database sweep repeats the work, not the broker. If a process dies, the transport delivers its messages
again, so a handler may see a message twice.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from micronova.objects.clock import Clock
from micronova.objects.errors import resource_exhausted
from micronova.rpc.contract import Handler, Interface, Method, parse_version
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.envelope import (
    CALL,
    REPLY,
    OutgoingReply,
    Request,
    decode_request,
    encode,
)
from micronova.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    NoSuchMethod,
    VersionTooNew,
    is_coded,
    to_body,
)
from micronova.telemetry.logs import request_id

log = logging.getLogger(__name__)

LONGEST_REQUEST_ID = 255


class Outcome(NamedTuple):
    """What the transport does with a handled message."""

    reply: bytes | None = None
    """What to send to the caller."""
    dead_letter: str = ""
    """Why the message goes to the dead-letter queue; empty if it does not."""


DONE = Outcome()


@dataclass
class Counters:
    """Messages that a bus has sent and handled, by method."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    expired: Counter[str] = field(default_factory=Counter)


class Dispatcher:
    """Runs the handlers of one interface's messages."""

    def __init__(
        self,
        interface: Interface,
        handler: object,
        clock: Clock,
        deadlines: Deadlines,
        counters: Counters,
    ) -> None:
        self.interface = interface
        self.clock = clock
        self._deadlines = deadlines
        self._counters = counters
        major, minor = parse_version(interface.version)
        self._versions = {f"{major}.{number}" for number in range(minor + 1)}
        self._handlers: dict[str, tuple[Method[Any, Any], Handler]] = {}
        for name, method in interface.methods.items():
            function = getattr(handler, name, None)
            if not inspect.iscoroutinefunction(function):
                raise TypeError(f"{type(handler).__name__} has no coroutine {name}, which {interface!r} declares")
            self._handlers[name] = (method, function)

    async def run(self, body: bytes, sender: str, received_at: float) -> Outcome:
        """Handle one message; raise CancelledError only if the server is being stopped.

        `received_at` is the monotonic time at which this process got the message: from then on a call's time is
        counted here. Before, the transport limits how long the message may wait.
        """
        try:
            request = decode_request(body)
        except msgspec.DecodeError as error:
            log.error("a message from %s cannot be decoded and becomes a dead letter: %s", sender, error)
            return Outcome(dead_letter=f"cannot be decoded: {error}")
        named = request.context.request_id
        context = msgspec.structs.replace(
            request.context,
            # It is in every line of the log: a host must not be able to write lines of its own there.
            request_id=named if named.isprintable() and len(named) <= LONGEST_REQUEST_ID else "",
            sender=sender,
            deadline=0.0,
        )
        request.context = context
        request_id.set(context.request_id)
        timer = None
        try:
            deadline = received_at + request.left
            left = deadline - self.clock.monotonic()
            if request.left and left <= 0:
                than = "its caller waits" if request.kind == CALL else "it may"
                return self._expired(
                    request, f"from {sender or 'this process'} waited for a handler longer than {than}"
                )
            if request.kind == CALL and request.left:
                context = msgspec.structs.replace(context, deadline=deadline)
                task = asyncio.current_task()
                assert task is not None
                timer = self._deadlines.after(left, task.cancel)
            method, handler = self._find(request)
            try:
                params = method.decode_params(request.payload)
            except msgspec.DecodeError as error:
                raise InvalidMessage(f"{method.label}: {error}") from error
            result = await handler(context, params)
            reply = encode(OutgoingReply(request.id, None, result)) if request.kind == CALL else None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            assert task is not None
            if timer is not None and timer.fired and task.uncancel() == 0:
                return self._expired(request, "was cancelled at its caller's deadline")
            if task.cancelling():
                raise
            return self._failed(request, error)
        except Exception as error:  # noqa: BLE001 - the caller gets whatever a handler raises
            return self._failed(request, error)
        finally:
            if timer is not None:
                timer.cancel()
        self._counters.handled[method.label] += 1
        if reply is None:
            return DONE
        self._counters.sent[REPLY, method.label] += 1
        return Outcome(reply)

    def _find(self, request: Request) -> tuple[Method[Any, Any], Handler]:
        found = self._handlers.get(request.method)
        if found is None or request.namespace != self.interface.namespace:
            raise NoSuchMethod(
                f"The service {self.interface.topic} (messages {self.interface.version}) does not know the message "
                f"{f'{request.namespace[:64]}:{request.method[:64]}'!r}."
            )
        if request.version not in self._versions:
            raise VersionTooNew(
                f"{request.method} needs contract {request.version[:32]!r}, this server has {self.interface.version}"
            )
        return found

    def _expired(self, request: Request, what: str) -> Outcome:
        self._counters.expired[self._label(request)] += 1
        log.warning("the message %s %s%s", self._label(request), what, _of_request(request))
        return DONE

    def _failed(self, request: Request, error: BaseException) -> Outcome:
        label = self._label(request)
        self._counters.failed[label] += 1
        if request.kind == CALL:
            if not is_coded(error):
                log.error("the message %s%s failed", label, _of_request(request), exc_info=error)
            self._counters.sent[REPLY, label] += 1
            try:
                # What lacks here for the moment must not end what the caller works on.
                body = to_body(resource_exhausted(error) or error)
                return Outcome(encode(OutgoingReply(request.id, body, None)))
            except MessageTooLarge as large:
                return Outcome(encode(OutgoingReply(request.id, to_body(large), None)))
        log.error("the message %s%s failed and becomes a dead letter", label, _of_request(request), exc_info=error)
        return Outcome(dead_letter=f"{type(error).__name__}: {error}")

    def _label(self, request: Request) -> str:
        # Not the name of an unknown method: a sender that makes up names would fill the counters.
        return f"{self.interface.topic}.{request.method if request.method in self._handlers else '(unknown)'}"


def _of_request(request: Request) -> str:
    """Return the id of the user's request that a message belongs to, for a line of the log; heartbeats have none."""
    return f" (request {request.context.request_id})" if request.context.request_id else ""

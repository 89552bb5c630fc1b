"""From received bytes to a handler's coroutine and back to bytes; the same for every transport.

What becomes of a handler's exception: a call's goes back to the caller and the message is done with; a cast's is
logged and the message is dead-lettered at once, because the database sweep drives the work again, not the broker;
a fan-out's is only logged. A message whose process died is delivered again by the transport, so that handlers may
see doubles.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from micronova.objects.clock import Clock
from micronova.rpc.contract import Context, Interface, Method, fits
from micronova.rpc.deadlines import Deadlines
from micronova.rpc.envelope import (
    CALL,
    CAST,
    REPLY,
    OutgoingReply,
    Request,
    decode_request,
    encode,
)
from micronova.rpc.errors import (
    InvalidMessage,
    NoSuchMethod,
    VersionTooNew,
    is_coded,
    to_body,
)
from micronova.telemetry.logs import request_id

log = logging.getLogger(__name__)

Handler = Callable[[Context, Any], Awaitable[Any]]


class Verdict(NamedTuple):
    """What the transport does next: send this reply if there is one, dead-letter the message if there is a reason."""

    reply: bytes | None = None
    dead: str = ""


DONE = Verdict()


@dataclass
class Counters:
    """What a bus has done so far, by method."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    expired: Counter[str] = field(default_factory=Counter)


class Dispatcher:
    """Runs the handlers of one interface."""

    def __init__(
        self,
        interface: Interface,
        handler: object,
        clock: Clock,
        deadlines: Deadlines,
        counters: Counters,
    ) -> None:
        self.interface = interface
        self._clock = clock
        self._deadlines = deadlines
        self._counters = counters
        self._spoken: set[str] = set()
        self._handlers: dict[str, tuple[Method[Any, Any], Handler]] = {}
        for name, method in interface.methods.items():
            function = getattr(handler, name, None)
            if not inspect.iscoroutinefunction(function):
                raise TypeError(f"{type(handler).__name__} has no coroutine {name}, which {interface!r} promises")
            self._handlers[name] = (method, function)

    async def run(self, body: bytes, sender: str) -> Verdict:
        """Handle one message; raises CancelledError only when the server is being stopped."""
        try:
            request = decode_request(body)
        except msgspec.DecodeError as error:
            log.error("a message from %s cannot be read: %s", sender, error)
            return Verdict(dead=f"unreadable: {error}")
        context = msgspec.structs.replace(request.context, sender=sender)
        request_id.set(context.request_id)
        timer = None
        try:
            if request.kind == CALL and context.deadline:
                left = context.deadline - self._clock.now()
                if left <= 0:
                    return self._expired(request, "arrived too late and was dropped")
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
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the caller's to know
            return self._failed(request, error)
        finally:
            if timer is not None:
                timer.cancel()
        self._counters.handled[method.label] += 1
        if reply is None:
            return DONE
        self._counters.sent[REPLY, method.label] += 1
        return Verdict(reply)

    def _find(self, request: Request) -> tuple[Method[Any, Any], Handler]:
        found = self._handlers.get(request.method)
        if found is None or request.namespace != self.interface.namespace:
            raise NoSuchMethod(f"{self.interface!r} has no method {request.namespace}:{request.method}")
        if request.version not in self._spoken:
            if not fits(request.version, self.interface.version):
                raise VersionTooNew(
                    f"{request.method} needs contract {request.version}, this server speaks {self.interface.version}"
                )
            self._spoken.add(request.version)
        return found

    def _expired(self, request: Request, what: str) -> Verdict:
        self._counters.expired[self._label(request)] += 1
        log.warning("%s %s [%s]", self._label(request), what, request.context.request_id)
        return DONE

    def _failed(self, request: Request, error: BaseException) -> Verdict:
        label = self._label(request)
        self._counters.failed[label] += 1
        if request.kind == CALL:
            if not is_coded(error):
                log.error("%s failed [%s]", label, request.context.request_id, exc_info=error)
            self._counters.sent[REPLY, label] += 1
            return Verdict(encode(OutgoingReply(request.id, to_body(error), None)))
        log.error("%s failed [%s], %s", label, request.context.request_id, request.kind, exc_info=error)
        return Verdict(dead=f"{type(error).__name__}: {error}") if request.kind == CAST else DONE

    def _label(self, request: Request) -> str:
        return f"{self.interface.topic}.{request.method}"

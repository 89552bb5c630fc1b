"""A bus on which traces travel: messages carry the span they are sent in, and are handled within a span below it.

Around any bus, and only when tracing is on. A message that belongs to no trace (a heartbeat)
begins none.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from opentelemetry.trace import SpanKind

from micronova.rpc.bus import DEFAULT_PREFETCH, Bus
from micronova.rpc.contract import Context, Interface, Method, P, R, Target
from micronova.rpc.server import Server
from micronova.rpc.wrapper import BusWrapper
from micronova.telemetry.spans import traceparent
from micronova.telemetry.tracing import Tracing

Handler = Callable[[Context, Any], Awaitable[Any]]


class TracedBus(BusWrapper):
    """Passes messages on to another bus."""

    def __init__(self, bus: Bus, tracing: Tracing) -> None:
        super().__init__(bus)
        self._tracing = tracing

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message."""
        await super().cast(target, method, params, context=_here(context))

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        """Send a message and wait for its answer."""
        return await super().call(target, method, params, context=_here(context), timeout=timeout)

    async def fanout(self, topic: str, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message to every server of a topic."""
        await super().fanout(topic, method, params, context=_here(context))

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Handle an interface's messages, each within a span."""
        traced = _Traced(self._tracing, interface, handler, host or "")
        return await super().serve(interface, traced, host=host, prefetch=prefetch, shared=shared)


def _here(context: Context) -> Context:
    parent = traceparent()
    return msgspec.structs.replace(context, traceparent=parent) if parent else context


class _Traced:
    """A handler of an interface with a span around each of its methods."""

    def __init__(self, tracing: Tracing, interface: Interface, handler: object, host: str) -> None:
        for name, method in interface.methods.items():
            setattr(self, name, _within_span(tracing, method, getattr(handler, name), host))


def _within_span(tracing: Tracing, method: Method[Any, Any], handler: Handler, host: str) -> Handler:
    role = method.interface.topic
    attributes = {"host": host} if host else {}

    async def handle(context: Context, params: Any) -> Any:
        if not context.traceparent:
            return await handler(context, params)
        with tracing.entrance(role, method.label, context.traceparent, SpanKind.CONSUMER, **attributes):
            return await handler(context, params)

    return handle

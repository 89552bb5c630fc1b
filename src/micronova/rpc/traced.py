"""A bus for tracing: a message carries the current span of its sender, and its handler runs within a child span.

It is used only when tracing is on. A message that belongs to no trace (a heartbeat) starts none.
"""

import functools
from typing import Any

import msgspec
from opentelemetry.trace import SpanKind

from micronova.objects.context import Context
from micronova.rpc.bus import DEFAULT_PREFETCH, Bus
from micronova.rpc.contract import Handler, Interface, Method, P, R, Target
from micronova.rpc.server import Server
from micronova.rpc.wrapper import BusWrapper, wrap_methods
from micronova.telemetry.spans import traceparent
from micronova.telemetry.tracing import Tracing


class TracedBus(BusWrapper):
    """Adds the trace context to messages and spans to their handling."""

    def __init__(self, bus: Bus, tracing: Tracing) -> None:
        super().__init__(bus)
        self._tracing = tracing

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message."""
        await super().cast(target, method, params, context=_with_current_span(context))

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        """Send a message and return its answer."""
        return await super().call(target, method, params, context=_with_current_span(context), timeout=timeout)

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
        wrap = functools.partial(_within_span, self._tracing, host or "")
        traced = wrap_methods(interface, handler, wrap)
        return await super().serve(interface, traced, host=host, prefetch=prefetch, shared=shared)


def _with_current_span(context: Context) -> Context:
    parent = traceparent()
    return msgspec.structs.replace(context, traceparent=parent) if parent else context


def _within_span(tracing: Tracing, host: str, method: Method[Any, Any], handler: Handler) -> Handler:
    role = method.interface.topic
    attributes = {"host": host} if host else {}

    async def handle(context: Context, params: Any) -> Any:
        if not context.traceparent:
            return await handler(context, params)
        with tracing.enter(role, method.label, context.traceparent, SpanKind.CONSUMER, **attributes):
            return await handler(context, params)

    return handle

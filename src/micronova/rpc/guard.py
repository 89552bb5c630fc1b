"""A bus that accepts messages only from the cloud's own broker users, except on interfaces that are for hosts.

A compute host may write to every queue, because it sends replies and reports. The broker verifies who sent a message.
So the server of an interface that is not for hosts refuses messages from hosts.
"""

import functools
from typing import Any

from micronova.objects.context import Context
from micronova.objects.errors import Forbidden
from micronova.rpc.bus import DEFAULT_PREFETCH, Bus
from micronova.rpc.contract import Handler, Interface, Method
from micronova.rpc.server import Server
from micronova.rpc.wrapper import BusWrapper, wrap_methods


class GuardedBus(BusWrapper):
    """Checks the sender of each message, unless the interface is declared with from_hosts."""

    def __init__(self, bus: Bus, users: frozenset[str]) -> None:
        super().__init__(bus)
        self._users = users

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Serve on the wrapped bus with a handler that checks the sender."""
        if not interface.from_hosts:
            handler = wrap_methods(interface, handler, self._check_sender)
        return await super().serve(interface, handler, host=host, prefetch=prefetch, shared=shared)

    def _check_sender(self, method: Method[Any, Any], handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def handle(context: Context, params: Any) -> Any:
            if context.sender not in self._users:
                raise Forbidden(f"{context.sender or 'An unknown sender'} may not send {method.label}.")
            return await handler(context, params)

        return handle

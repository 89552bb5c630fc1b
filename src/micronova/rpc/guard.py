"""A bus that takes orders only from the cloud's own broker users.

A compute host may write to every queue, because replies and reports go that way. Who sent a message is what the broker
says; so whoever serves an interface that is not meant for hosts refuses what they send.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from micronova.objects.errors import Forbidden
from micronova.rpc.bus import DEFAULT_PREFETCH, Bus
from micronova.rpc.contract import Context, Interface, Method
from micronova.rpc.server import Server
from micronova.rpc.wrapper import BusWrapper

Handler = Callable[[Context, Any], Awaitable[Any]]


class GuardedBus(BusWrapper):
    """Serves interfaces for some users alone, unless hosts may send to them."""

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
        """Serve on the bus within, behind the guard."""
        if not interface.from_hosts:
            handler = _Guarded(self._users, interface, handler)
        return await super().serve(interface, handler, host=host, prefetch=prefetch, shared=shared)


class _Guarded:
    """A handler that looks at the sender first."""

    def __init__(self, users: frozenset[str], interface: Interface, handler: object) -> None:
        for name, method in interface.methods.items():
            setattr(self, name, _for_users(users, method, getattr(handler, name)))


def _for_users(users: frozenset[str], method: Method[Any, Any], handler: Handler) -> Handler:
    @functools.wraps(handler)
    async def handle(context: Context, params: Any) -> Any:
        if context.sender not in users:
            raise Forbidden(f"{context.sender or 'Somebody unknown'} may not send {method.label}.")
        return await handler(context, params)

    return handle

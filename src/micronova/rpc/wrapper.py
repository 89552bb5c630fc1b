"""A bus around another bus; a subclass changes some of its methods."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from micronova.objects.context import Context
from micronova.rpc.bus import DEFAULT_PREFETCH, Bus, BusStats
from micronova.rpc.contract import Handler, Interface, Method, P, R, Target
from micronova.rpc.server import Server


class BusWrapper:
    """Calls the same method of the wrapped bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def start(self) -> None:
        """Start the wrapped bus."""
        await self._bus.start()

    async def stop(self) -> None:
        """Stop the wrapped bus."""
        await self._bus.stop()

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message."""
        await self._bus.cast(target, method, params, context=context)

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        """Send a message and return its answer."""
        return await self._bus.call(target, method, params, context=context, timeout=timeout)

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host."""
        await self._bus.delete_queue(interface, host)

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Serve on the wrapped bus."""
        return await self._bus.serve(interface, handler, host=host, prefetch=prefetch, shared=shared)

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Return whether the wrapped bus may send messages of this contract version."""
        return self._bus.can_send_version(interface, version)

    def stats(self) -> BusStats:
        """Return the statistics of the wrapped bus: what was really sent."""
        return self._bus.stats()

    async def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Ask the wrapped bus."""
        return await self._bus.queue_lengths(queues)

    async def probe(self) -> BusStats:
        """Ask the broker of the wrapped bus."""
        return await self._bus.probe()


def wrap_methods(interface: Interface, handler: object, wrap: Callable[[Method[Any, Any], Handler], Handler]) -> object:
    """Return an object whose methods are the handler's, each wrapped."""
    return SimpleNamespace(**{name: wrap(method, getattr(handler, name)) for name, method in interface.methods.items()})

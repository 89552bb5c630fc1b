"""A bus around another one; a subclass changes what it cares about."""

from typing import Any

from micronova.rpc.bus import DEFAULT_PREFETCH, Bus, BusStats
from micronova.rpc.contract import Context, Interface, Method, P, R, Target
from micronova.rpc.server import Server


class BusWrapper:
    """Passes everything on to the bus within."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def start(self) -> None:
        """Start the bus within."""
        await self._bus.start()

    async def stop(self) -> None:
        """Stop the bus within."""
        await self._bus.stop()

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message."""
        await self._bus.cast(target, method, params, context=context)

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        """Send a message and wait for its answer."""
        return await self._bus.call(target, method, params, context=context, timeout=timeout)

    async def fanout(self, topic: str, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message to every server of a topic."""
        await self._bus.fanout(topic, method, params, context=context)

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Serve on the bus within."""
        return await self._bus.serve(interface, handler, host=host, prefetch=prefetch, shared=shared)

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Ask the bus within."""
        return self._bus.can_send_version(interface, version)

    def stats(self) -> BusStats:
        """Give the statistics of the bus within: what was really sent."""
        return self._bus.stats()

    async def count_dead_letters(self) -> int:
        """Ask the bus within."""
        return await self._bus.count_dead_letters()

"""The bus as every room sees it: send a message by topic or host, serve an interface, connect by URL."""

from __future__ import annotations

import random as random_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from micronova.objects.clock import Clock
from micronova.rpc.contract import Context, Interface, Method, P, R, Target
from micronova.rpc.errors import BadBusUrl
from micronova.rpc.server import Server

DEFAULT_PREFETCH = 64


@dataclass(frozen=True)
class BusStats:
    """What a bus has done and how it is: for status, metrics, and tests that count messages."""

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """By kind (cast, call, fanout, reply) and method (conductor.build_instances); replies count where they are sent."""
    handled: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    """Messages in the dead-letter queue of the whole cell, as last seen; count_dead_letters() looks anew."""
    connected: bool = False
    pending_calls: int = 0

    def count(self, kind: str | None = None, method: str | None = None) -> int:
        """Count the messages sent of one kind, of one method, or both."""
        return sum(
            number
            for (a_kind, a_method), number in self.sent.items()
            if (kind is None or a_kind == kind) and (method is None or a_method == method)
        )


class Bus(Protocol):
    """One process's end of the bus."""

    async def start(self) -> None:
        """Connect; raises BusUnavailable when that cannot be done now."""
        ...

    async def stop(self) -> None:
        """Stop the servers with their grace time, fail calls in flight, disconnect."""
        ...

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message and return once it is safely queued; it waits there if no server is up."""
        ...

    async def call(
        self,
        target: Target,
        method: Method[P, R],
        params: P,
        *,
        context: Context,
        timeout: float,
    ) -> R:
        """Send a message and wait for its answer, no longer than the time-out nor the context's deadline."""
        ...

    async def fanout(self, topic: str, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message to every server of a topic that is up now."""
        ...

    async def serve(
        self,
        interface: Interface,
        handler: object,
        *,
        host: str | None = None,
        prefetch: int = DEFAULT_PREFETCH,
        shared: bool = True,
    ) -> Server:
        """Handle an interface's messages: those to the topic, to this host, and fan-outs; at most prefetch at once.

        With shared=False it leaves the topic's shared queue alone: a compute host takes only its own orders.

        The handler has a coroutine method (context, params) -> result for each method of the interface.
        """
        ...

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Say whether messages of this contract version may be sent, given the pins of a rolling upgrade."""
        ...

    def stats(self) -> BusStats:
        """Say what happened so far."""
        ...

    async def count_dead_letters(self) -> int:
        """Ask how many messages lie in the dead-letter queue."""
        ...


def connect(
    url: str,
    *,
    clock: Clock,
    random: random_module.Random,
    pins: Mapping[str, str] | None = None,
    name: str = "",
    grace: float = 10.0,
    send_wait: float = 5.0,
) -> Bus:
    """Make the bus for a URL: local://NAME within this process, amqp:// or amqps:// through RabbitMQ.

    pins maps topics to the newest contract version to send; grace is how long handlers may finish when a server
    stops; send_wait how long a message waits for a lost connection to come back. The name is the sender's on a
    local bus; on AMQP it is shown by the broker, and the sender is the URL's user.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "local":
        from micronova.rpc.local import LocalBus

        return LocalBus(
            rest.strip("/"),
            clock=clock,
            random=random,
            pins=pins,
            name=name,
            grace=grace,
        )
    if scheme in ("amqp", "amqps"):
        from micronova.rpc.amqp.bus import AmqpBus

        return AmqpBus(url, clock=clock, random=random, pins=pins, name=name, grace=grace, send_wait=send_wait)
    raise BadBusUrl(f"A bus URL (default.transport_url) begins with local:// or amqp://, not {scheme[:32]}://.")


__all__ = ["DEFAULT_PREFETCH", "Bus", "BusStats", "Server", "connect"]

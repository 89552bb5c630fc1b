"""The bus as roles use it: send a message to a topic or a host, serve an interface, connect by URL.

The way of a message through the modules. Sender: rpcapi.py of the called role → traced.py, if traces are on →
BaseBus.cast or call (base.py) → envelope.py → a transport (local.py; or unix/bus.py and amqp/bus.py, which share
reconnecting.py). Receiver: the transport's server (server.py) → Dispatcher (dispatch.py) → guard.py, where the users of
the broker are known, and traced.py, which wrap the handler (wrapper.py) → a method of the role's manager.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.rpc.contract import Interface, Method, P, R, Target
from micronova.rpc.errors import BadBusUrl
from micronova.rpc.server import Server

DEFAULT_PREFETCH = 64


@dataclass(frozen=True)
class BrokerState:
    """What a process knows of its broker; on a local bus, of the queues in memory. Times are wall-clock times."""

    connected_since: float | None = None
    blocked_since: float | None = None
    """When the broker announced that it accepts no messages from us; None while it accepts them."""
    blocked_reason: str = ""
    dead_letters: int = 0
    """Messages in the dead-letter queue of the whole cell when probe() last asked."""
    probe_error: str = ""
    """Why the last probe() could not ask the broker; empty if it could."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self.connected_since is not None

    @property
    def blocked(self) -> bool:
        """Whether the broker accepts no messages from us now."""
        return self.blocked_since is not None


@dataclass(frozen=True)
class BusStats:
    """What a bus has sent and handled, and the state of its broker: for status, metrics, and tests."""

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """By kind (cast, call, reply) and method (conductor.run_operations)."""
    handled: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)
    pending_calls: int = 0
    broker: BrokerState = BrokerState()

    def count(self, kind: str | None = None, method: str | None = None) -> int:
        """Return the number of messages sent of one kind, of one method, or both."""
        return sum(
            number
            for (a_kind, a_method), number in self.sent.items()
            if (kind is None or a_kind == kind) and (method is None or a_method == method)
        )


class Bus(Protocol):
    """One process's end of the bus."""

    async def start(self) -> None:
        """Connect; raise BusUnavailable if that fails."""
        ...

    async def stop(self) -> None:
        """Stop the servers with their grace time, fail pending calls, disconnect."""
        ...

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        """Send a message and return once it is queued; the queue keeps it until a server is up.

        Raise BusUnavailable if the broker does not accept it in time.
        """
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
        """Send a message and return the answer, within the time-out and the context's deadline.

        Raise CallTimeout if no answer arrives in time, BusUnavailable if the message cannot be sent.
        """
        ...

    async def delete_queue(self, interface: Interface, host: str) -> None:
        """Delete the queue of a host that is gone, with its messages; a host that lives makes it again.

        Raise BusUnavailable if the broker does not answer in time or does not allow it.
        """
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
        """Handle an interface's messages: those to the topic and to this host; at most prefetch at once.

        With shared=False the server does not consume the topic's shared queue: a compute host takes only orders
        addressed to it. The handler has a coroutine (context, params) -> result for each method of the interface.
        """
        ...

    def can_send_version(self, interface: Interface, version: str) -> bool:
        """Return whether messages of this contract version may be sent, given the pins of a rolling upgrade."""
        ...

    def stats(self) -> BusStats:
        """Return the counters and what is known of the broker, without asking it."""
        ...

    async def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages wait in each of these queues that exists; raise BusUnavailable."""
        ...

    async def probe(self) -> BusStats:
        """Ask the broker for its dead letters and whether it accepts messages, then return the statistics."""
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
    control_users: frozenset[str] = frozenset(),
) -> Bus:
    """Make the bus for a URL: local://NAME within this process, amqp:// or amqps:// through RabbitMQ.

    unix://PATH is the local bus of another process of this machine, through its gate.

    pins maps topics to the newest contract version to send. grace is the number of seconds that handlers have to finish
    when a server stops. send_wait is the number of seconds that a message waits for a broker that is lost or accepts no
    messages. Calls are answered by the control_users and the host that was asked; if there are none, by every broker
    user. On a local bus, name is the sender of messages; on AMQP the broker shows it as the connection's name, and
    the sender is the URL's user; a gate decides itself who the sender is.
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
    if scheme == "unix":
        from micronova.rpc.unix.bus import UnixBus

        return UnixBus(Path(rest), clock=clock, random=random, pins=pins, name=name, grace=grace, send_wait=send_wait)
    if scheme in ("amqp", "amqps"):
        from micronova.rpc.amqp.bus import AmqpBus

        return AmqpBus(
            url,
            clock=clock,
            random=random,
            pins=pins,
            name=name,
            grace=grace,
            send_wait=send_wait,
            control_users=control_users,
        )
    known = "local://, unix://, amqp:// or amqps://"
    raise BadBusUrl(f"A bus URL (default.transport_url) begins with {known}, not {scheme[:32]}://.")


__all__ = ["DEFAULT_PREFETCH", "BrokerState", "Bus", "BusStats", "Server", "connect"]

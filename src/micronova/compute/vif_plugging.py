"""Waiting until the network has plugged a guest's ports.

Ports are bound before the conductor sends the order, so the event may arrive before the order does. Every event is
therefore kept for a while, whether or not an order waits for it.

An event may also never arrive: it came before the server had a host, or the bus or the agent was down. So the wait also
asks a conductor for the status of the ports, at its beginning, at its end, and in between. Time in which no conductor
can tell the status does not count: an outage does not end a build.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from micronova.compute.settings import ComputeAgentSettings
from micronova.compute.waiting import wait_for_all
from micronova.objects.clock import Clock
from micronova.objects.errors import BuildAborted, Unavailable
from micronova.objects.external_events import PLUGGED, UNPLUGGED

log = logging.getLogger(__name__)

EVENTS_KEPT = 4_096
FIRST_PAUSE = 2.0
"""Seconds between the first two requests for the ports' status; doubled after each."""
LONGEST_PAUSE = 30.0

PluggedPorts = Callable[[tuple[str, ...]], Awaitable[frozenset[str]]]
"""Returns those of the ports that are plugged; raises Unavailable if it gets no answer."""


class PlugEvents:
    """The plug events that one host has received, and the orders that wait for more."""

    def __init__(self, settings: ComputeAgentSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._events: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # -> status, when
        self._waits: dict[str, set[PlugWait]] = {}

    def watch(self, uuid: str, ports: Iterable[str], plugged_ports: PluggedPorts) -> "PlugWait":
        """Begin to watch for the plug events of an instance's ports."""
        wait = PlugWait(self._settings, self._clock, uuid, ports, plugged_ports)
        if not wait.ports:
            return wait
        self._waits.setdefault(uuid, set()).add(wait)
        for port in wait.ports:
            status, when = self._events.get((uuid, port), ("", 0.0))
            if status and self._clock.monotonic() - when <= self._settings.vif_plugging_timeout:
                wait.arrived(port, status)
        return wait

    def receive(self, uuid: str, name: str, port: str, status: str) -> None:
        """Keep an event, and pass it to the orders that wait for it."""
        if name == UNPLUGGED:
            self._events.pop((uuid, port), None)
        elif name == PLUGGED:
            self._events[uuid, port] = (status, self._clock.monotonic())
            if len(self._events) > EVENTS_KEPT:
                self._events.popitem(last=False)
            for wait in self._waits.get(uuid, ()):
                wait.arrived(port, status)

    def close(self, wait: "PlugWait", *, used: bool) -> None:
        """Stop watching. Events that the order used are forgotten: they say nothing about a later plugging."""
        waits = self._waits.get(wait.uuid)
        if waits is not None:
            waits.discard(wait)
            if not waits:
                del self._waits[wait.uuid]
        if used:
            for port in wait.ports:
                self._events.pop((wait.uuid, port), None)


class PlugWait:
    """The ports that one order waits for."""

    def __init__(
        self,
        settings: ComputeAgentSettings,
        clock: Clock,
        uuid: str,
        ports: Iterable[str],
        plugged_ports: PluggedPorts,
    ) -> None:
        self.uuid = uuid
        self.ports = frozenset(ports)
        self._plugged_ports = plugged_ports
        self._settings = settings
        self._clock = clock
        self._missing = set(self.ports)
        self._failed: set[str] = set()
        self._decided: asyncio.Future[None] | None = None  # done when every port is plugged or one has failed

    def arrived(self, port: str, status: str) -> None:
        """Note the status of a port."""
        if port in self.ports:
            self._missing.discard(port)
            if status == "completed":
                self._failed.discard(port)
            else:
                self._failed.add(port)
            self._decide()

    async def wait(self) -> None:
        """Return when all ports are plugged; raise BuildAborted if one is not and the settings call that fatal."""
        timeout = self._settings.vif_plugging_timeout
        if timeout <= 0 or not (self._missing or self._failed):
            return
        if self._decided is None:
            self._decided = asyncio.get_running_loop().create_future()
            self._decide()
        await self._until_decided(self._decided, timeout)
        if self._failed:
            problem = f"The network could not plug the port {min(self._failed)}."
        elif self._missing:
            problem = f"The network did not plug the port {min(self._missing)} in time."
        else:
            return
        if self._settings.vif_plugging_is_fatal:
            raise BuildAborted(problem)
        log.warning("instance %s: %s It runs nevertheless.", self.uuid, problem)

    async def _until_decided(self, decided: asyncio.Future[None], left: float) -> None:
        """Return when all ports are plugged, one has failed, or the time is over and a conductor confirms that."""
        pause = FIRST_PAUSE
        while True:
            asking = asyncio.ensure_future(self._ask())
            try:
                pending: set[asyncio.Future[Any]] = {asking, decided}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if decided.done():
                    return
                answered = asking.result()
            finally:
                asking.cancel()
            if answered and left <= 0:
                return
            step = min(pause, left) if left > 0 else pause
            await wait_for_all(self._clock, [decided], step)
            if answered:
                left -= step
            pause = min(LONGEST_PAUSE, pause * 2)

    async def _ask(self) -> bool:
        """Ask for the status of the ports whose event is missing; return False if no answer comes."""
        try:
            plugged = await self._plugged_ports(tuple(sorted(self._missing)))
        except Unavailable as error:
            log.warning(
                "instance %s: whether its ports are plugged is not known; this is asked again: %s", self.uuid, error
            )
            return False
        except Exception as error:  # a conductor of an older release does not know the request
            log.warning("instance %s: no conductor tells whether its ports are plugged: %s", self.uuid, error)
            return True
        for port in plugged:
            self.arrived(port, "completed")
        return True

    def _decide(self) -> None:
        if self._decided is not None and not self._decided.done() and (self._failed or not self._missing):
            self._decided.set_result(None)

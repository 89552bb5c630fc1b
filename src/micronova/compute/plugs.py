"""Waiting until the network has plugged a guest's ports.

The network may be faster than the order: ports are bound before the conductor sends it. So every event is
kept for a while, whether somebody waits for it or not.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable

from micronova.compute.settings import ComputeSettings
from micronova.compute.waiting import wait_for_all
from micronova.objects.clock import Clock
from micronova.objects.errors import BuildAborted

log = logging.getLogger(__name__)

VIF_PLUGGED = "network-vif-plugged"
VIF_UNPLUGGED = "network-vif-unplugged"
EVENTS_KEPT = 4_096


class PlugBoard:
    """The plug events of one host."""

    def __init__(self, settings: ComputeSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._events: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # -> status, when
        self._gates: dict[str, set[PlugGate]] = {}

    def gate(self, uuid: str, ports: Iterable[str]) -> "PlugGate":
        """Begin to watch for the ports of an instance."""
        gate = PlugGate(self, uuid, ports)
        if not gate.ports:
            return gate
        self._gates.setdefault(uuid, set()).add(gate)
        for port in gate.ports:
            status, when = self._events.get((uuid, port), ("", 0.0))
            if status and self._clock.monotonic() - when <= self._settings.vif_plugging_timeout:
                gate.arrived(port, status)
        return gate

    def event(self, uuid: str, name: str, port: str, status: str) -> None:
        """Take an event."""
        if name == VIF_UNPLUGGED:
            self._events.pop((uuid, port), None)
        elif name == VIF_PLUGGED:
            self._events[uuid, port] = (status, self._clock.monotonic())
            if len(self._events) > EVENTS_KEPT:
                self._events.popitem(last=False)
            for gate in self._gates.get(uuid, ()):
                gate.arrived(port, status)

    def close(self, gate: "PlugGate", *, served: bool) -> None:
        """Stop watching; what served its purpose is forgotten, or it would answer for a later plugging."""
        gates = self._gates.get(gate.uuid)
        if gates is not None:
            gates.discard(gate)
            if not gates:
                del self._gates[gate.uuid]
        if served:
            for port in gate.ports:
                self._events.pop((gate.uuid, port), None)

    async def wait(self, gate: "PlugGate") -> None:
        """Return when all ports are plugged; raise BuildAborted if that fails and it matters."""
        settings = self._settings
        if settings.vif_plugging_timeout <= 0 or not (gate.missing or gate.failed):
            return
        if not gate.decided.done():
            await wait_for_all(self._clock, [gate.decided], settings.vif_plugging_timeout)
        if gate.failed:
            problem = f"The network could not plug the port {min(gate.failed)}."
        elif gate.missing:
            problem = f"The network did not plug the port {min(gate.missing)} in time."
        else:
            return
        if settings.vif_plugging_is_fatal:
            raise BuildAborted(problem)
        log.warning("instance %s: %s It runs nevertheless.", gate.uuid, problem)


class PlugGate:
    """The ports that one order waits for."""

    def __init__(self, board: PlugBoard, uuid: str, ports: Iterable[str]) -> None:
        self.uuid = uuid
        self.ports = frozenset(ports)
        self.missing = set(self.ports)
        self.failed: set[str] = set()
        self._board = board
        self._decided: asyncio.Future[None] | None = None

    @property
    def decided(self) -> asyncio.Future[None]:
        """Done when there is nothing more to wait for."""
        if self._decided is None:
            self._decided = asyncio.get_running_loop().create_future()
            self._decide()
        return self._decided

    def arrived(self, port: str, status: str) -> None:
        """Note what became of a port."""
        if port in self.ports:
            self.missing.discard(port)
            if status == "completed":
                self.failed.discard(port)
            else:
                self.failed.add(port)
            if self._decided is not None:
                self._decide()

    async def wait(self) -> None:
        """Return when all ports are plugged."""
        if self.ports:
            await self._board.wait(self)

    def close(self, *, served: bool) -> None:
        """Stop watching."""
        if self.ports:
            self._board.close(self, served=served)

    def _decide(self) -> None:
        if self._decided is not None and not self._decided.done() and (self.failed or not self.missing):
            self._decided.set_result(None)

"""Libvirt's events: one thread per process turns the library's event loop, callbacks hop to asyncio."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from micronova.virt.libvirt.library import load

log = logging.getLogger(__name__)

_started = threading.Lock()
_running = False


@dataclass(frozen=True, slots=True)
class GuestEvent:
    """Something happened to a guest. What it is now has to be asked: events may be late, or overtaken."""

    uuid: str
    kind: Literal["lifecycle", "reboot", "device_removed"]
    detail: str = ""


def start_event_loop() -> None:
    """Turn libvirt's event loop in a thread. The library has one per process, to be there before any connection."""
    global _running
    with _started:
        if _running:
            return
        library = load()
        library.virEventRegisterDefaultImpl()
        # By default the binding prints every error that it also raises.
        library.registerErrorHandler(lambda _context, _error: None, None)
        threading.Thread(target=_turn, args=(library,), name="libvirt-events", daemon=True).start()
        _running = True


def _turn(library: Any) -> None:
    while True:
        try:
            library.virEventRunDefaultImpl()
        except Exception:
            log.exception("libvirt's event loop stumbled")


def subscribe(connection: Any, loop: asyncio.AbstractEventLoop, handler: Callable[[GuestEvent], None]) -> None:
    """Have a connection's events delivered to a function, in the event loop's thread."""
    library = load()

    def deliver(domain: Any, kind: Literal["lifecycle", "reboot", "device_removed"], detail: str = "") -> None:
        try:
            event = GuestEvent(domain.UUIDString(), kind, detail)
            loop.call_soon_threadsafe(handler, event)
        except RuntimeError:  # the loop was closed: nobody listens any more
            pass

    def lifecycle(_: Any, domain: Any, event: int, detail: int, _context: Any) -> None:
        deliver(domain, "lifecycle", f"{event}/{detail}")

    def reboot(_: Any, domain: Any, _context: Any) -> None:
        deliver(domain, "reboot")

    def device_removed(_: Any, domain: Any, device: str, _context: Any) -> None:
        deliver(domain, "device_removed", device)

    register = connection.domainEventRegisterAny
    register(None, library.VIR_DOMAIN_EVENT_ID_LIFECYCLE, lifecycle, None)
    register(None, library.VIR_DOMAIN_EVENT_ID_REBOOT, reboot, None)
    register(None, library.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, device_removed, None)


class Watchers:
    """Who waits for events of which guest."""

    def __init__(self) -> None:
        self._queues: dict[str, set[asyncio.Queue[GuestEvent]]] = {}

    def tell(self, event: GuestEvent) -> None:
        """Pass an event on to those who wait."""
        for queue in self._queues.get(event.uuid, ()):
            queue.put_nowait(event)

    @contextlib.contextmanager
    def watch(self, uuid: str) -> Iterator["Watch"]:
        """Collect a guest's events from now on."""
        queue: asyncio.Queue[GuestEvent] = asyncio.Queue()
        self._queues.setdefault(uuid, set()).add(queue)
        try:
            yield Watch(queue)
        finally:
            queues = self._queues[uuid]
            queues.discard(queue)
            if not queues:
                del self._queues[uuid]


class Watch:
    """The events of one guest, one after the other."""

    def __init__(self, queue: asyncio.Queue[GuestEvent]) -> None:
        self._queue = queue

    async def next(self, timeout: float) -> GuestEvent | None:
        """Give the next event, or None when none comes in time."""
        try:
            async with asyncio.timeout(timeout):
                return await self._queue.get()
        except TimeoutError:
            return None

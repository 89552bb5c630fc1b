"""Libvirt's events. One thread per process runs the library's event loop; callbacks hand events over to asyncio."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.library import load

log = logging.getLogger(__name__)

_started = threading.Lock()
_running = False

EventKind = Literal["lifecycle", "reboot", "device_removed"]


@dataclass(frozen=True, slots=True)
class GuestEvent:
    """Something happened to a guest. Events may come late or out of order: read the guest's state from libvirt."""

    uuid: str
    kind: EventKind
    detail: str = ""


def start_event_loop() -> None:
    """Run libvirt's event loop in a thread. The library has one per process and needs it before any connection."""
    global _running
    with _started:
        if _running:
            return
        library = load()
        library.virEventRegisterDefaultImpl()
        # By default the binding prints every error that it also raises.
        library.registerErrorHandler(lambda _context, _error: None, None)
        threading.Thread(target=_run_loop, args=(library,), name="libvirt-events", daemon=True).start()
        _running = True


def _run_loop(library: Any) -> None:
    while True:
        try:
            library.virEventRunDefaultImpl()
        except Exception:
            log.exception("libvirt's event loop raised an error and continues")


def subscribe(connection: Connect, loop: asyncio.AbstractEventLoop, handler: Callable[[GuestEvent], None]) -> None:
    """Call a function for each event of a connection, in the thread of the asyncio loop."""
    library = load()

    def deliver(domain: Domain, kind: EventKind, detail: str = "") -> None:
        try:
            event = GuestEvent(domain.UUIDString(), kind, detail)
            loop.call_soon_threadsafe(handler, event)
        except RuntimeError:  # the loop is closed
            pass

    def lifecycle(_: Connect, domain: Domain, event: int, detail: int, _context: object) -> None:
        deliver(domain, "lifecycle", f"{event}/{detail}")

    def reboot(_: Connect, domain: Domain, _context: object) -> None:
        deliver(domain, "reboot")

    def device_removed(_: Connect, domain: Domain, device: str, _context: object) -> None:
        deliver(domain, "device_removed", device)

    register = connection.domainEventRegisterAny
    register(None, library.VIR_DOMAIN_EVENT_ID_LIFECYCLE, lifecycle, None)
    register(None, library.VIR_DOMAIN_EVENT_ID_REBOOT, reboot, None)
    register(None, library.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, device_removed, None)


class EventQueues:
    """Queues of events for the calls that wait for them, by guest."""

    def __init__(self) -> None:
        self._queues: dict[str, set[asyncio.Queue[GuestEvent]]] = {}

    def put(self, event: GuestEvent) -> None:
        """Add an event to all queues of its guest."""
        for queue in self._queues.get(event.uuid, ()):
            queue.put_nowait(event)

    @contextlib.contextmanager
    def watch(self, uuid: str) -> Iterator["EventQueue"]:
        """Collect a guest's events until the context ends."""
        queue: asyncio.Queue[GuestEvent] = asyncio.Queue()
        self._queues.setdefault(uuid, set()).add(queue)
        try:
            yield EventQueue(queue)
        finally:
            queues = self._queues[uuid]
            queues.discard(queue)
            if not queues:
                del self._queues[uuid]


class EventQueue:
    """The events of one guest, in order of arrival."""

    def __init__(self, queue: asyncio.Queue[GuestEvent]) -> None:
        self._queue = queue

    async def next(self, timeout: float) -> GuestEvent | None:
        """Return the next event, or None when none comes in time."""
        try:
            async with asyncio.timeout(timeout):
                return await self._queue.get()
        except TimeoutError:
            return None

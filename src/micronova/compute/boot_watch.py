"""Watching guests that were started until they show that they boot, and saying so of those that never do.

What counts as a sign is the driver's to know, and it counts from the guest's start. So nothing need be kept for an
agent that comes after this one: it watches all guests that it finds running, and those that live show it at the first
look. A boot that goes well costs one look, shared with all others, and no message.

A guest that shows no sign in time is reported with the heartbeats until a conductor has heard it, and is looked at
further. It may only be slow: then it is reported once more, as one that has booted after all.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from micronova.compute.settings import ComputeSettings
from micronova.compute.work import WorkBook
from micronova.objects.clock import Clock
from micronova.objects.orders import BootVerdict
from micronova.virt import power_state
from micronova.virt.driver import BootSigns, Driver

log = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 10.0
"""Seconds between looks: most guests have shown themselves by the first."""
LOOKS: Final = 4
"""How often a guest is looked at, at least, before it is given up."""
BOOTED: Final = ""


def look_interval(settings: ComputeSettings) -> float:
    """Say how often to look."""
    return min(LONGEST_PAUSE, settings.boot_timeout / LOOKS)


class _Start:
    """A guest's start: when it was, or when an agent found the guest running."""

    __slots__ = ("at", "given_up")

    def __init__(self, at: float) -> None:
        self.at = at
        self.given_up = False


class BootWatch:
    """The guests of one host that have not shown yet that they boot."""

    def __init__(
        self,
        host: str,
        driver: Driver,
        settings: ComputeSettings,
        clock: Clock,
        book: WorkBook,
        power: Callable[[str], int | None],
    ) -> None:
        self._host = host
        self._driver = driver
        self._timeout = settings.boot_timeout
        self._clock = clock
        self._book = book
        self._power = power  # of a guest, as the agent knows it; None: there is no such guest
        self._signs: BootSigns | None = None
        self._starts: dict[str, _Start] = {}
        self._verdicts: dict[str, str] = {}  # guest -> its fault, or BOOTED; what no conductor has heard yet
        self._doubted: set[str] = set()  # guests that a conductor may take for ones that do not boot
        self._found: set[str] = set()  # guests of an earlier agent, which had no order since

    def start(self, running: Iterable[str]) -> None:
        """Begin, with the guests that run already; the driver is ready and is able to."""
        if self._timeout > 0 and isinstance(self._driver, BootSigns):
            self._signs = self._driver
            for uuid in running:
                self._starts[uuid] = _Start(self._clock.monotonic())
                self._found.add(uuid)
                self._doubted.add(uuid)

    def started(self, uuid: str) -> None:
        """A guest has just been started."""
        if self._signs is not None:
            self._starts[uuid] = _Start(self._clock.monotonic())
            self._verdicts.pop(uuid, None)

    def ordered(self, uuid: str) -> None:
        """An order for this guest was taken: from now on the host knows at which epoch its instance is."""
        self._found.discard(uuid)

    def gone(self, uuid: str) -> None:
        """There is no such guest any more."""
        self._starts.pop(uuid, None)
        self._verdicts.pop(uuid, None)
        self._doubted.discard(uuid)
        self._found.discard(uuid)

    async def look(self) -> None:
        """Look at all that are watched, at once."""
        if self._signs is None:
            return
        for uuid in list(self._starts):
            if self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE):
                del self._starts[uuid]
        looked_at = {uuid: start for uuid, start in self._starts.items() if not self._book.on(uuid)}
        if not looked_at:
            return
        signs = await self._signs.boot_signs(looked_at)
        now = self._clock.monotonic()
        for uuid, start in looked_at.items():
            sign = signs.get(uuid)
            if sign is None or self._starts.get(uuid) is not start:  # it was started anew while we looked
                continue
            if sign.booted:
                self._booted(uuid)
            elif now - start.at >= self._timeout and not start.given_up:
                start.given_up = True
                self._give_up(uuid, sign.seen)

    def verdicts(self) -> tuple[BootVerdict, ...]:
        """List what no conductor has heard, except where work is in hand."""
        return tuple(
            BootVerdict(
                instance_uuid=uuid,
                epoch=self._book.epochs.highest(uuid),
                fault=fault,
                found=uuid in self._found,
            )
            for uuid, fault in self._verdicts.items()
            if not self._book.on(uuid)
        )

    def told(self, verdicts: Iterable[BootVerdict], again: Iterable[str] = ()) -> None:
        """A conductor has heard these, and wants to hear some once more."""
        unsettled = set(again)
        for verdict in verdicts:
            uuid = verdict.instance_uuid
            if uuid not in unsettled and self._verdicts.get(uuid) == verdict.fault:
                del self._verdicts[uuid]
                if verdict.fault == BOOTED:
                    self._doubted.discard(uuid)

    def _booted(self, uuid: str) -> None:
        start = self._starts.pop(uuid)
        if start.given_up:
            seconds = self._clock.monotonic() - start.at
            log.info("host %s: instance %s boots after all, %.0f s after its start", self._host, uuid, seconds)
        self._verdicts.pop(uuid, None)
        if uuid in self._doubted:
            self._verdicts[uuid] = BOOTED

    def _give_up(self, uuid: str, seen: str) -> None:
        told = f"within {self._timeout:g} s it {seen}"
        log.warning(
            "host %s: instance %s has not begun to boot: %s. Is its image bootable here? Its console may tell.",
            self._host,
            uuid,
            told,
        )
        self._doubted.add(uuid)
        self._verdicts[uuid] = (
            f"The guest has not begun to boot: {told}. "
            "Can its image be booted on this host? Look at its console; a hard reboot tries again."
        )

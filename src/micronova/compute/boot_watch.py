"""Watching guests after their start: those that show no sign of booting in time are reported to the conductor.

The driver decides what a sign is. It counts signs from the guest's start, so an agent keeps no record for the agent
after it: a new agent watches all guests that run, and the first check finds those that have booted. A boot that
succeeds costs one check, shared by all guests, and no message.

A guest that shows no sign in time is reported with the heartbeats until a conductor has replied, and is checked
further. If it was only slow, it is reported again, as one that has booted.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from micronova.compute.settings import ComputeAgentSettings
from micronova.compute.work import WorkRegistry
from micronova.objects import power_state
from micronova.objects.clock import Clock
from micronova.objects.orders import BootResult
from micronova.virt.driver import BootSigns, Driver, if_capable

log = logging.getLogger(__name__)

LONGEST_INTERVAL: Final = 10.0
"""Seconds between checks: most guests have shown a sign by the first."""
CHECKS: Final = 4
"""How often a guest is checked, at least, before it is reported as not booting."""
BOOTED: Final = ""


def check_interval(settings: ComputeAgentSettings) -> float:
    """Return the seconds between two checks."""
    return min(LONGEST_INTERVAL, settings.boot_timeout / CHECKS)


class _Start:
    """When a guest was started, or when an agent found it running."""

    __slots__ = ("at", "timed_out")

    def __init__(self, at: float) -> None:
        self.at = at
        self.timed_out = False


class BootWatch:
    """The guests of one host that have shown no sign of booting yet."""

    def __init__(
        self,
        host: str,
        driver: Driver,
        settings: ComputeAgentSettings,
        clock: Clock,
        work_registry: WorkRegistry,
        power: Callable[[str], int | None],
    ) -> None:
        self._host = host
        self._driver = driver
        self._timeout = settings.boot_timeout
        self._clock = clock
        self._registry = work_registry
        self._power = power  # returns the power state of a guest, None if there is no such guest
        self._signs: BootSigns | None = None
        self._starts: dict[str, _Start] = {}
        self._results: dict[str, str] = {}  # guest -> its fault, or BOOTED; no conductor has received these yet
        self._maybe_known_as_not_booting: set[str] = set()  # guests that a conductor may know as not booting
        self._found: set[str] = set()  # guests of an earlier agent that have had no order since

    def start(self, running: Iterable[str]) -> None:
        """Begin to watch the guests that run already; the driver is started."""
        self._signs = if_capable(self._driver, BootSigns) if self._timeout > 0 else None
        if self._signs is not None:
            for uuid in running:
                self._starts[uuid] = _Start(self._clock.monotonic())
                self._found.add(uuid)
                self._maybe_known_as_not_booting.add(uuid)

    def guest_started(self, uuid: str) -> None:
        """Watch a guest that was just started."""
        if self._signs is not None:
            self._starts[uuid] = _Start(self._clock.monotonic())
            self._results.pop(uuid, None)

    def order_accepted(self, uuid: str) -> None:
        """Note that an order for this guest was accepted: it contains the epoch of the instance."""
        self._found.discard(uuid)

    def guest_gone(self, uuid: str) -> None:
        """Forget a guest."""
        self._starts.pop(uuid, None)
        self._results.pop(uuid, None)
        self._maybe_known_as_not_booting.discard(uuid)
        self._found.discard(uuid)

    async def check(self) -> None:
        """Ask the driver, in one call, for the signs of all guests that are watched."""
        if self._signs is None:
            return
        for uuid in list(self._starts):
            if self._power(uuid) not in (power_state.RUNNING, power_state.NOSTATE):
                del self._starts[uuid]
        checked = {uuid: start for uuid, start in self._starts.items() if not self._registry.of_instance(uuid)}
        if not checked:
            return
        signs = await self._signs.boot_signs(checked)
        now = self._clock.monotonic()
        for uuid, start in checked.items():
            sign = signs.get(uuid)
            if sign is None or self._starts.get(uuid) is not start:  # it was started again meanwhile
                continue
            if sign.booted:
                self._booted(uuid)
            elif now - start.at >= self._timeout and not start.timed_out:
                start.timed_out = True
                self._timed_out(uuid, sign.seen)

    def results(self) -> tuple[BootResult, ...]:
        """Return what no conductor has received, except about instances that are worked on."""
        return tuple(
            BootResult(
                instance_uuid=uuid,
                epoch=self._registry.epochs.highest(uuid),
                fault=fault,
                found=uuid in self._found,
            )
            for uuid, fault in self._results.items()
            if not self._registry.of_instance(uuid)
        )

    def results_received(self, results: Iterable[BootResult], again: Iterable[str] = ()) -> None:
        """Forget results that a conductor has received, except those that it wants again."""
        wanted_again = set(again)
        for result in results:
            uuid = result.instance_uuid
            if uuid not in wanted_again and self._results.get(uuid) == result.fault:
                del self._results[uuid]
                if result.fault == BOOTED:
                    self._maybe_known_as_not_booting.discard(uuid)

    def _booted(self, uuid: str) -> None:
        start = self._starts.pop(uuid)
        if start.timed_out:
            seconds = self._clock.monotonic() - start.at
            log.info(
                "host %s: instance %s showed that it boots %.0f s after its start, later than the time limit",
                self._host,
                uuid,
                seconds,
            )
        self._results.pop(uuid, None)
        if uuid in self._maybe_known_as_not_booting:
            self._results[uuid] = BOOTED

    def _timed_out(self, uuid: str, seen: str) -> None:
        what_was_seen = f"within {self._timeout:g} s it {seen}"
        log.warning(
            "host %s: instance %s has not begun to boot: %s. Check that its image boots on this host.",
            self._host,
            uuid,
            what_was_seen,
        )
        self._maybe_known_as_not_booting.add(uuid)
        self._results[uuid] = (
            f"The guest has not begun to boot: {what_was_seen}. "
            "Can its image be booted on this host? Look at its console; a hard reboot tries again."
        )

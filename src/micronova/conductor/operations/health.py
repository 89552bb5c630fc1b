"""Whether a conductor can receive heartbeats: only then a missing heartbeat means a dead host.

A conductor proves periodically that the database answers, that the bus delivers messages, by a call through the queue
of the heartbeats, and that no heartbeat waits long for its transaction. It is healthy if the last proof is recent and
no outage has been noticed for longer than a lease. So neither an outage of the broker or of the database, nor a pause
of the process itself, counts as the death of all hosts. The same holds if the clock is set, or the machine was
suspended: the times of the last heartbeats are then compared with a time that the clock did not have when they were
written. For the same reasons an operation is late only if its conductor has worked undisturbed for as long as the
operation may take.
"""

import logging

from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

JUMP = 1.0
"""Seconds by which the clock may differ from the time that passed; more means that it was set."""


class Health:
    """The health of one conductor."""

    def __init__(self, clock: Clock, *, settle: float, proof_valid: float) -> None:
        """`settle` is the time without an outage, `proof_valid` the age of the last proof, both in seconds."""
        self._clock = clock
        self._settle = settle
        self._proof_valid = proof_valid
        self._since = self._proved_at = self._healthy_at = clock.monotonic()
        self._offset = self._clock_offset()

    def outage_noticed(self) -> None:
        """Note that heartbeats may have been lost: the database or the bus failed, or the conductor just started."""
        self._note_health()
        self._since = self._clock.monotonic()

    def proved(self) -> None:
        """Note that database and bus work. A gap since the last proof counts as an outage."""
        self._watch_clock()
        self._note_health()
        now = self._clock.monotonic()
        if now - self._proved_at > self._proof_valid:
            self._since = now
        self._proved_at = now

    def healthy(self) -> bool:
        """Return whether a missing heartbeat means a dead host."""
        self._watch_clock()
        now = self._clock.monotonic()
        return now - self._proved_at <= self._proof_valid and now - self._since > self._settle

    def undisturbed_for(self) -> float:
        """Return the seconds since the last outage, pause of the process or change of the clock; 0 without a proof."""
        self._watch_clock()
        now = self._clock.monotonic()
        return now - self._since if now - self._proved_at <= self._proof_valid else 0.0

    def unhealthy_for(self) -> float:
        """Return for how many seconds the conductor has not been healthy; 0 while it is."""
        self._watch_clock()
        self._note_health()
        return self._clock.monotonic() - self._healthy_at

    def _watch_clock(self) -> None:
        """Count it as an outage if the clock was set since the last call."""
        offset = self._clock_offset()
        jump = offset - self._offset
        self._offset = offset
        if abs(jump) > JUMP:
            log.warning("the clock was set by %.1f s; no host counts as dead for %.0f s", jump, self._settle)
            self.outage_noticed()

    def _clock_offset(self) -> float:
        return self._clock.now() - self._clock.monotonic()

    def _note_health(self) -> None:
        """Keep the last time at which the conductor was healthy; called before what changes the answer."""
        latest = min(self._clock.monotonic(), self._proved_at + self._proof_valid)
        if latest - self._since > self._settle:
            self._healthy_at = latest

"""The agent's way to the conductor: reports that are repeated until they are heard, and heartbeats."""

import logging
from random import Random

from micronova.conductor.rpcapi import GUEST_EVENT, HEARTBEAT, REPORT, GuestEvent, ReportReply
from micronova.objects.clock import Clock
from micronova.objects.orders import Heartbeat, HeartbeatReply, PowerChange, Report
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context

log = logging.getLogger(__name__)

CALL_TIMEOUT = 10.0
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0


class ConductorClient:
    """Calls the conductor on behalf of all hosts of a process."""

    def __init__(self, bus: Bus, clock: Clock, random: Random) -> None:
        self._bus = bus
        self._clock = clock
        self._random = random

    async def report(self, report: Report, context: Context) -> ReportReply:
        """Tell how an order ended, again and again until a conductor has answered."""
        target = REPORT.interface.target()
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._bus.call(target, REPORT, report, context=context, timeout=CALL_TIMEOUT)
            except Exception as error:  # whatever it is, a report must not be lost
                log.warning(
                    "host %s: the report on instance %s was not heard: %s",
                    report.host,
                    report.instance_uuid,
                    error,
                )
            # With jitter, or all hosts would come back at once when the conductor does.
            await self._clock.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(LONGEST_PAUSE, pause * 2)

    async def guest_event(self, host: str, change: PowerChange) -> None:
        """Hint at a power state that changed by itself; a hint that is lost does no harm."""
        event = GuestEvent(
            host=host,
            instance_uuid=change.instance_uuid,
            epoch=change.epoch,
            power_state=change.power_state,
        )
        try:
            await self._bus.cast(GUEST_EVENT.interface.target(), GUEST_EVENT, event, context=Context())
        except Exception as error:  # only a hint
            log.info("host %s: no conductor heard of instance %s: %s", host, change.instance_uuid, error)

    async def heartbeat(self, beat: Heartbeat, timeout: float = CALL_TIMEOUT) -> HeartbeatReply:
        """Say what the hosts have in hand, and hear what they should have."""
        return await self._bus.call(HEARTBEAT.interface.target(), HEARTBEAT, beat, context=Context(), timeout=timeout)

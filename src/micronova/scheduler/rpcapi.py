"""The messages that a scheduler takes, and the client end that sends them."""

from collections.abc import Mapping, Sequence

import msgspec

from micronova.objects.errors import MicronovaError
from micronova.objects.explanation import Explanation
from micronova.objects.scheduling import Placement, RequestSpec
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context, Interface
from micronova.rpc.errors import register

register(MicronovaError)  # NoValidHost arrives at the caller as itself

CALL_TIMEOUT = 60.0


class SelectDestinations(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one request that need hosts."""

    spec: RequestSpec
    instance_uuids: tuple[str, ...]
    epochs: dict[str, int] = {}
    """By instance: a claim for one that is gone or at another epoch is refused (Stale)."""


class Selected(msgspec.Struct, frozen=True, kw_only=True):
    """Where they go: all of them, claimed; and why."""

    placements: tuple[Placement, ...]
    explanation: Explanation


class HostsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A hint to look at the database before the next decision; hosts are told for the log."""

    hosts: tuple[str, ...] = ()


SCHEDULER = Interface("scheduler", version="1.0")
SELECT_DESTINATIONS = SCHEDULER.method("select_destinations", SelectDestinations, Selected)
HOSTS_CHANGED = SCHEDULER.method("hosts_changed", HostsChanged)


class SchedulerAPI:
    """Asks the schedulers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def select_destinations(
        self,
        context: Context,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        epochs: Mapping[str, int] | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> Selected:
        """Have hosts chosen and their resources claimed for all instances, or raise NoValidHost.

        Safe to repeat: instances that hold what they need keep it, unless on one of `spec.ignore_hosts`.
        """
        request = SelectDestinations(spec=spec, instance_uuids=tuple(instance_uuids), epochs=dict(epochs or {}))
        return await self._bus.call(SCHEDULER.target(), SELECT_DESTINATIONS, request, context=context, timeout=timeout)

    async def hosts_changed(self, context: Context, hosts: Sequence[str] = ()) -> None:
        """Tell all schedulers that hosts were enabled, disabled or put in another zone."""
        await self._bus.fanout(SCHEDULER.topic, HOSTS_CHANGED, HostsChanged(hosts=tuple(hosts)), context=context)

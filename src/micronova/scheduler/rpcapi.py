"""The messages to a scheduler, and the client that sends them."""

from collections.abc import Mapping, Sequence

from micronova.objects.context import Context
from micronova.objects.explanation import Explanation
from micronova.objects.fleet import Fleet, ListHosts
from micronova.objects.scheduling import (
    CheckImage,
    DryRun,
    DryRunResult,
    RequestSpec,
    SchedulerDecision,
    SelectDestinations,
)
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Interface

CALL_TIMEOUT = 60.0

SCHEDULER_INTERFACE = Interface("scheduler", version="1.2")
SELECT_DESTINATIONS = SCHEDULER_INTERFACE.method("select_destinations", SelectDestinations, SchedulerDecision)
CHECK_IMAGE = SCHEDULER_INTERFACE.method("check_image", CheckImage, Explanation, since="1.1")
DRY_RUN = SCHEDULER_INTERFACE.method("dry_run", DryRun, DryRunResult, since="1.2")
LIST_HOSTS = SCHEDULER_INTERFACE.method("list_hosts", ListHosts, Fleet, since="1.2")


class SchedulerAPI:
    """The client of the schedulers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def select_destinations(
        self,
        context: Context,
        spec: RequestSpec,
        instance_uuids: Sequence[str],
        *,
        epochs: Mapping[str, int] | None = None,
        moving: Mapping[str, str] | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> SchedulerDecision:
        """Choose hosts for all instances and claim their resources; raise NoValidHost.

        It can be repeated: instances keep what they hold, unless it is on one of `spec.ignore_hosts`.
        """
        request = SelectDestinations(
            spec=spec, instance_uuids=tuple(instance_uuids), epochs=dict(epochs or {}), moving=dict(moving or {})
        )
        return await self._bus.call(
            SCHEDULER_INTERFACE.target(), SELECT_DESTINATIONS, request, context=context, timeout=timeout
        )

    async def check_image(
        self, context: Context, spec: RequestSpec, node_uuid: str, *, timeout: float = CALL_TIMEOUT
    ) -> Explanation:
        """Return what the filters that compare images decide about the node of a server; raise NoValidHost."""
        request = CheckImage(spec=spec, node_uuid=node_uuid)
        return await self._bus.call(
            SCHEDULER_INTERFACE.target(), CHECK_IMAGE, request, context=context, timeout=timeout
        )

    async def dry_run(
        self,
        context: Context,
        spec: RequestSpec,
        count: int = 1,
        *,
        with_hosts: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> DryRunResult:
        """Return where servers would go, or what refuses them; nothing changes."""
        request = DryRun(spec=spec, count=count, with_hosts=with_hosts)
        return await self._bus.call(SCHEDULER_INTERFACE.target(), DRY_RUN, request, context=context, timeout=timeout)

    async def list_hosts(self, context: Context, *, timeout: float = CALL_TIMEOUT) -> Fleet:
        """Return all hosts with their use, as a scheduler knows them."""
        target = SCHEDULER_INTERFACE.target()
        return await self._bus.call(target, LIST_HOSTS, ListHosts(), context=context, timeout=timeout)

"""The messages to a scheduler, and the client that sends them."""

from collections.abc import Mapping, Sequence

from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError
from micronova.objects.explanation import Explanation
from micronova.objects.scheduling import CheckImage, RequestSpec, SelectDestinations, Selected
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Interface
from micronova.rpc.errors import register

register(MicronovaError)  # NoValidHost reaches the caller as NoValidHost

CALL_TIMEOUT = 60.0


SCHEDULER_INTERFACE = Interface("scheduler", version="1.1")
SELECT_DESTINATIONS = SCHEDULER_INTERFACE.method("select_destinations", SelectDestinations, Selected)
CHECK_IMAGE = SCHEDULER_INTERFACE.method("check_image", CheckImage, Explanation, since="1.1")


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
    ) -> Selected:
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

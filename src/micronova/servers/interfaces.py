"""The interfaces of servers: list, attach, detach, and events of the network service about them.

Attaching is an operation like all others, but its caller waits for the end: the answer describes the port. Requests for
one server that come together are served one after the other.
"""

import logging
from collections.abc import Awaitable, Callable

import msgspec

from micronova.clients.network.client import NetworkClient
from micronova.db import instances, network_info
from micronova.db.engine import Database
from micronova.objects import states
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import (
    AddressInUse,
    Conflict,
    Forbidden,
    Invalid,
    MicronovaError,
    NotFound,
    NotSupported,
    OperationFailed,
    PortLimitExceeded,
    RequestedNotFound,
)
from micronova.objects.instance import InstanceRow
from micronova.objects.network import VIF, NetworkRequest, PlannedPort
from micronova.objects.operations import InterfacePayload
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.waiting import DeviceChanges, wait_for_operation

log = logging.getLogger(__name__)

WAIT = 60.0  # seconds that a request waits for another one that changes the same server's interfaces
EVENT_WAIT = 5.0  # the same, for an event of the network service
REFRESH_TRIES = 5

# Errors of a failed attachment that the caller gets as they are; all others become a 500.
_PASSED_ON: dict[str, type[MicronovaError]] = {
    error.code: error for error in (Conflict, Forbidden, Invalid, NotFound, NotSupported, PortLimitExceeded)
}


class Interfaces:
    """Lists and changes the interfaces of servers."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        actions: ServerActions,
        network_client: NetworkClient | None,
        check_host: Callable[[InstanceRow], Awaitable[None]],
    ) -> None:
        """`check_host` raises Unavailable if the host of a server does not answer."""
        self._check_host = check_host
        self._database = database
        self._clock = clock
        self._changes = DeviceChanges(database, clock, states.CHANGES_INTERFACES)
        self._actions = actions
        self._network_client = network_client

    async def listed(self, row: InstanceRow) -> tuple[VIF, ...]:
        """Return a server's interfaces as the network service shows them now."""
        if self._network_client is None:
            return msgspec.convert(row["network_info"], tuple[VIF, ...])
        found = await self._network_client.network_info(row["uuid"])
        return network_info.in_order(found, row["network_info"])

    async def show(self, row: InstanceRow, port_id: str) -> VIF:
        """Return one of a server's interfaces."""
        for vif in await self.listed(row):
            if vif.port_id == port_id:
                return vif
        raise NotFound(f"Instance {row['uuid']} does not have a port with id {port_id[:64]}")

    async def attach(
        self, context: RequestContext, row: InstanceRow, request: NetworkRequest | None, *, may_attach_external: bool
    ) -> VIF:
        """Attach an interface; return it when it is plugged."""
        action = states.ACTIONS["attach_interface"]
        check_lock(context, row)
        row = await self._changes.wait(row, WAIT)
        check_state(action, row)
        if self._network_client is None:
            raise NotSupported("There is no network service: a server cannot get an interface.")
        await self._check_host(row)
        planned = await self._plan(self._network_client, context, row, request, may_attach_external)
        payload = InterfacePayload(request=planned)
        operation = await self._begin(context, row, action, payload, WAIT)
        port_id = await self._attached(row["uuid"], operation)
        await self.refresh(row["uuid"])  # the port's security groups become the server's
        return await self.show(await self._database.read(instances.get_existing, row["uuid"]), port_id)

    async def detach(self, context: RequestContext, row: InstanceRow, port_id: str) -> None:
        """Accept a request to detach an interface."""
        action = states.ACTIONS["detach_interface"]
        check_lock(context, row)
        await self._begin(context, row, action, InterfacePayload(port_id=port_id), WAIT)

    # --- events of the network service -----------------------------------------------------------------------

    async def refresh(self, uuid: str) -> bool:
        """Record a server's interfaces, addresses and security groups as the network service shows them now.

        Return False if the server has changed during each attempt, so that nothing is recorded.
        """
        if self._network_client is None:
            return True
        for _ in range(REFRESH_TRIES):
            row = await self._database.read(instances.get, uuid)
            if row is None:
                return True
            found = await self._network_client.network_info(uuid)
            security_groups = await self._network_client.security_groups.names_of(uuid)
            now = micros(self._clock.now())
            seen = row["updated_at"]
            if await self._database.write(network_info.record, uuid, seen, found, security_groups, now) != "stale":
                return True
        log.warning(
            "instance %s changed during each of %d reads of its ports: they are not recorded now", uuid, REFRESH_TRIES
        )
        return False

    async def port_deleted(self, context: RequestContext, row: InstanceRow, port_id: str) -> bool:
        """Detach the interface of a port that was deleted; a lock of the server does not matter.

        Return False if that has to be tried again later, such as after an action on the server.
        """
        if row["task_state"] == states.DELETING or not _has(row, port_id):
            return True
        action = states.ACTIONS["detach_interface"]
        try:
            payload = InterfacePayload(port_id=port_id)
            await self._begin(context, row, action, payload, EVENT_WAIT, respects_lock=False)
        except NotFound:
            pass  # it was detached before
        except (Conflict, NotSupported) as error:
            known = await self._database.read(instances.get, row["uuid"])
            if isinstance(error, Conflict) and known is not None and known["task_state"] is not None:
                return False
            log.warning("port %s of %s was deleted; its guest keeps a dead interface: %s", port_id, row["uuid"], error)
            return await self.refresh(row["uuid"])
        return True

    # --- attaching -------------------------------------------------------------------------------------------

    async def _plan(
        self,
        network_client: NetworkClient,
        context: RequestContext,
        row: InstanceRow,
        request: NetworkRequest | None,
        may_attach_external: bool,
    ) -> PlannedPort:
        """Check the request with the caller's token; return the planned port."""
        try:
            plan = await network_client.planner.plan(
                None if request is None else [request],
                [],
                token=context.token,
                project_id=row["project_id"],
                count=1,
                may_attach_external=may_attach_external,
            )
        except RequestedNotFound as error:
            raise NotFound(error.message) from None
        except AddressInUse as error:
            raise Conflict(error.message) from None
        except Conflict as error:
            if request is None:  # there are several networks, and none was named
                raise Invalid(error.message) from None
            raise
        if isinstance(plan.ports, str) or not plan.ports:
            raise Invalid(
                f"No specific network was requested and none are available for project '{row['project_id']}'."
            )
        if plan.max_servers == 0:
            raise PortLimitExceeded("Maximum number of ports exceeded")
        return plan.ports[0]

    async def _begin(
        self,
        context: RequestContext,
        row: InstanceRow,
        action: states.Action,
        payload: InterfacePayload,
        seconds: float,
        *,
        respects_lock: bool = True,
    ) -> str:
        """Start an operation after those that are changing the same server's interfaces."""

        def check(known: InstanceRow) -> None:
            if payload.port_id is not None and not _has(known, payload.port_id):
                raise NotFound(f"Port {payload.port_id[:64]} is not attached to instance {known['uuid']}")
            wanted = None if payload.request is None else payload.request.port_id
            if wanted is not None and _has(known, wanted):  # an equal request was first
                raise Conflict(f"Port {wanted} is still in use.")

        async def begin(free: InstanceRow) -> str:
            return await self._actions.begin(
                context, free, action.name, action, payload, check, respects_lock=respects_lock
            )

        return await self._changes.begin(row, seconds, begin)

    async def _attached(self, uuid: str, operation: str) -> str:
        """Wait until an attachment ends; return its port, or raise its error."""
        late = f"The interface is still being attached to instance {uuid}: look at it later."
        found = await wait_for_operation(self._database, self._clock, operation, late)
        if found is None:
            raise OperationFailed(f"What became of the interface of instance {uuid} is not known any more.")
        payload = InterfacePayload.decode(found["payload"])
        if found["result"] == "success" and payload.port_id is not None:
            return payload.port_id
        if found["result"] == "cancelled":
            raise Conflict(f"The interface was not attached to instance {uuid}: a later request took its place.")
        known = _PASSED_ON.get(payload.error_code or "")
        if known is not None:
            raise known(payload.error)
        raise OperationFailed(f"Failed to attach network adapter device to {uuid}: {payload.error}")


def _has(row: InstanceRow, port_id: str) -> bool:
    return any(vif["port_id"] == port_id for vif in row["network_info"])

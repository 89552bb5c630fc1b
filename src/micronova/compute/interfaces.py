"""The interfaces of servers that exist: listing, attaching, detaching, and what the network tells of them.

Attaching is an operation like all others, but its caller waits for the end: the answer describes the port. Requests for
one server that come together are served one after the other.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.compute.acceptance import Acceptance, check_lock
from micronova.conductor.interfaces import InterfacePayload
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.http.context import RequestContext
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import (
    AddressInUse,
    Conflict,
    Forbidden,
    InstanceNotFound,
    Invalid,
    MicronovaError,
    NotFound,
    NotSupported,
    OperationFailed,
    PortLimitExceeded,
    RequestedNotFound,
    Unavailable,
)
from micronova.objects.network import VIF, NetworkRequest

log = logging.getLogger(__name__)

FIRST_LOOK = 0.02
SELDOM = 0.5  # seconds between looks, in the end
PATIENCE = 60.0  # seconds that a request waits for another one that changes the same server's interfaces
EVENT_PATIENCE = 5.0  # the same, for news from the network service
GRACE = 30.0  # seconds after its deadline within which an operation is ended for sure
REFRESH_TRIES = 5

# What a conductor or a host may say of an attachment that failed, as the caller hears it; all else is a 500.
_TOLD: dict[str, type[MicronovaError]] = {
    error.code: error for error in (Conflict, Forbidden, Invalid, NotFound, NotSupported, PortLimitExceeded)
}


class ServerGroups(Protocol):
    """What is needed of the network service for the security groups of servers."""

    async def of_server(self, server: str, token: str) -> list[dict[str, Any]]:
        """Return the groups with their rules."""

    async def names_of(self, server: str) -> list[str]:
        """Return their names."""

    async def add(self, server: str, asked: str, *, token: str, project_id: str) -> list[str]:
        """Add one, by name or id; return the names of all."""

    async def remove(self, server: str, asked: str, *, token: str, project_id: str) -> list[str]:
        """Take one away; return the names of those that are left."""


class Networks(Protocol):
    """What is needed of the network service."""

    @property
    def groups(self) -> ServerGroups:
        """The security groups of servers."""

    async def validate(
        self,
        requests: Any,
        security_groups: list[str],
        *,
        token: str,
        project_id: str,
        count: int,
        may_attach_external: bool = False,
    ) -> Any:
        """Check with the user's token that networks and ports are the user's to use."""

    async def network_info(self, instance_uuid: str) -> tuple[VIF, ...]:
        """Return the interfaces of an instance as they are now."""


class Interfaces:
    """What may be asked about the interfaces of servers."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        acceptance: Acceptance,
        networks: Networks | None,
        is_up: Callable[[sa.Connection, str], bool],
    ) -> None:
        self._is_up = is_up
        self._database = database
        self._clock = clock
        self._acceptance = acceptance
        self._networks = networks

    async def listed(self, row: Any) -> tuple[VIF, ...]:
        """Return a server's interfaces as the network has them now."""
        if self._networks is None:
            return msgspec.convert(row["network_info"], tuple[VIF, ...])
        found = await self._networks.network_info(row["uuid"])
        return _in_order(found, row["network_info"])

    async def show(self, row: Any, port_id: str) -> VIF:
        """Return one of a server's interfaces."""
        for vif in await self.listed(row):
            if vif.port_id == port_id:
                return vif
        raise NotFound(f"Instance {row['uuid']} does not have a port with id {port_id[:64]}")

    async def attach(
        self, context: RequestContext, row: Any, request: NetworkRequest | None, *, may_attach_external: bool
    ) -> VIF:
        """Give a server one more interface; returns when it is plugged."""
        action = states.ACTIONS["attach_interface"]
        check_lock(context, row)
        row = await self._free(row, PATIENCE)
        reason = states.refusal(action, row["vm_state"], row["task_state"], row["host"] is not None)
        if reason is not None:
            raise Conflict(f"Cannot '{action.name}' instance {row['uuid']} {reason}")
        if self._networks is None:
            raise NotSupported("There is no network service: a server cannot get an interface.")
        if not await self._database.read(self._is_up, row["host"]):
            raise Unavailable(f"The host of instance {row['uuid']} does not answer just now. Try again later.")
        planned = await self._plan(self._networks, context, row, request, may_attach_external)
        payload = InterfacePayload(request=msgspec.to_builtins(planned))
        operation = await self._begin(context, row, action, payload, PATIENCE)
        port_id = await self._attached(row["uuid"], operation)
        await self.refresh(row["uuid"])  # it brings groups with it
        return await self.show(await self._row(row["uuid"]), port_id)

    async def detach(self, context: RequestContext, row: Any, port_id: str) -> None:
        """Accept the end of an interface."""
        action = states.ACTIONS["detach_interface"]
        check_lock(context, row)
        await self._begin(context, row, action, InterfacePayload(port_id=port_id), PATIENCE)

    # --- what the network tells ------------------------------------------------------------------------------

    async def refresh(self, uuid: str) -> None:
        """Note a server's interfaces, addresses and groups as the network has them: e.g. a floating IP came or went."""
        if self._networks is None:
            return
        for _ in range(REFRESH_TRIES):
            row = await self._database.read(instances.get, uuid)
            if row is None:
                return
            found = await self._networks.network_info(uuid)
            groups = await self._networks.groups.names_of(uuid)
            if await self._database.write(self._note, uuid, row["updated_at"], found, groups):
                return
        log.warning("the interfaces of %s change all the time: they are not looked at now", uuid)

    async def port_deleted(self, context: RequestContext, row: Any, port_id: str) -> None:
        """A port was deleted under a server: its guest loses the interface, whether the server is locked or not."""
        if row["task_state"] == states.DELETING or not _has(row, port_id):
            return
        action = dataclasses.replace(states.ACTIONS["detach_interface"], respects_lock=False)
        try:
            await self._begin(context, row, action, InterfacePayload(port_id=port_id), EVENT_PATIENCE)
        except NotFound:
            pass  # it was detached meanwhile, which is why it was deleted
        except (Conflict, NotSupported) as error:
            log.warning("port %s of %s was deleted; its guest keeps a dead interface: %s", port_id, row["uuid"], error)
            await self.refresh(row["uuid"])

    def _note(self, conn: sa.Connection, uuid: str, seen: int, found: tuple[VIF, ...], groups: list[str]) -> bool:
        """Keep what was found, unless somebody changed the server since it was looked at."""
        row = instances.lock(conn, uuid)
        if row is None:
            return True
        if row["updated_at"] != seen:
            return False
        values = {"network_info": msgspec.to_builtins(_in_order(found, row["network_info"]))}
        if row["vm_state"] != states.BUILDING:  # until it is built they are what its ports are to have
            values["security_groups"] = groups
        if any(row[name] != value for name, value in values.items()):
            instances.update(conn, uuid, micros(self._clock.now()), values)
        return True

    # --- steps -----------------------------------------------------------------------------------------------

    async def _plan(
        self,
        networks: Networks,
        context: RequestContext,
        row: Any,
        request: NetworkRequest | None,
        may_attach_external: bool,
    ) -> Any:
        """Check what is asked for with the caller's own rights; return the port to be."""
        try:
            plan = await networks.validate(
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
        if isinstance(plan.requests, str) or not plan.requests:
            raise Invalid(
                f"No specific network was requested and none are available for project '{row['project_id']}'."
            )
        if plan.room == 0:
            raise PortLimitExceeded("Maximum number of ports exceeded")
        return plan.requests[0]

    async def _begin(
        self, context: RequestContext, row: Any, action: states.Action, payload: InterfacePayload, patience: float
    ) -> str:
        """Begin an operation, after those that change the same server's interfaces already."""

        def check(known: Any) -> None:
            if payload.port_id is not None and not _has(known, payload.port_id):
                raise NotFound(f"Port {payload.port_id[:64]} is not attached to instance {known['uuid']}")

        until = self._clock.monotonic() + patience
        while True:
            row = await self._free(row, until - self._clock.monotonic())
            try:
                return await self._acceptance.begin(context, row, action.name, action, payload, check)
            except Conflict:
                row = await self._row(row["uuid"])
                if row["task_state"] not in states.CHANGES_INTERFACES or self._clock.monotonic() >= until:
                    raise

    async def _free(self, row: Any, patience: float) -> Any:
        """Wait until nobody else changes a server's interfaces; return the server as it is then."""
        until = self._clock.monotonic() + patience
        pause = FIRST_LOOK
        while row["task_state"] in states.CHANGES_INTERFACES and self._clock.monotonic() < until:
            await self._clock.sleep(pause)
            pause = min(SELDOM, pause * 1.5)
            row = await self._row(row["uuid"])
        return row

    async def _attached(self, uuid: str, operation: str) -> str:
        """Wait for the end of an attachment; return its port, or raise what went wrong."""
        pause = FIRST_LOOK
        while True:
            found = await self._database.read(operation_rows.get, operation)
            if found is None:
                raise OperationFailed(f"What became of the interface of instance {uuid} is not known any more.")
            if found["finished_at"] is not None:
                break
            if self._clock.now() > found["deadline"] / 1e6 + GRACE:
                raise Unavailable(f"The interface is still being attached to instance {uuid}: look at it later.")
            await self._clock.sleep(pause)
            pause = min(SELDOM, pause * 1.5)
        payload = msgspec.msgpack.decode(found["payload"], type=InterfacePayload)
        if found["result"] == "success" and payload.port_id is not None:
            return payload.port_id
        if found["result"] == "cancelled":
            raise Conflict(f"The interface was not attached to instance {uuid}: a later request took its place.")
        told = _TOLD.get(payload.error_code or "")
        if told is not None:
            raise told(payload.error)
        raise OperationFailed(f"Failed to attach network adapter device to {uuid}: {payload.error}")

    async def _row(self, uuid: str) -> Any:
        row = await self._database.read(instances.get, uuid)
        if row is None:
            raise InstanceNotFound(f"Instance {uuid} could not be found.")
        return row


def _has(row: Any, port_id: str) -> bool:
    return any(vif["port_id"] == port_id for vif in row["network_info"])


def _in_order(found: tuple[VIF, ...], known: list[Any]) -> tuple[VIF, ...]:
    """Return interfaces in the order in which the guest has them; new ones are the last."""
    places = {vif["port_id"]: place for place, vif in enumerate(known)}
    return tuple(sorted(found, key=lambda vif: places.get(vif.port_id, len(places))))

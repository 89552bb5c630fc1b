"""Starts the guests of a host again that should run and do not, after the host was switched off and on.

The agent names the guests that it found off when it started. A server whose state says that it runs gets a `start`
operation, recorded in the transaction that reads its state, so that no crash loses it. A server that its owner has
stopped, or that an operation changes, is left as it is.
"""

import logging
from uuid import UUID

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.own_requests import accept_own, own_ids
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects import power_state, states
from micronova.objects.instance import InstanceChanges
from micronova.objects.operations import PowerPayload
from micronova.objects.orders import GuestAtEpoch, GuestsOff

log = logging.getLogger(__name__)

NAMESPACE = UUID("0c7a2f0e-5d0b-4c38-9a51-8f1c1f8a7d10")
"""Of the ids of these operations and requests, which follow from the instance and its epoch."""
START = "start"


async def start_guests_after_host_boot(dependencies: ConductorDependencies, found: GuestsOff) -> tuple[str, ...]:
    """Start those of the guests that should run; return their instances."""
    engine = dependencies.engine
    # Every transaction locks in this order. One for each server: a host may have thousands.
    started: dict[str, str] = {}
    for guest in sorted(found.guests, key=lambda guest: guest.instance_uuid):
        operation = await engine.write_for_host(_begin, dependencies, found.host, guest)
        if operation is not None:
            started[guest.instance_uuid] = operation
    if started:
        log.info("host %s is back; servers that are started again: %d", found.host, len(started))
        await engine.lease_and_run(tuple(started.values()))
    return tuple(started)


def _begin(conn: sa.Connection, dependencies: ConductorDependencies, host: str, guest: GuestAtEpoch) -> str | None:
    """Record the operation; return its id, or None if the server should not run."""
    row = instances.lock(conn, guest.instance_uuid)
    if row is None or row["host"] != host or row["epoch"] < guest.epoch:
        return None
    before = own_ids(NAMESPACE, row["uuid"], row["epoch"])
    if operation_rows.get(conn, before[0]) is not None and row["task_state"] == states.POWERING_ON:
        return before[0]
    if (row["vm_state"], row["power_state"], row["task_state"]) != (states.ACTIVE, power_state.RUNNING, None):
        return None
    changes: InstanceChanges = {
        "vm_state": states.STOPPED,  # until it runs: a start that fails leaves it so
        "power_state": power_state.SHUTDOWN,
        "task_state": states.ACTIONS[START].task_state,
    }
    payload = PowerPayload(action=START, parameters={"cause": "host_boot"})
    return accept_own(conn, dependencies, row, changes, namespace=NAMESPACE, kind=START, payload=payload)[0]

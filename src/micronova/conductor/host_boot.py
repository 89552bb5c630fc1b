"""Starts the guests of a host again that should run and do not, after the host was switched off and on.

The agent names the guests that it found off when it started. A server whose state says that it runs gets a `start`
operation, recorded in the transaction that reads its state, so that no crash loses it. A server that its owner has
stopped, or that an operation changes, is left as it is.
"""

import logging
import uuid

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import Dependencies
from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.objects import power_state, states
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.operations import PowerPayload
from micronova.objects.orders import GuestAtEpoch, GuestsOff

log = logging.getLogger(__name__)

NAMESPACE = uuid.UUID("0c7a2f0e-5d0b-4c38-9a51-8f1c1f8a7d10")
"""Of the ids of these operations and requests. They follow from the instance and its epoch: recording an operation
again, because the answer to a commit was lost, finds it."""
START = "start"


async def start_guests_after_host_boot(dependencies: Dependencies, found: GuestsOff) -> tuple[str, ...]:
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


def _begin(conn: sa.Connection, dependencies: Dependencies, host: str, guest: GuestAtEpoch) -> str | None:
    """Record the operation; return its id, or None if the server should not run."""
    now = dependencies.engine.now()
    row = instances.lock(conn, guest.instance_uuid)
    if row is None or row["host"] != host or row["epoch"] < guest.epoch:
        return None
    before = _ids(row["uuid"], row["epoch"])
    if operation_rows.get(conn, before[0]) is not None and row["task_state"] == states.POWERING_ON:
        return before[0]
    if (row["vm_state"], row["power_state"], row["task_state"]) != (states.ACTIVE, power_state.RUNNING, None):
        return None
    operation, request = _ids(row["uuid"], row["epoch"] + 1)
    operation_rows.accept_action(
        conn,
        row,
        {
            "vm_state": states.STOPPED,  # until it runs: a start that fails leaves it so
            "power_state": power_state.SHUTDOWN,
            "task_state": states.ACTIONS[START].task_state,
        },
        id=operation,
        kind=START,
        context=Context(request_id=request),
        payload=PowerPayload(action=START, parameters={"cause": "host_boot"}),
        now=now,
        deadline=now + micros(dependencies.action_timeout),
    )
    return operation


def _ids(instance: str, epoch: int) -> tuple[str, str]:
    """Return the ids of the operation and of its request."""
    operation = uuid.uuid5(NAMESPACE, f"operation {instance} {epoch}")
    return str(operation), f"req-{uuid.uuid5(NAMESPACE, f'request {instance} {epoch}')}"

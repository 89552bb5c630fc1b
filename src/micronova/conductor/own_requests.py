"""Operations that a conductor records although no user has asked; their instance actions have no user.

A periodic job only records operations, and at most `MOST_BEGUN` in a run: the sweeps of all conductors share them.

An operation is recorded in the transaction that reads the server's state, so that no crash loses it, and no other
request comes between. Its id and that of its request follow from the server and the operation's epoch.
"""

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec
from uuid import UUID, uuid5

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Engine
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import Payload

P = ParamSpec("P")

TOGETHER = 100
"""Servers that a periodic job reads at once."""
MOST_BEGUN = 1000
"""Servers on which one run of a periodic job begins something; the next run takes the others."""
OWNERS_TIME = 600.0
"""Seconds after an outage that owners have at least, before the conductor does what they could have prevented."""


def owners_could_act(engine: Engine, window: float) -> bool:
    """Return whether owners had time since the last outage: as long as they have in any case, or `OWNERS_TIME`."""
    return engine.health.undisturbed_for() >= min(window, OWNERS_TIME)


def own_ids(namespace: UUID, *about: object) -> tuple[str, str]:
    """Return the ids of an operation and of its request; each cause has a namespace of its own."""
    name = " ".join(str(each) for each in about)
    return str(uuid5(namespace, f"operation {name}")), f"req-{uuid5(namespace, f'request {name}')}"


def accept_own(
    conn: sa.Connection,
    dependencies: ConductorDependencies,
    row: InstanceRow,
    changes: InstanceChanges,
    *,
    namespace: UUID,
    kind: str,
    payload: Payload | None,
    endless: bool = False,
) -> list[str]:
    """Record an operation on a server, whose row is locked; return the operations to start: it, and those it ends.

    With `endless` it has no deadline.
    """
    now = dependencies.engine.now()
    operation, request = own_ids(namespace, row["uuid"], row["epoch"] + 1)
    to_end = operation_rows.accept_action(
        conn,
        row,
        changes,
        id=operation,
        kind=kind,
        context=Context(request_id=request),
        payload=payload,
        now=now,
        deadline=operation_rows.NO_DEADLINE if endless else now + micros(dependencies.operation_timeout),
    )
    return [operation, *to_end]


async def record_on(
    database: Database,
    servers: Sequence[str],
    begin: Callable[Concatenate[sa.Connection, str, P], list[str]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[str]:
    """Record what is due on each of these servers; return the servers that have got something to do.

    `begin` runs in a transaction for one server, and returns the operations that it has recorded or ended.
    """
    return [id for id in servers if await database.write(begin, id, *args, **kwargs)]

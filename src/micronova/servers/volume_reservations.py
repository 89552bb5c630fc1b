"""Reservations of volumes that a request makes before it is recorded: none is left, whatever becomes of the request.

Before the API reserves volumes for a server, it announces them: by an operation that gives back what is not recorded,
and that no conductor takes for `ANNOUNCED_FOR`. The transaction that records the request withdraws the announcement.
If the answer of the volume service is lost, or the API dies, the operation remains. A request that comes meanwhile for
the same server and volume postpones it, because the volume service may give both the same reservation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import sqlalchemy as sa

from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unavailable
from micronova.objects.operations import SETTLE_VOLUMES, OperationRow, SettlePayload

ANNOUNCED_FOR: Final = 180.0
"""Seconds after which the reservations of a request that is not recorded are given back; a request takes less."""


class Reservations:
    """Announces reservations of volumes."""

    def __init__(self, database: Database, clock: Clock, conductor: ConductorAPI) -> None:
        self._database = database
        self._clock = clock
        self._conductor = conductor

    async def announce(self, context: RequestContext, wanted: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        """Record that volumes are about to be reserved: by server the id of the operation and the volumes.

        Raise Unavailable if an earlier reservation of one of them for the server is being given back.
        """
        await self._database.write(self._announce, context, wanted)

    def _announce(
        self, conn: sa.Connection, context: RequestContext, wanted: Mapping[str, tuple[str, Sequence[str]]]
    ) -> None:
        now = micros(self._clock.now())
        until = now + micros(ANNOUNCED_FOR)
        rows: list[OperationRow] = []
        open_ = operation_rows.open_of_many(conn, wanted)
        for server, (id, volumes) in wanted.items():
            earlier = open_.get(server, [])
            if any(row["id"] == id for row in earlier):
                continue  # the answer to the first commit was lost
            for row in earlier:
                if row["kind"] != SETTLE_VOLUMES or set(volumes).isdisjoint(_reserved(row)):
                    continue
                if not operation_rows.defer(conn, [row["id"]], until):
                    raise Unavailable("An earlier reservation of the volume is being given back. Try again.")
            rows.append(
                operation_rows.follow_up_row(
                    server,
                    SETTLE_VOLUMES,
                    id=id,
                    epoch=0,
                    now=now,
                    context=context.for_bus(),
                    payload=SettlePayload(reserved=list(volumes)),
                    deferred_until=until,
                )
            )
        operation_rows.insert(conn, rows)

    async def withdraw(self, ids: Iterable[str]) -> None:
        """Remove announcements whose reservations were given back."""
        await self._database.write(operation_rows.withdraw, list(ids))

    async def give_back(self, context: RequestContext, ids: Sequence[str]) -> None:
        """Let a conductor give back what was announced and is not recorded."""
        await self._database.write(operation_rows.defer, ids, 0)
        await self._conductor.run_operations(context.for_bus(), tuple(ids))


def withdraw_recorded(conn: sa.Connection, ids: Sequence[str]) -> None:
    """Withdraw announcements in the transaction that records what was reserved.

    Raise Unavailable if a conductor has begun to give it back.
    """
    if operation_rows.withdraw(conn, ids) < len(ids):
        raise Unavailable("The request took too long: its volumes are given back. Try again.")


def _reserved(row: OperationRow) -> list[str]:
    return SettlePayload.decode(row["payload"]).reserved

"""The scheduler's decisions about a server, which operations keep until they are purged: for admins."""

from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from micronova.db.prepared import Prepared
from micronova.db.tables import operations
from micronova.objects.context import Context
from micronova.objects.explanation import Explanation, attempts

_o = operations.c
_OF_SERVER = (
    sa.select(_o.context, _o.kind, _o.created_at, _o.finished_at, _o.explanation)
    .where(_o.instance_uuid == sa.bindparam("instance"))
    .order_by(_o.created_at)
)
_EXPLANATION = sa.select(_o.explanation).where(_o.id == sa.bindparam("id"))
_RECORD = Prepared(
    operations.update().where(_o.id == sa.bindparam("b_id")).values(explanation=sa.bindparam("b_explanation"))
)
MOST_EARLIER = 10  # attempts of one operation that are kept; hosts may be lost any number of times


class Decided(NamedTuple):
    """The decisions of one operation, the first one first; there are several if hosts failed."""

    request_id: str
    kind: str
    explanations: list[Explanation]
    ended: bool


def record(conn: sa.Connection, id: str, explanation: Explanation, *, again: bool = False) -> None:
    """Record how the scheduler decided in an operation; `again` after an earlier attempt, whose explanation is kept.

    Of the decisions to wait only the last one is kept, until there is another decision.
    """
    before = conn.execute(_EXPLANATION, {"id": id}).scalar_one_or_none() if again else None
    if before is not None:
        decided = [each for each in attempts(msgspec.convert(before, Explanation)) if not each.waits]
        explanation = msgspec.structs.replace(explanation, earlier=tuple(decided[-MOST_EARLIER:]))
    _RECORD.run(conn, {"b_id": id, "b_explanation": msgspec.to_builtins(explanation)})


def of_server(conn: sa.Connection, instance_uuid: str) -> list[Decided]:
    """Return the decisions about a server, in the order of the requests that needed them."""
    found = []
    for row in conn.execute(_OF_SERVER, {"instance": instance_uuid}):
        if row.explanation is not None:  # the scheduler decided about it
            request = msgspec.msgpack.decode(row.context, type=Context).request_id
            found.append(Decided(request, row.kind, whole(conn, row.explanation), row.finished_at is not None))
    return found


def whole(conn: sa.Connection, stored: object) -> list[Explanation]:
    """Return the decisions that an operation keeps, with filters that another one of the request may have."""
    return [_with_filters(conn, each) for each in attempts(msgspec.convert(stored, Explanation))]


def _with_filters(conn: sa.Connection, explanation: Explanation) -> Explanation:
    if not explanation.same_as:
        return explanation
    stored = conn.execute(_EXPLANATION, {"id": explanation.same_as}).scalar()
    if stored is None:  # it is purged
        return explanation
    # The other operation may have been placed again since.
    kept = [each.filters for each in attempts(msgspec.convert(stored, Explanation)) if each.filters]
    return msgspec.structs.replace(explanation, filters=kept[0]) if kept else explanation

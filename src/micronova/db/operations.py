"""Operations: rows that say what is to be done, how far it is, and who is at it until when."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db.tables import departures, instances, operations

Row = sa.RowMapping

_INSERT = operations.insert()
_OPEN = operations.c.finished_at.is_(None)
_LEASE = (
    operations.update()
    .where(operations.c.id.in_(bindparam("ids", expanding=True)), _OPEN, operations.c.lease_until < bindparam("now"))
    .values(owner=bindparam("new_owner"), lease_until=bindparam("until"), attempts=operations.c.attempts + 1)
    .returning(*operations.c)
)
_EXPIRED = (
    sa.select(operations.c.id, operations.c.group_id, operations.c.kind, operations.c.version, operations.c.owner)
    .where(_OPEN, operations.c.lease_until < bindparam("now"))
    .order_by(operations.c.lease_until)
    .limit(bindparam("most"))
)
_RENEW = (
    operations.update()
    .where(operations.c.id.in_(bindparam("ids", expanding=True)), _OPEN, operations.c.owner == bindparam("b_owner"))
    .values(lease_until=bindparam("until"))
)
# A host keeps what it has, unless the instance has gone on without it or time is up: then the lease runs out.
_RENEW_HOST = _RENEW.where(
    operations.c.deadline >= bindparam("now"),
    operations.c.epoch
    == sa.select(instances.c.epoch).where(instances.c.uuid == operations.c.instance_uuid).scalar_subquery(),
)
_GET = sa.select(operations).where(operations.c.id == bindparam("id"))
_LOCK = _GET.with_for_update()
_OWNED = sa.select(operations).where(_OPEN, operations.c.owner.in_(bindparam("owners", expanding=True)))
_CANCEL = (
    operations.update()
    .where(
        operations.c.instance_uuid == bindparam("b_instance"),
        _OPEN,
        sa.or_(operations.c.owner.is_(None), operations.c.owner.like("host:%")),
    )
    .values(finished_at=bindparam("now"), result="cancelled", secrets=None)
    .returning(operations.c.context)
)
_FINISH = (
    operations.update()
    .where(
        operations.c.id == bindparam("b_id"),
        _OPEN,
        operations.c.owner == bindparam("b_owner"),
        operations.c.epoch == bindparam("b_epoch"),
    )
    .values(finished_at=bindparam("now"), result=bindparam("b_result"), secrets=None, step="done")
)
_FINISH_WITH_PAYLOAD = _FINISH.values(payload=bindparam("b_payload"))
_STEP = (
    operations.update()
    .where(
        operations.c.id == bindparam("b_id"),
        _OPEN,
        operations.c.owner == bindparam("b_owner"),
        operations.c.epoch == bindparam("b_epoch"),
    )
    .values(
        step=bindparam("b_step"),
        owner=bindparam("new_owner"),
        epoch=bindparam("new_epoch"),
        lease_until=bindparam("until"),
        payload=bindparam("b_payload"),
    )
)
_GIVE_BACK = (
    operations.update().where(_OPEN, operations.c.owner == bindparam("b_owner")).values(lease_until=bindparam("until"))
)
_WAKE = (
    operations.update()
    .where(
        operations.c.instance_uuid == bindparam("b_instance"),
        _OPEN,
        sa.or_(operations.c.owner.is_(None), operations.c.owner.not_like("host:%")),
    )
    .values(lease_until=0)
    .returning(operations.c.id)
)
_PURGE = operations.delete().where(operations.c.finished_at < bindparam("before"))
_OPEN_OF = sa.select(operations).where(operations.c.instance_uuid == bindparam("uuid"), _OPEN)


def insert(conn: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Record new work, owned by nobody."""
    conn.execute(_INSERT, rows)


Known = tuple[tuple[str, int], ...]  # kinds of operations, each with the newest version that somebody knows


@functools.cache
def _of_known(known: Known) -> tuple[sa.Executable, sa.Executable]:
    """The statements that take, and that look for, operations of these kinds up to these versions."""
    condition = sa.or_(
        sa.false(), *(sa.and_(operations.c.kind == kind, operations.c.version <= version) for kind, version in known)
    )
    return _LEASE.where(condition), _EXPIRED.where(condition)


def lease(conn: sa.Connection, ids: Sequence[str], owner: str, now: int, until: int, known: Known) -> list[Row]:
    """Take what nobody holds (any more) of these operations and is known; return what was taken."""
    take, _ = _of_known(known)
    taken = conn.execute(take, {"ids": list(ids), "new_owner": owner, "now": now, "until": until})
    return list(taken.mappings())


def expired(conn: sa.Connection, now: int, most: int, known: Known) -> list[Row]:
    """Return known operations that nobody works on: never taken, or their lease ran out."""
    _, look = _of_known(known)
    return list(conn.execute(look, {"now": now, "most": most}).mappings())


def renew(conn: sa.Connection, ids: Sequence[str], owner: str, until: int) -> None:
    """Prolong leases in one statement."""
    if ids:
        conn.execute(_RENEW, {"ids": list(ids), "b_owner": owner, "until": until})


def renew_of_host(conn: sa.Connection, ids: Sequence[str], owner: str, now: int, until: int) -> None:
    """Prolong the leases of a host; not of work that was overtaken or is late, which the sweep then finds."""
    if ids:
        conn.execute(_RENEW_HOST, {"ids": list(ids), "b_owner": owner, "now": now, "until": until})


def get(conn: sa.Connection, id: str, *, lock: bool = False) -> Row | None:
    """Return an operation; with `lock` nobody else changes it until this transaction ends."""
    return conn.execute(_LOCK if lock else _GET, {"id": id}).mappings().first()


def owned(conn: sa.Connection, owners: Iterable[str]) -> list[Row]:
    """Return the open operations of these owners."""
    return list(conn.execute(_OWNED, {"owners": list(owners)}).mappings())


def open_of(conn: sa.Connection, instance_uuid: str) -> list[Row]:
    """Return the open operations of an instance."""
    return list(conn.execute(_OPEN_OF, {"uuid": instance_uuid}).mappings())


def cancel_others(conn: sa.Connection, instance_uuid: str, now: int) -> list[bytes]:
    """End the open operations of an instance that were overtaken; return their contexts.

    Not those in a conductor's hands: it may be allocating just now, so it must notice itself, let go and end them.
    """
    return list(conn.execute(_CANCEL, {"b_instance": instance_uuid, "now": now}).scalars())


def finish(
    conn: sa.Connection, id: str, now: int, result: str, *, owner: str, epoch: int, payload: bytes | None = None
) -> bool:
    """End an operation, if it still is the owner's; its secrets are erased. Say whether it was."""
    values = {"b_id": id, "now": now, "b_result": result, "b_owner": owner, "b_epoch": epoch}
    if payload is None:
        return conn.execute(_FINISH, values).rowcount == 1
    return conn.execute(_FINISH_WITH_PAYLOAD, {**values, "b_payload": payload}).rowcount == 1


def step(
    conn: sa.Connection,
    id: str,
    *,
    owner: str,
    epoch: int,
    step: str,
    payload: bytes,
    until: int,
    new_owner: str | None = None,
    new_epoch: int | None = None,
) -> bool:
    """Persist how far an operation is, if it still is the owner's; say whether it was."""
    done = conn.execute(
        _STEP,
        {
            "b_id": id,
            "b_owner": owner,
            "b_epoch": epoch,
            "b_step": step,
            "b_payload": payload,
            "until": until,
            "new_owner": new_owner or owner,
            "new_epoch": epoch if new_epoch is None else new_epoch,
        },
    )
    return done.rowcount == 1


def give_back(conn: sa.Connection, owner: str) -> None:
    """Let everybody else take what the owner held: it stops."""
    conn.execute(_GIVE_BACK, {"b_owner": owner, "until": 0})


def wake(conn: sa.Connection, instance_uuid: str) -> list[str]:
    """Let the operations of an instance that wait for another to end be taken at once; return their ids."""
    return list(conn.execute(_WAKE, {"b_instance": instance_uuid}).scalars())


def purge(conn: sa.Connection, before: int) -> int:
    """Forget operations that ended before this moment."""
    return conn.execute(_PURGE, {"before": before}).rowcount


def record_departure(conn: sa.Connection, host: str, instance_uuid: str, epoch: int, now: int) -> None:
    """Record that an instance left a host: its guest there, up to this epoch, is to be destroyed."""
    conn.execute(departures.delete().where(departures.c.host == host, departures.c.instance_uuid == instance_uuid))
    conn.execute(departures.insert(), {"host": host, "instance_uuid": instance_uuid, "epoch": epoch, "created_at": now})


def departures_of(conn: sa.Connection, hosts: Iterable[str]) -> list[Row]:
    """Return the guests that hosts still have to destroy."""
    return list(conn.execute(sa.select(departures).where(departures.c.host.in_(list(hosts)))).mappings())


def departed(conn: sa.Connection, host: str, instance_uuid: str, epoch: int) -> None:
    """The host has destroyed it."""
    conn.execute(
        departures.delete().where(
            departures.c.host == host, departures.c.instance_uuid == instance_uuid, departures.c.epoch <= epoch
        )
    )


_EXPLAIN = (
    operations.update().where(operations.c.id == bindparam("b_id")).values(explanation=bindparam("b_explanation"))
)


def explain(conn: sa.Connection, id: str, explanation: Any) -> None:
    """Keep how the scheduler decided, for admins."""
    conn.execute(_EXPLAIN, {"b_id": id, "b_explanation": explanation})

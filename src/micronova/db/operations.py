"""Operations: rows that say what is to be done, which step is next, and who owns it until when."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from micronova.db import instance_actions
from micronova.db.instances import devices_of
from micronova.db.instances import update as update_instance
from micronova.db.listed import one_of
from micronova.db.locking import in_order
from micronova.db.prepared import Prepared
from micronova.db.tables import instances, operations
from micronova.objects.block_device import BlockDevice
from micronova.objects.context import Context
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import (
    FOLLOW_UP_KINDS,
    IMAGE_KINDS,
    SWAP_VOLUME,
    UNDO_MOVE,
    VERSIONS,
    OperationRow,
    Payload,
    Result,
    Step,
    VolumePayload,
    instance_action,
    with_last_error,
)

_HOST = "host:"
NO_DEADLINE = 253_402_300_799_000_000
"""Of work that is repeated until it succeeds: the end of the year 9999."""
CANCELLED = 0
"""The deadline of work that an operator has cancelled."""


class Lease(NamedTuple):
    """What a worker holds of an operation. The row changes only for the worker whose lease is the row's.

    The number of leases tells apart two leases of one conductor, which has the same name in both.
    """

    owner: str
    epoch: int
    number: int  # how often a conductor has leased it: the column `leases`


def host_owner(host: str) -> str:
    """Return the owner of operations that a host works on."""
    return _HOST + host


_INSERT = Prepared(operations.insert())
_OPEN = operations.c.finished_at.is_(None)
_NAMED = one_of(operations.c.id, "ids")
_FREE = operations.c.lease_until < bindparam("now")
_LEASE = (
    operations.update()
    .where(_OPEN, _FREE)
    .values(owner=bindparam("new_owner"), lease_until=bindparam("until"), leases=operations.c.leases + 1)
    .returning(*operations.c)
)
_LEASE_ONE = _LEASE.where(operations.c.id == bindparam("id"))
_LEASE_MANY = _LEASE.where(in_order(operations.c.id, _NAMED, _OPEN, _FREE))
_EXPIRED = sa.select(operations.c.id, operations.c.batch_id).where(_OPEN, _FREE)
_OWN = operations.c.owner == bindparam("b_owner")
_RENEW = (
    operations.update()
    .where(in_order(operations.c.id, _NAMED, _OPEN, _OWN), _OPEN, _OWN)
    .values(lease_until=bindparam("until"))
)
_HELD = sa.and_(
    operations.c.id == bindparam("b_id"),
    _OPEN,
    _OWN,
    operations.c.epoch == bindparam("b_epoch"),
    operations.c.leases == bindparam("b_leases"),
)
_NOTE_ERROR = Prepared(
    operations.update()
    .where(operations.c.id == bindparam("b_id"), operations.c.payload == bindparam("b_payload"))
    .values(payload=bindparam("noted"))
)
_POSTPONE = operations.update().where(_HELD).values(lease_until=bindparam("until"))
# `is_late` has the same rule for a row in memory.
_LATE = sa.and_(
    operations.c.deadline < bindparam("now"),
    operations.c.deadline - operations.c.created_at <= bindparam("undisturbed"),
)
_LIST_LATE = sa.select(operations).where(_OPEN, _LATE)
# The lease of a host is not renewed if its instance has another epoch or it is late.
_RENEW_HOSTS = (
    operations.update()
    .where(
        in_order(operations.c.id, _NAMED, _OPEN),
        _OPEN,
        one_of(operations.c.owner, "owners"),
        sa.not_(_LATE),
        operations.c.epoch
        == sa.select(instances.c.epoch).where(instances.c.uuid == operations.c.instance_uuid).scalar_subquery(),
    )
    .values(lease_until=bindparam("until"))
)
_LOCK_MANY = sa.select(operations.c.id).where(_NAMED).order_by(operations.c.id).with_for_update()
_BY_ID = sa.select(operations).where(operations.c.id == bindparam("id"))
_GET = Prepared(_BY_ID)
_GET_MANY = sa.select(operations).where(_NAMED)
_LOCK = Prepared(_BY_ID.with_for_update())
_NOT_OVERTAKEN = Prepared(
    sa.select(operations.c.id)
    .join(instances, instances.c.uuid == operations.c.instance_uuid)
    .where(operations.c.id == bindparam("id"), operations.c.epoch == instances.c.epoch)
)
_OWNED = sa.select(operations).where(_OPEN, one_of(operations.c.owner, "owners"))
_OF_INSTANCE = operations.c.instance_uuid == bindparam("b_instance")
_MAKES_IMAGE = operations.c.kind.in_([sa.literal(kind) for kind in IMAGE_KINDS])
# A constant in the SQL: SQLite compiles a statement again at each execution if the pattern of a LIKE is a parameter.
_ANY_HOST: sa.ColumnElement[str] = sa.literal_column(f"'{_HOST}%'", sa.String)
_WITHOUT_CONDUCTOR = sa.or_(operations.c.owner.is_(None), operations.c.owner.like(_ANY_HOST))
_FOLLOWS = operations.c.kind.in_([sa.literal(kind) for kind in FOLLOW_UP_KINDS])
# An evacuation that has not begun holds nothing that a conductor would have to give back.
_NOT_BEGUN = sa.and_(operations.c.kind == "evacuate", operations.c.step == "new")
# A later request ends these itself; a conductor ends those that it owns when it sees the new epoch.
_CANCELLABLE = sa.or_(sa.and_(_WITHOUT_CONDUCTOR, sa.not_(_FOLLOWS), sa.not_(_MAKES_IMAGE)), _NOT_BEGUN)
_TAKEN_BACK = sa.and_(_WITHOUT_CONDUCTOR, sa.or_(_MAKES_IMAGE, operations.c.kind == UNDO_MOVE))
_CANCEL = Prepared(
    operations.update()
    .where(in_order(operations.c.id, _OF_INSTANCE, _OPEN, _CANCELLABLE), _OPEN, _CANCELLABLE)
    .values(finished_at=bindparam("now"), result="cancelled", secrets=None)
    .returning(operations.c.context)
)
_TAKE_FROM_OWNER = Prepared(
    operations.update()
    .where(in_order(operations.c.id, _OF_INSTANCE, _OPEN, _TAKEN_BACK), _OPEN, _TAKEN_BACK)
    .values(owner=None, lease_until=0)
    .returning(operations.c.id)
)
_NEVER_LEASED = sa.and_(operations.c.id == bindparam("b_id"), _OPEN, operations.c.leases == 0)
_START_DEFERRED = Prepared(
    operations.update()
    .where(_NEVER_LEASED)
    .values(step=bindparam("b_step"), payload=bindparam("b_payload"), lease_until=0)
)
_OF_MANY_NEVER_LEASED = sa.and_(one_of(operations.c.id, "ids"), _OPEN, operations.c.leases == 0)
_DEFER = operations.update().where(_OF_MANY_NEVER_LEASED).values(lease_until=bindparam("until"))
_WITHDRAW = operations.delete().where(_OF_MANY_NEVER_LEASED)
_END = (
    operations.update()
    .where(_HELD)
    .values(finished_at=bindparam("now"), result=bindparam("b_result"), secrets=None, step="done")
)
_FINISH = Prepared(_END)
_FINISH_WITH_PAYLOAD = Prepared(_END.values(payload=bindparam("b_payload")))
_ADVANCE = (
    operations.update()
    .where(_HELD)
    .values(
        step=bindparam("b_step"),
        owner=bindparam("new_owner"),
        epoch=bindparam("new_epoch"),
        lease_until=bindparam("until"),
        payload=bindparam("b_payload"),
    )
)
_STEP = Prepared(_ADVANCE)
_STEP_WITHOUT_DEADLINE = Prepared(_ADVANCE.values(deadline=NO_DEADLINE))
_RELEASE_LEASES = operations.update().where(in_order(operations.c.id, _OPEN, _OWN), _OPEN, _OWN).values(lease_until=0)
_NO_HOST = sa.or_(operations.c.owner.is_(None), operations.c.owner.not_like(_ANY_HOST))
# One that nobody has leased does not wait for another: it is free, or deferred until its image is created.
_WAITS = sa.and_(_OPEN, _NO_HOST, operations.c.leases > 0)
_WAKE = Prepared(
    operations.update()
    .where(in_order(operations.c.id, _OF_INSTANCE, _WAITS), _WAITS)
    .values(lease_until=0)
    .returning(operations.c.id)
)
_LOCK_OPEN_OF = sa.select(operations.c.id).where(_OF_INSTANCE, _OPEN).order_by(operations.c.id).with_for_update()
_OPEN_OF_MANY = sa.select(operations).where(one_of(operations.c.instance_uuid, "uuids"), _OPEN)
_OPEN_OF = Prepared(sa.select(operations).where(operations.c.instance_uuid == bindparam("uuid"), _OPEN))


def new_row(
    *,
    id: str,
    kind: str,
    instance_uuid: str,
    batch_id: str,
    step: Step,
    epoch: int,
    now: int,
    deadline: int,
    context: Context,
    payload: Payload | None = None,
    secrets: bytes | None = None,
    deferred_until: int = 0,
) -> OperationRow:
    """Return the row of a new operation without an owner; the transaction that accepts a request inserts it.

    No conductor takes it before `deferred_until`, or until `start_deferred` is called.
    """
    return {
        "id": id,
        "kind": kind,
        "version": payload.version_of(kind) if payload is not None else VERSIONS[kind],
        "instance_uuid": instance_uuid,
        "batch_id": batch_id,
        "step": step,
        "owner": None,
        "epoch": epoch,
        "lease_until": deferred_until,
        "deadline": deadline,
        "leases": 0,
        "payload": (payload or Payload()).encode(),
        "secrets": secrets,
        "context": msgspec.msgpack.encode(context),
        "created_at": now,
        "finished_at": None,
        "result": None,
        "explanation": None,
    }


def insert(conn: sa.Connection, rows: Sequence[OperationRow]) -> None:
    """Insert new operations."""
    _INSERT.run_each(conn, rows)


def _rows(result: sa.CursorResult[Any]) -> list[OperationRow]:
    return cast(list[OperationRow], list(result.mappings()))


Known = tuple[tuple[str, int], ...]  # kinds of operations, each with the newest version that a worker knows


def _is_known(known: Known) -> sa.ColumnElement[bool]:
    """Return the condition that an operation is of one of these kinds, up to its version."""
    return sa.or_(
        sa.false(), *(sa.and_(operations.c.kind == kind, operations.c.version <= version) for kind, version in known)
    )


@functools.cache
def _lease_of(known: Known) -> tuple[Prepared, Prepared]:
    """Return the statements that lease an operation of these kinds, and several.

    PostgreSQL would make a plan for each lease of one, if the statement were that for several.
    """
    return Prepared(_LEASE_ONE.where(_is_known(known))), Prepared(_LEASE_MANY.where(_is_known(known)))


@functools.cache
def _expired_of(known: Known, with_hosts: bool) -> tuple[sa.Executable, sa.Executable]:
    """Return the statements that find expired operations of these kinds: the first ones, and those of whole batches."""
    found = _EXPIRED.where(_is_known(known), *(() if with_hosts else (_NO_HOST,)))
    first = found.order_by(operations.c.lease_until).limit(bindparam("most"))
    return first, found.where(one_of(operations.c.batch_id, "batches"))


def lease(
    conn: sa.Connection, ids: Sequence[str], owner: str, now: int, until: int, known: Known
) -> list[OperationRow]:
    """Lease those of these operations that have no valid lease and are of a known kind; return them."""
    one, many = _lease_of(known)
    values = {"new_owner": owner, "now": now, "until": until}
    rows = one.all(conn, {"id": ids[0], **values}) if len(ids) == 1 else many.all(conn, {"ids": ids, **values})
    return cast(list[OperationRow], rows)


def expired(conn: sa.Connection, now: int, most: int, known: Known, *, with_hosts: bool) -> list[str]:
    """Return the ids of operations of known kinds without a valid lease; those of hosts only if asked for.

    More than `most` are returned only to complete a batch: the servers of one request are placed together.
    """
    first, of_batches = _expired_of(known, with_hosts)
    found = {row.id: row.batch_id for row in conn.execute(first, {"now": now, "most": most})}
    if len(found) < most:
        return list(found)
    more = conn.execute(of_batches, {"now": now, "batches": sorted(set(found.values()))})
    return list({**found, **{row.id: row.batch_id for row in more}})


def renew(conn: sa.Connection, ids: Sequence[str], owner: str, until: int) -> None:
    """Renew leases in one statement."""
    if ids:
        conn.execute(_RENEW, {"ids": list(ids), "b_owner": owner, "until": until})


def _held(id: str, lease: Lease) -> dict[str, Any]:
    return {"b_id": id, "b_owner": lease.owner, "b_epoch": lease.epoch, "b_leases": lease.number}


def is_held(row: OperationRow | None, lease: Lease) -> bool:
    """Return whether the row is open and has this lease."""
    return (
        row is not None
        and row["finished_at"] is None
        and (row["owner"], row["epoch"], row["leases"]) == (lease.owner, lease.epoch, lease.number)
    )


def is_late(deadline: int, created_at: int, now: int, undisturbed: int) -> bool:
    """Return whether an operation's deadline is over, and it had its time while its conductor was `undisturbed`.

    All are microseconds. Else an outage, or a clock that is set forward, would end operations that nobody could work
    on. `_LATE` is the same rule in SQL.
    """
    return deadline < now and deadline - created_at <= undisturbed


def list_late(conn: sa.Connection, now: int, undisturbed: int) -> list[OperationRow]:
    """Return the open operations that are late."""
    return _rows(conn.execute(_LIST_LATE, {"now": now, "undisturbed": undisturbed}))


def postpone(conn: sa.Connection, leased: Sequence[tuple[str, Lease]], until: int, reason: str = "") -> None:
    """Let operations wait until the same time, except those that have another lease; record a reason, if one is given.

    Users read the reason if the operation does not end in time.
    """
    lock_many(conn, [id for id, _ in leased])
    if reason:
        found = get_many(conn, [id for id, _ in leased])
        for id, lease in leased:
            if is_held(row := found.get(id), lease) and row is not None:
                note_error(conn, id, row["payload"], reason)
    conn.execute(_POSTPONE, [{**_held(id, lease), "until": until} for id, lease in leased])


def note_error(conn: sa.Connection, id: str, payload: bytes, reason: str) -> bool:
    """Record why an operation with this payload has to wait; return False if that is recorded, or it has changed."""
    noted = with_last_error(payload, reason)
    return noted != payload and _NOTE_ERROR.run(conn, {"b_id": id, "b_payload": payload, "noted": noted}) == 1


def renew_of_hosts(
    conn: sa.Connection, ids: Sequence[str], owners: Sequence[str], now: int, until: int, *, undisturbed: int
) -> None:
    """Renew the leases of hosts, except of operations that are overtaken or late; the sweep finds those."""
    if ids:
        values = {"owners": list(owners), "now": now, "until": until, "undisturbed": undisturbed}
        conn.execute(_RENEW_HOSTS, {"ids": list(ids), **values})


def get(conn: sa.Connection, id: str, *, lock: bool = False) -> OperationRow | None:
    """Return an operation; with `lock`, its row is locked until the transaction ends."""
    return cast(OperationRow | None, (_LOCK if lock else _GET).first(conn, {"id": id}))


def is_overtaken(conn: sa.Connection, id: str) -> bool:
    """Return whether a later request has overtaken an operation, or its server is gone."""
    return _NOT_OVERTAKEN.first(conn, {"id": id}) is None


def get_many(conn: sa.Connection, ids: Iterable[str]) -> dict[str, OperationRow]:
    """Return those of the operations that exist, by id."""
    return {row["id"]: row for row in _rows(conn.execute(_GET_MANY, {"ids": list(ids)}))}


def lock_many(conn: sa.Connection, ids: Iterable[str]) -> None:
    """Lock operations in the order of their ids; their instances are locked before."""
    conn.execute(_LOCK_MANY, {"ids": list(ids)})


def busy_servers() -> sa.Select[Any]:
    """Return the statement that selects the servers that have an open operation."""
    return sa.select(operations.c.instance_uuid).where(_OPEN)


def busy_server_ids(conn: sa.Connection) -> set[str]:
    """Return the servers that have an open operation."""
    return set(conn.execute(busy_servers()).scalars())


def lock_open_of(conn: sa.Connection, instance_uuid: str) -> None:
    """Lock the open operations of an instance, for a transaction that ends one and wakes those that wait for it."""
    conn.execute(_LOCK_OPEN_OF, {"b_instance": instance_uuid})


def owned(conn: sa.Connection, owners: Iterable[str]) -> list[OperationRow]:
    """Return the open operations of these owners."""
    return _rows(conn.execute(_OWNED, {"owners": list(owners)}))


def open_of(conn: sa.Connection, instance_uuid: str) -> list[OperationRow]:
    """Return the open operations of an instance."""
    return cast(list[OperationRow], _OPEN_OF.all(conn, {"uuid": instance_uuid}))


def open_of_many(conn: sa.Connection, instance_uuids: Iterable[str]) -> dict[str, list[OperationRow]]:
    """Return the open operations of instances that have any."""
    found: dict[str, list[OperationRow]] = {}
    for row in _rows(conn.execute(_OPEN_OF_MANY, {"uuids": list(instance_uuids)})):
        found.setdefault(row["instance_uuid"], []).append(row)
    return found


def attachment_ids_with_swaps(conn: sa.Connection, instance_uuid: str) -> set[str]:
    """Return the attachments of a server's volumes, with those that open operations swap its volumes to."""
    devices = _with_replacements(conn, instance_uuid)
    return {device.attachment_id for device in devices if device.attachment_id is not None}


def _with_replacements(conn: sa.Connection, instance_uuid: str) -> list[BlockDevice]:
    swaps = [row for row in open_of(conn, instance_uuid) if row["kind"] == SWAP_VOLUME]
    replacements = [VolumePayload.decode(row["payload"]).replacement for row in swaps]
    return [device for device in (*devices_of(conn, instance_uuid), *replacements) if device is not None]


def accept_action(
    conn: sa.Connection,
    row: InstanceRow,
    changes: InstanceChanges,
    *,
    id: str,
    kind: str,
    context: Context,
    payload: Payload | None,
    now: int,
    deadline: int,
    deferred_until: int = 0,
    step: Step = "new",
    secrets: bytes | None = None,
    overtakes: bool = True,
) -> list[str]:
    """Record an action on an instance, whose row is locked: the changes at the next epoch, the instance action, and the
    operation with this id; earlier operations are cancelled. Return those that a conductor has to end.

    No conductor takes the operation before `deferred_until`, or until `start_deferred` is called. Unless it
    `overtakes`, the epoch stays and earlier operations go on: a conductor decides whether they end.
    """
    uuid, epoch = row["uuid"], row["epoch"] + 1 if overtakes else row["epoch"]
    if overtakes or changes:
        update_instance(conn, uuid, now, {**changes, "epoch": epoch})
    to_end = cancel_open(conn, uuid, now) if overtakes else []
    name = instance_action(kind)
    instance_actions.start(conn, uuid, context.request_id, name, context.user_id, context.project_id, now)
    operation = new_row(
        id=id,
        kind=kind,
        instance_uuid=uuid,
        batch_id=uuid,
        step=step,
        epoch=epoch,
        now=now,
        deadline=deadline,
        context=context,
        payload=payload,
        secrets=secrets,
        deferred_until=deferred_until,
    )
    insert(conn, [operation])
    return to_end


def follow_up(
    conn: sa.Connection,
    instance_uuid: str,
    kind: str,
    *,
    id: str,
    epoch: int,
    now: int,
    context: Context,
    payload: Payload | None = None,
) -> None:
    """Record an operation that follows from another change of an instance."""
    row = follow_up_row(instance_uuid, kind, id=id, epoch=epoch, now=now, context=context, payload=payload)
    insert(conn, [row])


def follow_up_row(
    instance_uuid: str,
    kind: str,
    *,
    id: str,
    epoch: int,
    now: int,
    context: Context,
    payload: Payload | None = None,
    deferred_until: int = 0,
) -> OperationRow:
    """Return the row of an operation that follows from another change: without a deadline and an instance action.

    `kind` is one of FOLLOW_UP_KINDS; `deferred_until` is as in `new_row`.
    """
    return new_row(
        id=id,
        kind=kind,
        instance_uuid=instance_uuid,
        batch_id=instance_uuid,
        step="new",
        epoch=epoch,
        now=now,
        deadline=NO_DEADLINE,
        context=context,
        payload=payload,
        deferred_until=deferred_until,
    )


def start_deferred(conn: sa.Connection, id: str, step: Step, payload: Payload) -> bool:
    """Let conductors take an operation that was deferred, at this step; return False if one has taken it already."""
    values = {"b_id": id, "b_step": step, "b_payload": payload.encode()}
    return _START_DEFERRED.run(conn, values) == 1


def defer(conn: sa.Connection, ids: Sequence[str], until: int) -> int:
    """Let no conductor take operations before this time that none has taken yet; return how many there are."""
    return conn.execute(_DEFER, {"ids": sorted(ids), "until": until}).rowcount


def withdraw(conn: sa.Connection, ids: Sequence[str]) -> int:
    """Remove operations that no conductor has taken; return how many there were."""
    return conn.execute(_WITHDRAW, {"ids": sorted(ids)}).rowcount if ids else 0


def volume_ids_with_swaps(conn: sa.Connection, instance_uuid: str) -> set[str]:
    """Return the volumes that a server has, with those that open operations swap its volumes to."""
    return {device.volume_id for device in _with_replacements(conn, instance_uuid) if device.volume_id is not None}


def cancel_open(conn: sa.Connection, instance_uuid: str, now: int) -> list[str]:
    """Cancel the open operations of an instance and end their instance actions.

    Operations that a conductor owns stay open, except evacuations that have not begun: the conductor may be allocating
    ports, and cancels them when it sees the new epoch. Follow-ups (`FOLLOW_UP_KINDS`) stay open, too. Operations that
    make an image lose their owner and stay open, so that a conductor deletes the image; so do those that undo a move,
    whose host gets the order again at the new epoch. Return the ids of both.
    """
    to_end = [row["id"] for row in _TAKE_FROM_OWNER.all(conn, {"b_instance": instance_uuid})]
    for row in _CANCEL.all(conn, {"b_instance": instance_uuid, "now": now}):
        request_id = msgspec.msgpack.decode(row["context"], type=Context).request_id
        instance_actions.cancel(conn, instance_uuid, request_id, now)
    return to_end


def end_by_request(conn: sa.Connection, id: str, now: int) -> None:
    """End an operation that a later request replaces, whoever owns it: nobody has to give anything back."""
    ended = operations.update().where(operations.c.id == id, _OPEN)
    conn.execute(ended.values(finished_at=now, result="cancelled", secrets=None))


def finish(
    conn: sa.Connection, id: str, now: int, result: Result, lease: Lease, *, payload: bytes | None = None
) -> bool:
    """End an operation and erase its secrets; return False if it has another lease."""
    values = {**_held(id, lease), "now": now, "b_result": result}
    if payload is None:
        return _FINISH.run(conn, values) == 1
    return _FINISH_WITH_PAYLOAD.run(conn, {**values, "b_payload": payload}) == 1


def persist_step(
    conn: sa.Connection,
    id: str,
    lease: Lease,
    *,
    step: Step,
    payload: bytes,
    until: int,
    new_owner: str | None = None,
    new_epoch: int | None = None,
    endless: bool = False,
) -> bool:
    """Persist the next step of an operation; return False if it has another lease.

    From a step that is `endless` on, the operation has no deadline: it is repeated until it succeeds.
    """
    values = {
        **_held(id, lease),
        "b_step": step,
        "b_payload": payload,
        "until": until,
        "new_owner": new_owner or lease.owner,
        "new_epoch": lease.epoch if new_epoch is None else new_epoch,
    }
    return (_STEP_WITHOUT_DEADLINE if endless else _STEP).run(conn, values) == 1


def release_leases(conn: sa.Connection, owner: str) -> None:
    """Release all leases of an owner that stops."""
    conn.execute(_RELEASE_LEASES, {"b_owner": owner})


def wake(conn: sa.Connection, instance_uuid: str) -> list[str]:
    """Release the leases of an instance's operations that wait for another one; return their ids."""
    return [row["id"] for row in _WAKE.all(conn, {"b_instance": instance_uuid})]

"""Operations as rows, on both databases: which of them the end of another one wakes."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import instances
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.context import Context
from micronova.objects.network import PlannedPort
from micronova.objects.operations import VERSIONS, ImagePayload, InterfacePayload, Payload, SettlePayload
from micronova.objects.port_resources import PortGroup, PortResources
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances

KNOWN = tuple(sorted(VERSIONS.items()))


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_an_operation_that_is_deferred_is_not_woken(database: Database) -> None:
    await database.write(add_instances, "i-1")

    def record(conn: sa.Connection) -> None:
        row = instances.lock(conn, "i-1")
        assert row is not None
        operation_rows.follow_up(conn, "i-1", "discard_image", id="first", epoch=row["epoch"], now=1, context=Context())
        operation_rows.accept_action(
            conn,
            row,
            {"task_state": "shelving"},
            id="deferred",
            kind="shelve",
            context=Context(),
            payload=ImagePayload(),
            now=1,
            deadline=1000,
            deferred_until=100,
        )

    await database.write(record)
    await database.write(operation_rows.lease, ["first"], "conductor", 2, 50, KNOWN)
    assert await database.write(operation_rows.wake, "i-1") == ["first"]
    assert await database.read(operation_rows.expired, 3, 10, KNOWN, with_hosts=True) == ["first"]
    assert await database.write(operation_rows.start_deferred, "deferred", "new", ImagePayload(answered=True))
    assert set(await database.read(operation_rows.expired, 3, 10, KNOWN, with_hosts=True)) == {"first", "deferred"}


@pytest.mark.parametrize(
    ("kind", "payload", "taken"),
    [
        ("settle_volumes", SettlePayload(complete=["a"], all_attachments=True), True),
        ("settle_volumes", SettlePayload(reserved=["v"]), False),
        ("settle_volumes", SettlePayload(unrecorded=["d"]), False),
        ("attach_interface", InterfacePayload(request=PlannedPort(network_id="n", port_id="p")), True),
        (
            "attach_interface",
            InterfacePayload(
                request=PlannedPort(
                    network_id="n",
                    port_id="p",
                    resources=PortResources(port_id="p", groups=(PortGroup(resources={"NET_BW": 1}),)),
                )
            ),
            False,
        ),
    ],
)
async def test_conductors_of_0_2_0_take_what_they_can_carry_out(
    database: Database, kind: str, payload: Payload, taken: bool
) -> None:
    """They would ignore what they do not know, and end the operation: a reservation, or a claim, would be forgotten."""
    await database.write(add_instances, "i-1")

    def record(conn: sa.Connection) -> None:
        row = instances.lock(conn, "i-1")
        assert row is not None
        operation_rows.accept_action(
            conn, row, {}, id="op", kind=kind, context=Context(), payload=payload, now=1, deadline=1000
        )

    await database.write(record)
    old = ((kind, 1),)
    assert await database.read(operation_rows.expired, 3, 10, old, with_hosts=True) == (["op"] if taken else [])
    assert await database.read(operation_rows.expired, 3, 10, KNOWN, with_hosts=True) == ["op"]

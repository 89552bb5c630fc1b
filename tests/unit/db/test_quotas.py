"""Quotas hold whoever races, on both databases."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from micronova.db import quotas
from micronova.db.engine import Database
from micronova.db.tables import instances, quota_usages
from micronova.objects.errors import QuotaExceeded
from tests.plans import recorded
from tests.unit.db.databases import KINDS, compute_database
from tests.unit.scheduler.rows import add_instances


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_fifty_at_once_take_exactly_the_limit(database: Database) -> None:
    async def one() -> bool:
        try:
            await database.write(quotas.charge, "p", {"instances": 1, "cores": 2}, {"instances": 10, "cores": 100})
            return True
        except QuotaExceeded:
            return False

    accepted = await asyncio.gather(*(one() for _ in range(50)))
    assert sum(accepted) == 10
    used = await database.read(quotas.usage, "p")
    assert (used["instances"], used["cores"]) == (10, 20)


async def test_a_charge_is_all_or_nothing_and_says_all_that_lacks(database: Database) -> None:
    limits = {"instances": 10, "cores": 4, "ram": 1024}
    await database.write(quotas.charge, "p", {"instances": 1, "cores": 2, "ram": 512}, limits)
    with pytest.raises(QuotaExceeded) as caught:
        await database.write(quotas.charge, "p", {"instances": 1, "cores": 3, "ram": 1024}, limits)
    assert caught.value.message == (
        "Quota exceeded for cores, ram: Requested 3, 1024, but already used 2, 512 of 4, 1024 cores, ram"
    )
    used = await database.read(quotas.usage, "p")
    assert (used["instances"], used["cores"], used["ram"]) == (1, 2, 512)


async def test_the_message_names_one_resource(database: Database) -> None:
    await database.write(quotas.charge, "p", {"instances": 10}, {"instances": 10})
    with pytest.raises(QuotaExceeded) as caught:
        await database.write(quotas.charge, "p", {"instances": 1}, {"instances": 10})
    assert caught.value.message == ("Quota exceeded for instances: Requested 1, but already used 10 of 10 instances")


async def test_no_limit_is_as_much_as_can_be_counted(database: Database) -> None:
    most, unlimited = 2**31 - 1, {"ram": -1}
    with pytest.raises(QuotaExceeded, match=f"of {most} ram"):
        await database.write(quotas.charge, "p", {"ram": most + 1}, unlimited)
    await database.write(quotas.charge, "p", {"ram": most}, unlimited)
    with pytest.raises(QuotaExceeded, match=f"already used {most} of {most} ram"):
        await database.write(quotas.charge, "p", {"ram": 1}, unlimited)


async def test_minus_one_is_no_limit_and_zero_is_nothing(database: Database) -> None:
    await database.write(quotas.charge, "p", {"instances": 5000}, {"instances": -1})
    with pytest.raises(QuotaExceeded):
        await database.write(quotas.charge, "q", {"instances": 1}, {"instances": 0})


async def test_release_gives_back_and_never_goes_below_nothing(database: Database) -> None:
    limits = {"instances": 2}
    await database.write(quotas.charge, "p", {"instances": 2}, limits)
    await database.write(quotas.release, "p", {"instances": 1})
    await database.write(quotas.charge, "p", {"instances": 1}, limits)
    await database.write(quotas.release, "p", {"instances": 5})
    assert (await database.read(quotas.usage, "p"))["instances"] == 0


async def test_charge_up_to_takes_what_there_is_room_for(database: Database) -> None:
    limits = {"instances": 10, "cores": 9}
    assert await database.write(quotas.charge_up_to, "p", {"instances": 1, "cores": 2}, 1, 8, limits) == 4
    with pytest.raises(QuotaExceeded):
        await database.write(quotas.charge_up_to, "p", {"instances": 1, "cores": 2}, 1, 8, limits)
    used = await database.read(quotas.usage, "p")
    assert (used["instances"], used["cores"]) == (4, 8)


async def test_concurrent_charge_up_to_never_passes_the_limit(database: Database) -> None:
    async def one() -> int:
        try:
            return await database.write(quotas.charge_up_to, "p", {"instances": 1}, 1, 3, {"instances": 10})
        except QuotaExceeded:
            return 0

    assert sum(await asyncio.gather(*(one() for _ in range(12)))) == 10


async def test_limits_come_from_the_project_then_the_class_then_the_defaults(database: Database) -> None:
    defaults = {"instances": 10, "cores": 20, "ram": 100}
    await database.write(quotas.set_class_limits, "default", {"instances": 5, "cores": 6})
    await database.write(quotas.set_limits, "p", {"instances": 7})
    await database.write(quotas.set_limits, "p", {"ram": 50}, "u")
    limits = await database.read(quotas.limits_for, "p", defaults, "u")
    assert limits == {"instances": 7, "cores": 6, "ram": 100}
    assert limits.of_user == {"ram": 50}
    await database.write(quotas.delete_limits, "p")
    assert await database.read(quotas.limits_for, "p", defaults, "u") == {"instances": 5, "cores": 6, "ram": 100}


async def test_a_users_own_limit_holds_beside_the_projects(database: Database) -> None:
    await database.write(quotas.set_limits, "p", {"instances": 1}, "u")

    def charge(conn: sa.Connection, user: str) -> None:
        limits = quotas.limits_for(conn, "p", {"instances": 3}, user)
        quotas.charge(conn, "p", {"instances": 1}, limits, user)

    await database.write(charge, "u")
    with pytest.raises(QuotaExceeded):
        await database.write(charge, "u")
    await database.write(charge, "other")
    assert (await database.read(quotas.usage, "p"))["instances"] == 2
    await database.write(quotas.release, "p", {"instances": 1}, "u")
    await database.write(charge, "u")


async def test_key_pairs_are_counted_by_user_alone(database: Database) -> None:
    await database.write(quotas.charge, "", {"key_pairs": 1}, {"key_pairs": 1}, "u")
    with pytest.raises(QuotaExceeded):
        await database.write(quotas.charge, "", {"key_pairs": 1}, {"key_pairs": 1}, "u")
    await database.write(quotas.charge, "", {"key_pairs": 1}, {"key_pairs": 1}, "v")
    assert (await database.read(quotas.usage, "", "u"))["key_pairs"] == 1


async def test_drift_is_listed_and_mended(database: Database) -> None:
    await database.write(quotas.charge, "p", {"instances": 3}, {"instances": 10})
    found = await database.read(quotas.drift)
    assert [(each.resource, each.recorded, each.actual) for each in found] == [("instances", 3, 0)]
    assert await database.write(quotas.recount, "p") == found
    assert await database.write(quotas.recount, "p") == []
    assert await database.read(quotas.drift) == []
    assert (await database.read(lambda conn: conn.execute(sa.select(quota_usages.c.in_use)).scalar())) == 0


async def test_users_with_limits_of_their_own_cost_no_statements(database: Database) -> None:
    """The audit counts what exists once, however many pairs of project and user have a usage."""
    flavor = {"vcpus": 2, "ram": 64}

    def prepare(conn: sa.Connection) -> None:
        add_instances(conn, *(f"s{number}" for number in range(6)))
        for number in range(6):
            owner = {"project_id": f"p{number % 2}", "user_id": f"u{number % 3}", "flavor": flavor}
            conn.execute(sa.update(instances).where(instances.c.uuid == f"s{number}").values(owner))

    def counted(conn: sa.Connection) -> tuple[int, list[quotas.Drift]]:
        with recorded(conn) as statements:
            found = quotas.drift(conn)
        return len(statements), found

    await database.write(prepare)
    for project in ("p0", "p1"):
        await database.write(quotas.recount, project)
    without, found = await database.read(counted)
    assert found == []
    for number in range(50):
        await database.write(quotas.set_limits, "p0", {"instances": 5}, f"u{number}")
    await database.write(quotas.release, "p0", {"cores": 1}, "u1")
    with_pairs, found = await database.read(counted)
    assert with_pairs == without
    assert [(each.user_id, each.resource, each.recorded, each.actual) for each in found] == [
        ("", "cores", 5, 6),
        ("u1", "cores", 1, 2),
    ]
    await database.write(quotas.recount, "p0")
    assert (await database.read(quotas.usage, "p0", "u1"))["cores"] == 2

"""Claims on PostgreSQL, raced by several connection pools."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from micronova.db.engine import Database, open_database
from tests.unit.scheduler import claim_cases
from tests.unit.scheduler.claim_cases import (  # noqa: F401
    test_a_claim_names_cpus_and_devices,
    test_a_claim_of_another_epoch_is_refused,
    test_a_claim_replaces_and_a_repeated_one_changes_nothing,
    test_a_claim_takes_and_a_release_gives_back,
    test_a_claim_without_room_in_a_cell_changes_nothing,
    test_a_group_that_lives_long_keeps_no_rows_of_hosts_without_members,
    test_a_host_that_an_admin_has_closed,
    test_a_moving_instance_holds_both_places,
    test_affinity_is_kept_by_the_claim,
    test_all_or_nothing,
    test_amounts_groups_and_topologies_are_claimed_together,
    test_anti_affinity_is_counted_in_the_claim,
    test_audit_finds_and_repairs_drift,
    test_members_of_groups_are_repaired,
    test_the_statements_of_a_claim_with_request_groups_do_not_grow_with_its_servers,
    test_the_statements_of_a_write_of_many_consumers_do_not_grow_with_them,
    test_topologies_of_nobody_are_released,
    test_topologies_outlast_allocations_that_placement_gave_back,
    test_what_is_held_is_kept_when_asked,
    test_what_is_held_on_a_host_that_was_closed,
    test_who_claims_nothing_of_a_node_is_a_member_there,
    test_wrong_topologies_are_repaired,
)


@pytest_asyncio.fixture
async def databases(database_url: str) -> AsyncIterator[list[Database]]:
    """Four pools of connections, as four processes would have."""
    opened = [open_database(database_url, pool_size=5) for _ in range(4)]
    yield opened
    for each in opened:
        await each.close()


@pytest.fixture
def database(databases: list[Database]) -> Database:
    return databases[0]


def no_deadlocks(databases: list[Database]) -> None:
    """Rows are locked in one order by all, so that no transaction ever has to be ended for another one's sake.

    On a busy machine one may have waited too long for a lock.
    """
    assert sum(each.statistics.conflicts for each in databases) == 0


@pytest.mark.parametrize("seed", range(2))
async def test_race(databases: list[Database], seed: int) -> None:
    await claim_cases.race(databases, seed)
    no_deadlocks(databases)


async def test_race_with_placement(databases: list[Database]) -> None:
    await claim_cases.race_with_placement(databases)
    no_deadlocks(databases)


async def test_race_of_doubles(databases: list[Database]) -> None:
    await claim_cases.race_of_doubles(databases)


async def test_race_of_groups(databases: list[Database]) -> None:
    await claim_cases.race_of_groups(databases)
    no_deadlocks(databases)


@pytest.mark.parametrize("seed", range(2))
async def test_race_of_topologies(databases: list[Database], seed: int) -> None:
    await claim_cases.race_of_topologies(databases, seed)
    no_deadlocks(databases)

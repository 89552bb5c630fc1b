"""Scheduler roles on PostgreSQL."""

from collections.abc import AsyncIterator

import pytest_asyncio

from micronova.db.engine import Database, open_database
from tests.unit.scheduler import manager_cases
from tests.unit.scheduler.manager_cases import (  # noqa: F401
    test_a_dry_run_says_what_a_request_would_get_and_changes_nothing,
    test_a_host_that_was_disabled_just_now_gets_nothing,
    test_asking_again_for_the_last_resources,
    test_asking_again_gives_the_same_answer,
    test_group_members_are_where_the_database_says,
    test_hints_name_servers_of_the_same_project,
    test_images_alike_decide,
    test_metrics_of_monitors_decide,
    test_selects_claims_and_tells,
    test_what_was_given_back_elsewhere_is_seen_before_refusing,
    test_zones_come_from_aggregates,
)


@pytest_asyncio.fixture
async def databases(database_url: str) -> AsyncIterator[list[Database]]:
    """A pool of connections per scheduler, as four processes would have."""
    opened = [open_database(database_url, pool_size=5) for _ in range(4)]
    yield opened
    for each in opened:
        await each.close()


async def test_a_crowd(databases: list[Database]) -> None:
    await manager_cases.crowd(databases, hosts=75, requests=500)


async def test_a_crowd_of_batches(databases: list[Database]) -> None:
    await manager_cases.crowd_of_batches(databases)


async def test_a_crowd_for_topologies(databases: list[Database]) -> None:
    await manager_cases.crowd_for_topologies(databases)

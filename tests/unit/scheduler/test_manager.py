"""Scheduler roles on SQLite."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from micronova.db.engine import Database, open_database
from tests.unit.scheduler import manager_cases
from tests.unit.scheduler.manager_cases import (  # noqa: F401
    test_a_dry_run_says_that_a_silent_host_may_return,
    test_a_dry_run_says_what_a_request_would_get_and_changes_nothing,
    test_a_host_that_came_or_was_disabled_is_noticed,
    test_a_host_that_has_just_gone_may_come_back,
    test_a_host_that_was_disabled_just_now_gets_nothing,
    test_a_silent_host_is_down_and_up_when_heard_of,
    test_asking_again_for_the_last_resources,
    test_asking_again_gives_the_same_answer,
    test_group_members_are_where_the_database_says,
    test_hints_name_servers_of_the_same_project,
    test_images_alike_decide,
    test_messages_of_a_newer_version_are_understood,
    test_metrics_of_monitors_decide,
    test_no_valid_host_arrives_as_itself_and_claims_nothing,
    test_selects_claims_and_tells,
    test_what_another_scheduler_took_is_found_out,
    test_what_was_given_back_elsewhere_is_seen_before_refusing,
    test_who_is_gone_or_changed_hands_is_refused,
    test_zones_come_from_aggregates,
)


@pytest_asyncio.fixture
async def databases(tmp_path: Path) -> AsyncIterator[list[Database]]:
    """Writers of one file, as several processes would have."""
    opened = [open_database(f"sqlite:///{tmp_path / 'test.sqlite'}") for _ in range(3)]
    yield opened
    for each in opened:
        await each.close()


async def test_a_crowd(databases: list[Database]) -> None:
    await manager_cases.crowd(databases, hosts=15, requests=90)


async def test_a_crowd_of_batches(databases: list[Database]) -> None:
    await manager_cases.crowd_of_batches(databases)


async def test_a_crowd_for_topologies(databases: list[Database]) -> None:
    await manager_cases.crowd_for_topologies(databases)

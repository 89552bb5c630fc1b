"""Scheduler roles on PostgreSQL."""

from collections.abc import AsyncIterator

import pytest_asyncio

from micronova.db.engine import Database, open_database
from tests.unit.scheduler import manager_cases
from tests.unit.scheduler.manager_cases import (  # noqa: F401
    test_a_disabled_host_is_refused_at_once,
    test_a_dry_run_says_what_a_request_would_get_and_changes_nothing,
    test_a_host_that_refuses_many_servers_gets_fewer,
    test_a_host_that_the_server_group_forbids_is_refused_at_once,
    test_a_host_that_was_disabled_just_now_gets_nothing,
    test_a_lost_claim_that_cannot_be_corrected_leaves_no_use_behind,
    test_a_race_for_what_is_shared_reads_no_trees_of_other_hosts,
    test_a_search_that_ends_early_says_so_and_leaves_steps_to_others,
    test_a_server_group_that_was_deleted_rules_nobody,
    test_a_silent_host_with_request_groups_may_come_back,
    test_asking_again_after_the_host_was_closed,
    test_asking_again_beside_a_member_that_stays,
    test_asking_again_for_members_whose_host_was_closed,
    test_asking_again_for_the_last_resources,
    test_asking_again_gives_the_same_answer,
    test_group_members_are_where_the_database_says,
    test_hints_name_servers_of_the_same_project,
    test_hosts_that_were_not_compared_are_compared_later,
    test_images_alike_decide,
    test_metrics_of_monitors_decide,
    test_only_providers_of_hosts_that_pass_are_read_and_once,
    test_selects_claims_and_tells,
    test_the_zone_of_a_forced_host_counts_if_an_aggregate_has_it,
    test_what_a_claim_under_way_may_not_get_refuses_nobody,
    test_what_is_shared_counts_once_for_a_request,
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

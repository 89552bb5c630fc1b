"""The Placement API: all routes, and the service made of them."""

from collections.abc import Sequence
from random import Random

from micronova.api.placement import (
    aggregates,
    allocation_candidates,
    allocations,
    inventories,
    reshaper,
    resource_classes,
    resource_providers,
    traits,
    usages,
    versions,
)
from micronova.api.placement.service import VERSIONS, Answers, PlacementService, placement_fault
from micronova.db.engine import Database
from micronova.http.service import Authenticator, Observer, Policy, Route
from micronova.objects.clock import Clock

MOUNT = "/placement"


def routes(database: Database, clock: Clock, random: Random) -> list[Route]:
    """Return every route of the Placement API."""
    answers = Answers(clock)
    return [
        *versions.routes(answers),
        *resource_providers.routes(database, clock, random, answers),
        *inventories.routes(database, clock, answers),
        *aggregates.routes(database, clock, answers),
        *traits.routes(database, clock, answers),
        *usages.routes(database, answers),
        *allocations.routes(database, clock, answers),
        *allocation_candidates.routes(database, answers),
        *resource_classes.routes(database, clock, answers),
        *reshaper.routes(database, clock),
    ]


def make(
    declared: Sequence[Route],
    *,
    policy: Policy,
    authenticator: Authenticator,
    mount: str = MOUNT,
    public_url: str | None = None,
    max_body: int = 1_048_576,
    observer: Observer | None = None,
) -> PlacementService:
    """Return the service."""
    return PlacementService(
        "placement",
        declared,
        policy=policy,
        authenticator=authenticator,
        fault_body=placement_fault,
        versions=VERSIONS,
        mount=mount,
        public_url=public_url,
        max_body=max_body,
        observer=observer,
        knows_methods=True,
        checks_policy_first=True,
    )

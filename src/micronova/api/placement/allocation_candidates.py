"""Allocation candidates: the ways in which providers can serve a request."""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.api.placement import query, schemas
from micronova.api.placement.service import Answers
from micronova.db import placement_names, provider_trees
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid
from micronova.placement import candidates
from micronova.placement.model import Candidate, Provider, ResourceRequest
from micronova.placement.standard import CUSTOM

_ANSWER = {"allocation_requests": [{"allocations": object, "mappings?": {}}], "provider_summaries": {}}


class AllocationCandidates:
    """The handler."""

    def __init__(self, database: Database, answers: Answers) -> None:
        self._database = database
        self._answers = answers

    async def index(self, request: Request) -> Response:
        """List the candidates, and what their providers have."""
        wanted = query.request(request.raw_query, request.minor)
        sharing, roots = await self._database.snapshot(_begin, wanted)
        most = min(wanted.limit or candidates.MOST_CANDIDATES, candidates.MOST_CANDIDATES)
        found: list[Candidate] = []
        steps = candidates.RequestSteps()
        known: dict[str, Provider] = {each.uuid: each for each in sharing}
        for first in range(0, len(roots), provider_trees.PART):
            part = roots[first : first + provider_trees.PART]
            trees = await self._database.snapshot(_load, part)
            asked = dataclasses.replace(wanted, limit=most - len(found))
            new = await asyncio.to_thread(candidates.find, asked, [*trees, *sharing], part, steps)
            found += new
            used = {uuid for each in new for uuid in each.allocations}
            roots_of_used = {each.root for each in trees if each.uuid in used}
            known |= {each.uuid: each for each in trees if each.root in roots_of_used}
            if len(found) >= most:
                break
        body = {
            "allocation_requests": _requests(found, request.minor),
            "provider_summaries": _summaries(found, known, wanted, request.minor),
        }
        return self._answers.make(request, body)


def _begin(conn: sa.Connection, wanted: ResourceRequest) -> tuple[list[Provider], list[str]]:
    """Check the names that a request has; return the sharing providers and the roots of trees that may serve it."""
    if unknown := placement_names.unknown_classes(conn, wanted.classes):
        raise query.no_such_class(unknown)
    if unknown := placement_names.unknown_traits(conn, wanted.traits):
        raise Invalid(f"No such trait(s): {', '.join(unknown)}.")
    sharing = provider_trees.load_sharing(conn)
    return sharing, provider_trees.roots_of(conn, wanted, sharing)


def _load(conn: sa.Connection, roots: Sequence[str]) -> list[Provider]:
    return [each for part in provider_trees.trees(conn, roots) for each in part]


def _requests(found: Iterable[Candidate], minor: int) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for each in found:
        if minor < 12:
            listed = [
                {"resource_provider": {"uuid": uuid}, "resources": resources}
                for uuid, resources in each.allocations.items()
            ]
            shown.append({"allocations": listed})
            continue
        one: dict[str, Any] = {
            "allocations": {uuid: {"resources": resources} for uuid, resources in each.allocations.items()}
        }
        if minor >= 34:
            one["mappings"] = each.mappings
        shown.append(one)
    return shown


def _summaries(
    found: Iterable[Candidate], known: dict[str, Provider], wanted: ResourceRequest, minor: int
) -> dict[str, Any]:
    """Return what the providers of the candidates have; from 1.29 on, all providers of their trees."""
    used = {uuid for each in found for uuid in each.allocations}
    roots = {known[uuid].root for uuid in used}
    classes = wanted.classes
    summaries: dict[str, Any] = {}
    for uuid, each in known.items():
        if uuid not in used and (minor < 29 or each.root not in roots):
            continue
        one: dict[str, Any] = {
            "resources": {
                name: {"capacity": own.capacity, "used": own.used}
                for name, own in each.inventories.items()
                if minor >= 27 or name in classes
            }
        }
        if minor >= 17:
            one["traits"] = sorted(each.traits, key=lambda name: (name.startswith(CUSTOM), name))
        if minor >= 29:
            one |= {"parent_provider_uuid": each.parent, "root_provider_uuid": each.root}
        summaries[uuid] = one
    return summaries


def routes(database: Database, answers: Answers) -> list[Route]:
    """Declare the route of allocation candidates."""
    return [
        Route(
            method="GET",
            path="/allocation_candidates",
            handler=AllocationCandidates(database, answers).index,
            policy="placement:allocation_candidates:list",
            versions=since(10),
            query=schemas.candidate_query,
            answer=_ANSWER,
        )
    ]

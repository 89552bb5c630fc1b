"""Events about servers from other services: a port was plugged, a volume was extended."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api.compute.server_inputs import Id
from micronova.compute.rpcapi import InstanceEvent
from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.external_events import PortEvent
from micronova.objects.instance import InstanceRow
from micronova.servers.external_events import ExternalEvents

AT_ONCE = 10  # servers whose events are passed on at the same time; those of one server keep their order
_SINCE = {"volume-extended": 51, "power-update": 76, "accelerator-request-bound": 82, "volume-reimaged": 93}


class Event(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One event."""

    name: Literal[
        PortEvent,
        "volume-extended",
        "power-update",
        "accelerator-request-bound",
        "volume-reimaged",
    ]
    server_uuid: Id
    status: Literal["failed", "completed", "in-progress"] = "completed"
    tag: Annotated[str, Meta(max_length=255)] | UnsetType = UNSET


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Several events."""

    events: Annotated[list[Event], Meta(min_length=1)]


def routes(database: Database, events: ExternalEvents) -> list[Route]:
    """Return the route."""

    async def create(request: Request) -> Response:
        """Pass events on to the servers' hosts; the response has the result of each."""
        events: list[Event] = request.body.events
        for event in events:
            if request.minor < _SINCE.get(event.name, 0):
                raise Invalid(f"Invalid input for field/attribute name: {event.name} is not known at this version.")
        found = await database.read(instances.get_many, {event.server_uuid for event in events})
        by_server: dict[str, list[int]] = {}
        for number, event in enumerate(events):
            by_server.setdefault(event.server_uuid, []).append(number)
        slots = asyncio.Semaphore(AT_ONCE)
        answers: list[dict[str, Any]] = [{}] * len(events)

        async def pass_on_in_order(numbers: list[int]) -> None:
            async with slots:
                for number in numbers:
                    event = events[number]
                    answers[number] = await _pass_on(request, event, found.get(event.server_uuid))

        await asyncio.gather(*map(pass_on_in_order, by_server.values()))
        if all(answer["code"] == 404 for answer in answers):
            raise NotFound("No instances found for any event")
        partial = any(answer["code"] != 200 for answer in answers)
        return Response(body={"events": answers}, status=207 if partial else 200)

    async def _pass_on(request: Request, event: Event, row: InstanceRow | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"name": event.name, "server_uuid": event.server_uuid, "status": event.status}
        if event.tag is not UNSET:
            answer["tag"] = event.tag
        if row is None:
            return {**answer, "status": "failed", "code": 404}
        instance_event = InstanceEvent(
            instance_uuid=event.server_uuid,
            name=event.name,
            status=event.status,
            tag=None if isinstance(event.tag, UnsetType) else event.tag,
        )
        if not await events.handle(request.context, row, instance_event):
            return {**answer, "status": "failed", "code": 422}
        return {**answer, "code": 200}

    result = {"name": str, "server_uuid": str, "status": str, "tag?": str, "code": int}
    results = {"events": [result]}
    return [
        Route(
            method="POST",
            path="/os-server-external-events",
            handler=create,
            body=Body,
            policy="os_compute_api:os-server-external-events:create",
            answer=results,
            also={207: results},
        )
    ]

"""Instance actions: what users requested of a server, and the results."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType, field

from micronova.api import inputs
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, NoQuery, Paged
from micronova.api.links import LINKS, Links, host_id
from micronova.api.view import OMIT, Field, View
from micronova.db import explanations as explanation_rows
from micronova.db import instance_actions as actions
from micronova.db.engine import Database
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.explanation import Explanation, sentences

RULE = "os_compute_api:os-instance-actions"

ACTION = View(
    Field("action", "action", type=str),
    Field("instance_uuid", "instance_uuid", type=str),
    Field("request_id", "request_id", type=str),
    Field("user_id", "user_id", type=str | None),
    Field("project_id", "project_id", type=str | None),
    Field("start_time", lambda row, _: iso_micros(row.start_time), type=str),
    Field("message", "message", type=str | None),
    Field("updated_at", lambda row, _: iso_micros(row.updated_at), since(58), type=str | None),
)
DETAILS = since(84)  # of events


class EventContext(NamedTuple):
    """What the view of an event needs besides its row."""

    project: str
    explained: Mapping[int, str]  # by the sequence number of the event: how the scheduler decided

    def details(self, event: actions.InstanceActionEventRow) -> str | None:
        """Return what went wrong, and how the scheduler decided."""
        return "\n".join(filter(None, (event.details, self.explained.get(event.sequence)))) or None


EVENT = View(
    Field("event", "event", type=str),
    Field("start_time", lambda row, _: iso_micros(row.start_time), type=str),
    Field("finish_time", lambda row, _: iso_micros(row.finish_time), type=str | None),
    Field("result", "result", type=str | None),
    Field("traceback", "traceback", when="insight", type=str | None),
    Field("hostId", lambda row, context: host_id(context.project, row.host), since(62), type=str),
    Field("host", "host", since(62), when="insight", type=str | None),
    Field("details", lambda row, context: context.details(row), DETAILS, when="details", type=str | None),
)

# An action with its events, which only some callers see before 2.51.
DETAILED = View(*ACTION.fields, Field("events", lambda row, events: events, optional=True, type=[EVENT]))


class ListQuery(Paged):
    """The page, and the time of the last change."""

    versions = {
        "limit": since(58),
        "marker": since(58),
        "changes-since": since(58),
        "changes-before": since(66),
    }
    once = since(58)

    changes_since: str | UnsetType = field(default=UNSET, name="changes-since")
    changes_before: str | UnsetType = field(default=UNSET, name="changes-before")


class InstanceActions:
    """The handlers."""

    def __init__(self, database: Database, max_limit: int) -> None:
        self._database = database
        self._max_limit = max_limit

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's actions, the newest first."""
        query: ListQuery = request.query
        paged = request.minor >= 58
        limit, marker = query.page(self._max_limit) if paged else (None, None)
        first = _moment(query.changes_since, "changes-since")
        last = _last_moment(query.changes_before, "changes-before")
        if first is not None and last is not None and last < first:
            raise Invalid("The value of changes-since must be less than or equal to changes-before.")
        await authorized_server(self._database, request, id, deleted=request.minor >= 21)
        rows = await self._database.read(
            actions.list_for, id, changes_since=first, changes_before=last, marker=marker, limit=limit
        )
        if rows is None:
            raise Invalid(f"Marker {marker} could not be found.")
        shape = ACTION.at(request.minor)
        body: dict[str, Any] = {"instanceActions": [shape(row) for row in rows]}
        if limit and len(rows) == limit:
            path = f"servers/{id}/os-instance-actions"
            body["links"] = Links(request).next(request, path, rows[-1].request_id)
        return body

    async def show(self, request: Request, id: str, request_id: str) -> dict[str, Any]:
        """Show an action with the events that the caller may see."""
        server = await authorized_server(self._database, request, id, deleted=request.minor >= 21)
        row, events = await self._database.read(
            lambda conn: (actions.get(conn, id, request_id), actions.events(conn, id, request_id))
        )
        if row is None:
            raise NotFound(f"Action {request_id} not found")
        shown: Any = OMIT
        owner: str = server["project_id"]
        target = {"project_id": owner}
        insight = request.allows(target, f"{RULE}:events")
        if insight or request.minor >= 51:
            flags = {"insight"} if insight else set()
            if request.allows(target, f"{RULE}:events:details"):
                flags.add("details")
            shape = EVENT.at(request.minor, frozenset(flags))
            explained: dict[int, str] = {}
            if flags == {"insight", "details"} and request.minor in DETAILS:
                # Explanations name hosts: who sees only details does not get them.
                decided = await self._database.read(explanation_rows.of_server, id)
                explanations = [each for one in decided if one.request_id == request_id for each in one.explanations]
                explained = explain_events(events, explanations)
            context = EventContext(row.project_id or owner, explained)
            shown = [shape(event, context) for event in events]
        return {"instanceAction": DETAILED.at(request.minor)(row, shown)}


def explain_events(
    events: Sequence[actions.InstanceActionEventRow], explanations: Sequence[Explanation]
) -> dict[int, str]:
    """Return decisions in words, by the sequence number of the event that each belongs to.

    This is the event of the chosen host; if there is none, the conductor's own; else the first one.
    """
    in_order = sorted(events, key=lambda event: (event.start_time, event.sequence))
    of_hosts = [event for event in in_order if event.host is not None]
    own = [event for event in in_order if event.host is None] or in_order
    texts: dict[int, str] = {}
    for explanation in explanations if in_order else ():
        chosen = {winner.host for winner in explanation.winners}
        event = next((event for event in of_hosts if event.host in chosen), None)
        if event is not None:
            of_hosts.remove(event)  # a later decision for the same host is that of a later event
        number = (event or own[0]).sequence
        texts[number] = "\n".join(filter(None, (texts.get(number), " ".join(sentences(explanation)))))
    return texts


def _moment(value: str | UnsetType, name: str) -> int | None:
    return None if isinstance(value, UnsetType) else inputs.moment(value, name)


def _last_moment(value: str | UnsetType, name: str) -> int | None:
    return None if isinstance(value, UnsetType) else inputs.last_moment(value, name)


def routes(database: Database, max_limit: int) -> list[Route]:
    """Declare the routes of instance actions."""
    handlers = InstanceActions(database, max_limit)
    root = "/servers/{id}/os-instance-actions"
    return [
        Route(
            method="GET", path=root, handler=handlers.index, policy=f"{RULE}:list", query=ListQuery,
            strict_query=since(58), checks_policy=True, answer={"instanceActions": [ACTION], "links?": LINKS},
        ),
        Route(
            method="GET", path=f"{root}/{{request_id}}", handler=handlers.show, policy=f"{RULE}:show",
            query=NoQuery, strict_query=STRICT, checks_policy=True, answer={"instanceAction": DETAILED},
        ),
    ]  # fmt: skip

"""Messages: list, show, delete."""

from functools import partial
from typing import Any

import sqlalchemy as sa

from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.listing import Links
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Message
from micronova.embedded.volume.store import message_queries
from micronova.embedded.volume.tables import messages
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since

FILTERS = ("resource_uuid", "resource_type", "event_id", "request_id", "message_level")


class MessageHandlers:
    """The handlers of messages."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/messages/{message_id}"
        route = partial(Route, checks_policy=True, versions=since(3))
        return [
            Route(method="GET", path="/messages", handler=self.index, policy="message:get_all", versions=since(3)),
            route(method="GET", path=one, handler=self.show, policy="message:get"),
            route(method="DELETE", path=one, handler=self.delete, policy="message:delete", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the messages of the caller's project."""
        query = request.raw_query if request.minor >= 5 else {}
        page = listing.read_page(query, message_queries.SORTABLE, self._core.settings.max_limit)
        conditions = [
            messages.c.expires_at > self._core.now(),
            *listing.own_project(request, messages.c.project_id),
        ]
        conditions += [messages.c[name].in_(query[name]) for name in FILTERS if name in query]
        if request.minor >= 31:
            listing.refuse_unknown(query, frozenset(FILTERS))
        found = await self._core.database.read(message_queries.list_messages, page, conditions)
        return listing.answer(request, "messages", "messages", found, partial(_view, Links(request)))

    async def show(self, request: Request, message_id: str) -> dict[str, Any]:
        """Show a message."""
        return {"message": _view(Links(request), await self._load(request, message_id))}

    async def delete(self, request: Request, message_id: str) -> None:
        """Delete a message."""
        await self._load(request, message_id)
        await self._core.database.write(message_queries.delete, message_id)

    async def _load(self, request: Request, message_id: str) -> Message:
        now = self._core.now()

        def get(conn: sa.Connection, id: str) -> Message | None:
            return message_queries.get(conn, id, now)

        return await self._core.load(request, get, message_id, noun="Message", see="message:get")


def _view(links: Links, message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "event_id": message.event_id,
        "user_message": message.user_message,
        "message_level": message.message_level,
        "created_at": iso_micros(message.created_at),
        "guaranteed_until": iso_micros(message.expires_at),
        "request_id": message.request_id,
        "links": links.of("messages", message.id),
        "resource_type": message.resource_type,
        "resource_uuid": message.resource_uuid,
    }

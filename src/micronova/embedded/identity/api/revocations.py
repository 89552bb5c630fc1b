"""GET /v3/OS-REVOKE/events: revocations, for services that verify tokens by signature."""

from typing import Any

from micronova.embedded.common.query import last
from micronova.embedded.identity.api.common import V3, route, self_link
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import revocations
from micronova.embedded.identity.store.revocations import Revocation
from micronova.embedded.identity.store.rows import QUERY
from micronova.http import revocation_subjects
from micronova.http.paging import iso_from_seconds
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.clock import seconds

_ATTRIBUTES = {
    "user": ["user_id"],
    "project": ["project_id"],
    "domain": ["domain_id"],
    "grant": ["user_id", "project_id"],
    "audit": ["audit_chain_id"],
}


class RevocationsAPI:
    """Revocations."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the route."""
        return [
            route("GET", f"{V3}/OS-REVOKE/events", self.index, "list_revoke_events"),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the revocations since a time that still concern unexpired tokens."""
        since = last(request.raw_query, "since")
        at = 0 if since is None else QUERY.time("since", since)
        found = await self._core.database.read(revocations.since, at, self._core.now())
        return {"events": [_view(each) for each in found], "links": {"self": self_link(request)}}


def _view(each: Revocation) -> dict[str, Any]:
    """Return an event. Our own services read `subject`; the other attributes are Keystone's."""
    kind, *ids = revocation_subjects.parts(each.subject)
    at = iso_from_seconds(seconds(each.at))
    return {
        "subject": each.subject,
        "issued_before": at,
        "revoked_at": at,
        "expires_at": iso_from_seconds(seconds(each.expires_at)),
        **dict(zip(_ATTRIBUTES.get(kind, ()), ids, strict=False)),
    }

"""GET /v3/OS-REVOKE/events: what was revoked, for services that verify tokens by signature."""

from datetime import UTC, datetime
from typing import Any

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity.api.common import V3, self_link
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import revocations
from micronova.neighbours.identity.store.revocations import Revocation
from micronova.objects.clock import micros
from micronova.objects.errors import Invalid

_KEYS = {"user": "user_id", "project": "project_id", "domain": "domain_id", "audit": "audit_chain_id"}


class RevocationsAPI:
    """Revocations."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Declare the operation."""
        return [
            Route(
                method="GET",
                path=f"{V3}/OS-REVOKE/events",
                handler=self.index,
                policy="identity:list_revoke_events",
            )
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List what was revoked since a moment and still matters."""
        since = 0
        if "since" in request.raw_query:
            try:
                moment = datetime.fromisoformat(request.raw_query["since"][-1])
                since = micros((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
            except (ValueError, OverflowError):
                message = "Invalid input for query parameter since: write a time like 2030-01-31T12:00:00Z."
                raise Invalid(message) from None
        found = await self._core.read(revocations.since, since, self._core.now)
        return {"events": [_view(each) for each in found], "links": {"self": self_link(request)}}


def _view(each: Revocation) -> dict[str, Any]:
    """Return an event; `subject` is how our own services read it, the rest is how others would."""
    kind, _, key = each.subject.partition(":")
    at = _time(each.at)
    view = {"subject": each.subject, "issued_before": at, "revoked_at": at, "expires_at": _time(each.expires_at)}
    if kind == "grant":
        user_id, _, scope = key.partition(":")
        return {**view, "user_id": user_id, "project_id": scope}
    return {**view, _KEYS[kind]: key} if kind in _KEYS else view


def _time(at: int) -> str:
    return datetime.fromtimestamp(at / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

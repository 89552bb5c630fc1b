"""Fault rules of simulated hosts, changed while they run: for tests of how clients handle faults.

The routes exist only with the setting `api.fault_injection`, for administrators. docs/fake-driver.md explains the
rules.
"""

from typing import Any

import msgspec

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.servers.guest_queries import GuestQueries


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """All rules of a host's process."""

    rules: list[dict[str, Any]]


def routes(guests: GuestQueries) -> list[Route]:
    """Return the routes."""

    async def show(request: Request, host: str) -> dict[str, Any]:
        """List the rules in force."""
        return {"rules": await guests.fault_rules(request.context, host, None)}

    async def replace(request: Request, host: str) -> dict[str, Any]:
        """Replace all rules; an empty list clears them."""
        return {"rules": await guests.fault_rules(request.context, host, request.body.rules)}

    path, policy = "/os-fault-rules/{host}", "micronova:fault-rules"
    answer = {"rules": list[dict[str, Any]]}
    return [
        Route(method="GET", path=path, handler=show, policy=policy, answer=answer, errors=(501,)),
        Route(method="PUT", path=path, handler=replace, policy=policy, body=Body, answer=answer, errors=(501,)),
    ]

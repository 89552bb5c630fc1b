"""Fault rules of simulated hosts, at run time: for testing what clients do when a cloud misbehaves.

Only there when the setting `api.fault_injection` is on, and for admins. docs/fake-driver.md explains the rules.
"""

from typing import Any

import msgspec

from micronova.compute.api import API
from micronova.http.request import Request
from micronova.http.service import Route


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """All rules of a host's process."""

    rules: list[dict[str, Any]]


def routes(api: API) -> list[Route]:
    """Return the routes."""

    async def show(request: Request, host: str) -> dict[str, Any]:
        """List the rules in force."""
        return {"rules": await api.fault_rules(request.context, host, None)}

    async def replace(request: Request, host: str) -> dict[str, Any]:
        """Replace all rules; an empty list clears them."""
        return {"rules": await api.fault_rules(request.context, host, request.body.rules)}

    path, policy = "/os-fault-rules/{host}", "micronova:fault-rules"
    return [
        Route(method="GET", path=path, handler=show, policy=policy),
        Route(method="PUT", path=path, handler=replace, policy=policy, body=Body),
    ]

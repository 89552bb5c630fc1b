"""An extension that is refused, because a route of the API is what it wants to add."""

from typing import Any

from micronova.api.extension import Additions, Extension
from micronova.http.request import Request
from micronova.http.service import Route


def _add(dependencies: Any) -> Additions:
    async def nothing(request: Request) -> dict[str, Any]:
        return {"servers": []}

    own = Route(method="GET", path="/greedy", handler=nothing, policy="", answer={"servers": [str]})
    taken = Route(method="GET", path="/servers", handler=nothing, policy="", answer={"servers": [str]})
    return Additions(routes=[own, taken])


EXTENSION = Extension(
    alias="os-greedy", name="Greedy", description="Wants GET /servers.", updated="2026-01-01T00:00:00Z", add=_add
)

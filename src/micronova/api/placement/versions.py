"""The version document of the Placement API, at its root. It needs no token."""

from typing import Any

from micronova.api.placement.service import LEAST, NEWEST, VERSIONS, Answers
from micronova.http.request import Request, Response
from micronova.http.service import Route

_ANSWER = {
    "versions": [
        {"id": str, "status": str, "max_version": str, "min_version": str, "links": [{"rel": str, "href": str}]}
    ]
}


def routes(answers: Answers) -> list[Route]:
    """Declare the route of the root."""

    async def show(request: Request) -> Response:
        """Show the only version."""
        version: dict[str, Any] = {
            "id": "v1.0",
            "max_version": VERSIONS.text(NEWEST),
            "min_version": VERSIONS.text(LEAST),
            "status": "CURRENT",
            "links": [{"rel": "self", "href": request.service.mount}],
        }
        return answers.make(request, {"versions": [version]})

    return [Route(method="GET", path="", handler=show, policy=None, answer=_ANSWER)]

"""Links to resources, as this caller sees the service."""

import hashlib

from micronova.http.paging import next_link
from micronova.http.request import Request


class Links:
    """Makes the links of one answer: what they begin with is worked out once."""

    __slots__ = ("base", "bookmark")

    def __init__(self, request: Request) -> None:
        root = request.base_url.removesuffix(request.service.prefix)
        # Whoever names the project in the URL gets links that name it too.
        project = request.falcon.scope.get("micronova.project")
        tail = f"/{project}" if project else ""
        self.base = f"{root}{'/v2' if request.relaxed else request.service.prefix}{tail}"
        self.bookmark = f"{root}{tail}"

    def of(self, collection: str, identifier: str) -> list[dict[str, str]]:
        """Return the links of a resource: under its version, and without."""
        return [
            {"rel": "self", "href": f"{self.base}/{collection}/{identifier}"},
            {"rel": "bookmark", "href": f"{self.bookmark}/{collection}/{identifier}"},
        ]

    def next(self, request: Request, path: str, marker: str) -> list[dict[str, str]]:
        """Return the link to the page after the marker."""
        return [{"rel": "next", "href": next_link(f"{self.base}/{path}", request.raw_query, marker)}]


def host_id(project_id: str, host: str | None) -> str:
    """Return a host's name as a project may see it: the same for its servers on one host, and no name."""
    return hashlib.sha224(f"{project_id}{host}".encode()).hexdigest() if host else ""

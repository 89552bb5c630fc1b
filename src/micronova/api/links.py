"""Links to resources, with the service's URL as the caller sees it."""

import hashlib

from micronova.http.paging import next_link
from micronova.http.request import Request

# As api/openapi.py reads it: the links of a resource, and those of a page of a list.
LINKS = [{"rel": str, "href": str, "type?": str}]


class Links:
    """Makes the links of one response; their common beginning is computed once."""

    __slots__ = ("base", "bookmark")

    def __init__(self, request: Request) -> None:
        root = request.base_url.removesuffix(request.service.prefix)
        # A request with the project in its URL gets links with the project.
        project = request.falcon.scope.get("micronova.project")
        tail = f"/{project}" if project else ""
        self.base = f"{root}{'/v2' if request.is_v2 else request.service.prefix}{tail}"
        self.bookmark = f"{root}{tail}"

    def of(self, collection: str, identifier: str) -> list[dict[str, str]]:
        """Return the links of a resource, with and without the API version."""
        return [
            {"rel": "self", "href": f"{self.base}/{collection}/{identifier}"},
            {"rel": "bookmark", "href": f"{self.bookmark}/{collection}/{identifier}"},
        ]

    def next(self, request: Request, path: str, marker: str) -> list[dict[str, str]]:
        """Return the link to the page after the marker."""
        return [{"rel": "next", "href": next_link(f"{self.base}/{path}", request.raw_query, marker)}]


def host_id(project_id: str, host: str | None) -> str:
    """Return a hash of the host's name for users: equal for a project's servers on one host, "" without a host."""
    return hashlib.sha224(f"{project_id}{host}".encode()).hexdigest() if host else ""

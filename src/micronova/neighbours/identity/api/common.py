"""What the handlers of all identity resources share: routes, pages, links, collections."""

from collections.abc import Sequence
from typing import Any

from micronova.http.paging import next_link
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.objects.errors import Invalid

V3 = "/v3"
LIMIT = 1000  # of a page that is asked for


def checked_route(method: str, path: str, handler: Any, rule: str, **more: Any) -> Route:
    """Declare an operation whose handler asks policy itself, once it knows about what."""
    return Route(
        method=method, path=path, handler=handler, policy=f"identity:{rule}", checks_policy=True, **more
    )


def page(request: Request) -> Page:
    """Read limit= and marker=."""
    query = request.raw_query
    marker = query["marker"][-1] if "marker" in query else None
    if "limit" not in query:
        return Page(None, marker)
    text = query["limit"][-1]
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise Invalid(f"Invalid input for query parameter limit: {text[:64]!r} is not a number above 0.")
    return Page(min(int(text[:9]), LIMIT), marker)


def link(request: Request, *parts: str) -> str:
    """Return the URL of a resource."""
    return "/".join((request.base_url + V3, *parts))


def self_link(request: Request) -> str:
    """Return the URL of the request itself."""
    query = request.falcon.query_string
    return request.base_url + request.falcon.path + (f"?{query}" if query else "")


def collection(request: Request, name: str, items: Sequence[Any], listed: Listed | None = None) -> dict[str, Any]:
    """Return a list with its links, and one to the next page when there is more."""
    links: dict[str, str | None] = {"next": None, "self": self_link(request), "previous": None}
    body: dict[str, Any] = {name: items, "links": links}
    if listed is not None and listed.more:
        url = request.base_url + request.falcon.path
        links["next"] = next_link(url, request.raw_query, listed.rows[-1]["id"])
        body["truncated"] = True
    return body


def public_url(request: Request) -> str:
    """Return scheme, host and port of this cloud as the client sees them."""
    return request.base_url.removesuffix(request.service.mount)


def filter_domain(request: Request) -> str | None:
    """Return the domain that lists are limited to: that of a token for a domain."""
    return request.context.domain_id


def home_domain(request: Request) -> str:
    """Return the domain in which a resource is made when the body names none."""
    return request.context.domain_id or request.context.project_domain_id or request.context.user_domain_id


def in_domain(row: Row | None, **more: Any) -> dict[str, Any]:
    """Return the policy target for a resource of a domain; one that does not exist is in none."""
    return {"domain_id": row["domain_id"] if row else None, **more}

"""What the handlers of all identity resources share: routes, pages, links, tokens, policy targets."""

from collections.abc import Mapping, Sequence
from typing import Any

from micronova.embedded.common.query import last
from micronova.embedded.identity import tokens
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.endpoint_urls import OwnURLs
from micronova.embedded.identity.store.rows import QUERY, Listed, Page
from micronova.http.paging import next_link
from micronova.http.request import Request, Response
from micronova.http.service import Handler, Route
from micronova.http.tokens import Claims

V3 = "/v3"
MAX_LIMIT = 1000  # rows in a page that has a limit


def route(method: str, path: str, handler: Handler, rule: str, **more: Any) -> Route:
    """Return a route with this rule of policy."""
    return Route(method=method, path=path, handler=handler, policy=f"identity:{rule}", **more)


def checked_route(method: str, path: str, handler: Handler, rule: str, **more: Any) -> Route:
    """Return a route whose handler checks policy itself, after it has loaded the policy target."""
    return route(method, path, handler, rule, checks_policy=True, **more)


def page(request: Request) -> Page:
    """Return what the query string says about paging; raise Invalid."""
    query = request.raw_query
    return Page(QUERY.limit(query, least=1, most=MAX_LIMIT), last(query, "marker"))


def link(request: Request, *parts: str) -> str:
    """Return the URL of a resource."""
    return "/".join((request.base_url + V3, *parts))


def self_link(request: Request) -> str:
    """Return the URL of the request itself."""
    query = request.falcon.query_string
    return request.base_url + request.falcon.path + (f"?{query}" if query else "")


def collection(request: Request, name: str, items: Sequence[Any], listed: Listed[Any] | None = None) -> dict[str, Any]:
    """Return the body of a list, with a link to the next page if there is one."""
    links: dict[str, str | None] = {"next": None, "self": self_link(request), "previous": None}
    body: dict[str, Any] = {name: items, "links": links}
    if listed is not None and listed.more:
        url = request.base_url + request.falcon.path
        links["next"] = next_link(url, request.raw_query, listed.rows[-1]["id"])
        body["truncated"] = True
    return body


def token_response(
    core: Core, request: Request, token: str, claims: Claims, details: tokens.Details, with_catalog: bool
) -> Response:
    """Return the response that describes a token."""
    body = tokens.body(claims, details, with_catalog, own_urls(core, request))
    return Response(body={"token": body}, headers=token_headers(token))


def token_headers(token: str) -> dict[str, str]:
    """Return the headers of a response about a token."""
    return {"x-subject-token": token, "vary": "X-Auth-Token"}


def own_urls(core: Core, request: Request) -> OwnURLs:
    """Return where the services of this cloud are, as the client sees this one."""
    return OwnURLs(request.base_url.removesuffix(request.service.mount), core.elsewhere)


def default_domain(request: Request) -> str:
    """Return the domain in which a resource is created when the body names none."""
    return request.context.domain_id or request.context.project_domain_id or request.context.user_domain_id


def domain_target(row: Mapping[str, object] | None, **more: Any) -> dict[str, Any]:
    """Return the policy target for a resource of a domain; a resource that does not exist has no domain."""
    return {"domain_id": row["domain_id"] if row else None, **more}

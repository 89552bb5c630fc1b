"""Lists as Cinder's clients ask for them: the query string, and the answer with the links to the next page."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args

import sqlalchemy as sa

from micronova.db.keyset import SortKey
from micronova.embedded.common.query import Query, QueryRules, last
from micronova.embedded.volume.store.paging import Listed, Page
from micronova.http.paging import check_filter, next_link
from micronova.http.request import Request
from micronova.http.service import SERVICE_ROLE
from micronova.objects.errors import Invalid

R = TypeVar("R")

TrueWord = Literal["True", "TRUE", "true", "1", "ON", "On", "on", "YES", "Yes", "yes", "y", "t"]
FalseWord = Literal["False", "FALSE", "false", "0", "OFF", "Off", "off", "NO", "No", "no", "n", "f"]
"""The words of bodies. Query strings have them too, in any case."""
QUERY_RULES = QueryRules(
    true=frozenset(word.lower() for word in get_args(TrueWord)),
    false=frozenset(word.lower() for word in get_args(FalseWord)),
    not_boolean="Invalid value for '{name}': '{value}' is neither true nor false.",
    not_integer="Invalid value for '{name}': '{value}' is not a whole number in the allowed range.",
    not_time="Invalid value for '{name}': '{value}' is not an ISO 8601 time.",
    not_limit="limit param must be a non-negative integer, not '{value}'.",
)
MAX_OFFSET = 0x7FFFFFFF
MOST_VALUES = 200  # of all parameters together; each may become a condition of a statement
PAGING = frozenset({"limit", "marker", "offset", "sort", "sort_key", "sort_dir", "all_tenants", "with_count"})
"""The parameters of a list that are not filters."""
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # characters that Python's escapes can write and no database stores


def read_page(query: Query, sortable: Mapping[str, sa.Column[Any]], most: int) -> Page:
    """Return what the query string says about paging and order; raise Invalid."""
    check_length(query)
    limit = QUERY_RULES.limit(query, most=most)
    offset = last(query, "offset")
    return Page(
        limit=most if limit is None else limit,
        marker=last(query, "marker") or None,
        offset=0 if offset is None else QUERY_RULES.integer("offset", offset, 0, MAX_OFFSET),
        keys=_sort_keys(query, sortable),
    )


def check_length(query: Query) -> None:
    """Raise Invalid if a query string has more values than a statement should have conditions."""
    number = sum(1 + value.count(",") for values in query.values() for value in values)
    if number > MOST_VALUES:
        raise Invalid(f"The query string has {number} values: it may have at most {MOST_VALUES}.")


def any_of(values: Iterable[str]) -> list[str]:
    """Return the values of a filter that may name several, separated by commas."""
    return [part.strip() for value in values for part in value.split(",")]


def _sort_keys(query: Query, sortable: Mapping[str, sa.Column[Any]]) -> tuple[SortKey, ...]:
    text, key, direction = last(query, "sort"), last(query, "sort_key"), last(query, "sort_dir")
    if text is not None and (key is not None or direction is not None):
        raise Invalid("The 'sort_key' and 'sort_dir' parameters are deprecated and cannot be used with 'sort'.")
    if text is None:
        text = f"{key or 'created_at'}:{direction or 'desc'}"
    wanted: dict[str, bool] = {}
    for part in text.split(","):
        name, _, order = part.strip().partition(":")
        if name not in sortable:
            raise Invalid(f"Invalid sort key '{name[:64]}': use {', '.join(sorted(sortable))}.")
        if order not in ("", "asc", "desc"):
            raise Invalid(f"Invalid sort direction '{order[:64]}': use asc or desc.")
        wanted[name] = order != "asc"
    if "id" not in wanted:
        wanted["id"] = next(iter(wanted.values()))
    return tuple(SortKey(sortable[name], descending) for name, descending in wanted.items())


def wants_count(request: Request) -> bool:
    """Return whether the answer to a list has to say how long the whole list is; from 3.45 on."""
    text = last(request.raw_query, "with_count") if request.minor >= 45 else None
    return text is not None and QUERY_RULES.boolean("with_count", text)


def answer(
    request: Request, collection: str, path: str, listed: Listed[R], view: Callable[[R], dict[str, Any]]
) -> dict[str, Any]:
    """Return the answer to a list: the resources of a page, the link to the next one, and how many there are in all."""
    shown = [view(each) for each in listed.resources]
    body: dict[str, Any] = {collection: shown}
    body |= Links(request).next(collection, path, shown[-1]["id"] if shown and listed.more else None)
    return body if listed.total is None else {**body, "count": listed.total}


def refuse_unknown(query: Query, known: frozenset[str]) -> None:
    """Raise Invalid for parameters that are not filters of a list; handlers ignore them before 3.31."""
    wrong = sorted(query.keys() - known - PAGING)
    if wrong:
        raise Invalid(f"Invalid filters {', '.join(wrong)[:200]} are found in query options.")


def own_project(
    request: Request, project_id: sa.Column[str], *, services: bool = False
) -> list[sa.ColumnElement[bool]]:
    """Return the condition that resources belong to the caller's project.

    There is none if an administrator, or with `services` a service, asks for the resources of all projects.
    """
    text = last(request.raw_query, "all_tenants")
    may_see_all = request.context.is_admin or (services and SERVICE_ROLE in request.context.roles)
    wants_all = text is not None and (text == "" or QUERY_RULES.boolean("all_tenants", text))
    return [] if wants_all and may_see_all else [project_id == request.context.project_id]


def dictionary(name: str, text: str) -> dict[str, str]:
    """Return a filter that clients write as a Python dictionary or as JSON; raise Invalid."""
    try:
        found = ast.literal_eval(text)
        wanted = {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a key that is a list
        wanted = None
    if wanted is None or _NO_TEXT.search("".join((*wanted, *wanted.values()))):
        raise Invalid(f"Invalid value for '{name}': write a dictionary, {{'key': 'value'}}.")
    check_filter(name, wanted)
    return wanted


class Links:
    """Makes the links in the answer to a request, which name the project as the request's path does."""

    def __init__(self, request: Request) -> None:
        project = request.falcon.scope.get("micronova.project")
        self._request = request
        self._self = request.base_url + (f"/{project}" if project else "")
        self._bookmark = request.base_url.removesuffix(request.service.prefix) + (f"/{project}" if project else "")

    def of(self, collection: str, id: str) -> list[dict[str, str]]:
        """Return the links of a resource."""
        return [
            {"rel": "self", "href": f"{self._self}/{collection}/{id}"},
            {"rel": "bookmark", "href": f"{self._bookmark}/{collection}/{id}"},
        ]

    def next(self, collection: str, path: str, marker: str | None) -> dict[str, Any]:
        """Return the link to the page after the marker as a list's answer has it; nothing without a marker."""
        if marker is None:
            return {}
        query = {name: values for name, values in self._request.raw_query.items() if name != "offset"}
        return {f"{collection}_links": [{"rel": "next", "href": next_link(f"{self._self}/{path}", query, marker)}]}

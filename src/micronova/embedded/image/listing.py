"""The query strings of lists: which page is wanted, and of images the filters that the queries turn into SQL."""

import csv
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from micronova.embedded.common.query import Query, QueryRules, last
from micronova.embedded.image.model import MEMBER_STATUSES, VISIBILITIES
from micronova.http.paging import check_filter, next_link
from micronova.objects.errors import Invalid

DEFAULT_LIMIT = 25
MAX_LIMIT = 1000
SORT_KEYS = ("name", "status", "container_format", "disk_format", "size", "id", "created_at", "updated_at")
COMPARISONS = ("gt", "gte", "eq", "neq", "lt", "lte")
_LISTS = ("id", "name", "status", "container_format", "disk_format")  # these accept in:a,b
_TEXTS = ("owner", "checksum", "os_hash_algo", "os_hash_value")
_NUMBERS = ("size", "virtual_size", "min_disk", "min_ram")
_TIMES = ("created_at", "updated_at")
PAGING = ("limit", "marker", "sort_key", "sort_dir")
_OTHER = (
    *PAGING,
    "sort",
    "tag",
    "visibility",
    "member_status",
    "size_min",
    "size_max",
    "protected",
    "os_hidden",
)
_MAX_INT = 2**63 - 1
SECOND = 1_000_000  # microseconds

QUERY = QueryRules(
    true=frozenset({"true"}),
    false=frozenset({"false"}),
    not_boolean="Invalid query parameter '{name}': it must be true or false.",
    not_integer="Invalid query parameter '{name}': it must be a whole number, 0 or more.",
    not_time="Invalid query parameter '{name}': '{value}' is not a time in ISO 8601 format.",
    not_limit="Invalid query parameter '{name}': it must be a whole number, 0 or more.",
)


class TimeComparison(msgspec.Struct, frozen=True):
    """A comparison with a time. Image times are shown in whole seconds and are compared as shown."""

    column: str
    op: str
    second: int  # the begin of the second, in microseconds


class Listing(msgspec.Struct, kw_only=True):
    """The filters, the order and the page of a list."""

    equal: dict[str, Any] = {}
    one_of: dict[str, list[str]] = {}
    properties: dict[str, str] = {}
    tags: list[str] = []
    times: list[TimeComparison] = []
    size_min: int | None = None
    size_max: int | None = None
    visibility: str | None = None  # one, "all", or None for the default list
    member_status: str = "accepted"  # one, or "all"
    order: list[tuple[str, bool]] = []  # (column, descending)
    limit: int
    marker: str | None = None


def refuse_others(query: Query, *known: str) -> None:
    """Raise Invalid for a query parameter that a list does not have; it is refused rather than ignored."""
    for name in query:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise Invalid(f"The list has no query parameter '{name[:64]}': {takes}.")


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list a caller wants, and in which order."""

    sort_key: str
    descending: bool
    limit: int | None
    marker: str | None


def read_page(
    query: Query,
    sort_keys: Sequence[str],
    *also: str,
    default: int | None = DEFAULT_LIMIT,
    most: int = MAX_LIMIT,
) -> Page:
    """Return which part of a list of anything but images the query asks for; raise Invalid.

    The list has the query parameters `also`.
    """
    refuse_others(query, *PAGING, *also)
    sort_key, direction = last(query, "sort_key") or "created_at", last(query, "sort_dir") or "desc"
    _check_order(sort_key, direction, sort_keys)
    limit = QUERY.limit(query, most=most)
    return Page(
        sort_key=sort_key,
        descending=direction == "desc",
        limit=default if limit is None else limit,
        marker=last(query, "marker"),
    )


def links(path: str, query: Query, after: str | None) -> dict[str, str]:
    """Return the links of a list: to its first page, and to the page that follows the item `after`, if there is one.

    They are relative to the service, as Glance's are.
    """
    kept = [(name, value) for name, values in query.items() if name != "marker" for value in values]
    found = {"first": f"{path}?{urlencode(kept)}" if kept else path}
    return found if after is None else {**found, "next": next_link(path, query, after)}


def read(query: Query) -> Listing:
    """Return the parsed query string of a list of images; a parameter that is no attribute is a property.

    Raise Invalid.
    """
    limit = QUERY.limit(query, most=MAX_LIMIT, refuse_above=_MAX_INT)
    listing = Listing(
        order=_order(query),
        tags=list(dict.fromkeys(query.get("tag", ()))),
        limit=DEFAULT_LIMIT if limit is None else limit,
    )
    given = {name: values[-1] for name, values in query.items()}
    listing.equal["os_hidden"] = QUERY.boolean("os_hidden", given.get("os_hidden", "false"))
    if "protected" in given:
        listing.equal["protected"] = QUERY.boolean("protected", given["protected"])
    listing.visibility = choice("visibility", given.get("visibility"), (*VISIBILITIES, "all"))
    listing.member_status = (
        choice("member_status", given.get("member_status"), (*MEMBER_STATUSES, "all")) or listing.member_status
    )
    listing.size_min = _number("size_min", given["size_min"]) if "size_min" in given else None
    listing.size_max = _number("size_max", given["size_max"]) if "size_max" in given else None
    listing.marker = given.get("marker")
    for name, value in given.items():
        if name in _LISTS:
            _list_or_equal(listing, name, value)
        elif name in _TEXTS:
            listing.equal[name] = value
        elif name in _NUMBERS:
            listing.equal[name] = _number(name, value)
        elif name in _TIMES:
            listing.times.append(_time_comparison(name, value))
        elif name not in _OTHER:
            listing.properties[name] = value
    check_filter("tag", listing.tags)
    check_filter("properties", listing.properties)
    return listing


def _list_or_equal(listing: Listing, name: str, value: str) -> None:
    # A name may contain a colon ("ubuntu:22.04"), so only known operators are operators.
    op, colon, rest = value.partition(":")
    if not colon or op not in ("in", *COMPARISONS):
        listing.equal[name] = value
    elif op == "eq":
        listing.equal[name] = rest
    elif op == "in":
        listing.one_of[name] = _split(name, rest)
    else:
        raise Invalid(f"Invalid query parameter '{name}': operator '{op}' does not apply; use 'in:' or 'eq:'.")


def _split(name: str, text: str) -> list[str]:
    """Split a list at its commas; an item with a comma is quoted."""
    try:
        [items] = csv.reader([text], strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        raise Invalid(f"Invalid query parameter '{name}': the list's quotation marks do not match.") from None
    return items


def _time_comparison(name: str, value: str) -> TimeComparison:
    op, colon, rest = value.partition(":")
    if not colon or op not in COMPARISONS:
        if op.isalpha():
            raise Invalid(f"Invalid query parameter '{name}': the operator must be one of {', '.join(COMPARISONS)}.")
        op, rest = "eq", value
    return TimeComparison(name, op, QUERY.time(name, rest) // SECOND * SECOND)


def _order(query: Query) -> list[tuple[str, bool]]:
    keys, directions = list(query.get("sort_key", ())), list(query.get("sort_dir", ()))
    if "sort" in query:
        if keys or directions:
            raise Invalid("Use either 'sort' or 'sort_key' and 'sort_dir', not both.")
        order = []
        for item in query["sort"][-1].split(","):
            key, _, direction = item.strip().partition(":")
            order.append((key, direction or "desc"))
    else:
        keys = keys or ["created_at"]
        directions = directions or ["desc"]
        if len(directions) not in (1, len(keys)):
            raise Invalid("There must be one 'sort_dir' for all, or one for each 'sort_key'.")
        order = list(zip(keys, directions * (len(keys) if len(directions) == 1 else 1), strict=True))
    found: dict[str, bool] = {}
    for key, direction in order:
        _check_order(key, direction, SORT_KEYS)
        found.setdefault(key, direction == "desc")
    for key in ("created_at", "id"):  # without a unique last key, a page could repeat or lose an image
        found.setdefault(key, order[0][1] == "desc")
    return list(found.items())


def _check_order(key: str, direction: str, allowed: Sequence[str]) -> None:
    if key not in allowed:
        raise Invalid(f"Invalid sort key '{key[:64]}': it must be one of {', '.join(allowed)}.")
    if direction not in ("asc", "desc"):
        raise Invalid(f"Invalid sort direction '{direction[:64]}': it must be asc or desc.")


def choice(name: str, value: str | None, allowed: Sequence[str]) -> str | None:
    """Return the value of a query parameter; raise Invalid if it is none of the allowed ones."""
    if value is not None and value not in allowed:
        raise Invalid(f"Invalid query parameter '{name}': it must be one of {', '.join(allowed)}.")
    return value


def _number(name: str, value: str) -> int:
    return QUERY.integer(name, value, least=0, most=_MAX_INT)

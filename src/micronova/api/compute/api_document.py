"""The OpenAPI document of the compute API, at GET /openapi.json and by `micronova openapi`.

The query parameter `microversion` says of which microversion; by default it is the one that the request's header
names, and without a header the newest.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from micronova.api import openapi
from micronova.api.compute.versions_doc import VERSIONS
from micronova.api.inputs import STRICT, Query
from micronova.http.faults import COMPUTE_FAULT, COMPUTE_KEYS
from micronova.http.request import Request, Response
from micronova.http.service import AUTHENTICATED, Route

_URL = "URL of the API"  # in documents that are kept, in the place of the URL that a client uses
_ABOUT = (
    "OpenStack Compute as Micronova serves it. The document is generated from the declarations of its routes, and is "
    "true for this microversion. `x-policy` names the policy rule of an operation."
)


class DocumentQuery(Query):
    """The microversion, as 2.N or latest."""

    microversion: str | UnsetType = UNSET


def document(routes: Iterable[Route], minor: int, url: str = "/compute/v2.1") -> dict[str, Any]:
    """Return the document of a microversion; `url` is where the API is."""
    faults = {COMPUTE_FAULT, *COMPUTE_KEYS.values()}
    return openapi.document(routes, VERSIONS, minor, title="Compute", description=_ABOUT, url=url, faults=faults)


def minor_of(text: str) -> int:
    """Read a microversion; raise Invalid or NotAcceptable."""
    return VERSIONS.negotiate(None, text)


def routes(declared: Callable[[], Iterable[Route]]) -> list[Route]:
    """Declare the route; `declared` returns all routes of the API."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="openapi")  # starts no thread until it is used

    # One takes 50 ms to make and has 300 KB, and 20 compressed. All are kept: there are some hundred microversions.
    @cache
    def compressed(minor: int) -> bytes:
        return zlib.compress(msgspec.json.encode(document(declared(), minor, _URL)))

    def encoded(minor: int, url: str) -> bytes:
        return zlib.decompress(compressed(minor)).replace(msgspec.json.encode(_URL), msgspec.json.encode(url), 1)

    async def show(request: Request) -> Response:
        """Show the OpenAPI document of a microversion."""
        minor = VERSIONS.newest
        if not isinstance(request.query.microversion, UnsetType):
            minor = minor_of(request.query.microversion)
        elif request.header("openstack-api-version") or request.header(VERSIONS.legacy_header or ""):
            minor = request.minor
        base = request.base_url
        return Response(body=await asyncio.get_running_loop().run_in_executor(pool, encoded, minor, base))

    return [
        Route(
            method="GET",
            path="/openapi.json",
            handler=show,
            policy=AUTHENTICATED,
            query=DocumentQuery,
            strict_query=STRICT,
            answer=dict[str, Any],
        )
    ]

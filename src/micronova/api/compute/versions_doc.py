"""Version documents: what clients read to find out the versions of the API. They need no token."""

from typing import Any

from micronova.api.links import LINKS
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import Versions
from micronova.objects.errors import NotFound

LEAST, NEWEST = 1, 104  # the minor numbers of our microversions
VERSIONS = Versions("compute", 2, LEAST, NEWEST, "X-OpenStack-Nova-API-Version")

VENDOR_TYPE = "application/vnd.openstack.compute+json"

_PATHS = {"v2.0": "v2", "v2.1": "v2.1"}
_HELP = {"rel": "describedby", "type": "text/html", "href": "https://docs.openstack.org/"}


_ABOUT: dict[str, dict[str, Any]] = {
    # The old API: the same features without microversions.
    "v2.0": {
        "id": "v2.0",
        "status": "DEPRECATED",
        "version": "",
        "min_version": "",
        "updated": "2025-07-04T12:00:00Z",
    },
    "v2.1": {
        "id": "v2.1",
        "status": "CURRENT",
        "version": f"2.{NEWEST}",
        "min_version": f"2.{LEAST}",
        "updated": "2013-07-23T11:33:21Z",
    },
}

_ANSWER = {
    "version": {
        "id": str,
        "status": str,
        "version": str,
        "min_version": str,
        "updated": str,
        "links": LINKS,
        "media-types": [{"base": str, "type": str}],
    }
}


async def index(request: Request) -> dict[str, Any]:
    """List the versions."""
    return {"versions": [{**about, "links": [_self(request, version)]} for version, about in _ABOUT.items()]}


async def choices(request: Request, path: str) -> dict[str, Any]:
    """List the versions that a path above them may mean."""
    return {
        "choices": [
            {
                "id": about["id"],
                "status": about["status"],
                "links": [{"rel": "self", "href": f"{_self(request, version)['href']}{path}"}],
                "media-types": _media_types(version),
            }
            for version, about in _ABOUT.items()
        ]
    }


async def show_own(request: Request) -> dict[str, Any]:
    """Show the version that the request's path begins with."""
    return _document(request, "v2.0" if request.is_v2 else "v2.1")


async def show(request: Request, id: str) -> dict[str, Any]:
    """Show a version by its id."""
    if id not in _ABOUT:
        raise NotFound("The resource could not be found.")
    return _document(request, "v2.0" if request.is_v2 else id)


def _document(request: Request, version: str) -> dict[str, Any]:
    return {
        "version": {
            **_ABOUT[version],
            "links": [_self(request, version), _HELP],
            "media-types": _media_types(version),
        }
    }


def _media_types(version: str) -> list[dict[str, str]]:
    number = version.removeprefix("v").removesuffix(".0")
    return [{"base": "application/json", "type": f"{VENDOR_TYPE};version={number}"}]


def _self(request: Request, version: str) -> dict[str, str]:
    root = request.base_url.removesuffix(request.service.prefix)
    return {"rel": "self", "href": f"{root}/{_PATHS[version]}/"}


def root_routes() -> list[Route]:
    """Declare the routes above the versions, for a service without prefix and microversions."""
    return [
        Route(method="GET", path="", handler=index, policy=None),
        *(
            Route(method=method, path="/{path:path}", handler=choices, policy=None, status=300)
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        ),
    ]


def routes() -> list[Route]:
    """Declare the routes of /v2.1."""
    return [
        Route(method="GET", path="", handler=show_own, policy=None, answer=_ANSWER),
        Route(method="GET", path="/versions/{id}", handler=show, policy=AUTHENTICATED, answer=_ANSWER),
    ]

"""The client of the image service, over the API that Glance and the embedded service share."""

import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.http.tickets import Tickets
from micronova.objects.errors import NotFound
from micronova.objects.image import LONGEST_PROPERTY, ImageMeta

TICKET_LIFETIME = 900.0  # seconds within which a host has to start the download

PAGE = 1000

Documents = list[dict[str, Any]]

# Attributes of an image: the API shows properties beside them in one flat object.
ATTRIBUTES = frozenset(ImageMeta.__struct_fields__) | {
    "visibility",
    "protected",
    "os_hidden",
    "tags",
    "virtual_size",
    "created_at",
    "updated_at",
    "self",
    "file",
    "schema",
    "locations",
    "direct_url",
    "stores",
}
_NEXT = re.compile(r"^/v2(?=/)")


class ImageClient:
    """Calls the image service with a user's token or as the service user.

    `tickets`, whose key the embedded service shares, let hosts download without a token. Glance does not know
    tickets: without them `ticket_url` is the plain URL.
    """

    def __init__(
        self,
        service: ServiceClient,
        *,
        url: str | Callable[[], str] | None = None,
        tickets: Tickets | None = None,
        now: Callable[[], float] | None = None,
        lifetime: float = TICKET_LIFETIME,
    ) -> None:
        self._service = service
        self._url = url  # of the service as compute hosts reach it, without /v2; a function if it may change
        self._tickets = tickets
        self._now = now
        self._lifetime = lifetime

    async def get(self, image_id: str, token: str | None = None) -> ImageMeta:
        """Return an image that the user may see; raise NotFound otherwise."""
        return from_wire(await self._service.request("GET", _checked_path(image_id), token=token))

    async def list(self, token: str | None = None, **filters: str) -> list[ImageMeta]:
        """Return all images that the user may see and that match the filters; read page by page."""
        path: str | None = "/v2/images?" + urllib.parse.urlencode({"limit": str(PAGE), **filters})
        found: list[ImageMeta] = []
        while path:
            page = await self._service.request("GET", path, token=token)
            found += [from_wire(image) for image in page["images"]]
            path = _next(page)
        return found

    # --- the API as a user has it: documents as the service sends them -------------------------------------------

    async def document(self, image_id: str, token: str) -> dict[str, Any]:
        """Return an image's document; raise NotFound if the user may not see it."""
        return dict(await self._service.request("GET", _checked_path(image_id), token=token))

    async def documents(
        self, token: str, *, limit: int | None = None, marker: str | None = None, filters: Mapping[str, str]
    ) -> Documents:
        """Return the documents of at most `limit` images that the user may see, after the marker."""
        first = {**filters, "limit": str(min(limit or PAGE, PAGE)), **({"marker": marker} if marker else {})}
        path: str | None = "/v2/images?" + urllib.parse.urlencode(first)
        found: Documents = []
        while path and (limit is None or len(found) < limit):
            page = await self._service.request("GET", path, token=token)
            found += page["images"]
            path = _next(page)
        return found[:limit]

    async def patch(self, image_id: str, changes: Documents, token: str) -> dict[str, Any]:
        """Change an image by a JSON patch; return its document."""
        kind = {"content-type": "application/openstack-images-v2.1-json-patch"}
        path = _checked_path(image_id)
        return dict(await self._service.request("PATCH", path, changes, token=token, headers=kind))

    async def delete(self, image_id: str, token: str) -> None:
        """Delete an image."""
        await self._service.request("DELETE", _checked_path(image_id), token=token)

    @property
    def url(self) -> str | None:
        """The URL of the service as compute hosts reach it; None if it has none."""
        return self._url if self._url is None or isinstance(self._url, str) else self._url()

    def ticket_url(self, image_id: str) -> str | None:
        """Return the URL from which a host can download an image for a short time; None if the service has no URL."""
        url = self.url
        if url is None:
            return None
        address = f"{url.rstrip('/')}{_path(image_id)}/file"
        if self._tickets is None or self._now is None:
            return address
        return f"{address}?ticket={self._tickets.issue(image_id, self._now() + self._lifetime)}"


def from_wire(image: dict[str, Any]) -> ImageMeta:
    """Return an image of the API, in which attributes and properties stand side by side; cut long properties."""
    known = {name: image[name] for name in ImageMeta.__struct_fields__ if image.get(name) is not None}
    known["properties"] = {name: _kept(value) for name, value in properties_of(image).items()}
    return msgspec.convert(known, ImageMeta)


def properties_of(image: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties in an image's document, in which attributes stand beside them."""
    return {name: value for name, value in image.items() if name not in ATTRIBUTES}


def _kept(value: Any) -> Any:
    return value[:LONGEST_PROPERTY] if isinstance(value, str) else value


def _next(page: Mapping[str, Any]) -> str | None:
    following: str | None = page.get("next")
    return following if following and _NEXT.match(following) else None


def _checked_path(image_id: str) -> str:
    if image_id in ("", ".", ".."):  # they would change the path
        raise NotFound(f"There is no image '{image_id}'.")
    return _path(image_id)


def _path(image_id: str) -> str:
    # Quoted, because the id comes from the user and must not change the path.
    return f"/v2/images/{urllib.parse.quote(image_id, safe='')}"

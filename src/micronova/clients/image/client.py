"""The client of the image service, over the API that Glance and the embedded service share."""

import re
import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.http.tickets import Tickets
from micronova.objects.errors import NotFound
from micronova.objects.image import LONGEST_PROPERTY, ImageMeta

TICKET_LIFETIME = 900.0  # seconds within which a host has to start the download

# Attributes of an image: the API shows properties beside them in one flat object.
_ATTRIBUTES = frozenset(ImageMeta.__struct_fields__) | {
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
        if image_id in ("", ".", ".."):  # they would change the path
            raise NotFound(f"There is no image '{image_id}'.")
        return from_wire(await self._service.request("GET", _path(image_id), token=token))

    async def list(self, token: str | None = None, **filters: str) -> list[ImageMeta]:
        """Return all images that the user may see and that match the filters; read page by page."""
        path: str | None = "/v2/images?" + urllib.parse.urlencode({"limit": "1000", **filters})
        found: list[ImageMeta] = []
        while path:
            page = await self._service.request("GET", path, token=token)
            found += [from_wire(image) for image in page["images"]]
            following = page.get("next")
            path = following if following and _NEXT.match(following) else None
        return found

    def ticket_url(self, image_id: str) -> str | None:
        """Return the URL from which a host can download an image for a short time; None if the service has no URL."""
        if self._url is None:
            return None
        url = self._url if isinstance(self._url, str) else self._url()
        address = f"{url.rstrip('/')}{_path(image_id)}/file"
        if self._tickets is None or self._now is None:
            return address
        return f"{address}?ticket={self._tickets.issue(image_id, self._now() + self._lifetime)}"


def from_wire(image: dict[str, Any]) -> ImageMeta:
    """Return an image of the API, in which attributes and properties stand side by side; cut long properties."""
    known = {name: image[name] for name in ImageMeta.__struct_fields__ if image.get(name) is not None}
    known["properties"] = {name: _kept(value) for name, value in image.items() if name not in _ATTRIBUTES}
    return msgspec.convert(known, ImageMeta)


def _kept(value: Any) -> Any:
    return value[:LONGEST_PROPERTY] if isinstance(value, str) else value


def _path(image_id: str) -> str:
    # Quoted, because the id comes from the user and must not change the path.
    return f"/v2/images/{urllib.parse.quote(image_id, safe='')}"

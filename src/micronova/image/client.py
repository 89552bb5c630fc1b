"""What compute needs of the image service, over its public API: a real Glance and the embedded one alike."""

import re
import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.http.tickets import Tickets
from micronova.objects.errors import NotFound
from micronova.objects.image import ImageMeta

TICKET_LIFETIME = 900.0  # seconds: a host that begins to download later asks for a new order

# What is not a property, although it stands beside the properties in an image's one flat object.
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
    """Asks the image service, on behalf of a user or as compute's own service user.

    With `tickets`, whose key the embedded service shares, hosts download without a token. A real Glance knows
    no tickets: without them `ticket_url` is the plain address, and the host needs a token of its own.
    """

    def __init__(
        self,
        service: ServiceClient,
        *,
        url: str | None = None,
        tickets: Tickets | None = None,
        now: Callable[[], float] | None = None,
        lifetime: float = TICKET_LIFETIME,
    ) -> None:
        self._service = service
        self._url = url.rstrip("/") if url else None  # of the service as compute hosts reach it, without /v2
        self._tickets = tickets
        self._now = now
        self._lifetime = lifetime

    async def get(self, image_id: str, token: str | None = None) -> ImageMeta:
        """Return an image that the user may know of; NotFound otherwise."""
        if image_id in ("", ".", ".."):  # no ids, but parts of a path that mean something else
            raise NotFound(f"There is no image '{image_id}'.")
        return from_wire(await self._service.request("GET", _path(image_id), token=token))

    async def list(self, token: str | None = None, **filters: str) -> list[ImageMeta]:
        """Return all images that the user may know of and that pass the filters, page by page."""
        path: str | None = "/v2/images?" + urllib.parse.urlencode({"limit": "1000", **filters})
        found: list[ImageMeta] = []
        while path:
            page = await self._service.request("GET", path, token=token)
            found += [from_wire(image) for image in page["images"]]
            following = page.get("next")
            path = following if following and _NEXT.match(following) else None
        return found

    def ticket_url(self, image_id: str) -> str | None:
        """Return where a host can fetch the image's data for a short time; None when there is no address."""
        if self._url is None:
            return None
        address = f"{self._url}{_path(image_id)}/file"
        if self._tickets is None or self._now is None:
            return address
        return f"{address}?ticket={self._tickets.issue(image_id, self._now() + self._lifetime)}"


def from_wire(image: dict[str, Any]) -> ImageMeta:
    """Read an image as an image service shows it: attributes, and properties beside them."""
    known = {name: image[name] for name in ImageMeta.__struct_fields__ if image.get(name) is not None}
    known["properties"] = {name: value for name, value in image.items() if name not in _ATTRIBUTES}
    return msgspec.convert(known, ImageMeta)


def _path(image_id: str) -> str:
    # A user may have sent anything as an id: quoted, it cannot lead anywhere else.
    return f"/v2/images/{urllib.parse.quote(image_id, safe='')}"

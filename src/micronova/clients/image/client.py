"""The client of the image service, over the API that Glance and the embedded service share."""

import re
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.http.tickets import Tickets, download_subject, manage_subject, upload_subject
from micronova.objects.errors import NotFound, Unavailable
from micronova.objects.image import BACKUP, LONGEST_PROPERTY, MAPPING, ImageMeta

TICKET_LIFETIME = 900.0  # seconds within which a host has to start the download or upload

PAGE = 100
"""Images that are asked for at once. The embedded service sends fewer if they are large; Glance does not."""

Documents = list[dict[str, Any]]

# Attributes of an image: the API shows properties beside them in one flat object.
_OURS = frozenset(ImageMeta.__struct_fields__) - {
    "signature", "kernel", "ramdisk", MAPPING,  # made of properties
}  # fmt: skip
ATTRIBUTES = _OURS | {
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

    `tickets`, whose key the embedded service shares, let hosts download and upload without a token. Glance does not
    know tickets: without them `download_url` is the plain URL.
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
        page = int(filters.pop("limit", PAGE))
        return [from_wire(image) async for found in self.pages(token, page=page, filters=filters) for image in found]

    # --- the API as a user has it: documents as the service sends them -------------------------------------------

    async def document(self, image_id: str, token: str | None) -> dict[str, Any]:
        """Return an image's document; raise NotFound if the user may not see it."""
        return dict(await self._service.request("GET", _checked_path(image_id), token=token))

    async def pages(
        self, token: str | None, *, page: int = PAGE, marker: str | None = None, filters: Mapping[str, str]
    ) -> AsyncGenerator[Documents]:
        """Return the documents of the images that the user may see, after the marker, page by page.

        Without a token: that the service user may see. The documents of one page may have megabytes: what a caller
        keeps of them has to be little, or limited.
        """
        first = {**filters, "limit": str(page), **({"marker": marker} if marker else {})}
        path: str | None = "/v2/images?" + urllib.parse.urlencode(first)
        while path:
            answer = await self._service.request("GET", path, token=token)
            path = _next(answer)
            yield answer["images"]

    async def patch(self, image_id: str, changes: Documents, token: str) -> dict[str, Any]:
        """Change an image by a JSON patch; return its document."""
        kind = {"content-type": "application/openstack-images-v2.1-json-patch"}
        path = _checked_path(image_id)
        return dict(await self._service.request("PATCH", path, changes, token=token, headers=kind))

    async def delete(self, image_id: str, token: str) -> None:
        """Delete an image."""
        await self._service.request("DELETE", _checked_path(image_id), token=token)

    # --- images of servers ---------------------------------------------------------------------------------------

    async def create(self, document: Mapping[str, Any], token: str, *, share_with: str | None = None) -> None:
        """Create an image without data as the user; let another project use it, too."""
        await self._service.request("POST", "/v2/images", dict(document), token=token)
        if share_with is not None:
            path = f"{_checked_path(document['id'])}/members"
            await self._service.request("POST", path, {"member": share_with}, token=token)

    async def create_without_data(
        self, document: Mapping[str, Any], token: str, *, share_with: str | None = None
    ) -> None:
        """Create an image as the user that is active and has no data: its properties are all that there is to it.

        Glance makes an image active when it gets data of known formats, be it none.
        """
        formats = {"disk_format": "qcow2", "container_format": "bare"}
        await self.create({**document, **formats}, token, share_with=share_with)
        await self._service.upload(f"{_checked_path(document['id'])}/file", b"", token=token)

    async def backups(self, instance_uuid: str, backup_type: str, *, owner: str, token: str) -> Sequence[str]:
        """Return the ids of the backups of a server that a project has and the user may see, the newest first."""
        wanted = {"instance_uuid": instance_uuid, "backup_type": backup_type, "image_type": BACKUP}
        order = {"sort_key": "created_at", "sort_dir": "desc"}
        filters = {**wanted, **order, "owner": owner, "status": "active"}
        return [image["id"] async for page in self.pages(token, filters=filters) for image in page]

    async def status_of_made(self, image_id: str) -> str | None:
        """Return the status of an image that was made from a server; None if there is none any more."""
        try:
            return str((await self._manage("GET", image_id))["status"])
        except NotFound:
            return None

    async def get_made(self, image_id: str) -> ImageMeta:
        """Return an image that was made from a server; raise NotFound if there is none."""
        return from_wire(await self._manage("GET", image_id))

    async def document_as_service(self, image_id: str) -> dict[str, Any]:
        """Return an image without the user's token. The caller has checked that the user may see it. Raise NotFound."""
        return dict(await self._manage("GET", image_id))

    async def delete_made(self, image_id: str) -> None:
        """Delete an image that was made from a server; raise NotFound if there is none."""
        await self._manage("DELETE", image_id)

    async def _manage(self, method: str, image_id: str) -> Any:
        """Look after an image on behalf of the user who has asked for it, whose token is gone: by a ticket.

        The service user could not: it may do no more with images than anybody else. Raise NotFound only if the service
        says of this image that there is none, because the caller then gives up what the image was for; at a wrong path
        or endpoint another 404 is possible.
        """
        path, token = _checked_path(image_id), None
        if self._tickets is not None and self._now is not None:
            ticket = self._tickets.issue(manage_subject(image_id), self._now() + self._lifetime)
            path, token = f"{path}?ticket={ticket}", ""
        try:
            return await self._service.request(method, path, token=token)
        except NotFound as error:
            if image_id in error.message:
                raise
            raise Unavailable(f"The image service does not know what image {image_id} is: {error.message}") from error

    @property
    def url(self) -> str | None:
        """The URL of the service as compute hosts reach it; None if it has none."""
        return self._url if self._url is None or isinstance(self._url, str) else self._url()

    def download_url(self, image_id: str) -> str | None:
        """Return the URL from which a host can download an image for a short time; None if the service has no URL."""
        url = self.url
        if url is None:
            return None
        address = f"{url.rstrip('/')}{_path(image_id)}/file"
        if self._tickets is None or self._now is None:
            return address
        ticket = self._tickets.issue(download_subject(image_id), self._now() + self._lifetime)
        return f"{address}?ticket={ticket}"

    @property
    def takes_uploads(self) -> bool:
        """Whether hosts can upload images."""
        return self._tickets is not None and self._now is not None

    def upload_url(self, image_id: str, host: str) -> str | None:
        """Return the URL with which this host can upload this image once, for a short time; None if it cannot."""
        url = self.url
        if url is None or self._tickets is None or self._now is None:
            return None
        ticket = self._tickets.issue(upload_subject(image_id, host), self._now() + self._lifetime)
        query = urllib.parse.urlencode({"host": host, "ticket": ticket})
        return f"{url.rstrip('/')}{_path(image_id)}/file?{query}"


def from_wire(image: dict[str, Any]) -> ImageMeta:
    """Return an image of the API, in which attributes and properties stand side by side; cut long properties."""
    known = {name: image[name] for name in _OURS if image.get(name) is not None}
    known["properties"] = {name: _kept(value) for name, value in properties_of(image).items() if name != MAPPING}
    known[MAPPING] = _mapping(image.get(MAPPING))
    return msgspec.convert(known, ImageMeta)


def _mapping(value: Any) -> str:
    """Return the block devices of an image as JSON, as the API has them; "" if there are none."""
    if value in (None, "", "[]", []):
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


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

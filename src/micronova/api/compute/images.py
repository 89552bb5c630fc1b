"""Images (until 2.35), as the image service shows them to the user."""

import contextlib
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from micronova.api.inputs import NoQuery, Query
from micronova.api.links import LINKS, Links
from micronova.api.view import OMIT, Field, View
from micronova.clients.image.client import PAGE, ImageClient, properties_of
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import until
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.guest_properties import disk_config_of

_STATUS = {
    "active": "ACTIVE",
    "queued": "SAVING",
    "saving": "SAVING",
    "deleted": "DELETED",
    "pending_delete": "DELETED",
    "killed": "ERROR",
}
_PROGRESS = {"queued": 25, "saving": 50, "active": 100}
# Query parameter -> filter of the image service. Any property is a filter, too: property-NAME.
_FILTERS = {
    "name": "name",
    "status": "status",
    "changes-since": "updated_at",
    "server": "instance_uuid",
    "type": "image_type",
    "minRam": "min_ram",
    "minDisk": "min_disk",
}
MOST_IMAGES = 1000  # of one answer; a link leads to the others
MOST_BYTES = 4 << 20  # of the properties in one answer
_Page = Annotated[int, Meta(ge=1)]


class ListQuery(Query):
    """The page of a list; `_filters` reads the filters."""

    limit: _Page | UnsetType = UNSET
    page_size: _Page | UnsetType = UNSET
    marker: str | UnsetType = UNSET
    offset: _Page | UnsetType = UNSET


class ImageLinks(Links):
    """The links of images: their third one leads to the image service."""

    def __init__(self, request: Request, client: ImageClient) -> None:
        super().__init__(request)
        self.image_service = (client.url or self.bookmark).rstrip("/")

    def of_image(self, id: str) -> list[dict[str, str]]:
        """Return the links of an image."""
        other = {"rel": "alternate", "type": "application/vnd.openstack.image"}
        return [*self.of("images", id), {**other, "href": f"{self.image_service}/images/{id}"}]


def _server(image: dict[str, Any], links: ImageLinks) -> Any:
    server = image.get("instance_uuid")
    return OMIT if server is None else {"id": server, "links": links.of("servers", server)}


def _disk_config(image: dict[str, Any], _: ImageLinks) -> Any:
    value = image.get("auto_disk_config")
    return OMIT if value is None else disk_config_of(value)


_BRIEF = (
    Field("id", "id", type=str),
    Field("name", lambda image, _: image.get("name"), type=str | None),
    Field("links", lambda image, links: links.of_image(image["id"]), type=LINKS),
)
BRIEF = View(*_BRIEF, keyed=True)
FULL = View(
    *_BRIEF,
    Field("minRam", lambda image, _: image.get("min_ram") or 0, type=int),
    Field("minDisk", lambda image, _: image.get("min_disk") or 0, type=int),
    Field("metadata", lambda image, _: properties_of(image), type=dict[str, str]),
    Field("created", "created_at", type=str),
    Field("updated", "updated_at", type=str),
    Field("status", lambda image, _: _STATUS.get(image["status"], "UNKNOWN"), type=str),
    Field("progress", lambda image, _: _PROGRESS.get(image["status"], 0), type=int),
    Field("OS-EXT-IMG-SIZE:size", lambda image, _: image.get("size") or 0, type=int),
    Field("server", _server, optional=True, type={"id": str, "links": LINKS}),
    Field("OS-DCF:diskConfig", _disk_config, optional=True, type=Literal["AUTO", "MANUAL"]),
    keyed=True,
)


def _filters(request: Request) -> dict[str, str]:
    """Return the filters of a list in the image service's words."""
    found = {}
    for name, values in request.raw_query.items():
        wanted = _FILTERS.get(name) or (name.removeprefix("property-") if name.startswith("property-") else None)
        if wanted:
            found[wanted] = values[-1]
    if "status" in found:
        found["status"] = found["status"].lower()
    if "updated_at" in found:
        found["updated_at"] = f"gte:{found['updated_at']}"
    if "instance_uuid" in found:  # a server may be named by its URL
        found["instance_uuid"] = found["instance_uuid"].rpartition("/")[2]
    return found


def _bytes(shown: dict[str, Any]) -> int:
    """Return about how many bytes of an image's metadata are shown."""
    return sum(len(name) + len(str(value)) for name, value in shown.get("metadata", {}).items())


class Images:
    """The handlers."""

    def __init__(self, client: ImageClient | None) -> None:
        self._client = client

    async def index(self, request: Request) -> dict[str, Any]:
        """List images by name."""
        return await self._list(request, BRIEF, "images")

    async def detail(self, request: Request) -> dict[str, Any]:
        """List images with all fields."""
        return await self._list(request, FULL, "images/detail")

    async def _list(self, request: Request, view: View, path: str) -> dict[str, Any]:
        client, query = image_service(self._client), request.query
        limit = None if isinstance(query.limit, UnsetType) else query.limit
        marker = None if isinstance(query.marker, UnsetType) else query.marker
        links, shape = ImageLinks(request, client), view.at(request.minor)
        most = min(limit or MOST_IMAGES, MOST_IMAGES)
        shown: list[dict[str, Any]] = []
        left = MOST_BYTES
        pages = client.pages(request.context.token, page=min(most, PAGE), marker=marker, filters=_filters(request))
        async with contextlib.aclosing(pages):
            try:
                async for page in pages:
                    for image in page:
                        shown.append(shape(image, links))
                        left -= _bytes(shown[-1])
                        if len(shown) == most or left <= 0:
                            more = links.next(request, path, image["id"])
                            return {"images": shown, "images_links": more}
            except NotFound as error:  # the marker
                raise Invalid(error.message) from None
        return {"images": shown}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show an image."""
        client = image_service(self._client)
        image = await client.document(id, request.context.token)
        return {"image": FULL.at(request.minor)(image, ImageLinks(request, client))}

    async def delete(self, request: Request, id: str) -> None:
        """Delete an image."""
        await image_service(self._client).delete(id, request.context.token)


def image_service(client: ImageClient | None) -> ImageClient:
    """Return the client; raise NotSupported if there is no image service."""
    if client is None:
        raise NotSupported("There is no image service.")
    return client


def routes(client: ImageClient | None) -> list[Route]:
    """Declare the routes of images; the image service decides who may do what."""
    handlers = Images(client)
    route = partial(Route, policy=AUTHENTICATED, versions=until(35), errors=(501,))
    return [
        route(
            method="GET",
            path="/images",
            handler=handlers.index,
            query=ListQuery,
            answer={"images": [BRIEF], "images_links?": LINKS},
        ),
        route(
            method="GET",
            path="/images/detail",
            handler=handlers.detail,
            query=ListQuery,
            answer={"images": [FULL], "images_links?": LINKS},
        ),
        route(method="GET", path="/images/{id}", handler=handlers.show, query=NoQuery, answer={"image": FULL}),
        route(method="DELETE", path="/images/{id}", handler=handlers.delete, status=204),
    ]

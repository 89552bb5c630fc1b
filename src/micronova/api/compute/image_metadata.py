"""The metadata of images (until 2.38), which are the properties that the image service keeps."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from micronova.api.compute.images import image_service
from micronova.api.compute.server_metadata import MetaBody, MetadataBody
from micronova.api.inputs import NoQuery
from micronova.clients.image.client import ATTRIBUTES, ImageClient, properties_of
from micronova.db import quotas
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import until
from micronova.objects.errors import Invalid, NotFound, QuotaExceeded


class ImageMetadata:
    """The handlers."""

    def __init__(self, database: Database, client: ImageClient | None, quota_defaults: Mapping[str, int]) -> None:
        self._database = database
        self._client = client
        self._quota_defaults = quota_defaults

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List an image's metadata."""
        return {"metadata": await self._properties(request, id)}

    async def show(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Show one item."""
        return {"meta": {key: (await self._existing(request, id, key))[key]}}

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Add or change items."""
        known = await self._properties(request, id)
        return {"metadata": await self._replace(request, id, known, {**known, **request.body.metadata})}

    async def update_all(self, request: Request, id: str) -> dict[str, Any]:
        """Replace all items."""
        known = await self._properties(request, id)
        return {"metadata": await self._replace(request, id, known, request.body.metadata)}

    async def update(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Set one item."""
        meta = request.body.meta
        if key not in meta:
            raise Invalid("Request body and URI mismatch: the item's key must be the one in the URL.")
        known = await self._properties(request, id)
        await self._replace(request, id, known, {**known, **meta})
        return {"meta": meta}

    async def delete(self, request: Request, id: str, key: str) -> None:
        """Delete one item."""
        known = await self._existing(request, id, key)
        await self._replace(request, id, known, {name: value for name, value in known.items() if name != key})

    async def _properties(self, request: Request, id: str) -> dict[str, Any]:
        return properties_of(await image_service(self._client).document(id, request.context.token))

    async def _existing(self, request: Request, id: str, key: str) -> dict[str, Any]:
        known = await self._properties(request, id)
        if key not in known:
            raise NotFound(f"Metadata item {key[:64]} was not found")
        return known

    async def _replace(
        self, request: Request, id: str, known: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Make an image's properties what is wanted; return them."""
        attributes = sorted(ATTRIBUTES & wanted.keys())
        if attributes:
            raise Invalid(f"Metadata must not have the names of an image's attributes: {', '.join(attributes)}.")
        if len(wanted) > len(known):
            await self._check_quota(request, len(wanted))
        changes: list[dict[str, Any]] = [{"op": "remove", "path": f"/{name}"} for name in known if name not in wanted]
        changes += [
            {"op": "replace" if name in known else "add", "path": f"/{name}", "value": value}
            for name, value in wanted.items()
            if known.get(name) != value
        ]
        if not changes:
            return dict(wanted)
        return properties_of(await image_service(self._client).patch(id, changes, request.context.token))

    async def _check_quota(self, request: Request, count: int) -> None:
        project = request.context.project_id
        limits = await self._database.read(quotas.limits_for, project, self._quota_defaults)
        if quotas.exceeds(limits, "metadata_items", count):
            raise QuotaExceeded(f"Image metadata limit exceeded: at most {limits['metadata_items']} items.")


def routes(database: Database, client: ImageClient | None, quota_defaults: Mapping[str, int]) -> list[Route]:
    """Declare the routes of metadata; the image service decides who may do what."""
    handlers = ImageMetadata(database, client, quota_defaults)
    route = partial(Route, policy=AUTHENTICATED, versions=until(38), errors=(501,))
    items, item = {"metadata": dict[str, str]}, {"meta": dict[str, str]}
    root = "/images/{id}/metadata"
    one = f"{root}/{{key}}"
    return [
        route(method="GET", path=root, handler=handlers.index, query=NoQuery, answer=items),
        route(method="POST", path=root, handler=handlers.create, body=MetadataBody, answer=items),
        route(method="PUT", path=root, handler=handlers.update_all, body=MetadataBody, answer=items),
        route(method="GET", path=one, handler=handlers.show, query=NoQuery, answer=item),
        route(method="PUT", path=one, handler=handlers.update, body=MetaBody, answer=item),
        route(method="DELETE", path=one, handler=handlers.delete, status=204),
    ]

"""Images: create, list, show, change, delete, tags, deactivate and reactivate."""

from functools import partial
from typing import Any

import msgspec

from micronova.embedded.image import attributes, listing, patch, queries, task_queries, views
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import ACTIVE, DEACTIVATED, IMPORT_METHODS, QUEUED, Image
from micronova.embedded.image.store import Store
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import Forbidden, Invalid, NotFound

_DEFAULTS: dict[str, Any] = {
    "name": None,
    "visibility": "shared",
    "protected": False,
    "os_hidden": False,
    "disk_format": None,
    "container_format": None,
    "min_disk": 0,
    "min_ram": 0,
    "tags": [],
}
_VISIBILITY_RULES = {"public": "publicize_image", "community": "communitize_image"}


class ImageHandlers:
    """The handlers of images."""

    def __init__(self, core: Core, store: Store, *, max_property_bytes: int, project_images: int | None) -> None:
        """`max_property_bytes` are the bytes of an image's properties; `project_images` is what a project may have."""
        self._core = core
        self._store = store
        self._max_property_bytes = max_property_bytes
        self._project_images = project_images

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/v2/images", "/v2/images/{image_id}"
        tag = f"{one}/tags/{{tag}}"
        deactivate, reactivate = f"{one}/actions/deactivate", f"{one}/actions/reactivate"
        route = partial(Route, checks_policy=True)
        return [
            Route(method="GET", path=all_, handler=self.list, policy="get_images"),
            route(
                method="POST",
                path=all_,
                handler=self.create,
                policy="add_image",
                body=dict[str, Any],
                status=201,
            ),
            route(method="GET", path=one, handler=self.show, policy="get_image", takes_ticket=True),
            route(method="PATCH", path=one, handler=self.patch, policy="modify_image", body=list[Any]),
            route(
                method="DELETE",
                path=one,
                handler=self.delete,
                policy="delete_image",
                status=204,
                takes_ticket=True,
            ),
            route(method="GET", path=f"{one}/tasks", handler=self.tasks, policy="get_image"),
            route(method="PUT", path=tag, handler=self.add_tag, policy="modify_image", status=204),
            route(method="DELETE", path=tag, handler=self.remove_tag, policy="modify_image", status=204),
            route(method="POST", path=deactivate, handler=self.deactivate, policy="deactivate", status=204),
            route(method="POST", path=reactivate, handler=self.reactivate, policy="reactivate", status=204),
        ]

    async def create(self, request: Request) -> Response:
        """Create an image without data."""
        body: dict[str, Any] = request.body
        image_id = attributes.check("id", body.pop("id", self._core.new_id()), attributes.ID)
        fields = {**_DEFAULTS, "owner": request.context.project_id or None}
        properties: dict[str, str | None] = {}
        for name, value in body.items():
            attributes.check_writable(name)
            checked = attributes.check(name, value)
            if name in attributes.WRITABLE:
                fields[name] = checked
            else:
                properties[name] = checked
        now = self._core.now()
        fields["tags"] = attributes.unique(fields["tags"])
        image = Image(id=image_id, status=QUEUED, created_at=now, updated_at=now, properties=properties, **fields)
        attributes.check_amounts(image.tags, image.properties, {}, self._max_property_bytes)
        request.authorize(image.target_for(request.context.project_id))
        self._authorize_visibility(request, None, image)
        await self._core.database.write(queries.create, image, self._project_images)
        headers = {
            "location": f"{request.base_url}/v2/images/{image_id}",
            "openstack-image-import-methods": ",".join(IMPORT_METHODS),
        }
        return Response(body=views.image(image), headers=headers)

    async def list(self, request: Request) -> dict[str, Any]:
        """List the images that the caller may see."""
        wanted = listing.read(request.raw_query)
        found = await self._core.database.read(
            queries.list_images, wanted, request.context.project_id, request.context.is_admin
        )
        if found is None:
            raise Invalid(f"Invalid query parameter 'marker': there is no image {str(wanted.marker)[:64]}.")
        shown, more = found
        return {
            "images": [views.image(image) for image in shown],
            "schema": "/v2/schemas/images",
            **listing.links("/v2/images", request.raw_query, shown[-1].id if shown and more else None),
        }

    async def show(self, request: Request, image_id: str) -> dict[str, Any]:
        """Show one image."""
        return views.image(await self._core.load(request, image_id))

    async def patch(self, request: Request, image_id: str) -> dict[str, Any]:
        """Change an image by JSON patch."""
        changes = patch.read(request.media_type, request.body)

        def alter(image: Image) -> Image:
            is_admin = request.context.is_admin
            altered = patch.apply(image, changes, is_admin=is_admin, max_property_bytes=self._max_property_bytes)
            self._authorize_visibility(request, image, altered)
            return altered

        return views.image(await self._core.change(request, image_id, "modify_image", alter))

    async def delete(self, request: Request, image_id: str) -> None:
        """Delete an image and its data."""

        def check(image: Image) -> None:
            if image.protected:
                raise Forbidden(f"Image {image_id} is protected: set 'protected' to false before deleting it.")

        await self._core.delete(request, image_id, check)
        await self._store.remove(image_id)  # after a crash before this, the sweep at the next start removes the file

    async def add_tag(self, request: Request, image_id: str, tag: str) -> None:
        """Add a tag to an image, which may have it already."""
        attributes.check("tags", [tag])

        def alter(image: Image) -> Image:
            altered = msgspec.structs.replace(image, tags=attributes.unique([*image.tags, tag]))
            attributes.check_amounts(altered.tags, altered.properties, image.properties, self._max_property_bytes)
            return altered

        await self._core.change(request, image_id, "modify_image", alter)

    async def remove_tag(self, request: Request, image_id: str, tag: str) -> None:
        """Remove a tag from an image."""

        def alter(image: Image) -> Image:
            if tag not in image.tags:
                raise NotFound(f"Image {image_id} has no tag '{tag[:64]}'.")
            return msgspec.structs.replace(image, tags=tuple(other for other in image.tags if other != tag))

        await self._core.change(request, image_id, "modify_image", alter)

    async def deactivate(self, request: Request, image_id: str) -> None:
        """Deactivate an image: only administrators can download its data."""
        await self._set_status(request, image_id, "deactivate", DEACTIVATED)

    async def reactivate(self, request: Request, image_id: str) -> None:
        """Reactivate an image."""
        await self._set_status(request, image_id, "reactivate", ACTIVE)

    async def _set_status(self, request: Request, image_id: str, action: str, status: str) -> None:
        def alter(image: Image) -> Image:
            if image.status not in (ACTIVE, DEACTIVATED):
                raise Forbidden(f"There is nothing to {action}: the image is {image.status}.")
            return msgspec.structs.replace(image, status=status)

        await self._core.change(request, image_id, action, alter)

    async def tasks(self, request: Request, image_id: str) -> dict[str, Any]:
        """List the tasks of an image: its import."""
        await self._core.load(request, image_id)
        found = await self._core.database.read(task_queries.of_image, image_id, self._core.now())
        return {"tasks": [views.task(task, details=True) for task in found]}

    def _authorize_visibility(self, request: Request, old: Image | None, new: Image) -> None:
        rule = _VISIBILITY_RULES.get(new.visibility)
        if rule and (old is None or old.visibility != new.visibility):
            request.authorize((old or new).target_for(request.context.project_id), rule)

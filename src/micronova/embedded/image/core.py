"""What all handlers share: load an image for a caller, and change it without losing concurrent changes."""

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator

import msgspec

from micronova.db.engine import Database
from micronova.embedded.common.revisions import Contended, retry
from micronova.embedded.image import attributes, queries
from micronova.embedded.image.model import Image
from micronova.http.request import Request
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, NotFound

Alter = Callable[[Image], Image]

_UUID = re.compile(attributes.UUID)


def random_id() -> str:
    """Return a new id."""
    return str(uuid.uuid4())


class Core:
    """The shared objects of all handlers, and access to images with the rules about who may see and change them."""

    def __init__(self, database: Database, clock: Clock, new_id: Callable[[], str] = random_id) -> None:
        self.database = database
        self.clock = clock
        self.new_id = new_id

    def now(self) -> int:
        """Return the time in microseconds."""
        return micros(self.clock.now())

    async def load(self, request: Request, image_id: str, rule: str = "get_image") -> Image:
        """Return an image; raise NotFound if the caller may not see it, Forbidden if `rule` does not allow it."""
        project = request.context.project_id
        if not _UUID.fullmatch(image_id):
            raise not_found(image_id)
        image = await self.database.read(queries.get, image_id, project)
        if image is None or not image.is_visible_to(project, request.context.is_admin):
            raise not_found(image_id)
        target = image.target_for(project)
        if not request.allows("get_image", target):
            raise not_found(image_id)
        request.authorize(target, rule)
        return image

    async def change(self, request: Request, image_id: str, rule: str, alter: Alter) -> Image:
        """Load an image, alter it and write it back; start over if another request has changed it meanwhile."""

        async def try_change() -> Image:
            image = await self.load(request, image_id, rule)
            altered = alter(image)
            if altered == image:
                return image
            now = self.now()
            await self.database.write(queries.replace, image, altered, now)
            return msgspec.structs.replace(altered, updated_at=now, revision=image.revision + 1)

        with _refuse_when_contended(image_id):
            return await retry(try_change)

    async def delete(self, request: Request, image_id: str, allowed: Callable[[Image], None]) -> Image:
        """Delete an image, unless `allowed` raises an error; return the deleted image."""

        async def try_delete() -> Image:
            image = await self.load(request, image_id, "delete_image")
            allowed(image)
            await self.database.write(queries.delete, image, self.now())
            return image

        with _refuse_when_contended(image_id):
            return await retry(try_delete)


@contextlib.contextmanager
def _refuse_when_contended(image_id: str) -> Iterator[None]:
    try:
        yield
    except Contended:
        raise Conflict(f"Image {image_id} is being changed by others all the time: try again.") from None


def not_found(image_id: str) -> NotFound:
    """Return the error for an image that does not exist or that the caller may not see."""
    return NotFound(f"There is no image {image_id[:64]}.")

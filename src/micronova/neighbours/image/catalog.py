"""What all handlers share: finding an image for a caller, and changing it without losing others' changes."""

import re
import uuid
from collections.abc import Callable

import msgspec

from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.neighbours.image import attributes, queries
from micronova.neighbours.image.model import Image
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, NotFound

Alter = Callable[[Image], Image]

_UUID = re.compile(attributes.UUID)
_ATTEMPTS = 16  # of a change that others keep overtaking


def random_id() -> str:
    """Return an id that nobody has."""
    return str(uuid.uuid4())


class Catalog:
    """The images, behind the rules about who may know of them."""

    def __init__(self, database: Database, clock: Clock, new_id: Callable[[], str] = random_id) -> None:
        self.database = database
        self.clock = clock
        self.new_id = new_id

    def now(self) -> int:
        """The time as rows keep it."""
        return micros(self.clock.now())

    async def load(self, request: Request, image_id: str, rule: str = "get_image") -> Image:
        """Return an image that the caller may do this to: who may not know of it gets 404, others 403."""
        project = request.context.project_id
        if not _UUID.fullmatch(image_id):
            raise not_found(image_id)
        image = await self.database.read(queries.get, image_id, project)
        if image is None or not image.is_known_to(project, is_admin(request)):
            raise not_found(image_id)
        target = image.target_for(project)
        if not request.allows("get_image", target):
            raise not_found(image_id)
        request.authorize(target, rule)
        return image

    async def change(self, request: Request, image_id: str, rule: str, alter: Alter) -> Image:
        """Load an image, alter it and write it back; again from the start when somebody else was faster."""
        for _ in range(_ATTEMPTS):
            image = await self.load(request, image_id, rule)
            altered = alter(image)
            if altered == image:
                return image
            now = self.now()
            if await self.database.write(queries.replace, image, altered, now):
                return msgspec.structs.replace(altered, updated_at=now, version=image.version + 1)
        raise Conflict(f"Image {image_id} is being changed by others all the time: try again.")

    async def delete(self, request: Request, image_id: str, allowed: Callable[[Image], None]) -> Image:
        """Delete an image, unless `allowed` objects; return what it was."""
        for _ in range(_ATTEMPTS):
            image = await self.load(request, image_id, "delete_image")
            allowed(image)
            if await self.database.write(queries.delete, image, self.now()):
                return image
        raise Conflict(f"Image {image_id} is being changed by others all the time: try again.")


def is_admin(request: Request) -> bool:
    """Say whether the caller sees and changes the images of every project."""
    return request.allows("context_is_admin")


def not_found(image_id: str) -> NotFound:
    """The answer to those who ask for what is not there, or not for them."""
    return NotFound(f"There is no image {image_id[:64]}.")

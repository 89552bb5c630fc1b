"""What all handlers share: load an image for a caller, and change it without losing concurrent changes."""

import contextlib
import random
import re
from collections.abc import Callable, Iterator

import msgspec
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.common.revisions import Contended, retry
from micronova.embedded.image import attributes, queries, task_queries
from micronova.embedded.image.model import Image, Task
from micronova.http.request import Request
from micronova.http.tickets import Tickets, manage_subject
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Unauthorized
from micronova.objects.ids import new_uuid

Alter = Callable[[Image], Image]

_UUID = re.compile(attributes.UUID)


class Core:
    """The shared objects of all handlers, and access to images with the rules about who may see and change them."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random_source: random.Random | None = None,
        *,
        tickets: Tickets | None = None,
    ) -> None:
        self.database = database
        self.clock = clock
        self._random = random_source or random.Random()  # ids need not be secret
        self._tickets = tickets

    def now(self) -> int:
        """Return the time in microseconds."""
        return micros(self.clock.now())

    def new_id(self) -> str:
        """Return the id of a new object."""
        return new_uuid(self._random)

    async def load(self, request: Request, image_id: str, rule: str = "get_image") -> Image:
        """Return an image; raise NotFound if the caller may not see it, Forbidden if `rule` does not allow it.

        A conductor with a ticket for an image may do what the route is for.
        """
        if request.route.takes_ticket and "ticket" in request.raw_query:
            return await self.load_by_ticket(request, image_id, manage_subject(image_id))
        project = request.context.project_id
        if not _UUID.fullmatch(image_id):
            raise queries.no_image(image_id)
        image = await self.database.read(queries.get, image_id, project)
        if image is None or not image.is_visible_to(project, request.context.is_admin):
            raise queries.no_image(image_id)
        target = image.target_for(project)
        if not request.allows(target, "get_image"):
            raise queries.no_image(image_id)
        request.authorize(target, rule)
        return image

    async def load_by_ticket(self, request: Request, image_id: str, subject: str) -> Image:
        """Return an image to the bearer of a ticket for this subject; raise Unauthorized or NotFound."""
        self.check_ticket(request, subject)
        image = await self.database.read(queries.get, image_id, "")
        if image is None:
            raise queries.no_image(image_id)
        return image

    def check_ticket(self, request: Request, subject: str) -> None:
        """Raise Unauthorized if the request has no valid ticket for this subject."""
        if self._tickets is None:
            raise Unauthorized("This service takes no tickets.")
        self._tickets.verify(request.raw_query["ticket"][-1], subject, self.clock.now())
        request.authorized = True  # the service that issued the ticket has asked policy for the user

    async def change(
        self, request: Request, image_id: str, rule: str, alter: Alter, record: Callable[[Image], Task] | None = None
    ) -> Image:
        """Load an image, alter it and write it back; start over if another request has changed it meanwhile.

        The task that `record` returns is written in the same transaction.
        """

        async def try_change() -> Image:
            image = await self.load(request, image_id, rule)
            altered = alter(image)
            if altered == image:
                return image
            now = self.now()
            await self.database.write(_replace, image, altered, now, record(image) if record else None)
            return msgspec.structs.replace(altered, updated_at=now, revision=image.revision + 1)

        with _refuse_when_contended(image_id):
            return await retry(try_change)

    async def delete(self, request: Request, image_id: str, check: Callable[[Image], None]) -> Image:
        """Delete an image, unless `check` raises an error; return the deleted image."""

        async def try_delete() -> Image:
            image = await self.load(request, image_id, "delete_image")
            check(image)
            await self.database.write(queries.delete, image, self.now())
            return image

        with _refuse_when_contended(image_id):
            return await retry(try_delete)


def _replace(conn: sa.Connection, old: Image, new: Image, now: int, task: Task | None) -> None:
    queries.replace(conn, old, new, now)
    if task is not None:
        task_queries.add(conn, task)


@contextlib.contextmanager
def _refuse_when_contended(image_id: str) -> Iterator[None]:
    try:
        yield
    except Contended:
        raise Conflict(f"Image {image_id} is being changed by others all the time: try again.") from None

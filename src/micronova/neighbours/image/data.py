"""An image's data: upload, stage, import, download."""

import asyncio
import contextlib
import errno
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
import msgspec

from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.tickets import Tickets
from micronova.neighbours.image import queries
from micronova.neighbours.image.catalog import Catalog, is_admin, not_found
from micronova.neighbours.image.discovery import IMPORT_METHODS
from micronova.neighbours.image.model import ACTIVE, DEACTIVATED, QUEUED, SAVING, UPLOADING, Image
from micronova.neighbours.image.store import BLOCK, Store, Upload
from micronova.neighbours.image.sweep import end_dead_upload
from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    MicronovaError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)

log = logging.getLogger(__name__)

_OCTETS = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """A complete file that is not an image's data yet, as a checker sees it."""

    path: Path
    size: int
    disk_format: str | None
    container_format: str | None


# Looks at what was uploaded before anybody can use it: the place for the inspection of formats. It runs in a
# thread, reads the file as it likes, raises Invalid to refuse it, and returns the virtual size if it can.
Checker = Callable[[Uploaded], int | None]


def accept_all(_uploaded: Uploaded) -> int | None:
    """Refuse nothing, know nothing."""
    return None


class ImportMethod(msgspec.Struct):
    """How an image shall be imported."""

    name: str


class Import(msgspec.Struct):
    """The body of an import; everything about several stores is ignored, because there is one."""

    method: ImportMethod


class ImageData:
    """The handlers; `routes` declares them."""

    def __init__(
        self,
        catalog: Catalog,
        store: Store,
        *,
        tickets: Tickets | None,
        check: Checker,
        max_size: int,
        project_limit: int | None,
        idle_timeout: float,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._tickets = tickets
        self._check = check
        self._max_size = max_size
        self._project_limit = project_limit
        self._idle_timeout = idle_timeout

    def routes(self) -> list[Route]:
        """Declare the routes."""
        one = "/v2/images/{image_id}"
        file, stage, import_ = f"{one}/file", f"{one}/stage", f"{one}/import"
        route = partial(Route, checks_policy=True)
        receive = partial(route, method="PUT", policy="upload_image", raw_body=True, status=204)
        return [
            receive(path=file, handler=self.upload),
            receive(path=stage, handler=self.stage),
            route(method="GET", path=file, handler=self.download, policy="download_image", takes_ticket=True),
            route(
                method="POST",
                path=import_,
                handler=self.import_,
                policy="modify_image",
                body=Import,
                status=202,
            ),
        ]

    async def upload(self, request: Request, image_id: str) -> None:
        """Take an image's data; it is active when this is answered."""
        image = await self._catalog.load(request, image_id, "upload_image")
        await self._receive(request, image, SAVING, ACTIVE)

    async def stage(self, request: Request, image_id: str) -> None:
        """Take an image's data, to be made the image's by an import."""
        image = await self._catalog.load(request, image_id, "upload_image")
        await self._receive(request, image, UPLOADING, UPLOADING)

    async def import_(self, request: Request, image_id: str) -> None:
        """Make staged data the image's."""
        body: Import = request.body
        if body.method.name not in IMPORT_METHODS:
            raise Invalid(f"Unknown import method '{body.method.name[:64]}': use {IMPORT_METHODS[0]}.")

        def alter(image: Image) -> Image:
            if not image.is_staged:
                raise Conflict(f"Image {image_id} is {image.status}: stage its data before importing it.")
            return msgspec.structs.replace(image, status=ACTIVE)

        await self._catalog.change(request, image_id, "modify_image", alter)

    async def download(self, request: Request, image_id: str) -> Response:
        """Give out an image's data, to those who may have it or who carry a ticket for it."""
        ticket = request.raw_query.get("ticket")
        if ticket is not None:
            image = await self._by_ticket(request, image_id, ticket[-1])
        else:
            image = await self._catalog.load(request, image_id, "download_image")
        if image.status == DEACTIVATED and (ticket is not None or not is_admin(request)):
            raise Forbidden(f"Image {image_id} is deactivated: its data is withheld.")
        size = image.size or 0
        if image.status not in (ACTIVE, DEACTIVATED) or not size:
            return Response(status=204)
        headers = {"content-md5": str(image.checksum), "accept-ranges": "bytes"}
        begin, end = 0, size
        wanted = _RANGE.fullmatch(request.header("range") or "")
        if wanted and wanted[0] != "bytes=-":
            begin, end = _range(wanted[1], wanted[2], size)
            if begin >= end:
                message = f"There is no such range: the data has {size} bytes."
                body = {"message": message, "code": "416 Range Not Satisfiable"}
                return Response(body=body, status=416, headers={"content-range": f"bytes */{size}"})
            headers["content-range"] = f"bytes {begin}-{end - 1}/{size}"
            headers.pop("content-md5")  # it is the whole's
        try:
            stream = await self._store.open_download(image_id, begin, end)
        except FileNotFoundError:
            raise not_found(image_id) from None  # deleted between the look and the leap
        headers["content-length"] = str(end - begin)
        status = 206 if "content-range" in headers else 200
        return Response(status=status, headers=headers, content_type=_OCTETS, stream=stream)

    async def _by_ticket(self, request: Request, image_id: str, ticket: str) -> Image:
        if self._tickets is None:
            raise Unauthorized("This service takes no tickets.")
        self._tickets.verify(ticket, image_id, self._catalog.clock.now())
        request.authorized = True  # whoever wrote the ticket asked policy on behalf of the user
        image = await self._catalog.database.read(queries.get, image_id, "")
        if image is None:
            raise not_found(image_id)
        return image

    # --- receiving ---

    async def _receive(self, request: Request, image: Image, during: str, afterwards: str) -> None:
        kind = (request.falcon.content_type or "").partition(";")[0].strip().lower()
        if image.disk_format is None or image.container_format is None:  # which say what the data has to be
            raise Invalid("Set 'disk_format' and 'container_format' of the image before uploading its data.")
        if kind != _OCTETS:
            raise UnsupportedMediaType(f"Unsupported Content-Type {kind[:64]!r}: use {_OCTETS}.")
        if image.upload_id and await end_dead_upload(self._catalog, self._store, image.id, image.upload_id):
            log.info("ended an upload of image %s that had been interrupted", image.id)
        elif image.status != QUEUED:
            raise Conflict(f"Image {image.id} is {image.status}: data is uploaded once, while it is queued.")
        await self.receive(
            image, _chunks(request.falcon, self._idle_timeout), _announced(request), during, afterwards
        )

    async def receive(
        self, image: Image, chunks: AsyncIterator[bytes], announced: int | None, during: str, afterwards: str
    ) -> None:
        """Write data to a file aside, have it checked, and make it the image's; or leave no trace."""
        room = await self._room(image.owner)
        if announced is not None and announced > room:
            raise self._too_large(room)
        upload = await self._store.open_upload(image.id, self._catalog.new_id())
        try:
            if not await self._catalog.database.write(
                queries.begin_upload, image.id, upload.id, during, self._catalog.now()
            ):
                raise Conflict(f"Image {image.id} is not queued any more.")
            await self._write(upload, chunks, room)
            if announced is not None and upload.size != announced:
                raise Invalid(f"{announced} bytes were announced, but {upload.size} were sent.")
            await self._store.run(upload.sync)
            uploaded = Uploaded(
                path=upload.path,
                size=upload.size,
                disk_format=image.disk_format,
                container_format=image.container_format,
            )
            data = upload.data(await self._store.run(self._check, uploaded))
            await self._store.run(upload.publish)
            now, limit = self._catalog.now(), self._project_limit
            finished = await self._catalog.database.write(
                queries.finish_upload, image.id, upload.id, afterwards, data, limit, now
            )
            if not finished:
                raise Gone(f"Image {image.id} was deleted during the upload.")
        except BaseException as error:
            # In a task of its own: the client going away, or a shutdown, must not stop the tidying up.
            await asyncio.shield(asyncio.ensure_future(self._give_up(upload)))
            if isinstance(error, OSError):
                raise _storage_error(error) from error
            raise
        await self._store.run(upload.close)

    async def _room(self, owner: str | None) -> int:
        if self._project_limit is None:
            return self._max_size
        used = await self._catalog.database.read(queries.used, owner)
        return max(0, min(self._max_size, self._project_limit - used))

    def _too_large(self, room: int) -> TooLarge:
        if room < self._max_size:
            return TooLarge(f"The project may keep {self._project_limit} bytes of images: {room} are left.")
        return TooLarge(f"An image may have {self._max_size} bytes.")

    async def _write(self, upload: Upload, chunks: AsyncIterator[bytes], room: int) -> None:
        gathered: list[bytes] = []
        size = total = 0
        async for chunk in chunks:
            size += len(chunk)
            total += len(chunk)
            if total > room:
                raise self._too_large(room)
            gathered.append(chunk)
            if size >= BLOCK:
                await self._store.run(upload.write, gathered)
                gathered, size = [], 0
        if gathered:
            await self._store.run(upload.write, gathered)

    async def _give_up(self, upload: Upload) -> None:
        """Undo an upload; what cannot be undone now (the database is away) is left for the sweep."""
        ours: bool | None = False
        try:
            ours = await self._catalog.database.write(queries.holds_upload, upload.image_id, upload.id)
        except Exception:
            log.exception("the upload of image %s is left for the next sweep", upload.image_id)
        if ours or ours is None or upload.path.suffix == ".part":
            # The file before the row: from then on another upload may use the name.
            await self._store.run(upload.discard)
        else:
            await self._store.run(upload.close)  # the commit, which seemed to fail, had succeeded
        if ours:
            with contextlib.suppress(MicronovaError):
                await self._catalog.database.write(
                    queries.abort_upload, upload.image_id, upload.id, self._catalog.now()
                )


def _announced(request: Request) -> int | None:
    """How many bytes the client says it sends; the length of a body, and the header of newer clients."""
    try:
        length = request.falcon.content_length
    except falcon.HTTPError:
        raise Invalid("Invalid header Content-Length: it must be a whole number.") from None
    named = request.header("x-openstack-image-size")
    if named is None:
        return length
    if not (named.isascii() and named.isdigit() and len(named) < 19):
        raise Invalid("Invalid header X-OpenStack-Image-Size: it must be a whole number, 0 or more.")
    if length is not None and length != int(named):
        raise Invalid("The headers X-OpenStack-Image-Size and Content-Length contradict each other.")
    return int(named)


async def _chunks(http: falcon.asgi.Request, idle_timeout: float) -> AsyncIterator[bytes]:
    """Yield a body as it arrives; a client that goes away, or sends nothing for too long, is an error."""
    stream = http.stream
    receive = stream._receive

    async def guarded() -> Any:
        event = await receive()
        if event["type"] == "http.disconnect":  # which Falcon takes for the end of the body
            raise Invalid("The client went away during the upload.")
        return event

    stream._receive = guarded
    parts = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(idle_timeout):
                part = await anext(parts, None)
        except TimeoutError:
            error = Invalid(f"Nothing was sent for {idle_timeout:g} seconds.")
            error.http_status = 408  # type: ignore[attr-defined]
            raise error from None
        if part is None:
            return
        yield part


def _range(first: str, last: str, size: int) -> tuple[int, int]:
    """Return the begin and the end of a range as clients write it: from-to, from-, or -amount."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)


def _storage_error(error: OSError) -> MicronovaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TooLarge("There is no room for the image in the store.")
    return Unavailable("The store cannot be written to.")

"""The data of an image: upload, stage, import, download."""

import asyncio
import contextlib
import errno
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
import msgspec

from micronova.embedded.image import attributes, queries
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import (
    ACTIVE,
    DEACTIVATED,
    IMPORT_METHODS,
    QUEUED,
    SAVING,
    STORE,
    UPLOADING,
    DataSummary,
    Image,
    Task,
    UploadState,
)
from micronova.embedded.image.signatures import CertificateSource, SignedData, same_signature
from micronova.embedded.image.store import BLOCK, Store, Upload
from micronova.embedded.image.sweep import abort_dead_upload
from micronova.embedded.image.task_queries import KEPT
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.tickets import download_subject, upload_subject
from micronova.objects.errors import (
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    MicronovaError,
    RequestTimeout,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
)

log = logging.getLogger(__name__)

_OCTETS = "application/octet-stream"
_RESERVE_AHEAD = 64 << 20  # bytes; so a long upload asks the database rarely, and notices soon that its image is gone
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """A completely uploaded file that has yet to be checked."""

    path: Path
    size: int
    disk_format: str | None
    container_format: str | None


# Checks an uploaded file before anybody can use it. It runs in a thread, raises Invalid to refuse the file, and
# returns the virtual size of the disk if it knows it.
Checker = Callable[[Uploaded], int | None]


def accept_all(_uploaded: Uploaded) -> int | None:
    """Accept every file; the virtual size is unknown."""
    return None


class ImportMethod(msgspec.Struct):
    """How to import an image."""

    name: str


class Import(msgspec.Struct):
    """The body of an import. `all_stores` means the one that there is."""

    method: ImportMethod
    stores: list[str] = []


def _check_stores(request: Request, stores: Sequence[str]) -> None:
    """Raise Invalid if the request names a store that does not exist."""
    named = request.falcon.get_header("x-image-meta-store")
    for store in (*stores, *([] if named is None else [named])):
        if store != STORE:
            raise Invalid(f"Unknown store '{store[:64]}': there is only '{STORE}'.")


class ImageDataHandlers:
    """The handlers of image data."""

    def __init__(
        self,
        core: Core,
        store: Store,
        *,
        check: Checker,
        max_size: int,
        project_bytes: int | None,
        project_uploads: int | None,
        idle_timeout: float,
        certificates: CertificateSource | None,
    ) -> None:
        self._core = core
        self._store = store
        self._signed = SignedData(certificates)
        self._check = check
        self._max_size = max_size
        self._project_bytes = project_bytes
        self._project_uploads = project_uploads
        self._idle_timeout = idle_timeout

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/v2/images/{image_id}"
        file, stage, import_ = f"{one}/file", f"{one}/stage", f"{one}/import"
        route = partial(Route, checks_policy=True)
        receive = partial(route, method="PUT", policy="upload_image", raw_body=True, status=204)
        return [
            receive(path=file, handler=self.upload, takes_ticket=True),
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
        """Receive the data of an image; the image is active when the request is answered.

        A host that uploads by a ticket names disk_format and container_format in the query string, because only the
        host knows them.
        """
        if "ticket" in request.raw_query:
            await self._upload_by_ticket(request, image_id)
            return
        image = await self._core.load(request, image_id, "upload_image")
        _check_stores(request, ())
        await self._receive_body(request, image, SAVING, ACTIVE)

    async def _upload_by_ticket(self, request: Request, image_id: str) -> None:
        """Receive the data of a host; the image is read in the transaction that begins the upload."""
        query = {name: values[-1] for name, values in request.raw_query.items()}
        self._core.check_ticket(request, upload_subject(image_id, query.get("host", "")))
        formats: dict[str, str] = {name: query[name] for name in ("disk_format", "container_format") if name in query}
        for name, value in formats.items():
            attributes.check(name, value)
        _check_stores(request, ())
        _check_type(request)
        declared = _declared_size(request)

        async def begin(upload: Upload) -> Image:
            for _ in range(2):
                image = await self._core.database.write(
                    queries.load_and_begin_upload, image_id, formats, upload.id, SAVING, self._core.now(),
                    **self._limits(declared),
                )  # fmt: skip
                if image is None:
                    raise queries.no_image(image_id)
                if image.upload_id == upload.id:
                    return image
                if not await self.can_receive(image):
                    raise _not_queued(image)
            raise Conflict(f"Image {image_id} is not queued any more.")

        chunks = _chunks(request.falcon, self._idle_timeout)
        await self._receive(image_id, begin, chunks, declared, ACTIVE, request.context.token)

    async def stage(self, request: Request, image_id: str) -> None:
        """Receive the data of an image without activating it; an import does that."""
        image = await self._core.load(request, image_id, "upload_image")
        await self._receive_body(request, image, UPLOADING, UPLOADING)

    async def import_(self, request: Request, image_id: str) -> None:
        """Activate an image with its staged data."""
        body: Import = request.body
        if body.method.name not in IMPORT_METHODS:
            raise Invalid(f"Unknown import method '{body.method.name[:64]}': use {IMPORT_METHODS[0]}.")
        _check_stores(request, body.stores)
        staged = await self._core.load(request, image_id, "modify_image")
        if staged.is_staged:
            await self._signed.verify(staged, self._store.path(image_id), request.context.token)

        def alter(image: Image) -> Image:
            if not image.is_staged:
                raise Conflict(f"Image {image_id} is {image.status}: stage its data before importing it.")
            if not same_signature(image, staged) or image.checksum != staged.checksum:
                raise Conflict(f"Image {image_id} was changed during the import: try again.")
            return msgspec.structs.replace(image, status=ACTIVE)

        asked = msgspec.structs.replace(body, stores=list(dict.fromkeys(body.stores)))  # no more than there are

        def record(image: Image) -> Task:
            now = self._core.now()
            return Task(
                id=self._core.new_id(),
                type="api_image_import",
                status="success",  # an import is complete when it is answered
                owner=image.owner,
                image_id=image_id,
                user_id=request.context.user_id,
                request_id=request.context.request_id,
                input={"image_id": image_id, "import_req": msgspec.to_builtins(asked), "backend": [STORE]},
                result={"image_id": image_id},
                message="",
                created_at=now,
                updated_at=now,
                expires_at=now + KEPT,
            )

        await self._core.change(request, image_id, "modify_image", alter, record)

    async def download(self, request: Request, image_id: str) -> Response:
        """Send the data of an image to a caller that policy allows or that has a ticket for it."""
        ticket = request.raw_query.get("ticket")
        if ticket is not None:
            image = await self._core.load_by_ticket(request, image_id, download_subject(image_id))
        else:
            image = await self._core.load(request, image_id, "download_image")
        if image.status == DEACTIVATED and (ticket is not None or not request.context.is_admin):
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
            headers.pop("content-md5")  # it is the checksum of the whole data
        try:
            stream = await self._store.open_download(image_id, begin, end)
        except FileNotFoundError:
            raise queries.no_image(image_id) from None  # the image was deleted meanwhile
        headers["content-length"] = str(end - begin)
        status = 206 if "content-range" in headers else 200
        return Response(status=status, headers=headers, content_type=_OCTETS, stream=stream)

    # --- receiving ---

    async def _receive_body(self, request: Request, image: Image, status_during: str, status_after: str) -> None:
        if image.disk_format is None or image.container_format is None:
            raise Invalid(queries.NO_FORMATS)
        _check_type(request)
        if not await self.can_receive(image):
            raise _not_queued(image)
        await self.receive(
            image,
            _chunks(request.falcon, self._idle_timeout),
            _declared_size(request),
            status_during,
            status_after,
            token=request.context.token,
        )

    async def can_receive(self, image: Image) -> bool:
        """Return whether an image can receive data: it is queued, or was left by a dead upload, which is aborted."""
        if image.upload_id is None:
            return image.status == QUEUED
        aborted = await abort_dead_upload(self._core, self._store, image.id, image.upload_id)
        if aborted:
            log.info("aborted an interrupted upload of image %s; a new upload begins", image.id)
        return aborted

    async def receive(
        self,
        image: Image,
        chunks: AsyncIterator[bytes],
        declared: int | None,
        status_during: str,
        status_after: str,
        *,
        token: str = "",
    ) -> None:
        """Write data to a temporary file, check it, and make it the data of the image; undo everything on an error.

        `declared` is the size that the client has announced, `token` that of the client. `status_during` and
        `status_after` are of the image.
        """

        async def begin(upload: Upload) -> Image:
            if not await self._core.database.write(
                queries.begin_upload, image, upload.id, status_during, self._core.now(), **self._limits(declared)
            ):
                raise Conflict(f"Image {image.id} is not queued any more.")
            return image

        await self._receive(image.id, begin, chunks, declared, status_after, token)

    def _limits(self, declared: int | None) -> dict[str, Any]:
        return {"max_uploads": self._project_uploads, "size": declared or 0, "max_bytes": self._project_bytes}

    async def _receive(
        self,
        image_id: str,
        begin: Callable[[Upload], Awaitable[Image]],
        chunks: AsyncIterator[bytes],
        declared: int | None,
        status_after: str,
        token: str,
    ) -> None:
        """Do what `receive` does; `begin` records the upload and returns the image."""
        if declared is not None and declared > self._max_size:
            raise self._too_large()
        upload = await self._store.open_upload(image_id, self._core.new_id())
        try:
            image = await begin(upload)
            last = await self._write(upload, chunks, declared or 0)
            summary = await self._store.run(self._complete, upload, last, image, declared)
            if status_after == ACTIVE:
                await self._signed.verify(image, upload.path, token)
            finished = await self._core.database.write(
                queries.finish_upload,
                image.id,
                upload.id,
                status_after,
                summary,
                self._project_bytes,
                self._core.now(),
            )
            if not finished:
                raise _image_deleted(image.id)
        except BaseException as error:
            # In a separate task, so that a disconnect of the client or a shutdown does not interrupt it.
            await asyncio.shield(asyncio.ensure_future(self._abort(upload)))
            if isinstance(error, OSError):
                raise _storage_error(error) from error
            raise
        upload.close()

    def _complete(self, upload: Upload, last: list[bytes], image: Image, declared: int | None) -> DataSummary:
        """Write the last blocks, check the file and publish it; return what the row will say of it."""
        upload.write(last)
        if declared is not None and upload.size != declared:
            raise Invalid(f"{declared} bytes were announced, but {upload.size} were sent.")
        virtual_size = self._check(
            Uploaded(
                path=upload.path,
                size=upload.size,
                disk_format=image.disk_format,
                container_format=image.container_format,
            )
        )
        upload.publish()
        return upload.summary(virtual_size)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"An image may have {self._max_size} bytes.")

    async def _write(self, upload: Upload, chunks: AsyncIterator[bytes], reserved: int) -> list[bytes]:
        """Write what arrives; return the last blocks, which are still to be written."""
        gathered: list[bytes] = []
        size = total = 0
        allowed = min(reserved, _RESERVE_AHEAD)
        async for chunk in chunks:
            size += len(chunk)
            total += len(chunk)
            if total > self._max_size:
                raise self._too_large()
            if total > allowed:
                allowed = await self._reserve(upload, total)
            gathered.append(chunk)
            if size >= BLOCK:
                await self._store.run(upload.write, gathered)
                gathered, size = [], 0
        return gathered

    async def _reserve(self, upload: Upload, total: int) -> int:
        """Reserve a part of the project's limit for an upload; return up to which size it needs to reserve no more.

        Raise TooLarge if the limit is reached, Gone if the image was deleted.
        """
        if self._project_bytes is None:
            return self._max_size
        ahead = total + min(total, _RESERVE_AHEAD)
        reserved = await self._core.database.write(queries.reserve, upload.id, total, ahead, self._project_bytes)
        if reserved is None:
            raise _image_deleted(upload.image_id)
        return min(reserved, total + _RESERVE_AHEAD)

    async def _abort(self, upload: Upload) -> None:
        """Undo an upload. If the database does not answer, the sweep at the next start does it."""
        state = None
        try:
            state = await self._core.database.write(queries.upload_state, upload.image_id, upload.id)
        except Exception:
            log.exception(
                "could not abort the upload of image %s; the next start of the service does it", upload.image_id
            )
        published = upload.path.suffix != ".part"
        if published and state in (UploadState.ENDED, None):
            # The commit that seemed to fail has succeeded, or may have: the file may be the image's data.
            await self._store.run(upload.close)
        else:
            # Remove the file before the row changes: after that another upload may use the name.
            await self._store.run(upload.discard)
        if state is UploadState.RUNNING:
            with contextlib.suppress(MicronovaError):
                await self._core.database.write(queries.abort_upload, upload.image_id, upload.id, self._core.now())


def _check_type(request: Request) -> None:
    if request.media_type != _OCTETS:
        raise UnsupportedMediaType(f"Unsupported Content-Type {request.media_type[:64]!r}: use {_OCTETS}.")


def _not_queued(image: Image) -> Conflict:
    return Conflict(f"Image {image.id} is {image.status}: data is uploaded once, while it is queued.")


def _declared_size(request: Request) -> int | None:
    """Return how many bytes the client announces, by Content-Length or X-OpenStack-Image-Size; None if it does not."""
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
    """Yield a body as it arrives; raise Invalid if the client disconnects, RequestTimeout if it stops sending."""
    stream = http.stream
    receive = stream._receive

    async def guarded() -> Any:
        event = await receive()
        if event["type"] == "http.disconnect":  # Falcon would take it for the end of the body
            raise Invalid("The client went away during the upload.")
        return event

    stream._receive = guarded
    parts = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(idle_timeout):
                part = await anext(parts, None)
        except TimeoutError:
            raise RequestTimeout(f"Nothing was sent for {idle_timeout:g} seconds.") from None
        if part is None:
            return
        yield part


def _range(first: str, last: str, size: int) -> tuple[int, int]:
    """Return the begin and the end of a range: `first-last`, `first-` or `-amount`."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)


def _image_deleted(image_id: str) -> Gone:
    return Gone(f"Image {image_id} was deleted during the upload.")


def _storage_error(error: OSError) -> MicronovaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TooLarge("There is no room for the image in the store.")
    return Unavailable("The store cannot be written to.")

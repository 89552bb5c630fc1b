"""Uploading an image to the URL, with a ticket, that a conductor has given to the host."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from micronova.http.client import Answer, ASGIApp, ASGITransport, error_message, host_connector
from micronova.objects.errors import OperationFailed, Unavailable

SILENCE: Final = 300.0
"""Seconds without progress after which an upload fails; a service checks a large image before it answers."""
_MOST_ANSWERED: Final = 65_536  # bytes of an answer that are read
_BUSY: Final = (408, 409, 425, 429)  # also 409: an interrupted upload of this image may not have ended yet

Parts = AsyncGenerator[bytes, None]


class ImageUploads:
    """Sends images to the image service: over HTTP, or to the service of this process."""

    def __init__(
        self,
        service: str = "",
        *,
        here: Callable[[], str] | None = None,
        application: ASGIApp | None = None,
        ca_file: str = "",
    ) -> None:
        """`service` is the URL of the image service, `ca_file` has its authorities: see `host_connector`.

        `here` returns the URL of the service of this process, if there is one, and `application` is that service.
        """
        self._service = service
        self._ca_file = ca_file
        self._here = here
        self._transport = None if application is None else ASGITransport(application)

    async def put(self, url: str, chunks: AsyncGenerator[bytes, None], size: int) -> None:
        """Upload an image of this size.

        Raise Unavailable if the service does not answer or cannot take it at the moment, OperationFailed if it
        refuses it, and what `chunks` raises.
        """
        body = _Body(chunks)
        # A service may answer before it has read all of it.
        async with aclosing(chunks), aclosing(body.parts()) as parts:
            headers = {"content-type": "application/octet-stream", "content-length": str(size)}
            if self._here is not None and self._transport is not None and url.startswith(f"{self._here()}/"):
                answer = await self._transport.request("PUT", url.removeprefix(self._here()), headers, parts)
            else:
                answer = await self._send(url, body, parts, headers)
        if body.error is not None:
            raise body.error
        if answer.status < 300:
            return
        reason = f"The image service did not take the image: it answered {answer.status} ({error_message(answer)})"
        # With Retry-After what is against it passes, such as other uploads of the project.
        if answer.status in _BUSY or answer.status >= 500 or "retry-after" in answer.headers:
            raise Unavailable(reason)
        raise OperationFailed(reason)

    async def _send(self, url: str, body: "_Body", parts: Parts, headers: dict[str, str]) -> Answer:
        import aiohttp

        try:
            connector, address = host_connector(url, self._service, self._ca_file)
        except LookupError as error:
            raise OperationFailed(f"The image cannot be uploaded: {error}.") from None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                async with session.put(address, data=parts, headers=headers, allow_redirects=False) as answer:
                    kept = {name.lower(): value for name, value in answer.headers.items()}
                    return Answer(answer.status, kept, await answer.content.read(_MOST_ANSWERED))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if body.error is not None:
                raise body.error from None
            what = str(error) or type(error).__name__
            raise Unavailable("The image service does not answer.", details=what) from error


class _Body:
    """Reads the chunks, and remembers an error of theirs: clients and servers report it as one of their own."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self._chunks = chunks
        self.error: Exception | None = None

    async def parts(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except Exception as error:
            self.error = error
            raise

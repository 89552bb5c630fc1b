"""Downloading an image from the URL, with a ticket, that an order has for it."""

from collections.abc import AsyncIterator, Callable
from typing import Final

from micronova.http.client import Answer, ASGIApp, ASGITransport, host_connector
from micronova.objects.errors import BuildFailed, Unavailable

CHUNK: Final = 1024 * 1024
READ_TIMEOUT: Final = 60.0
"""Seconds without a byte after which a download fails."""


class TicketRefused(BuildFailed):
    """The image service does not accept the ticket, e.g. because it has expired. Another ticket may work."""


async def stream(url: str, service: str = "", ca_file: str = "") -> AsyncIterator[bytes]:
    """Yield the content at a URL in chunks. `service` and `ca_file`: see `host_connector`.

    Raise Unavailable if the image service does not answer, or says that it cannot at the moment.
    """
    import aiohttp

    try:
        connector, address = host_connector(url, service, ca_file)
    except LookupError as error:
        raise BuildFailed(f"The image cannot be fetched: {error}.") from None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=READ_TIMEOUT)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            async with session.get(address, allow_redirects=False) as answer:
                _check(answer.status)
                async for chunk in answer.content.iter_chunked(CHUNK):
                    yield chunk
    except (aiohttp.ClientError, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise Unavailable("The image cannot be fetched: the image service does not answer.", details=what) from error


class ImageDownloads:
    """Fetches images: over HTTP, or from the service of this process."""

    def __init__(
        self,
        service: str = "",
        *,
        here: Callable[[], str] | None = None,
        application: ASGIApp | None = None,
        ca_file: str = "",
    ) -> None:
        """The arguments are those of `ImageUploads`."""
        self._ca_file = ca_file
        self._service = service
        self._here = here
        self._transport = None if application is None else ASGITransport(application)

    async def stream(self, url: str) -> AsyncIterator[bytes]:
        """Yield the content at a URL in chunks, as the function `stream` does."""
        if self._here is None or self._transport is None or not url.startswith(f"{self._here()}/"):
            async for chunk in stream(url, self._service, self._ca_file):
                yield chunk
            return
        path, begin = url.removeprefix(self._here()), 0
        while True:  # in parts, because a transport without a connection keeps an answer in memory
            part: Answer = await self._transport.request(
                "GET", path, {"range": f"bytes={begin}-{begin + CHUNK - 1}"}, None
            )
            if part.status != 206:
                _check(part.status)  # 204: an image without data
                return
            yield part.body
            begin += len(part.body)
            if begin >= int(part.headers["content-range"].rpartition("/")[2]):
                return


def _check(status: int) -> None:
    """Raise an error if the image service has not given the image out."""
    if status in (401, 403, 404):
        raise TicketRefused(f"The image service did not give the image out: it answered {status}.")
    if status == 429 or status >= 500:
        raise Unavailable(f"The image cannot be fetched: the image service answered {status}.")
    if status not in (200, 204):  # 204: an image without data
        raise BuildFailed(f"The image cannot be fetched: the image service answered {status}.")

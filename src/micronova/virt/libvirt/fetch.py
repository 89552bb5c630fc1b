"""Fetching an image by its ticket, piece by piece, into a file."""

import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Final

from micronova.objects.errors import BuildFailed, InsufficientResources
from micronova.objects.image import ImageMeta
from micronova.virt.libvirt.pool import Pool

PIECE: Final = 1024 * 1024
SILENCE: Final = 60.0
"""Seconds without a byte after which a download is given up."""

Stream = Callable[[str], AsyncIterator[bytes]]
Progress = Callable[[int], None]


class TicketRefused(BuildFailed):
    """The image service does not accept the ticket: too old, or of another cloud. Another one may do."""


async def stream(url: str) -> AsyncIterator[bytes]:
    """Yield what is at an address."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE)
    try:
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status in (401, 403, 404):
                    raise TicketRefused(f"The image service did not give the image out: it answered {answer.status}.")
                if answer.status not in (200, 204):  # 204: an image without data
                    raise BuildFailed(f"The image cannot be fetched: the image service answered {answer.status}.")
                async for piece in answer.content.iter_chunked(PIECE):
                    yield piece
    except (aiohttp.ClientError, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise BuildFailed("The image cannot be fetched: the image service does not answer.", details=what) from error


async def fetch(
    image: ImageMeta, url: str, target: Path, files: Pool, progress: Progress | None = None, source: Stream = stream
) -> None:
    """Write an image to a file; raise unless size and checksum are what the image service says they are."""
    algorithm, expected = _expected(image)
    writer = await files.run(_Writer, target, algorithm)
    try:
        async with aclosing(_closing(source(url))) as pieces:
            async for piece in pieces:
                await files.run(writer.write, piece)
                if image.size and writer.size > image.size:
                    raise BuildFailed(f"The image {image.id} is longer than the {image.size} bytes it should have.")
                if progress is not None and image.size:
                    progress(writer.size * 100 // image.size)
        digest = await files.run(writer.finish)
    except OSError as error:
        raise InsufficientResources(f"The image cannot be stored: {error.strerror}.") from error
    finally:
        writer.close()
    if image.size and writer.size != image.size:
        raise BuildFailed(f"Of the image {image.id} only {writer.size} of {image.size} bytes arrived.")
    if expected and digest != expected.lower():
        raise BuildFailed(f"The image {image.id} is damaged: its {algorithm} checksum is not the one it should have.")


def _expected(image: ImageMeta) -> tuple[str, str]:
    """Choose by what the image is checked: the hash that its service names, if we know the algorithm, else MD5."""
    algorithm = (image.os_hash_algo or "").lower()
    if image.os_hash_value and algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
        return algorithm, image.os_hash_value
    return "md5", image.checksum or ""


async def _closing(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in pieces:
        yield piece


class _Writer:
    """Writes and sums up; zeros become holes."""

    def __init__(self, target: Path, algorithm: str) -> None:
        self._descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._sum = hashlib.new(algorithm, usedforsecurity=False)
        self.size = 0

    def write(self, piece: bytes) -> None:
        self._sum.update(piece)
        if piece.count(0) != len(piece):
            done = 0
            while done < len(piece):
                done += os.pwrite(self._descriptor, piece[done:], self.size + done)
        self.size += len(piece)

    def finish(self) -> str:
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)
        return self._sum.hexdigest()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


Fetcher = Callable[[ImageMeta, str, Path, Pool, Progress | None], Awaitable[None]]

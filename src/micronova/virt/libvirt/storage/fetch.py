"""Downloading an image to a file."""

import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from micronova.http.image_downloads import stream
from micronova.objects.errors import BuildFailed, InsufficientResources, resource_exhausted
from micronova.objects.image import ImageMeta
from micronova.virt.libvirt.client.threads import ThreadPool

Stream = Callable[[str], AsyncIterator[bytes]]


async def fetch(
    image: ImageMeta,
    url: str,
    target: Path,
    files: ThreadPool,
    source: Stream = stream,
) -> None:
    """Download an image to a file; raise BuildFailed unless it has the size and the checksum of its metadata."""
    algorithm, expected = _expected(image)
    writer = await files.run(_Writer, target, algorithm)
    try:
        async with aclosing(_closing(source(url))) as chunks:
            async for chunk in chunks:
                await files.run(writer.write, chunk)
                if image.size and writer.size > image.size:
                    raise BuildFailed(f"The image {image.id} is longer than the {image.size} bytes it should have.")
        digest = await files.run(writer.finish)
    except OSError as error:
        lack = resource_exhausted(error)
        raise lack or InsufficientResources(f"The image cannot be stored: {error.strerror}.") from error
    finally:
        writer.close()
    if image.size and writer.size != image.size:
        raise BuildFailed(f"Of the image {image.id} only {writer.size} of {image.size} bytes arrived.")
    if expected and digest != expected.lower():
        raise BuildFailed(f"The image {image.id} is damaged: its {algorithm} checksum is not the one it should have.")


def _expected(image: ImageMeta) -> tuple[str, str]:
    """Return algorithm and checksum: the image's os_hash_value if we know its algorithm, else its MD5."""
    algorithm = (image.os_hash_algo or "").lower()
    if image.os_hash_value and algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
        return algorithm, image.os_hash_value
    return "md5", image.checksum or ""


async def _closing(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        yield chunk


class _Writer:
    """Writes a file with holes for zeros, and computes its checksum."""

    def __init__(self, target: Path, algorithm: str) -> None:
        self._descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._digest = hashlib.new(algorithm, usedforsecurity=False)
        self.size = 0

    def write(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        if chunk.count(0) != len(chunk):
            done = 0
            while done < len(chunk):
                done += os.pwrite(self._descriptor, chunk[done:], self.size + done)
        self.size += len(chunk)

    def finish(self) -> str:
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)
        return self._digest.hexdigest()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


Fetcher = Callable[[ImageMeta, str, Path, ThreadPool], Awaitable[None]]

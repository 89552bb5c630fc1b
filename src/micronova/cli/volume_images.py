"""The image service as the embedded volume service uses it."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from micronova.cli import volume_tools
from micronova.cli.wiring import Process
from micronova.clients.image.client import ImageClient
from micronova.http.image_downloads import ImageDownloads
from micronova.http.image_uploads import ImageUploads
from micronova.objects.errors import Unavailable

_HOST = "volume-service"
"""The name that tickets for uploads have in the place of a compute host's."""


class VolumeImages:
    """Implements `embedded.volume.images.Images` by the client that compute uses."""

    def __init__(self, client: ImageClient, downloads: ImageDownloads, uploads: ImageUploads) -> None:
        self._client = client
        self._downloads = downloads
        self._uploads = uploads

    async def show(self, image_id: str, token: str) -> Mapping[str, Any]:
        """Return an image that the user may see; raise NotFound."""
        return await self._client.document(image_id, token)

    async def show_as_service(self, image_id: str) -> Mapping[str, Any]:
        """Return an image without the user's token. The caller has checked that the user may see it. Raise NotFound."""
        return await self._client.document_as_service(image_id)

    async def named(self, name: str, token: str) -> list[Mapping[str, Any]]:
        """Return the images of this name that the user may see."""
        return [image async for page in self._client.pages(token, filters={"name": name}) for image in page]

    async def download(self, image_id: str) -> AsyncIterator[bytes]:
        """Yield the data of an image; a ticket replaces the token of the user, which is gone."""
        url = self._client.download_url(image_id)
        if url is None:
            raise Unavailable("The image service has no URL.")
        async for chunk in self._downloads.stream(url):
            yield chunk

    async def convert(self, source: Path, source_format: str, target: Path, size: int) -> None:
        """Convert an inspected image to a raw file, by a program that opens nothing else."""
        await volume_tools.convert(source, source_format, target, size)

    async def create(self, document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
        """Create an image without data as the user."""
        await self._client.create(document, token)
        return await self._client.document(document["id"], token)

    async def status(self, image_id: str) -> str | None:
        """Return the status of an image that was made from a volume; None if it is gone."""
        return await self._client.status_of_made(image_id)

    async def upload(self, image_id: str, chunks: AsyncGenerator[bytes, None], size: int) -> None:
        """Upload the data of an image, by a ticket."""
        url = self._client.upload_url(image_id, _HOST)
        if url is None:
            raise Unavailable("The image service takes no uploads without a token: set glance.ticket_key.")
        await self._uploads.put(url, chunks, size)


def volume_images(process: Process) -> VolumeImages | None:
    """Return what the volume service of this process uses; None without an image service."""
    client = process.clients.image_client()
    if client is None:
        return None
    return VolumeImages(client, process.clients.image_downloads(), process.clients.image_uploads())

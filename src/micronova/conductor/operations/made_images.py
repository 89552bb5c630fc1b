"""The images that were made from servers, as conductors look after them: by tickets, which they issue themselves."""

import logging
from typing import Final

from micronova.clients.image.client import ImageClient
from micronova.objects.errors import MicronovaError, NotFound, Unavailable
from micronova.objects.image import ImageMeta

log = logging.getLogger(__name__)

COMPLETE: Final = "active"
"""The status of an image that has its data."""


class MadeImages:
    """Looks for images that were made from servers, and deletes them."""

    def __init__(self, client: ImageClient | None) -> None:
        self._known = client

    @property
    def _client(self) -> ImageClient:
        if self._known is None:
            raise Unavailable("This conductor has no image service: set glance.endpoint_override.")
        return self._known

    async def status(self, image_id: str) -> str | None:
        """Return the status of an image; None if there is none."""
        return await self._client.status_of_made(image_id)

    async def get(self, image_id: str) -> ImageMeta | None:
        """Return an image; None if there is none."""
        try:
            return await self._client.get_made(image_id)
        except NotFound:
            return None

    async def delete(self, image_id: str) -> bool:
        """Delete an image if the service lets us; return whether there was one."""
        try:
            await self._client.delete_made(image_id)
        except NotFound:
            return False
        except Unavailable:
            raise
        except MicronovaError as error:
            log.warning("image %s is not deleted: %s; its owner may delete it", image_id, error)
        return True

"""Requests to fetch images to the hosts of an aggregate before servers need them."""

from collections.abc import Sequence

import msgspec

from micronova.clients.image.client import ImageClient
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import aggregates
from micronova.db.engine import Database
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound, NotSupported
from micronova.objects.image import ImageMeta
from micronova.servers.image_signatures import ImageSignatures


class CacheImagesRequests:
    """Checks the images, as the user who asks, and hands the request to a conductor."""

    def __init__(
        self,
        *,
        database: Database,
        conductor: ConductorAPI,
        image_client: ImageClient | None,
        signatures: ImageSignatures,
    ) -> None:
        self._database = database
        self._conductor = conductor
        self._image_client = image_client
        self._signatures = signatures

    async def request(self, context: RequestContext, aggregate: int, image_ids: Sequence[str]) -> None:
        """Ask for images on the hosts of an aggregate.

        Raise NotFound if there is no such aggregate, Invalid if an image cannot be used.
        """
        if len(set(image_ids)) != len(image_ids):
            raise Invalid("Duplicate images in request")
        await self._database.read(aggregates.get, aggregate)
        images = tuple([await self._image(context, id) for id in image_ids])
        await self._conductor.cache_images(context.for_bus(), aggregate, images)

    async def _image(self, context: RequestContext, id: str) -> ImageMeta:
        if self._image_client is None:
            raise NotSupported("There is no image service.")
        try:
            image = await self._image_client.get(id, context.token)
        except NotFound:
            raise Invalid(f"Image {id} could not be found.") from None
        if image.status != "active":
            raise Invalid(f"Image {id} is not active: it is {image.status}.")
        image = await self._signatures.signed(image, None, user_token=context.token, image_token=context.token)
        # A cache needs none of the properties, which may be large.
        return msgspec.structs.replace(image, properties={})

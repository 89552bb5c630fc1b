"""Reading the image that a request names."""

from micronova.clients.image.client import ImageClient
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.image import ImageMeta


async def named_image(image_client: ImageClient | None, context: RequestContext, id: str) -> ImageMeta:
    """Return the image with this id, as the user sees it; raise Invalid if there is none."""
    if image_client is None:
        return ImageMeta(id=id)
    try:
        return await image_client.get(id, context.token)
    except NotFound:
        raise Invalid(f"Invalid imageRef provided: image {id} could not be found.") from None

"""The images of a simulated host that have to be verified: it downloads no others."""

from micronova.http.image_downloads import ImageDownloads
from micronova.imageformat.signatures import DataVerifier
from micronova.objects.errors import BuildAborted, BuildFailed, Invalid
from micronova.objects.image import ImageMeta, ImageSignature
from micronova.virt.driver import GuestPlan


class SignedImages:
    """Verifies each image once, as a host does that caches it."""

    def __init__(self, images: ImageDownloads) -> None:
        self._images = images
        self._verified: set[tuple[str, ImageSignature]] = set()

    async def verify_all(self, image: ImageMeta | None, plan: GuestPlan) -> None:
        """Verify an image of a plan, its kernel and its ramdisk."""
        if image is not None:
            for each, url in (
                (image, plan.image_url),
                (image.kernel, plan.kernel_url),
                (image.ramdisk, plan.ramdisk_url),
            ):
                await self.verify(each, url)

    async def verify(self, image: ImageMeta | None, url: str | None) -> None:
        """Raise BuildAborted if an image is signed and its data is not what was signed."""
        if image is None or image.signature is None or (image.id, image.signature) in self._verified:
            return
        if url is None:
            raise BuildFailed(f"The order has no URL of the image {image.id}.")
        verifier = DataVerifier(image.signature)
        async for chunk in self._images.stream(url):
            verifier.update(chunk)
        try:
            verifier.verify()
        except Invalid as error:
            raise BuildAborted(f"The image {image.id} is refused: {error.message}.") from error
        self._verified.add((image.id, image.signature))

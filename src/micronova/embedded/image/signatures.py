"""Data of signed images is verified before they become active, if this service can get certificates."""

import asyncio
from pathlib import Path
from typing import Protocol

from micronova.embedded.image.model import Image
from micronova.embedded.image.queries import no_image
from micronova.imageformat.signatures import PROPERTIES, certificate_of, is_signed, read_signature, verify_file
from micronova.objects.errors import Invalid, NotFound


class CertificateSource(Protocol):
    """Where certificates are found by their ids."""

    async def available(self) -> bool:
        """Return whether a directory of certificates or a key manager is configured."""

    async def get(self, id: str, token: str) -> bytes:
        """Return a certificate that the user with this token may read; raise NotFound if there is none."""


class SignedData:
    """Verifies the data of images that have all properties of a signature, one image at a time.

    The threads of the store are for the blocks of uploads and downloads, which must not wait for a whole file.
    """

    def __init__(self, certificates: CertificateSource | None) -> None:
        self._certificates = certificates
        self._turn = asyncio.Lock()

    async def verify(self, image: Image, file: Path, token: str) -> None:
        """Raise Invalid if a file is not the data that the image's signature is of."""
        if self._certificates is None or not is_signed(image.properties) or not await self._certificates.available():
            return
        try:
            certificate = await self._certificates.get(certificate_of(image.properties), token)
            signature = read_signature(image.properties, certificate)
            async with self._turn:
                await asyncio.to_thread(verify_file, file, signature)
        except FileNotFoundError:
            raise no_image(image.id) from None
        except (Invalid, NotFound) as error:
            reason = error.message.removesuffix(".")
            raise Invalid(f"Signature verification failed for image {image.id}: {reason}.") from error


def same_signature(first: Image, second: Image) -> bool:
    """Return whether two states of an image have the same signature."""
    return all(first.properties.get(name) == second.properties.get(name) for name in PROPERTIES)

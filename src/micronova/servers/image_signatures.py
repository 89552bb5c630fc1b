"""Which images have to be signed, and by whom; what hosts verify their data with.

The API reads the signature and the certificates, as the user who asks, and checks the certificates. The image that a
server keeps then has the signature with its key (`ImageMeta.signature`). So every order for the server has what its
host needs, and neither hosts nor conductors ask for certificates. A server keeps its key even if the certificate
expires: it says who has signed the image, which does not change.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from micronova.clients.image.client import ImageClient, properties_of
from micronova.clients.key_manager.certificates import Certificates
from micronova.imageformat.signatures import certificate_of, check_trusted, read_signature
from micronova.objects.clock import Clock
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.image import ImageMeta, ImageSignature


@dataclass(frozen=True, kw_only=True)
class SignatureRules:
    """The settings of signed images."""

    verify: bool = False  # also images of servers without trusted certificates
    validate: bool = False  # the certificates of these, too
    default_trusted: tuple[str, ...] = ()


class ImageSignatures:
    """Gives images the signature that hosts verify, if they have to."""

    def __init__(
        self,
        *,
        image_client: ImageClient | None,
        certificates: Certificates,
        clock: Clock,
        rules: SignatureRules,
    ) -> None:
        self._image_client = image_client
        self._certificates = certificates
        self._clock = clock
        self._rules = rules

    def trusted(self, named: Sequence[str] | None) -> list[str] | None:
        """Return the ids of the certificates that a server keeps as trusted: those of the request, or the defaults."""
        if named:
            return list(named)
        rules = self._rules
        return list(rules.default_trusted) or None if rules.verify and rules.validate else None

    async def signed(
        self, image: ImageMeta, trusted: Sequence[str] | None, *, user_token: str, image_token: str | None = None
    ) -> ImageMeta:
        """Return the image with the signature that hosts verify, or without one if none has to be verified.

        Raise Invalid if the image has no signature, or none by a certificate that is trusted. The user with
        `user_token` asks for the certificates; the one with `image_token`, or without it the service user, sees the
        image.
        """
        rules = self._rules
        if not trusted and rules.validate:
            trusted = rules.default_trusted
        if not trusted and not rules.verify:
            return msgspec.structs.replace(image, signature=None)
        try:
            signature = await self._signature(image.id, trusted or (), user_token, image_token)
        except Invalid as error:
            raise Invalid(f"The signature of image {image.id} cannot be verified: {error.message}.") from error
        return msgspec.structs.replace(image, signature=signature)

    async def _signature(
        self, image_id: str, trusted: Sequence[str], user_token: str, image_token: str | None
    ) -> ImageSignature:
        if self._image_client is None:
            raise Invalid("there is no image service")
        # Read again, because images have only the beginnings of long properties.
        try:
            properties = properties_of(await self._image_client.document(image_id, image_token))
            id = certificate_of(properties)
            certificate = await self._certificates.get(id, user_token)
        except NotFound as error:
            raise Invalid(error.message.removesuffix(".")) from error
        signature = read_signature(properties, certificate)
        if trusted:
            others = await asyncio.gather(*(self._trusted(each, user_token) for each in trusted if each != id))
            anchors = [each for each in others if each is not None]
            check_trusted(certificate, [certificate, *anchors] if id in trusted else anchors, self._clock.now())
        elif self._rules.validate:
            raise Invalid("certificates have to be trusted here, and trusted_image_certificates names none")
        return signature

    async def _trusted(self, id: str, user_token: str) -> bytes | None:
        """Return a trusted certificate, or None if it does not exist."""
        try:
            return await self._certificates.get(id, user_token)
        except NotFound:
            return None

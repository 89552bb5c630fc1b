"""Certificates and signatures of images, made as an operator would."""

import base64
import functools
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding

HASHES: dict[str, Any] = {
    "SHA-224": hashes.SHA224(),
    "SHA-256": hashes.SHA256(),
    "SHA-384": hashes.SHA384(),
    "SHA-512": hashes.SHA512(),
}


@functools.cache
def new_key(kind: str, number: int = 0) -> Any:
    """Return a private key of a type; of each type there are several."""
    if kind == "RSA-PSS":
        return rsa.generate_private_key(65537, 2048)
    if kind == "DSA":
        return dsa.generate_private_key(1024)  # short: a long one takes seconds
    return ec.generate_private_key({"ECC_SECP384R1": ec.SECP384R1(), "ECC_SECP521R1": ec.SECP521R1()}[kind])


class Signer:
    """A key with its certificate, which is signed by itself or by another signer."""

    def __init__(
        self,
        kind: str = "ECC_SECP384R1",
        *,
        issuer: "Signer | None" = None,
        authority: bool = True,
        days: tuple[int, int] = (-1, 1),
        number: int = 0,
        name: str = "signer",
    ) -> None:
        self.kind = kind
        self._key = new_key(kind, number)
        now = datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate: x509.Certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.certificate.subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=authority,
                    crl_sign=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .sign((self if issuer is None else issuer)._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    def sign(self, data: bytes, method: str = "SHA-256") -> bytes:
        """Sign the data of an image."""
        algorithm = HASHES[method]
        if self.kind == "RSA-PSS":
            longest = padding.PSS(padding.MGF1(algorithm), padding.PSS.MAX_LENGTH)
            return bytes(self._key.sign(data, longest, algorithm))
        if self.kind == "DSA":
            return bytes(self._key.sign(data, algorithm))
        return bytes(self._key.sign(data, ec.ECDSA(algorithm)))

    def properties(self, data: bytes, certificate: str, method: str = "SHA-256") -> dict[str, Any]:
        """Return the properties of an image with this data, whose certificate has this id."""
        return {
            "img_signature": base64.b64encode(self.sign(data, method)).decode(),
            "img_signature_hash_method": method,
            "img_signature_key_type": self.kind,
            "img_signature_certificate_uuid": certificate,
        }

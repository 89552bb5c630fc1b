"""Signatures of images: four properties of an image, and an X.509 certificate that is kept elsewhere.

What is signed is the data of the image as it is uploaded and downloaded. A certificate is trusted if it is one of the
trusted ones, or if one of these has signed it and may sign certificates; both have to be valid at the time.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from micronova.objects.errors import Invalid
from micronova.objects.image import ImageSignature

if TYPE_CHECKING:  # imported by the functions: most clouds verify no signatures
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

SIGNATURE: Final = "img_signature"
HASH_METHOD: Final = "img_signature_hash_method"
KEY_TYPE: Final = "img_signature_key_type"
CERTIFICATE: Final = "img_signature_certificate_uuid"
PROPERTIES: Final = (SIGNATURE, HASH_METHOD, KEY_TYPE, CERTIFICATE)

HASH_METHODS: Final = ("SHA-224", "SHA-256", "SHA-384", "SHA-512")  # see `_algorithm`
_RSA_PSS, _DSA = "RSA-PSS", "DSA"
_CURVES: Final = {"ECC_SECP384R1": "secp384r1", "ECC_SECP521R1": "secp521r1"}
KEY_TYPES: Final = (_RSA_PSS, _DSA, *_CURVES)
LONGEST_SIGNATURE: Final = 4096  # characters in base64: a key of 16384 bits makes 2732
LARGEST_CERTIFICATE: Final = 65_536
_BLOCK: Final = 1 << 20


def is_signed(properties: Mapping[str, Any]) -> bool:
    """Return whether an image has all properties of a signature."""
    return all(isinstance(properties.get(name), str) for name in PROPERTIES)


def certificate_of(properties: Mapping[str, Any]) -> str:
    """Return the id of the certificate of an image's signature; raise Invalid if a property of it is missing."""
    missing = [name for name in PROPERTIES if not isinstance(properties.get(name), str)]
    if missing:
        raise Invalid(f"the image is not signed: it has no property {', '.join(missing)}")
    return str(properties[CERTIFICATE])


def read_signature(properties: Mapping[str, Any], certificate: bytes) -> ImageSignature:
    """Return the signature that an image's properties describe, with the key of its certificate; else raise Invalid."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    certificate_of(properties)  # all properties are there
    method, kind = properties[HASH_METHOD], properties[KEY_TYPE]
    _algorithm(method)
    if kind not in KEY_TYPES:
        raise Invalid(f"{KEY_TYPE} is {kind[:64]!r}, and has to be one of {', '.join(KEY_TYPES)}")
    text = properties[SIGNATURE]
    try:
        if len(text) > LONGEST_SIGNATURE:
            raise ValueError
        signature = base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error):
        raise Invalid(f"{SIGNATURE} is not a signature in base64") from None
    try:
        key = _load(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise Invalid("the key of its certificate is of an unknown type") from None
    _check_key(key, kind)
    return ImageSignature(
        signature=signature,
        hash_method=method,
        key_type=kind,
        public_key=key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    )


def check_trusted(certificate: bytes, trusted: Iterable[bytes], now: float) -> None:
    """Raise Invalid unless a certificate is valid, and is one of the trusted ones or was signed by one of them."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding

    at = datetime.fromtimestamp(now, UTC)
    signing = _load(certificate)
    if not _is_valid(signing, at):
        raise Invalid(
            f"its certificate is valid from {signing.not_valid_before_utc:%Y-%m-%d} to "
            f"{signing.not_valid_after_utc:%Y-%m-%d} only"
        )
    for each in trusted:
        try:
            anchor = _load(each)
        except Invalid:
            continue
        if anchor.public_bytes(Encoding.DER) == signing.public_bytes(Encoding.DER):
            return
        if not _is_valid(anchor, at) or not _may_sign_certificates(anchor):
            continue
        try:
            signing.verify_directly_issued_by(anchor)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return
    raise Invalid("its certificate is none of the trusted ones, and none of them has signed it")


class DataVerifier:
    """Verifies data that comes in parts."""

    def __init__(self, signature: ImageSignature) -> None:
        from cryptography.hazmat.primitives import hashes

        self._signature = signature
        self._algorithm = _algorithm(signature.hash_method)
        self._hash = hashes.Hash(self._algorithm)

    def update(self, data: bytes) -> None:
        """Take the next part."""
        self._hash.update(data)

    def verify(self) -> None:
        """Raise Invalid if the data is not what was signed. Call it once, at the end."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import dsa, ec, padding, rsa, utils
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        digest = self._hash.finalize()
        known = utils.Prehashed(self._algorithm)
        signature = self._signature.signature
        key = load_der_public_key(self._signature.public_key)
        _check_key(key, self._signature.key_type)
        try:
            if isinstance(key, rsa.RSAPublicKey):
                scheme = padding.PSS(mgf=padding.MGF1(self._algorithm), salt_length=padding.PSS.AUTO)
                key.verify(signature, digest, scheme, known)
            elif isinstance(key, dsa.DSAPublicKey):
                key.verify(signature, digest, known)
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature, digest, ec.ECDSA(known))
        except (InvalidSignature, ValueError):
            raise Invalid("its signature is not that of its data") from None


def verify_file(path: Path, signature: ImageSignature) -> None:
    """Raise Invalid if a file is not what was signed. Blocks."""
    verifier = DataVerifier(signature)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            verifier.update(block)
    verifier.verify()


def _load(certificate: bytes) -> "x509.Certificate":
    """Return a certificate from PEM or DER."""
    from cryptography import x509

    try:
        if len(certificate) > LARGEST_CERTIFICATE:
            raise ValueError
        if b"-----BEGIN" in certificate:
            return x509.load_pem_x509_certificate(certificate)
        return x509.load_der_x509_certificate(certificate)
    except ValueError:
        raise Invalid("its certificate is neither X.509 in PEM nor in DER") from None


def _check_key(key: object, kind: str) -> None:
    """Raise Invalid if a key is not of the type that the image names."""
    from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa

    fits = (
        isinstance(key, rsa.RSAPublicKey)
        if kind == _RSA_PSS
        else isinstance(key, dsa.DSAPublicKey)
        if kind == _DSA
        else isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == _CURVES.get(kind)
    )
    if not fits:
        raise Invalid(f"the key of its certificate is not of the type {kind}, which the image names")


def _algorithm(method: str) -> "hashes.HashAlgorithm":
    from cryptography.hazmat.primitives import hashes

    known: dict[str, hashes.HashAlgorithm] = {
        "SHA-224": hashes.SHA224(),
        "SHA-256": hashes.SHA256(),
        "SHA-384": hashes.SHA384(),
        "SHA-512": hashes.SHA512(),
    }
    if method not in known:
        raise Invalid(f"{HASH_METHOD} is {method[:64]!r}, and has to be one of {', '.join(HASH_METHODS)}")
    return known[method]


def _is_valid(certificate: "x509.Certificate", at: datetime) -> bool:
    return certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc


def _may_sign_certificates(certificate: "x509.Certificate") -> bool:
    """Return whether a certificate says of itself that it is one of an authority, for certificates."""
    from cryptography import x509

    try:
        extensions = certificate.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    return constraints.ca and usage.key_cert_sign

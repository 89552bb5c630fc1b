"""The cryptography of key pairs: fingerprints of public keys, and generation of key pairs."""

import base64
import binascii
import hashlib
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from micronova.objects.errors import Invalid

_USER_NAME = x509.ObjectIdentifier("1.3.6.1.4.1.311.20.2.3")  # where Windows finds the user in a certificate


def fingerprint(kind: str, public_key: str) -> str:
    """Return the fingerprint of an SSH key or of a certificate; raise Invalid when it is neither."""
    try:
        if kind == "x509":
            certificate = x509.load_pem_x509_certificate(public_key.encode())
            digest = certificate.fingerprint(hashes.SHA1()).hex()  # noqa: S303 - what the API shows
        else:
            serialization.load_ssh_public_key(public_key.encode())
            data = base64.b64decode(public_key.split()[1])
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
    except (ValueError, IndexError, TypeError, binascii.Error, UnsupportedAlgorithm):
        what = "a certificate in PEM form" if kind == "x509" else "an SSH key (TYPE BASE64 [COMMENT])"
        raise Invalid(f"Keypair data is invalid: public_key must be {what}.") from None
    return ":".join(digest[index : index + 2] for index in range(0, len(digest), 2))


def generate(kind: str, user_id: str, now: float) -> tuple[str, str]:
    """Return a new private key, and its public key or certificate. Slow: call it in a thread."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat
    private = key.private_bytes(
        serialization.Encoding.PEM,
        form.PKCS8 if kind == "x509" else form.TraditionalOpenSSL,
        serialization.NoEncryption(),
    ).decode()
    if kind == "x509":
        return private, _certificate(key, user_id, now)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, f"{public.decode()} Generated-by-Nova"


def _certificate(key: rsa.RSAPrivateKey, user_id: str, now: float) -> str:
    """Return a certificate with which a user logs in to Windows without a password."""
    since = datetime.fromtimestamp(now, UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, user_id[:64])])
    login = f"{user_id}@localhost"[:120].encode()
    user = x509.OtherName(_USER_NAME, b"\x0c" + bytes([len(login)]) + login)  # an ASN.1 UTF8String
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + timedelta(days=3650))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([user]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()

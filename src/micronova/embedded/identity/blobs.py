"""Encryption of the secrets that users keep in credentials."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from micronova.objects.errors import MicronovaError


class BlobBox:
    """Encrypts the blobs of credentials; a blob can be decrypted only for the credential that it belongs to."""

    def __init__(self, secret_key: bytes) -> None:
        derived = HKDF(SHA256(), 32, salt=None, info=b"micronova identity credentials").derive(secret_key)
        self._cipher = ChaCha20Poly1305(derived)

    def seal(self, blob: str, credential_id: str) -> bytes:
        """Encrypt."""
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, blob.encode(), credential_id.encode())

    def open(self, sealed: bytes, credential_id: str) -> str:
        """Decrypt."""
        try:
            return self._cipher.decrypt(sealed[:12], sealed[12:], credential_id.encode()).decode()
        except InvalidTag:
            raise MicronovaError(
                f"Credential {credential_id} cannot be read: this process has another secret key than the one that "
                "stored it."
            ) from None

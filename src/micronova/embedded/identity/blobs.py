"""Encryption of the secrets that users keep in credentials."""

import os
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from micronova.objects.errors import MicronovaError


class BlobBox:
    """Encrypts the blobs of credentials; a blob can be decrypted only for the credential that it belongs to."""

    def __init__(self, secret_key: bytes, others: Sequence[bytes] = ()) -> None:
        """`others` are keys that blobs may have been sealed with, too, while the key is being changed."""
        self._cipher = _cipher(secret_key)
        self._all = (self._cipher, *map(_cipher, others))

    def seal(self, blob: str, credential_id: str) -> bytes:
        """Encrypt."""
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, blob.encode(), credential_id.encode())

    def reseal(self, sealed: bytes, credential_id: str) -> bytes | None:
        """Return what was sealed with one of the other keys, sealed with the key; None if it is so already."""
        try:
            self._cipher.decrypt(sealed[:12], sealed[12:], credential_id.encode())
        except InvalidTag:
            return self.seal(self.open(sealed, credential_id), credential_id)
        return None

    def open(self, sealed: bytes, credential_id: str) -> str:
        """Decrypt."""
        for cipher in self._all:
            try:
                return cipher.decrypt(sealed[:12], sealed[12:], credential_id.encode()).decode()
            except InvalidTag:
                continue
        raise MicronovaError(
            f"Credential {credential_id} cannot be read: this process has another secret key than the one that "
            "stored it."
        )


def _cipher(secret_key: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=b"micronova identity credentials").derive(secret_key))

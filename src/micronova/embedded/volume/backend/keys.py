"""The keys of encrypted volumes: one for each volume, sealed in its row and in those of what is copied from it.

A copy of an encrypted file can be read with the key of the original. So a snapshot has the key of its volume under the
same id, and what may outlive its source (a volume made from another one, a backup) has it under an id of its own.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from micronova.objects.errors import MicronovaError


class SealedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as rows have it: the id that clients see, and the key encrypted with the cloud's."""

    id: str
    sealed: bytes


class KeyNotReadable(MicronovaError):
    """This process has another secret key than the one that encrypted a key."""

    code = "key_not_readable"


class KeyBox:
    """Encrypts the keys of volumes; a key can be decrypted only under its own id."""

    def __init__(self, secret_key: bytes, others: Sequence[bytes] = ()) -> None:
        """`others` are keys that may have encrypted what is stored, while the key is being changed."""
        self._cipher = _cipher(secret_key)
        self._all = (self._cipher, *map(_cipher, others))

    def make(self, id: str, bits: int) -> SealedKey:
        """Return a new key."""
        return self._seal(id, secrets.token_hex(bits // 8))

    def copy(self, id: str, key: SealedKey) -> SealedKey:
        """Return a key under another id."""
        return self._seal(id, self.open(key))

    def open(self, key: SealedKey) -> str:
        """Return the passphrase: the key in hexadecimal digits, as Nova and Cinder use the keys of a key manager.

        Raise KeyNotReadable.
        """
        for cipher in self._all:
            with contextlib.suppress(InvalidTag):
                return cipher.decrypt(key.sealed[:12], key.sealed[12:], key.id.encode()).decode()
        raise KeyNotReadable(
            f"The key {key.id} of a volume cannot be read: this process has another secret key "
            "(default.secret_key) than the one that made it."
        )

    def reseal(self, key: SealedKey) -> SealedKey | None:
        """Encrypt a key with the present secret key. Return None if it is encrypted with that already."""
        try:
            self._cipher.decrypt(key.sealed[:12], key.sealed[12:], key.id.encode())
        except InvalidTag:
            return self.copy(key.id, key)
        return None

    def _seal(self, id: str, passphrase: str) -> SealedKey:
        nonce = os.urandom(12)
        return SealedKey(id=id, sealed=nonce + self._cipher.encrypt(nonce, passphrase.encode(), id.encode()))


def _cipher(secret_key: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=b"micronova volume keys").derive(secret_key))

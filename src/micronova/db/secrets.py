"""Secrets of operations (admin passwords, injected files): encrypted in the row, and erased when the operation ends."""

import contextlib
import hmac
import os
from collections.abc import Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from micronova.objects.errors import SecretNotReadable
from micronova.objects.orders import InjectedFile


def key_id(key: bytes) -> str:
    """Return what tells a secret key from others. It says nothing about a key of 32 random bytes."""
    return hmac.digest(key, b"micronova: which secret key is this?", "sha256")[:16].hex()


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of an operation: of a build, a rescue or a change of the password.

    A build whose volumes have to be made has the token of its user: a conductor makes those that the API could not.
    """

    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()
    user_token: str | None = None


class SecretBox:
    """Encrypts secrets with the cloud's key; only the operation whose id they were sealed with can open them.

    What none of its keys can open raises SecretNotReadable: the operation waits for a conductor that has the key.

    What another process has sealed with one of the `others` can be read, too, while the key is being changed.
    """

    def __init__(self, key: bytes, others: Sequence[bytes] = ()) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._all = (self._cipher, *map(ChaCha20Poly1305, others))

    def seal(self, secrets: Secrets, operation_id: str) -> bytes:
        """Encrypt."""
        return self._encrypt(msgspec.msgpack.encode(secrets), operation_id)

    def open(self, sealed: bytes | None, operation_id: str) -> Secrets:
        """Decrypt."""
        return msgspec.msgpack.decode(self._decrypt(sealed, operation_id), type=Secrets) if sealed else Secrets()

    def seal_text(self, text: str, bound_to: str) -> bytes:
        """Encrypt a text; it can be opened only by who knows what it is bound to, such as the id of a volume."""
        return self._encrypt(text.encode(), bound_to)

    def open_text(self, sealed: bytes, bound_to: str) -> str:
        """Decrypt a text."""
        return self._decrypt(sealed, bound_to).decode()

    def reseal(self, sealed: bytes, bound_to: str) -> bytes | None:
        """Return what was sealed with one of the other keys, sealed with the key; None if it is so already."""
        try:
            self._cipher.decrypt(sealed[:12], sealed[12:], bound_to.encode())
        except InvalidTag:
            return self._encrypt(self._decrypt(sealed, bound_to), bound_to)
        return None

    def _encrypt(self, data: bytes, bound_to: str) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, data, bound_to.encode())

    def _decrypt(self, sealed: bytes, bound_to: str) -> bytes:
        for cipher in self._all:
            with contextlib.suppress(InvalidTag):
                return cipher.decrypt(sealed[:12], sealed[12:], bound_to.encode())
        raise SecretNotReadable(
            "A secret cannot be read: this process has another secret key than the one that recorded it."
        )

"""Secrets of operations (admin passwords, injected files): encrypted in the row, and erased when the operation ends."""

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from micronova.objects.errors import MicronovaError
from micronova.objects.orders import InjectedFile


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of an operation: of a build, a rescue or a change of the password."""

    admin_password: str | None = None
    injected_files: tuple[InjectedFile, ...] = ()


class SecretBox:
    """Encrypts secrets with the cloud's key; only the operation whose id they were sealed with can open them."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)

    def seal(self, secrets: Secrets, operation_id: str) -> bytes:
        """Encrypt."""
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, msgspec.msgpack.encode(secrets), operation_id.encode())

    def open(self, sealed: bytes | None, operation_id: str) -> Secrets:
        """Decrypt."""
        if not sealed:
            return Secrets()
        try:
            data = self._cipher.decrypt(sealed[:12], sealed[12:], operation_id.encode())
        except InvalidTag:
            raise MicronovaError(
                "An operation's secrets cannot be read: this process has another secret key than the one that "
                "recorded them."
            ) from None
        return msgspec.msgpack.decode(data, type=Secrets)

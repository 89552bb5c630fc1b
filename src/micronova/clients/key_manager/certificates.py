"""The certificates of signed images: files of a local directory, or secrets of a key manager (Barbican)."""

import asyncio
import re
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from micronova.http.client import ServiceClient
from micronova.objects.errors import Invalid, MicronovaError, NotFound, Unavailable

LARGEST: Final = 65_536
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_SUFFIXES: Final = ("", ".pem", ".crt", ".der")
_SECRETS: Final = "/v1/secrets/"
_BINARY: Final = "application/octet-stream"
_READABLE: Final = (_BINARY, "application/pkix-cert", "text/plain")


class _Secret(msgspec.Struct):
    """What is read of a secret's description."""

    content_types: dict[str, str] | None = None


class Certificates:
    """Finds certificates by their ids: in the directory first, and else, as the user who asks, at the key manager."""

    def __init__(
        self,
        directory: Path,
        key_manager: ServiceClient | None = None,
        *,
        in_catalog: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """A directory that does not exist has no certificates; `in_catalog` says whether there is a key manager."""
        self._directory = directory
        self._key_manager = key_manager
        self._in_catalog = in_catalog

    async def available(self) -> bool:
        """Return whether there is a directory of certificates or a key manager."""
        return await asyncio.to_thread(self._directory.is_dir) or await self._has_key_manager()

    async def _has_key_manager(self) -> bool:
        return self._key_manager is not None and (self._in_catalog is None or await self._in_catalog())

    async def get(self, id: str, token: str) -> bytes:
        """Return a certificate, in PEM or DER; raise NotFound if there is none that the user may read."""
        found = await asyncio.to_thread(self._read, id)
        if found is not None:
            return found
        if self._key_manager is None or not await self._has_key_manager():
            raise NotFound(f"There is no certificate {id[:64]!r}.")
        try:
            return await self._fetch(self._key_manager, id, token)
        except Unavailable:
            raise
        except MicronovaError as error:
            raise NotFound(f"The key manager has no certificate {id[:64]!r} for you: {error.message}") from error

    def _read(self, id: str) -> bytes | None:
        """Return the content of the file that has the name of an id. Blocks."""
        if not _FILE_NAME.fullmatch(id):
            return None
        for suffix in _SUFFIXES:
            try:
                with (self._directory / f"{id}{suffix}").open("rb") as stream:
                    return stream.read(LARGEST + 1)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue
            except OSError as error:
                raise Unavailable(f"The certificate {id} cannot be read: {error.strerror}.") from error
        return None

    async def _fetch(self, key_manager: ServiceClient, id: str, token: str) -> bytes:
        if id in ("", ".", ".."):  # they would change the path
            raise NotFound("There is no such secret.")
        path = _SECRETS + urllib.parse.quote(id, safe="")
        try:
            secret = msgspec.convert(await key_manager.request("GET", path, token=token), _Secret)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"The key manager sent no description of a secret: {error}") from error
        kind = (secret.content_types or {}).get("default", _BINARY)
        if kind.partition(";")[0] not in _READABLE:
            raise Invalid(f"it has the type {kind[:64]}")
        return await key_manager.content(f"{path}/payload", accept=kind, token=token)

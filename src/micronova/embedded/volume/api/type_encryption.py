"""Encryption of volume types: the cipher, and who encrypts."""

from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.volume.api.request_bodies import Body, Text
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import TypeEncryption, TypeEncryptionColumns
from micronova.embedded.volume.store import type_queries
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

KeySize = (
    Annotated[int, Meta(ge=0, le=0x7FFFFFFF)]
    | Annotated[str, Meta(title="a whole number", pattern=r"^[0-9]{1,9}\Z")]
    | None
)
_RULE = "volume_extension:volume_type_encryption:"


class NewEncryption(Body):
    """The encryption to create."""

    provider: Text
    control_location: Literal["front-end", "back-end"]
    cipher: Text | None = None
    key_size: KeySize = None


class NewEncryptionBody(Body):
    """The body of a create."""

    encryption: NewEncryption


class EncryptionChanges(Body):
    """The fields of the encryption of a type that can change."""

    provider: Text | UnsetType = UNSET
    control_location: Literal["front-end", "back-end"] | UnsetType = UNSET
    cipher: Text | None | UnsetType = UNSET
    key_size: KeySize | UnsetType = UNSET


class EncryptionChangesBody(Body):
    """The body of an update."""

    encryption: EncryptionChanges


class TypeEncryptionHandlers:
    """The handlers of encryption of types."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/types/{type_id}/encryption", "/types/{type_id}/encryption/{key}"
        return [
            Route(method="GET", path=all_, handler=self.index, policy=f"{_RULE}get"),
            Route(method="POST", path=all_, handler=self.create, policy=f"{_RULE}create", body=NewEncryptionBody),
            Route(method="GET", path=one, handler=self.show, policy=f"{_RULE}get"),
            Route(method="PUT", path=one, handler=self.update, policy=f"{_RULE}update", body=EncryptionChangesBody),
            Route(method="DELETE", path=one, handler=self.delete, policy=f"{_RULE}delete", status=202),
        ]

    async def index(self, request: Request, type_id: str) -> dict[str, Any]:
        """Show the encryption of a type; nothing of a type without."""
        found = await self._core.database.read(_read, type_id)
        return {} if found is None else _view(found)

    async def show(self, request: Request, type_id: str, key: str) -> dict[str, Any]:
        """Show one field."""
        found = await self._core.database.read(_read, type_id)
        shown = {} if found is None else _view(found)
        if key not in shown:
            raise _missing(type_id)
        return {key: shown[key]}

    async def create(self, request: Request, type_id: str) -> dict[str, Any]:
        """Let volumes of a type be encrypted."""
        given: NewEncryption = request.body.encryption
        made = TypeEncryption(
            volume_type_id=type_id,
            encryption_id=self._core.new_id(),
            provider=given.provider,
            cipher=given.cipher,
            key_size=None if given.key_size is None else int(given.key_size),
            control_location=given.control_location,
            created_at=self._core.now(),
            updated_at=None,
        )
        await self._core.database.write(_insert, made)
        fields = ("volume_type_id", "encryption_id", "provider", "control_location", "cipher", "key_size")
        return {"encryption": {name: getattr(made, name) for name in fields}}

    async def update(self, request: Request, type_id: str, key: str) -> dict[str, Any]:
        """Change the encryption of a type that no volume has."""
        given = _changed_columns(request.body.encryption)
        await self._core.database.write(_update, type_id, key, {**given, "updated_at": self._core.now()})
        return {"encryption": given}

    async def delete(self, request: Request, type_id: str, key: str) -> None:
        """Let volumes of a type be in the clear."""
        await self._core.database.write(_delete, type_id, key)


def _read(conn: sa.Connection, type_id: str) -> TypeEncryption | None:
    type_queries.existing(conn, type_id)
    return type_queries.encryption_of(conn, type_id)


def _insert(conn: sa.Connection, made: TypeEncryption) -> None:
    _check_unused(conn, made.volume_type_id)
    if not type_queries.insert_encryption(conn, made):
        raise Invalid(f"Volume type encryption for type {made.volume_type_id} already exists.")


def _update(conn: sa.Connection, type_id: str, key: str, values: TypeEncryptionColumns) -> None:
    _check_unused(conn, type_id)
    if not type_queries.update_encryption(conn, type_id, _encryption_id(key), values):
        raise _missing(type_id)


def _delete(conn: sa.Connection, type_id: str, key: str) -> None:
    _check_unused(conn, type_id)
    if not type_queries.delete_encryption(conn, type_id, _encryption_id(key)):
        raise _missing(type_id)


def _encryption_id(key: str) -> str | None:
    """Return the id that a client names; None for that of the type, which clients name by the word `provider`."""
    return None if key == "provider" else key


def _check_unused(conn: sa.Connection, type_id: str) -> None:
    """Raise NotFound if there is no such type, Invalid if volumes have it."""
    # A new volume has a foreign key to the type and so waits for this lock, or this transaction for it.
    type_queries.lock(conn, type_id)
    _read(conn, type_id)
    if type_queries.has_volumes(conn, type_id):
        raise Invalid(f"The encryption of type {type_id} cannot change: volumes have this type.")


def _missing(type_id: str) -> NotFound:
    return NotFound(f"Volume type encryption for type {type_id[:64]} does not exist.")


def _changed_columns(given: EncryptionChanges) -> TypeEncryptionColumns:
    changed: TypeEncryptionColumns = {}
    if not isinstance(given.provider, UnsetType):
        changed["provider"] = given.provider
    if not isinstance(given.control_location, UnsetType):
        changed["control_location"] = given.control_location
    if not isinstance(given.cipher, UnsetType):
        changed["cipher"] = given.cipher
    if not isinstance(given.key_size, UnsetType):
        changed["key_size"] = None if given.key_size is None else int(given.key_size)
    return changed


def _view(found: TypeEncryption) -> dict[str, Any]:
    return {
        "volume_type_id": found.volume_type_id,
        "encryption_id": found.encryption_id,
        "provider": found.provider,
        "cipher": found.cipher,
        "key_size": found.key_size,
        "control_location": found.control_location,
        "created_at": iso_micros(found.created_at),
        "updated_at": iso_micros(found.updated_at),
        "deleted": False,
        "deleted_at": None,
    }

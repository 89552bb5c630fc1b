"""Encryption of volumes: which one the volumes of a type have, and the keys of copies."""

from dataclasses import dataclass

import sqlalchemy as sa

from micronova.embedded.common.revisions import Changed
from micronova.embedded.volume.backend.keys import SealedKey
from micronova.embedded.volume.backend.luks import DEFAULT_KEY_BITS, BadCipher, Cipher, LuksTool, cipher_of
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.model import Backup, ResourceColumns, Snapshot, TypeEncryption, Volume, VolumeType
from micronova.embedded.volume.store.type_queries import encryption_of
from micronova.objects.errors import Invalid

_PROVIDERS = ("luks", "luks2", "nova.volume.encryptors.luks.luksencryptor", "luksencryptor")
"""The providers whose volumes QEMU can read, in lower case. It knows the first version of LUKS only."""


@dataclass(frozen=True)
class VolumeCipher:
    """The cipher of a volume, and the length of its key."""

    cipher: Cipher
    key_bits: int


def cipher_for_type(
    volume_type: VolumeType, found: TypeEncryption | None, tool: LuksTool | None
) -> VolumeCipher | None:
    """Return how volumes of a type are encrypted; None if they are not. Raise Invalid if that is not possible here."""
    if found is None:
        return None
    if tool is None:
        raise Invalid(f"Volumes of the type {volume_type.name} are to be encrypted, which this service cannot do.")
    if found.control_location != "front-end":
        raise Invalid(
            f"Volumes of the type {volume_type.name} are to be encrypted at the back end: control_location must be "
            "front-end, so that hypervisors encrypt."
        )
    if found.provider.lower() not in _PROVIDERS:
        raise Invalid(f"Volumes of the type {volume_type.name} have the provider {found.provider}: it must be luks.")
    try:
        cipher = cipher_of(found.cipher, found.key_size)
    except BadCipher as error:
        raise Invalid(f"Volumes of the type {volume_type.name} cannot be encrypted: {error}") from None
    return VolumeCipher(cipher, found.key_size or DEFAULT_KEY_BITS)


async def load_cipher(core: Core, volume_type: VolumeType) -> VolumeCipher | None:
    """Return how volumes of a type are encrypted; raise as `cipher_for_type` does."""
    found = await core.database.read(encryption_of, volume_type.id)
    return cipher_for_type(volume_type, found, core.luks)


def same_encryption(one: TypeEncryption | None, other: TypeEncryption | None) -> bool:
    """Return whether the volumes of two types are encrypted in the same way, or are both in the clear."""
    if one is None or other is None:
        return one is other
    fields = ("provider", "cipher", "key_size", "control_location")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


async def check_same_encryption(core: Core, volume_type: VolumeType, source_type_id: str | None, what: str) -> None:
    """Raise Invalid unless a volume of a type can have the file of a volume of another type."""
    found = await core.database.read(encryption_of, volume_type.id)
    of_source = None if source_type_id is None else await core.database.read(encryption_of, source_type_id)
    if not same_encryption(found, of_source):
        raise Invalid(
            f"Invalid volume_type provided: {volume_type.name}; the {what} is encrypted in another way, or not at all. "
            "Name a type with the same encryption, or none."
        )


def check_type_unchanged(conn: sa.Connection, type_id: str, *, encrypted: bool) -> None:
    """Raise Changed if the encryption of the type has been added or removed since the request read it.

    The transaction has written a volume of the type, which keeps others from changing the encryption from now on.
    Without the check the volume could be unencrypted, and nobody would notice.
    """
    if (encryption_of(conn, type_id) is not None) != encrypted:
        raise Changed


def key_of(resource: Volume | Snapshot | Backup) -> SealedKey | None:
    """Return the key of a volume, a snapshot or a backup; None if it is in the clear."""
    if resource.encryption_key_id is None or resource.sealed_key is None:
        return None
    return SealedKey(id=resource.encryption_key_id, sealed=resource.sealed_key)


def key_after_copy(core: Core, volume: Volume, source: Volume | Snapshot | Backup) -> ResourceColumns:
    """Return the columns of a volume that gets the file of something else: the key of that, under an id of its own.

    A volume that has this key already keeps it: nothing of its row changes, because the key may be encrypted anew while
    the copy is made.
    """
    key, own = key_of(source), key_of(volume)
    if key is not None and core.keys is not None:
        if own is not None and core.keys.open(own) == core.keys.open(key):
            return {}
        key = core.keys.copy(core.new_id(), key)
    return {"encryption_key_id": None if key is None else key.id, "sealed_key": None if key is None else key.sealed}

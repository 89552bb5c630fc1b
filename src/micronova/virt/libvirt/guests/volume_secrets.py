"""The keys of encrypted volumes, and the passwords of targets, while libvirt gives them to QEMU.

QEMU keeps the key for as long as the guest has the volume. Libvirt needs it only when a guest is started or gets the
volume. So its secret is ephemeral, private, and there only meanwhile: it is on no disk, and nobody can read it there.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from micronova.objects.errors import Invalid, MicronovaError
from micronova.objects.volume import AttachedVolume, ISCSIConnection
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.library import has_code
from micronova.virt.libvirt.client.xmltree import child, element, unparse
from micronova.virt.libvirt.definition.volumes import secret_of

log = logging.getLogger(__name__)


@asynccontextmanager
async def known_secrets(
    connection: Connection, guest: str, volumes: Iterable[AttachedVolume]
) -> AsyncGenerator[None, None]:
    """Let libvirt know the keys and passwords of a guest's volumes; raise Invalid if the order lacks one."""
    guarded = [volume for volume in volumes if volume.connection.encrypted or _logs_in(volume)]
    try:
        for volume in guarded:
            await _define(connection, guest, volume)
        yield
    finally:
        if guarded:
            await asyncio.shield(_forget(connection, guest, [secret_of(volume) for volume in guarded]))


def _logs_in(volume: AttachedVolume) -> bool:
    return isinstance(volume.connection, ISCSIConnection) and volume.connection.auth_username is not None


async def _define(connection: Connection, guest: str, volume: AttachedVolume) -> None:
    text = volume.secret
    if text is None:
        raise Invalid(f"The order has no key or password for volume {volume.volume_id}, which needs one.")
    id, (usage, what) = secret_of(volume), ("iscsi", "target") if _logs_in(volume) else ("volume", "volume")
    secret = element("secret", ephemeral="yes", private="yes")
    child(secret, "uuid", id)
    child(child(secret, "usage", type=usage), what, f"micronova/{id}")
    xml = unparse(secret)

    def define(library: Connect) -> None:
        library.secretDefineXML(xml).setValue(text.encode())

    await connection.change(guest, define, "give libvirt the secret of a volume")


async def _forget(connection: Connection, guest: str, ids: list[str]) -> None:
    def undefine(library: Connect) -> None:
        for id in ids:
            try:
                library.secretLookupByUUIDString(id).undefine()
            except Exception as error:
                if not has_code(error, "VIR_ERR_NO_SECRET"):
                    raise

    try:
        await connection.change(guest, undefine, "remove the secret of a volume from libvirt")
    except MicronovaError as error:
        log.warning("libvirt keeps the secrets of volumes of guest %s until it ends: %s", guest, error)

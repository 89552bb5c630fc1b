"""How a volume is encrypted, and its key: what compute asks for before it attaches the volume."""

from typing import Any

from micronova.embedded.volume.core import Core
from micronova.embedded.volume.encryption import key_of
from micronova.embedded.volume.model import TypeEncryption, Volume
from micronova.embedded.volume.store.type_queries import encryption_of
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import NotFound


class VolumeEncryptionHandlers:
    """The handlers of the encryption of volumes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        metadata = "volume_extension:volume_encryption_metadata"
        one = "/volumes/{volume_id}/encryption"
        return [
            Route(method="GET", path=one, handler=self.index, policy=metadata, checks_policy=True),
            Route(method="GET", path=f"{one}/{{key}}", handler=self.show, policy=metadata, checks_policy=True),
            Route(
                method="GET",
                path="/volumes/{volume_id}/encryption_key",
                handler=self.key,
                policy="volume:get_encryption_key",
                checks_policy=True,
            ),
        ]

    async def index(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Show how a volume is encrypted; of one in the clear only that it has no key."""
        volume = await self._core.load_volume(request, volume_id)
        found = await self._core.database.read(encryption_of, volume.volume_type_id)
        return _view(volume, found)

    async def show(self, request: Request, volume_id: str, key: str) -> dict[str, Any]:
        """Show one field."""
        shown = await self.index(request, volume_id)
        if key not in shown:
            raise NotFound(f"The encryption of volume {volume_id} has no field {key[:64]}.")
        return {key: shown[key]}

    async def key(self, request: Request, volume_id: str) -> dict[str, Any]:
        """Return the key of a volume, for compute: the service user alone may have it."""
        volume = await self._core.load_volume(request, volume_id)
        found = key_of(volume)
        if found is None or self._core.keys is None:
            raise NotFound(f"Volume {volume_id} is not encrypted.")
        return {"encryption_key": {"id": found.id, "passphrase": self._core.keys.open(found)}}


def _view(volume: Volume, found: TypeEncryption | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"encryption_key_id": volume.encryption_key_id}
    if found is not None and volume.encryption_key_id is not None:
        names = ("provider", "control_location", "cipher", "key_size")
        shown |= {name: getattr(found, name) for name in names}
    return shown

"""What the classes that accept requests about servers need."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.clients.volume.client import VolumeClient
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db.engine import Database
from micronova.db.secrets import SecretBox
from micronova.notifications.notifier import Notifier
from micronova.objects.clock import Clock
from micronova.objects.errors import NotSupported
from micronova.servers.image_refs import BootImages
from micronova.servers.image_signatures import ImageSignatures
from micronova.servers.unsupported import Unsupported


@dataclass(frozen=True, kw_only=True)
class RequestDependencies:
    """Shared by `ServerCreator`, `ServerActions`, `ServerMoves` and the others of this package."""

    database: Database
    clock: Clock
    random: random.Random
    conductor: ConductorAPI
    notifier: Notifier
    secrets: SecretBox
    image_client: ImageClient | None
    network_client: NetworkClient | None
    volume_client: VolumeClient | None = None
    unsupported: Unsupported
    signatures: ImageSignatures
    boot_images: BootImages
    quota_defaults: Mapping[str, int]
    operation_timeout: float  # seconds after which an operation that has not ended fails
    service_down_time: float
    default_zone: str

    def require_volume_client(self) -> VolumeClient:
        """Return the client of the volume service; raise NotSupported if there is none."""
        if self.volume_client is None:
            raise NotSupported("There is no block storage service here: servers cannot use volumes.")
        return self.volume_client

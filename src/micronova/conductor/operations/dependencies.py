"""What the kinds of operations and the periodic jobs of a conductor need."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.clients.volume.client import VolumeClient
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.operations.engine import Engine
from micronova.db.secrets import SecretBox
from micronova.notifications.notifier import Notifier
from micronova.objects.pci_devices import Alias
from micronova.plugins.hooks import Hooks


@dataclass(kw_only=True)
class ConductorDependencies:
    """Shared by all kinds of operations and all jobs."""

    engine: Engine
    compute: ComputeAPI
    secrets: SecretBox
    network_client: NetworkClient | None
    image_client: ImageClient | None
    volume_client: VolumeClient | None = None
    notifier: Notifier
    service_down_time: float
    operation_timeout: float  # seconds after which an operation that has not ended fails
    volume_creation_timeout: float = 600.0  # seconds that a build waits for a volume that is made for it
    reimage_timeout_per_gb: int = 20  # the same for each GiB of a volume that gets an image, if that is more
    hooks: Hooks = field(default_factory=Hooks)
    access_network: str | None = None
    notifies_volume_usage: bool = False  # whether a detach sends volume.usage
    audit_period: str = "month"  # of instance.exists
    pci_aliases: Mapping[str, Alias] = field(default_factory=dict)

    def download_url(self, image_id: str | None) -> str | None:
        """Return where a host downloads an image; None without an image, or if the host finds out by itself."""
        return self.image_client.download_url(image_id) if image_id and self.image_client else None

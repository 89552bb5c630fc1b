"""What the kinds of operations and the periodic jobs of a conductor need."""

from dataclasses import dataclass, field

from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.operations.engine import Engine
from micronova.db.secrets import SecretBox
from micronova.notifications.notifier import Notifier
from micronova.plugins.hooks import Hooks


@dataclass(kw_only=True)
class ConductorDependencies:
    """Shared by all kinds of operations and all jobs."""

    engine: Engine
    compute: ComputeAPI
    secrets: SecretBox
    network_client: NetworkClient | None
    image_client: ImageClient | None
    notifier: Notifier
    service_down_time: float
    operation_timeout: float  # seconds after which an operation that has not ended fails
    hooks: Hooks = field(default_factory=Hooks)
    access_network: str | None = None
    audit_period: str = "month"  # of instance.exists

    def download_url(self, image_id: str | None) -> str | None:
        """Return where a host downloads an image; None without an image, or if the host finds out by itself."""
        return self.image_client.download_url(image_id) if image_id and self.image_client else None

"""The embedded volume service."""

from collections.abc import Callable

from micronova.cli.volume_images import volume_images
from micronova.cli.volume_tools import QemuLuks
from micronova.cli.wiring import Process, Role
from micronova.embedded.volume.backend.exporter_exports import ExporterExports
from micronova.embedded.volume.backend.exports import Exports, SimulatedExports
from micronova.embedded.volume.backend.files import Files
from micronova.embedded.volume.backend.keys import KeyBox
from micronova.embedded.volume.core import VolumeServiceSettings
from micronova.embedded.volume.service import VolumeService
from micronova.embedded.volume.store.quotas import QUOTAS
from micronova.exporter.client import ExporterClient
from micronova.policies.enforcer import Enforcer
from micronova.policies.volume import RULES
from micronova.virt.libvirt.storage import acl


def _exports(process: Process) -> Callable[[Files], Exports] | None:
    """Return what makes exports: by the exporter of this machine, or simulated ones; None if guests reach no volume."""
    link = None if process.agent is None else process.agent.exporter
    if link is not None:
        client = ExporterClient(link.socket)
        return lambda files: ExporterExports(files, client, acl.share, link.uid, link.seen_as)
    if process.settings.compute.compute_driver == "fake":
        return lambda files: SimulatedExports(files.root)
    return None


async def make(process: Process) -> Role:
    """Make the embedded volume service."""
    settings = process.settings
    secret_key, *other_keys = process.secret_keys()
    role = VolumeService(
        await process.open_database("volume"),
        process.directory.path / "volumes",
        Enforcer(RULES),
        process.clients.authenticator(),
        process.clock,
        volume_images(process),
        _exports(process),
        process.clients.compute("volumes", "guests do not see that their volumes have grown"),
        KeyBox(secret_key, other_keys),
        QemuLuks(),
        machine=process.host,
        schema=process.schema_of("volume"),
        observer=process.telemetry.requests,
        public_url=settings.api.public_url,
        random_source=process.random,
        settings=VolumeServiceSettings(
            max_limit=settings.api.max_limit,
            availability_zone=settings.default.default_availability_zone,
            default_volume_type=settings.volume.default_volume_type,
            quotas={
                **QUOTAS,
                "volumes": settings.volume.quota_volumes,
                "snapshots": settings.volume.quota_snapshots,
                "backups": settings.volume.quota_backups,
                "backup_gigabytes": settings.volume.quota_backup_gigabytes,
                "gigabytes": settings.volume.quota_gigabytes,
                "per_volume_gigabytes": settings.volume.per_volume_size_limit,
            },
        ),
    )
    for pool, threads in role.files.pools.items():
        process.telemetry.metrics.threads(pool, threads.use)
    process.embedded["volume"] = role
    process.register(role.service)
    process.register(role.documents)
    process.apps[role.service.mount] = role.app
    return role

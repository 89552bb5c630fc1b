"""The embedded image service."""

from micronova.cli.image import ensure_test_image
from micronova.cli.wiring import AfterStart, Process, Role
from micronova.embedded.image.data import accept_all
from micronova.embedded.image.formats import check_format
from micronova.embedded.image.service import ImageService
from micronova.policies.enforcer import Enforcer
from micronova.policies.image import RULES


async def make(process: Process) -> Role:
    """Make the embedded image service."""
    glance = process.settings.glance
    keys = (glance.ticket_key or process.keys.ticket_key, *glance.other_ticket_keys.split())
    role = ImageService(
        await process.open_database("image"),
        process.directory.path / "images",
        Enforcer(RULES),
        process.clients.authenticator(),
        process.clock,
        [bytes.fromhex(key) for key in keys],
        schema=process.schema_of("image"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        check=check_format if process.settings.image_format.require_image_format_match else accept_all,
        max_size=process.settings.image.image_size_cap,
        max_property_bytes=process.settings.image.image_metadata_size_cap,
        project_images=process.settings.image.image_count_total or None,
        project_bytes=process.settings.image.user_storage_quota or None,
        project_uploads=process.settings.image.uploads_per_project or None,
        idle_timeout=process.settings.api.client_timeout,
        random_source=process.random,
        certificates=process.clients.certificates(),
    )
    process.telemetry.metrics.threads("image-data", role.thread_use)
    process.embedded["image"] = role
    process.mount(role.service)

    return AfterStart(role, lambda: ensure_test_image(role, process.settings.compute.compute_driver))

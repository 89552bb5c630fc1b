"""The embedded identity service."""

from micronova.cli.clients import ENDPOINTS
from micronova.cli.wiring import AfterStart, Process, Role
from micronova.conf.services import NovaSettings, OtherService, PlacementSettings
from micronova.conf.settings import Settings
from micronova.embedded.identity.endpoint_urls import PUBLIC_URL
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.service import IdentityService

_VERSIONS = {"compute": "/v2.1", "block-storage": "/v3", "volumev3": "/v3"}
"""What the URLs of these services end with in a catalog."""


async def make(process: Process) -> Role:
    """Make the embedded identity service."""
    settings = process.settings
    passwords = Passwords(waiting=settings.identity.max_password_checks)
    process.telemetry.metrics.threads("passwords", passwords.use)
    role = IdentityService(
        database=await process.open_database("identity"),
        clock=process.clock,
        token_keys=process.directory.token_keys,
        secret_keys=process.secret_keys(),
        token_lifetime=settings.identity.token_lifetime,
        passwords=passwords,
        region=settings.identity.region_name,
        public_url=settings.api.public_url,
        elsewhere=_elsewhere(settings),
        db_schema=process.schema_of("identity"),
        observer=process.telemetry.requests,
    )
    process.embedded["identity"] = role
    process.mount(role.service)

    async def bootstrap() -> None:
        keys = process.keys
        service = settings.identity.password or keys.service_password
        user = settings.identity.username
        await role.bootstrap(keys.admin_password, keys.demo_password, service, ENDPOINTS, service_user=user)

    return AfterStart(role, bootstrap)


def _elsewhere(settings: Settings) -> dict[tuple[str, str], str]:
    """Return the URLs of the services that the settings name, by the URL in the catalog and by interface."""
    sections: dict[str, NovaSettings | OtherService | PlacementSettings] = {
        "compute": settings.nova,
        "image": settings.glance,
        "network": settings.neutron,
        "placement": settings.placement,
        "block-storage": settings.cinder,
        "volumev3": settings.cinder,
    }
    found: dict[tuple[str, str], str] = {}
    for name, section in sections.items():
        own, version = PUBLIC_URL + ENDPOINTS[name], _VERSIONS.get(name, "")
        inner = _with_version(section.endpoint_override, version)
        outer = _with_version(section.public_endpoint, version) or inner
        urls = {"public": outer, "internal": inner, "admin": inner}
        found |= {(own, interface): url for interface, url in urls.items() if url}
    return found


def _with_version(url: str, version: str) -> str:
    """Return the URL of a service with its version; settings may leave the version out."""
    base = url.rstrip("/")
    return f"{base.removesuffix(version)}{version}" if base else ""

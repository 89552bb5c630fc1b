"""The embedded identity service."""

from micronova.cli.clients import ENDPOINTS
from micronova.cli.wiring import AfterStart, Process, Role
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.service import IdentityService


async def make(process: Process) -> Role:
    """Make the embedded identity service."""
    settings = process.settings
    role = IdentityService(
        database=await process.open_database("identity"),
        clock=process.clock,
        token_keys=process.directory.token_keys,
        secret_key=bytes.fromhex(settings.default.secret_key or process.keys.secret_key),
        token_lifetime=settings.identity.token_lifetime,
        passwords=Passwords(waiting=settings.identity.max_password_checks),
        region=settings.identity.region_name,
        public_url=settings.api.public_url,
        db_schema=process.schema_of("identity"),
        observer=process.telemetry.requests,
    )
    process.embedded["identity"] = role
    process.mount(role.service)

    async def bootstrap() -> None:
        keys = process.keys
        service = settings.identity.password or keys.service_password
        await role.bootstrap(keys.admin_password, keys.demo_password, service, ENDPOINTS)

    return AfterStart(role, bootstrap)

"""The embedded network service."""

from micronova.cli.wiring import AfterStart, Process, Role
from micronova.embedded.network.core import NetworkServiceSettings
from micronova.embedded.network.service import NetworkService
from micronova.http.host_keys import HostTickets
from micronova.policies.enforcer import Enforcer
from micronova.policies.network import RULES


async def make(process: Process) -> Role:
    """Make the embedded network service."""
    clients = process.clients
    role = NetworkService(
        await process.open_database("network"),
        Enforcer(RULES),
        HostTickets(clients.keyring(), clients.authenticator(), process.clock.now),
        process.clock,
        clients.compute("ports", "builds wait for them"),
        schema=process.schema_of("network"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        random_source=process.random,
        settings=NetworkServiceSettings(max_limit=process.settings.api.max_limit),
    )
    process.embedded["network"] = role
    process.mount(role.service)
    return AfterStart(role, role.bootstrap)

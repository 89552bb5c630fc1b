"""The metadata service."""

from collections.abc import Awaitable, Callable

from micronova.api.metadata.app import routes
from micronova.api.metadata.guests import Guests
from micronova.api.metadata.signed import Signatures
from micronova.cli.vendor_data import vendor_data_source
from micronova.cli.wiring import Process, Role
from micronova.http.auth import NoTokens
from micronova.http.faults import compute_fault
from micronova.http.service import Service
from micronova.policies.enforcer import Enforcer


async def make(process: Process) -> Role:
    """Make the metadata service."""
    assert process.database is not None
    settings = process.settings.api
    guests = Guests(process.database, vendor_data_source(settings), settings.metadata_cache_expiration)
    shared_secret = process.settings.neutron.metadata_proxy_shared_secret
    signatures = Signatures(process.clients.keyring(), shared_secret, process.clock.now)
    service = Service(
        "metadata",
        routes(process.database, guests, signatures, process.clock, process.random),
        policy=Enforcer([]),
        authenticator=NoTokens(),
        fault_body=compute_fault,
        mount="/metadata",
        observer=process.telemetry.requests,
    )
    process.mount(service)
    return _Closing(guests.close)


class _Closing:
    """A role that only answers HTTP, and closes something when it stops."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Close it."""
        await self._close()

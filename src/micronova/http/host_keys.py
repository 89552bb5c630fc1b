"""Keys with which a compute host authenticates itself to other services, without a shared password.

Conductors, the embedded network service and the metadata service share one secret. A conductor knows from the broker
which host asks, and issues two keys to it: a *ticket*, which replaces a token at the routes that are for hosts, and a
*metadata key*, with which the host's proxy signs requests of guests. Both hold for one host name and until an expiry
time; neither reveals the shared secret.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from micronova.http.tickets import Tickets
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized, Unavailable
from micronova.objects.host_keys import HostKeys

if TYPE_CHECKING:
    from micronova.http.service import Authenticator

log = logging.getLogger(__name__)

LIFETIME = 900.0  # seconds for which a host that was removed from the cloud can still use its keys
RETRY_INTERVAL = 10.0  # least seconds between two requests for keys, even when services refuse them
PREFIX = "mnh1."  # of a host's ticket; tokens have another
HOST_HEADER = "x-metadata-host"
EXPIRY_HEADER = "x-metadata-key-expires"
_LONGEST = 2048


class HostKeyring:
    """Issues and verifies the keys of hosts."""

    def __init__(self, key: bytes, others: Sequence[bytes] = ()) -> None:
        """`others` are keys that hosts may have got their keys by, too, while the key is being changed."""
        self._tickets = Tickets(key, others)

    def issue(self, host: str, now: float, lifetime: float = LIFETIME) -> HostKeys:
        """Return new keys for a host."""
        expires_at = int(now + lifetime)
        name = base64.urlsafe_b64encode(host.encode()).decode().rstrip("=")
        return HostKeys(
            ticket=f"{PREFIX}{name}.{self._tickets.issue(_network(host), expires_at)}",
            metadata_key=self.metadata_key(host, expires_at),
            expires_at=expires_at,
            lifetime=lifetime,
        )

    def host_of(self, ticket: str, now: float) -> str:
        """Return the host of a ticket; raise Unauthorized if it is forged or has expired."""
        name, _, rest = ticket.removeprefix(PREFIX).partition(".")
        try:
            if len(ticket) > _LONGEST:
                raise ValueError
            host = base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True).decode()
            self._tickets.verify(rest, _network(host), now)
        except (binascii.Error, ValueError, Unauthorized):
            raise Unauthorized(
                "The host's ticket is not valid, or no longer: conductors and this service need the same "
                "neutron.ticket_key, and clocks that agree."
            ) from None
        return host

    def metadata_key(self, host: str, expires_at: int) -> str:
        """Return the key with which a host signs requests of its guests until `expires_at`."""
        return self._tickets.issue(f"metadata\n{host}", expires_at)

    def metadata_keys(self, host: str, expires_at: int) -> list[str]:
        """Return the keys with which a host may sign: one for each key of this keyring."""
        return self._tickets.all(f"metadata\n{host}", expires_at)


def _network(host: str) -> str:
    return f"network\n{host}"


def sign_metadata(key: str, host: str, instance_id: str, project_id: str, address: str) -> str:
    """Return the signature of a host's metadata proxy for a request of a guest."""
    said = "\n".join((host, instance_id, project_id, address))
    return hmac.new(key.encode(), said.encode(), hashlib.sha256).hexdigest()


class HostTickets:
    """Authenticates a host by its ticket, and all others with another authenticator."""

    def __init__(self, keyring: HostKeyring, others: "Authenticator", now: Callable[[], float]) -> None:
        self._keyring = keyring
        self._others = others
        self._now = now

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Choose the way by the token's prefix."""
        if token is None or not token.startswith(PREFIX):
            return await self._others.authenticate(token, context)
        return msgspec.structs.replace(context, host=self._keyring.host_of(token, self._now()))


class HeldKeys:
    """The keys of this host: fetched from a conductor, and renewed long before they expire.

    For a `ServiceClient`: `ServiceClient(transport, keys.ticket, renew=keys.forget)`.
    """

    def __init__(self, host: str, fetch: Callable[[], Awaitable[HostKeys]], now: Callable[[], float]) -> None:
        self._host = host
        self._fetch = fetch
        self._now = now
        self._lock = asyncio.Lock()
        self._keys: HostKeys | None = None
        self._got_at = self._renew_at = self._good_until = 0.0

    async def ticket(self) -> str:
        """Return the ticket, which replaces a token."""
        return (await self._get()).ticket

    async def vouch(self, instance_id: str, project_id: str, address: str) -> dict[str, str]:
        """Return the signed headers that tell the metadata service which guest asks."""
        keys = await self._get()
        return {
            "x-instance-id": instance_id,
            "x-tenant-id": project_id,
            "x-forwarded-for": address,
            HOST_HEADER: urllib.parse.quote(self._host, safe=""),
            EXPIRY_HEADER: str(keys.expires_at),
            "x-instance-id-signature": sign_metadata(keys.metadata_key, self._host, instance_id, project_id, address),
        }

    def forget(self) -> None:
        """Drop the keys after a service refused them, unless they are new."""
        if self._now() >= self._got_at + RETRY_INTERVAL:
            self._keys = None

    async def _get(self) -> HostKeys:
        now = self._now()
        # While one task renews keys that are still valid, other tasks use them.
        if self._keys is not None and now < self._good_until and (now < self._renew_at or self._lock.locked()):
            return self._keys
        async with self._lock:
            if self._keys is None or self._now() >= self._renew_at:
                await self._renew()
            assert self._keys is not None
            return self._keys

    async def _renew(self) -> None:
        try:
            keys = await self._fetch()
        except Unavailable as error:
            if self._keys is None or self._now() >= self._good_until:
                raise
            log.warning("cannot renew the keys of host %s, will retry: %s", self._host, error)
            self._renew_at = self._now() + RETRY_INTERVAL
            return
        self._keys, self._got_at = keys, self._now()
        # After a third of the lifetime: the host works on while conductors are unreachable for some minutes.
        self._renew_at, self._good_until = self._got_at + keys.lifetime / 3, self._got_at + keys.lifetime

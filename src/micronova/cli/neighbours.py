"""How this process reaches identity, image and network: in the process, by URL, or not at all."""

import hmac
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from micronova.conductor.rpcapi import HostKeysAPI
from micronova.conf.settings import SettingsError
from micronova.http.auth import EitherTokens, KeystoneTokens, NoAuth2, SignedTokens
from micronova.http.client import Answer, ASGITransport, HTTPTransport, ServiceClient, Transport
from micronova.http.host_keys import HeldKeys, HostKeyring
from micronova.http.service import Authenticator
from micronova.http.tickets import Tickets
from micronova.http.tokens import Revocations, TokenVerifier
from micronova.identity.client import IdentityClient, ServiceToken
from micronova.identity.feed import RevocationFeed
from micronova.objects.errors import Unavailable

if TYPE_CHECKING:
    from micronova.cli.wiring import Process

log = logging.getLogger(__name__)

ENDPOINTS = {
    "identity": "/identity/v3",
    "compute": "/compute/v2.1",
    "image": "/image",
    "network": "/network",
}


class Neighbours:
    """Makes the clients of the neighbours as the settings say."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._transports: list[Transport] = []
        self._token: ServiceToken | None = None
        self._networks: Any = None
        self._feeds: list[RevocationFeed] = []  # what was revoked, told by an identity in another process

    @property
    def _noauth(self) -> bool:
        return self._process.settings.api.auth_strategy == "noauth2"

    async def start(self) -> None:
        """Begin to hear what is revoked elsewhere."""
        for feed in self._feeds:
            await feed.start()

    async def close(self) -> None:
        """Let go of all connections."""
        for feed in self._feeds:
            await feed.stop()
        self._feeds.clear()
        for transport in self._transports:
            await transport.close()
        self._transports.clear()

    # --- identity --------------------------------------------------------------------------------------------

    def authenticator(self) -> Authenticator:
        """Return what checks tokens: by signature where we can, by asking Keystone otherwise."""
        process = self._process
        if self._noauth:
            return NoAuth2()
        identity = process.embedded.get("identity")
        if identity is not None:
            return SignedTokens(identity.verifier, process.clock.now)
        asking = KeystoneTokens(
            self._identity(), process.clock.now, remember=process.settings.identity.token_cache_time
        )
        key = process.settings.identity.public_key
        if not key:
            return asking
        revocations = Revocations()
        verifier = TokenVerifier(bytes.fromhex(key), revocations)
        self._feeds.append(RevocationFeed(self._identity(), revocations, process.clock))
        return EitherTokens(SignedTokens(verifier, process.clock.now), asking)

    def _identity(self) -> IdentityClient:
        return IdentityClient(self._transport("identity", self._process.settings.identity.auth_url), self.token())

    def token(self) -> ServiceToken:
        """Return the service user's token, which all clients share."""
        if self._token is None:
            process = self._process
            settings = process.settings.identity
            self._token = ServiceToken(
                self._transport("identity", settings.auth_url),
                username=settings.username,
                password=settings.password or process.keys.service_password,
                project_name=settings.project_name,
                user_domain_name=settings.user_domain_name,
                project_domain_name=settings.project_domain_name,
                now=process.clock.now,
            )
        return self._token

    async def project_exists(self, project_id: str) -> bool:
        """Ask identity whether there is such a project; without identity every project does."""
        if self._noauth:
            return True
        return await self._identity().project_exists(project_id)

    # --- image and network -----------------------------------------------------------------------------------

    def images(self) -> Any:
        """Return the image client; None when there is no image service."""
        from micronova.image.client import ImageClient

        process = self._process
        if not self._has("image", process.settings.glance.endpoint_override):
            return None
        key = process.settings.glance.ticket_key or ("image" in process.roles and process.keys.ticket_key)
        return ImageClient(
            self._client("image", process.settings.glance.endpoint_override),
            url=process.settings.glance.endpoint_override or f"{process.url}/image",
            tickets=Tickets(bytes.fromhex(key)) if key else None,
            now=process.clock.now,
        )

    def networks(self) -> Any:
        """Return the network client; None when there is no network service."""
        from micronova.network.client import NetworkClient

        override = self._process.settings.neutron.endpoint_override
        if self._networks is None and self._has("network", override):
            self._networks = NetworkClient(self._client("network", override))
        return self._networks

    def network_service(self, keys: HeldKeys) -> ServiceClient:
        """Return the bare client of the network service, for its agent: it comes as the host that it works for."""
        transport = self._transport("network", self._process.settings.neutron.endpoint_override)
        return ServiceClient(transport, keys.ticket, renew=keys.forget)

    # --- compute hosts ---------------------------------------------------------------------------------------

    def keyring(self) -> HostKeyring:
        """Return what makes and knows the keys of hosts; all who need it have the same setting, or directory."""
        given = self._process.settings.neutron.ticket_key
        if given:
            return HostKeyring(bytes.fromhex(given))
        own = bytes.fromhex(self._process.keys.ticket_key)
        return HostKeyring(hmac.digest(own, b"compute hosts", "sha256"))

    def host_keys(self) -> HeldKeys:
        """Return the keys of this host, which a conductor gives."""
        process = self._process
        assert process.bus is not None
        return HeldKeys(process.host, HostKeysAPI(process.bus, process.host).fetch, process.clock.now)

    def compute(self) -> ServiceClient | None:
        """Return the compute client, for neighbours that tell it something; the API may start after them."""
        url = self._process.settings.nova.endpoint_override
        if not url and "api" not in self._process.roles:
            log.warning("Compute will not hear of ports: set nova.endpoint_override to its URL.")
            return None
        return self._client("compute", url)

    # --- metadata --------------------------------------------------------------------------------------------

    def metadata(self) -> Transport:
        """Return the way to the metadata service, for the proxies of the network agent; it may start after them."""
        url = self._process.settings.neutron.metadata_url
        if url or "metadata" in self._process.roles:
            return self._transport("metadata", url)
        return Nowhere("There is no metadata service here: run the role metadata, or set neutron.metadata_url.")

    def _has(self, name: str, override: str) -> bool:
        if override or name in self._process.roles:
            return True
        return bool(self._process.settings.identity.auth_url) and not self._noauth

    def _client(self, name: str, override: str) -> ServiceClient:
        prefix = "" if name != "compute" else "/v2.1"
        if self._noauth:
            return ServiceClient(self._transport(name, override), _noauth_token, prefix=prefix)
        token = self.token()
        return ServiceClient(self._transport(name, override), token.get, prefix=prefix, renew=token.forget)

    def _transport(self, name: str, url: str) -> Transport:
        if url:
            base = url.rstrip("/")
            base = base.removesuffix({"identity": "/v3", "compute": "/v2.1"}.get(name, ""))
            made: Transport = HTTPTransport(base)
            self._transports.append(made)
            return made
        if name not in self._process.roles and not (name == "compute" and "api" in self._process.roles):
            section = {
                "identity": "identity.auth_url",
                "image": "glance.endpoint_override",
                "network": "neutron.endpoint_override",
            }[name]
            raise SettingsError(f"Where is the {name} service? Set {section}, or run its role in this process.")
        return ASGITransport(_Late(self._process, f"/{name}"))


class _Late:
    """A service of this process by its mount: looked up at each call, for it may start after us."""

    def __init__(self, process: "Process", mount: str) -> None:
        self._process = process
        self._mount = mount

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand the request on."""
        await self._process.apps[self._mount](scope, receive, send)


class Nowhere:
    """The way to a service that this cloud does not have: whoever asks is told so."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Refuse."""
        raise Unavailable(self._reason)

    def stream(self, method: str, url: str, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Refuse."""
        raise Unavailable(self._reason)

    async def close(self) -> None:
        """Nothing to let go of."""


async def _noauth_token() -> str:
    return "admin:admin"

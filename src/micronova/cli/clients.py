"""How this process reaches the other OpenStack services: inside the process, by URL, by the catalog, or not at all."""

import functools
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from micronova.clients.identity.catalog import Catalog, CatalogTransport
from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.clients.key_manager.certificates import Certificates
from micronova.clients.volume.client import VERSION as VOLUME_VERSION
from micronova.conductor.rpcapi import HostKeysAPI
from micronova.conf.settings import SettingsError
from micronova.http.client import Answer, ASGITransport, HTTPTransport, ServiceClient, Transport, raise_for, tls_context
from micronova.http.host_keys import HeldKeys, HostKeyring
from micronova.http.image_downloads import ImageDownloads
from micronova.http.image_uploads import ImageUploads
from micronova.http.tickets import Tickets
from micronova.objects.errors import Forbidden, Unavailable

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.clients.identity.feed import RevocationFeed
    from micronova.clients.image.client import ImageClient
    from micronova.clients.network.client import NetworkClient
    from micronova.clients.volume.client import VolumeClient
    from micronova.http.service import Authenticator

log = logging.getLogger(__name__)

ENDPOINTS = {
    "identity": "/identity/v3",
    "compute": "/compute/v2.1",
    "image": "/image",
    "network": "/network",
    "placement": "/placement",
    "block-storage": "/volume/v3",
    "volumev3": "/volume/v3",
}


KEY_MANAGER = "key-manager"
"""The type of the key manager in a catalog. There is no embedded one."""


class Question(NamedTuple):
    """A request to a service, for `micronova check`."""

    service: str
    setting: str  # that names the service
    ask: Callable[[], Awaitable[object]]
    left_open: str  # what the answer does not prove
    transport: Transport


class Clients:
    """Makes the clients of the OpenStack services that the settings name, and what checks tokens and host keys."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._transports: list[Transport] = []
        self._token: ServiceToken | None = None
        self._catalog: Catalog | None = None
        self._image_client: ImageClient | None = None
        self._network_client: NetworkClient | None = None
        self._volume_client: VolumeClient | None = None
        self._feeds: list[RevocationFeed] = []  # revoked tokens, from an identity service in another process

    @property
    def _noauth(self) -> bool:
        return self._process.settings.api.auth_strategy == "noauth2"

    @property
    def _authorities(self) -> str:
        """The PEM file of the authorities that verify other services; raise SettingsError if it cannot be used."""
        file = self._process.settings.ssl.ca_file
        try:
            tls_context(file)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"ssl.ca_file ({file}) is no PEM file with certificates: {error}.") from None
        return file

    def check_authorities(self) -> str:
        """Return `ssl.ca_file` after a look at it; raise SettingsError if it cannot be used."""
        return self._authorities

    def renew_certificates(self) -> None:
        """Verify other services by the present content of `ssl.ca_file` from now on."""
        for transport in self._transports:
            if isinstance(transport, HTTPTransport | CatalogTransport):
                transport.renew()

    async def start(self) -> None:
        """Fetch the catalog if it is needed, and start to follow the tokens that other processes revoke."""
        if self._catalog is not None:
            await self._catalog.start()
        for feed in self._feeds:
            await feed.start()

    async def close(self) -> None:
        """Stop what follows the identity service, and close all connections."""
        if self._catalog is not None:
            await self._catalog.stop()
        for feed in self._feeds:
            await feed.stop()
        self._feeds.clear()
        for transport in self._transports:
            await transport.close()
        self._transports.clear()

    # --- identity --------------------------------------------------------------------------------------------

    def authenticator(self) -> "Authenticator":
        """Return what checks tokens: by signature where the key is known, otherwise by asking the identity service."""
        from micronova.clients.identity.feed import RevocationFeed
        from micronova.http.auth import EitherTokens, KeystoneTokens, NoAuth2, SignedTokens
        from micronova.http.tokens import Revocations, TokenVerifier

        process = self._process
        if self._noauth:
            return NoAuth2()
        identity = process.embedded.get("identity")
        if identity is not None:
            return SignedTokens(identity.verifier, process.clock.now)
        asking = KeystoneTokens(
            self._identity(), process.clock.now, cache_seconds=process.settings.identity.token_cache_time
        )
        keys = process.settings.identity.public_key.split()
        if not keys:
            return asking
        revocations = Revocations()
        verifier = TokenVerifier([bytes.fromhex(key) for key in keys], revocations)
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

    def catalog(self) -> Catalog:
        """Return the identity service's catalog, where services are found that have no URL in the settings."""
        if self._catalog is None:
            settings = self._process.settings.identity
            tls_only = settings.auth_url.lower().startswith("https://")
            self._catalog = Catalog(self.token(), self._process.clock, region=settings.region_name, tls_only=tls_only)
        return self._catalog

    async def project_exists(self, project_id: str) -> bool:
        """Ask the identity service whether a project exists; with noauth2 every project does."""
        if self._noauth:
            return True
        return await self._identity().project_exists(project_id)

    async def find_project(self, named: str, token: str | None) -> str:
        """Return the id of a project by its id or name; with noauth2 every id is that of a project."""
        return named if self._noauth else await self._identity().find_project(named, token)

    # --- image and network -----------------------------------------------------------------------------------

    def image_client(self) -> "ImageClient | None":
        """Return the image client; None when there is no image service."""
        from micronova.clients.image.client import ImageClient

        process = self._process
        override = process.settings.glance.endpoint_override
        if self._image_client is not None or not self._has("image", override):
            return self._image_client
        url: str | Callable[[], str] = override or self._image_url()
        if self._in_catalog("image", override):
            url = functools.partial(self.catalog().known_endpoint, "image")
        key = process.settings.glance.ticket_key or ("image" in process.roles and process.keys.ticket_key)
        self._image_client = ImageClient(
            self._client("image", override),
            url=url,
            tickets=Tickets(bytes.fromhex(key)) if key else None,
            now=process.clock.now,
        )
        return self._image_client

    def _image_url(self) -> str:
        """Return the URL of the embedded image service that tickets have: hosts reach it there, or the agents do."""
        process = self._process
        return f"{process.url if process.agent is None else process.agent.url}/image"

    def image_uploads(self) -> ImageUploads:
        """Return what the compute agents and the volume service of this process upload images with."""
        process = self._process
        service = process.settings.glance.endpoint_override
        if not self._is_embedded("image"):
            return ImageUploads(service, ca_file=self._authorities)
        application = MountedApp(process, "/image")
        return ImageUploads(service, here=self._image_url, application=application)

    def image_downloads(self) -> ImageDownloads:
        """Return what the drivers and the volume service of this process download images with."""
        process = self._process
        service = process.settings.glance.endpoint_override
        if not self._is_embedded("image"):
            return ImageDownloads(service, ca_file=self._authorities)
        application = MountedApp(process, "/image")
        return ImageDownloads(service, here=self._image_url, application=application)

    def certificates(self) -> Certificates:
        """Return what has the certificates of signed images: a directory, and the key manager if there is one."""
        process = self._process
        named = process.settings.glance.certificate_directory
        directory = Path(named) if named else process.directory.path / "certificates"
        url = process.settings.barbican.barbican_endpoint
        if not self._has(KEY_MANAGER, url):
            return Certificates(directory)
        if url:
            return Certificates(directory, ServiceClient(self._key_manager(), _no_token))
        client, catalog = self._client(KEY_MANAGER, ""), self.catalog()
        return Certificates(directory, client, in_catalog=functools.partial(catalog.has, KEY_MANAGER))

    def _key_manager(self) -> Transport:
        """Return the transport to the key manager that the settings name; its versions are one level higher."""
        url = self._process.settings.barbican.barbican_endpoint
        return self._transport(KEY_MANAGER, url.rstrip("/").removesuffix("/v1"))

    def network_client(self) -> "NetworkClient | None":
        """Return the network client; None when there is no network service."""
        from micronova.clients.network.client import NetworkClient

        override = self._process.settings.neutron.endpoint_override
        if self._network_client is None and self._has("network", override):
            zone = self._process.settings.default.default_availability_zone
            self._network_client = NetworkClient(self._client("network", override), zone)
        return self._network_client

    def volume_client(self) -> "VolumeClient | None":
        """Return the client of the volume service; None when there is none."""
        from micronova.clients.volume.client import VolumeClient

        settings = self._process.settings.cinder
        if self._volume_client is None and self._has("volume", settings.endpoint_override):
            client = self._client("volume", settings.endpoint_override, settings.service_type)
            self._volume_client = VolumeClient(client)
        return self._volume_client

    def network_agent_client(self, keys: HeldKeys) -> ServiceClient:
        """Return the client that the network agent uses: it identifies itself by the keys of its host."""
        transport = self._transport("network", self._process.settings.neutron.endpoint_override)
        return ServiceClient(transport, keys.ticket, renew=keys.forget)

    def questions(self) -> Iterator[Question]:
        """Yield a question to each other service that the settings name, which changes nothing.

        Without a service user (compute hosts have none) the request is for the list of versions, which needs no token.
        """
        settings = self._process.settings
        with_user = self._noauth or bool(settings.identity.auth_url)
        if settings.identity.auth_url and not self._noauth:
            transport = self._transport("identity", settings.identity.auth_url)
            yield Question("identity", "identity.auth_url", self._logs_in, "", transport)
        for name, section, override, path in (
            ("image", "glance", settings.glance.endpoint_override, "/v2/schemas/image"),
            ("network", "neutron", settings.neutron.endpoint_override, "/v2.0/networks?limit=1&fields=id"),
            ("volume", "cinder", settings.cinder.endpoint_override, "/v3/attachments?limit=1"),
        ):
            setting = f"{section}.endpoint_override"
            if self._has(name, override) and with_user:
                kind = settings.cinder.service_type if name == "volume" else None
                client = self._client(name, override, kind)
                headers = {"openstack-api-version": f"volume {VOLUME_VERSION}"} if name == "volume" else None
                ask = functools.partial(client.request, "GET", path, headers=headers)
                yield Question(name, setting, ask, "", client.transport)
            elif override:
                left_open = "it answers, but without a service user (identity.auth_url) nothing more can be asked of it"
                transport = self._transport(name, override)
                yield Question(name, setting, functools.partial(_versions, transport), left_open, transport)
        if settings.barbican.barbican_endpoint:
            left_open = "it answers; certificates are asked for with the tokens of users, and not here"
            transport = self._key_manager()
            ask = functools.partial(_versions, transport)
            yield Question(KEY_MANAGER, "barbican.barbican_endpoint", ask, left_open, transport)
        for name, setting, url in (
            ("compute", "nova.endpoint_override", settings.nova.endpoint_override),
            ("metadata", "neutron.metadata_url", settings.neutron.metadata_url),
        ):
            if url:
                transport = self._transport(name, url)
                yield Question(name, setting, functools.partial(_versions, transport), "", transport)

    async def _logs_in(self) -> None:
        """Log in as the service user, and validate a token as roles do with those of users."""
        token = await self.token().get()
        try:
            await self._identity().validate(token)
        except Forbidden:
            name = self._process.settings.identity.username
            raise Unavailable(
                f"The service user {name} may not validate tokens: give it the role service or admin in the project "
                f"{self._process.settings.identity.project_name}."
            ) from None

    # --- compute hosts ---------------------------------------------------------------------------------------

    def keyring(self) -> HostKeyring:
        """Return what derives the keys of hosts; its users share neutron.ticket_key, or DIR."""
        neutron = self._process.settings.neutron
        others = [bytes.fromhex(key) for key in neutron.other_ticket_keys.split()]
        if neutron.ticket_key:
            return HostKeyring(bytes.fromhex(neutron.ticket_key), others)
        own = bytes.fromhex(self._process.keys.ticket_key)
        return HostKeyring(hmac.digest(own, b"compute hosts", "sha256"), others)

    def host_keys(self) -> HeldKeys:
        """Return the keys of this host, which it fetches from a conductor."""
        process = self._process
        assert process.bus is not None
        return HeldKeys(process.host, HostKeysAPI(process.bus, process.host).fetch, process.clock.now)

    def compute(self, of: str, without: str) -> ServiceClient | None:
        """Return the client with which a service sends events to compute; the API may start after it.

        `of` says what the events are about, and `without` what follows if there is no compute.
        """
        url = self._process.settings.nova.endpoint_override
        if not self._has("compute", url):
            log.warning("compute gets no events of %s, and %s: set nova.endpoint_override", of, without)
            return None
        return self._client("compute", url)

    # --- metadata --------------------------------------------------------------------------------------------

    def metadata(self) -> Transport:
        """Return the transport to the metadata service for the agent's proxies; the service may start after them."""
        url = self._process.settings.neutron.metadata_url
        if url or "metadata" in self._process.roles:
            return self._transport("metadata", url)
        return NoService("There is no metadata service here: run the role metadata, or set neutron.metadata_url.")

    def _has(self, name: str, override: str) -> bool:
        return bool(override) or self._is_embedded(name) or self._in_catalog(name, override)

    def _is_embedded(self, name: str) -> bool:
        return ("api" if name == "compute" else name) in self._process.roles

    def _in_catalog(self, name: str, override: str) -> bool:
        """Return whether a service is looked up in the catalog: it has no URL in the settings and is not embedded."""
        if override or self._is_embedded(name) or self._noauth:
            return False
        return bool(self._process.settings.identity.auth_url)

    def _client(self, name: str, override: str, service_type: str | None = None) -> ServiceClient:
        """Return the client of a service; `service_type` is its type in the catalog, if that is not its name."""
        prefix = "" if name != "compute" else "/v2.1"
        if self._noauth:
            return ServiceClient(self._transport(name, override), _noauth_token, prefix=prefix)
        token = self.token()
        if self._in_catalog(name, override):
            transport: Transport = CatalogTransport(self.catalog(), service_type or name, self._authorities)
            self._transports.append(transport)
        else:
            transport = self._transport(name, override)
        return ServiceClient(transport, token.get, prefix=prefix, renew=token.forget)

    def _transport(self, name: str, url: str) -> Transport:
        if url:
            base = url.rstrip("/")
            base = base.removesuffix({"identity": "/v3", "compute": "/v2.1", "volume": "/v3"}.get(name, ""))
            made: Transport = HTTPTransport(base, ca_file=self._authorities)
            self._transports.append(made)
            return made
        if not self._is_embedded(name):
            section = {
                "identity": "identity.auth_url",
                "image": "glance.endpoint_override",
                "network": "neutron.endpoint_override",
                "volume": "cinder.endpoint_override",
            }[name]
            raise SettingsError(f"The {name} service has no URL: set {section}, or run its role in this process.")
        return ASGITransport(MountedApp(self._process, f"/{name}"))


async def _versions(transport: Transport) -> None:
    """Ask a service for its versions; raise an error if it does not list them."""
    answer = await transport.request("GET", "/", {"accept": "application/json"}, None)
    raise_for(answer, "GET", "/")


class MountedApp:
    """A service of this process by its mount path. It is looked up at each call, because it may start later."""

    def __init__(self, process: "Process", mount: str) -> None:
        self._process = process
        self._mount = mount

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the service."""
        await self._process.apps[self._mount](scope, receive, send)


class NoService:
    """The transport to a service that this cloud does not have: every request fails with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Raise Unavailable."""
        raise Unavailable(self._reason)

    async def close(self) -> None:
        """Do nothing."""


async def _no_token() -> str:
    """The service user asks the key manager for nothing: users do."""
    return ""


async def _noauth_token() -> str:
    return "admin:admin"

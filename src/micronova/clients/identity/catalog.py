"""Services found in the identity service's catalog, which comes with the service user's token."""

import re
from collections.abc import Mapping

from micronova.clients.identity.client import ServiceToken
from micronova.clients.identity.follower import Follower
from micronova.http.client import Answer, HTTPTransport
from micronova.objects.clock import Clock
from micronova.objects.errors import Unavailable

INTERFACES = ("internal", "public")
"""The interfaces that are looked for, in this order: services use the internal network where there is one."""
INTERVAL = 60.0
"""Seconds between two looks whether the token, and with it the catalog, is due for renewal."""

# Clients add the version to a path themselves. Some catalogs name it, and a project after it.
_VERSION = re.compile(r"/v\d+(\.\d+)?(/[^/]+)?$")


class Catalog(Follower):
    """The endpoints of one region.

    A catalog is as old as the token. If an endpoint is missing, the next look fetches a new token, so that an
    endpoint that is added later is found within `interval` seconds.

    Clients send the service user's token to these endpoints. So where the identity service is reached by HTTPS
    (`tls_only`), endpoints without TLS are not used.
    """

    what = "catalog"

    def __init__(
        self, token: ServiceToken, clock: Clock, *, region: str, tls_only: bool = False, interval: float = INTERVAL
    ) -> None:
        super().__init__(clock, interval)
        self._token = token
        self._region = region
        self._schemes = ("https://",) if tls_only else ("https://", "http://")
        self._missing = False

    async def endpoint(self, service_type: str) -> str:
        """Return the URL of a service, without version and trailing slash; raise Unavailable if there is none."""
        await self._token.get()
        return self.known_endpoint(service_type)

    async def has(self, service_type: str) -> bool:
        """Return whether the catalog has a service that need not be there; one that is added later is found, too."""
        await self._token.get()
        found = any(interface in INTERFACES for interface, _ in self._named(service_type))
        self._missing = self._missing or not found
        return found

    def known_endpoint(self, service_type: str) -> str:
        """Return the URL of a service as the last catalog has it, without asking; otherwise as `endpoint`."""
        if self._token.catalog is None:
            raise Unavailable("The identity service has not sent its catalog yet.")
        named = self._named(service_type)
        for wanted in INTERFACES:
            for interface, url in named:  # of several, the first, as other clients do
                if interface == wanted and url.lower().startswith(self._schemes):
                    return _VERSION.sub("", url.rstrip("/"))
        self._missing = True
        if refused := [url for interface, url in named if interface in INTERFACES]:
            raise Unavailable(
                f"The identity service's catalog has only {', '.join(refused)} for the {service_type} service, and the "
                f"service user's token is sent to {' or '.join(self._schemes)} only: correct the catalog, or set the "
                "service's endpoint_override."
            )
        raise Unavailable(
            f"The identity service's catalog has no endpoint of the {service_type} service in region {self._region}."
        )

    def _named(self, service_type: str) -> list[tuple[str, str]]:
        """Return the interfaces of a service in this region, with their URLs."""
        return [
            (endpoint["interface"], str(endpoint["url"]))
            for service in self._token.catalog or ()
            if service.get("type") == service_type
            for endpoint in service.get("endpoints", ())
            if endpoint.get("region_id") == self._region
        ]

    async def refresh(self) -> None:
        """Renew the token, and with it the catalog, if it is due or an endpoint was missing."""
        if self._missing:
            await self._token.renew()
            self._missing = False
        else:
            await self._token.get()


class CatalogTransport:
    """Sends requests to a service at the URL that the catalog has for it."""

    def __init__(self, catalog: Catalog, service_type: str, ca_file: str = "") -> None:
        self._ca_file = ca_file
        self._catalog = catalog
        self._service_type = service_type
        self._transports: dict[str, HTTPTransport] = {}  # by URL: requests to an earlier one may be under way

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request and read the whole answer."""
        base = await self._catalog.endpoint(self._service_type)
        transport = self._transports.get(base)
        if transport is None:
            transport = self._transports[base] = HTTPTransport(base, ca_file=self._ca_file)
        return await transport.request(method, url, headers, body)

    def renew(self) -> None:
        """Read the certificates of authorities again for requests from now on."""
        for transport in self._transports.values():
            transport.renew()

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.close()
        self._transports.clear()

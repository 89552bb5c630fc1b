"""Services found in the identity service's catalog, which comes with the service user's token."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping

from micronova.clients.identity.client import ServiceToken
from micronova.http.client import Answer, HTTPTransport
from micronova.objects.clock import Clock
from micronova.objects.errors import Unavailable

log = logging.getLogger(__name__)

INTERFACES = ("internal", "public")
"""The interfaces that are looked for, in this order: services use the internal network where there is one."""
INTERVAL = 60.0
"""Seconds between two looks whether the token, and with it the catalog, is due for renewal."""

# Clients add the version to a path themselves. Some catalogs name it, and a project after it.
_VERSION = re.compile(r"/v\d+(\.\d+)?(/[^/]+)?$")


class Catalog:
    """The endpoints of one region.

    A catalog is as old as the token. If an endpoint is missing, the next look fetches a new token, so that an
    endpoint that is added later is found within `interval` seconds.

    Clients send the service user's token to these endpoints. So where the identity service is reached by HTTPS
    (`tls_only`), endpoints without TLS are not used.
    """

    def __init__(
        self, token: ServiceToken, clock: Clock, *, region: str, tls_only: bool = False, interval: float = INTERVAL
    ) -> None:
        self._token = token
        self._clock = clock
        self._region = region
        self._schemes = ("https://",) if tls_only else ("https://", "http://")
        self._interval = interval
        self._missing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Fetch the catalog and keep it fresh; an identity service that does not answer yet is asked again."""
        await self._look()
        self._task = asyncio.create_task(self._follow(), name="catalog")

    async def stop(self) -> None:
        """Stop keeping the catalog fresh."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def endpoint(self, service_type: str) -> str:
        """Return the URL of a service, without version and trailing slash; raise Unavailable if there is none."""
        await self._token.get()
        return self.known_endpoint(service_type)

    def known_endpoint(self, service_type: str) -> str:
        """Return the URL of a service as the last catalog has it, without asking; otherwise as `endpoint`."""
        if self._token.catalog is None:
            raise Unavailable("The identity service has not sent its catalog yet.")
        named = [
            (endpoint["interface"], str(endpoint["url"]))
            for service in self._token.catalog
            if service.get("type") == service_type
            for endpoint in service.get("endpoints", ())
            if endpoint.get("region_id") == self._region
        ]
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

    async def refresh(self) -> None:
        """Renew the token, and with it the catalog, if it is due or an endpoint was missing."""
        if self._missing:
            await self._token.renew()
            self._missing = False
        else:
            await self._token.get()

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self._look()

    async def _look(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # the next look tries again
            log.warning("cannot read the identity service's catalog: %s", error)


class CatalogTransport:
    """Sends requests to a service at the URL that the catalog has for it."""

    def __init__(self, catalog: Catalog, service_type: str) -> None:
        self._catalog = catalog
        self._service_type = service_type
        self._transports: dict[str, HTTPTransport] = {}  # by URL: requests to an earlier one may be under way

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request and read the whole answer."""
        base = await self._catalog.endpoint(self._service_type)
        transport = self._transports.get(base)
        if transport is None:
            transport = self._transports[base] = HTTPTransport(base)
        return await transport.request(method, url, headers, body)

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.close()
        self._transports.clear()

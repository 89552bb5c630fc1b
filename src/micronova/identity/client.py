"""What our services need of identity, over its public API: any Keystone and the embedded one alike.

Paths begin with /v3: a transport's base is the identity service itself, without the version.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from micronova.http.client import ServiceClient, Transport, raise_for
from micronova.objects.errors import Forbidden, NotFound, Unauthorized, Unavailable

MARGIN = 120.0  # seconds before its end at which a token is no longer used: requests under way need it, too


class ServiceToken:
    """The token of a service user: got with its password, shared by all clients, renewed before it runs out.

    For a `ServiceClient`: `ServiceClient(transport, token.get, renew=token.forget)`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        username: str,
        password: str,
        project_name: str,
        now: Callable[[], float],
        user_domain_name: str = "Default",
        project_domain_name: str = "Default",
        margin: float = MARGIN,
    ) -> None:
        self._transport = transport
        self._now = now
        self._margin = margin
        self._request = msgspec.json.encode(
            {
                "auth": {
                    "identity": {
                        "methods": ["password"],
                        "password": {
                            "user": {"name": username, "domain": {"name": user_domain_name}, "password": password}
                        },
                    },
                    "scope": {"project": {"name": project_name, "domain": {"name": project_domain_name}}},
                }
            }
        )
        self._username = username
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._until = 0.0
        self._catalog: list[dict[str, Any]] = []

    async def get(self) -> str:
        """Return a token that is good for a while yet; of many who ask at once, one fetches it."""
        if self._token is None or self._now() >= self._until:
            async with self._lock:
                if self._token is None or self._now() >= self._until:
                    await self._fetch()
        assert self._token is not None
        return self._token

    def forget(self) -> None:
        """Do not use the present token any more: a service refused it."""
        self._token = None

    async def endpoint(self, service: str, *, interface: str = "internal", region: str | None = None) -> str:
        """Return a service's URL as the catalog has it, without a trailing slash."""
        await self.get()
        for entry in self._catalog:
            if entry.get("type") != service:
                continue
            for endpoint in entry.get("endpoints", ()):
                if endpoint.get("interface") == interface and region in (None, endpoint.get("region_id")):
                    return str(endpoint["url"]).rstrip("/")
        where = f" in region {region}" if region else ""
        raise NotFound(f"The catalog has no {interface} endpoint of type {service}{where}.")

    async def _fetch(self) -> None:
        headers = {"content-type": "application/json", "accept": "application/json"}
        answer = await self._transport.request("POST", "/v3/auth/tokens", headers, self._request)
        if answer.status == 401:
            # Our own settings are wrong; that must not look as if the caller's token were.
            raise Unavailable(f"The identity service does not accept the service user {self._username}.")
        raise_for(answer, "POST", "/v3/auth/tokens")
        token = answer.json()["token"]
        expires_at = datetime.fromisoformat(token["expires_at"]).timestamp()
        issued_at = datetime.fromisoformat(token["issued_at"]).timestamp()
        # A margin that leaves short-lived tokens some life.
        self._until = expires_at - min(self._margin, (expires_at - issued_at) / 4)
        self._catalog = token.get("catalog", [])
        self._token = answer.headers["x-subject-token"]


class IdentityClient:
    """Asks an identity service, as the service user."""

    def __init__(self, transport: Transport, token: ServiceToken) -> None:
        self._service = ServiceClient(transport, token.get, renew=token.forget)

    async def validate(self, token: str) -> dict[str, Any]:
        """Return what a token says; raise Unauthorized when it is forged, expired or revoked."""
        if not (token.isascii() and token.isprintable()):
            raise Unauthorized("The token is not valid.")  # it would not even fit into a header
        try:
            body = await self._service.request("GET", "/v3/auth/tokens?nocatalog=1", headers={"x-subject-token": token})
        except NotFound:
            raise Unauthorized("The token is not valid, has expired or was revoked.") from None
        except Unauthorized:  # of the service user's own token, twice: nothing that the caller could mend
            raise Unavailable("The identity service does not accept our service user's token.") from None
        return dict(body["token"])

    async def project_exists(self, project_id: str, token: str | None = None) -> bool:
        """Say whether there is such a project; when we are not allowed to know, believe the caller."""
        try:
            await self._service.request("GET", f"/v3/projects/{quote(project_id, safe='')}", token=token)
        except NotFound:
            return False
        except Forbidden:
            return True
        return True

    async def revocations(self, since: float) -> list[dict[str, Any]]:
        """Return what an embedded identity revoked from a moment on; see `micronova.identity.feed`."""
        moment = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = await self._service.request("GET", f"/v3/OS-REVOKE/events?since={moment}")
        return list(body["events"])

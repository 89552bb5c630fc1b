"""The client of the identity service, over the API that Keystone and the embedded service share.

Paths begin with /v3: the base of a transport is the identity service without a version.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from micronova.http.client import ServiceClient, Transport, raise_for
from micronova.http.paging import iso_from_seconds
from micronova.objects.errors import Forbidden, Invalid, NotFound, Unauthorized, Unavailable

ACCESS_RULES = "openstack-identity-access-rules"  # a header: the version of access rules that we enforce
MARGIN = 120.0  # seconds before its expiry at which a token is renewed, so that it outlives requests under way


class ServiceToken:
    """The token of the service user: fetched with its password, shared by all clients, renewed before it expires.

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
        self.catalog: list[dict[str, Any]] | None = None  # that came with the token; see Catalog

    async def get(self) -> str:
        """Return a token that does not expire soon; concurrent callers share one request."""
        if self._token is None or self._now() >= self._until:
            async with self._lock:
                if self._token is None or self._now() >= self._until:
                    await self._fetch()
        assert self._token is not None
        return self._token

    async def renew(self) -> None:
        """Replace the token and the catalog; if that fails, the old ones stay."""
        async with self._lock:
            await self._fetch()

    def forget(self) -> None:
        """Drop the token, because a service refused it."""
        self._token = None

    async def _fetch(self) -> None:
        headers = {"content-type": "application/json", "accept": "application/json"}
        answer = await self._transport.request("POST", "/v3/auth/tokens", headers, self._request)
        if answer.status == 401:
            # Our settings are wrong. A 401 would tell the caller that its own token is.
            raise Unavailable(f"The identity service does not accept the service user {self._username}.")
        raise_for(answer, "POST", "/v3/auth/tokens")
        token = answer.json()["token"]
        expires_at = datetime.fromisoformat(token["expires_at"]).timestamp()
        issued_at = datetime.fromisoformat(token["issued_at"]).timestamp()
        # A short-lived token is used for at least three quarters of its lifetime.
        self._until = expires_at - min(self._margin, (expires_at - issued_at) / 4)
        self.catalog = token.get("catalog", [])
        self._token = answer.headers["x-subject-token"]


class IdentityClient:
    """Calls the identity service as the service user."""

    def __init__(self, transport: Transport, token: ServiceToken) -> None:
        self._service = ServiceClient(transport, token.get, renew=token.forget)

    async def validate(self, token: str) -> dict[str, Any]:
        """Return the contents of a token; raise Unauthorized if it is forged, expired or revoked."""
        if not (token.isascii() and token.isprintable()):
            raise Unauthorized("The token is not valid.")  # it cannot be sent in a header
        try:
            headers = {"x-subject-token": token, ACCESS_RULES: "1.0"}
            body = await self._service.request("GET", "/v3/auth/tokens?nocatalog=1", headers=headers)
        except NotFound:
            raise Unauthorized("The token is not valid, has expired or was revoked.") from None
        return dict(body["token"])

    async def project_exists(self, project_id: str, token: str | None = None) -> bool:
        """Return whether a project exists; also True if we are not allowed to look."""
        try:
            await self._service.request("GET", f"/v3/projects/{quote(project_id, safe='')}", token=token)
        except NotFound:
            return False
        except Forbidden:
            return True
        return True

    async def find_project(self, named: str, token: str | None = None) -> str:
        """Return the id of a project by its id or name; raise Invalid if there is none, or several of that name."""
        if await self.project_exists(named, token):
            return named
        try:
            body = await self._service.request("GET", f"/v3/projects?name={quote(named, safe='')}", token=token)
        except Forbidden:
            raise Invalid(f"There is no project with the id {named}, and its name may not be looked up.") from None
        found = [str(project["id"]) for project in body["projects"]]
        if len(found) > 1:
            raise Invalid(f"{len(found)} projects are called {named}: give the id of one.")
        if not found:
            raise Invalid(f"There is no project {named}.")
        return found[0]

    async def revocations(self, since: float) -> list[dict[str, Any]]:
        """Return what an embedded identity service has revoked since a time; see `micronova.clients.identity.feed`."""
        body = await self._service.request("GET", f"/v3/OS-REVOKE/events?since={iso_from_seconds(since)}")
        return list(body["events"])

"""The network service, as an agent sees it."""

import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.neighbours.network.agent.state import HostState

WAIT = 25.0  # seconds that a question waits for a change


class NetworkServiceClient:
    """Asks and tells the network service about one host."""

    def __init__(self, client: ServiceClient, host: str) -> None:
        self._client = client
        self.host = host

    async def state(self, fingerprint: str = "", wait: float = WAIT) -> tuple[str, HostState | None]:
        """Return the host's desired state once it is another than the named one; None if it did not change so long."""
        query = urllib.parse.urlencode({"fingerprint": fingerprint, "wait": f"{wait:g}"} if fingerprint else {})
        answer = await self._client.request("GET", f"/v2.0/agent-states/{urllib.parse.quote(self.host)}?{query}")
        found = answer.get("state")
        return answer["fingerprint"], None if found is None else msgspec.convert(found, HostState)

    async def report(
        self,
        *,
        started: bool = False,
        configurations: dict[str, Any] | None = None,
        up: Sequence[str] = (),
        down: Sequence[str] = (),
        dhcp: bool = False,
    ) -> None:
        """Tell that the agent lives, which ports are wired or no longer so, and whether DHCP servers lack theirs."""
        body: dict[str, Any] = {"host": self.host, "started": started, "up": list(up), "down": list(down)}
        body.update(configurations=configurations or {}, dhcp=dhcp)
        await self._client.request("POST", "/v2.0/agent-reports", body)

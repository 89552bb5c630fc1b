"""The part of the network service's API that the network agent uses."""

import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from micronova.embedded.network.agent.desired_state import DesiredState
from micronova.http.client import ServiceClient

WAIT = 25.0  # seconds that a request waits for a change


class NetworkServiceClient:
    """Reads one host's desired state from the network service and reports to it."""

    def __init__(self, client: ServiceClient, host: str) -> None:
        self._client = client
        self.host = host

    async def state(self, fingerprint: str = "", wait: float = WAIT) -> tuple[str, DesiredState | None]:
        """Return the desired state and its fingerprint; None if the state has not changed after `wait` seconds."""
        query = urllib.parse.urlencode({"fingerprint": fingerprint, "wait": f"{wait:g}"} if fingerprint else {})
        answer = await self._client.request("GET", f"/v2.0/agent-states/{urllib.parse.quote(self.host)}?{query}")
        found = answer.get("state")
        return answer["fingerprint"], None if found is None else msgspec.convert(found, DesiredState)

    async def report(
        self,
        *,
        started: bool = False,
        configurations: dict[str, Any] | None = None,
        up: Sequence[str] = (),
        down: Sequence[str] = (),
        dhcp: bool = False,
    ) -> None:
        """Send a heartbeat with the ports that became wired (`up`) or are no longer (`down`).

        `dhcp` asks the service to bring the ports of DHCP servers up to date.
        """
        body: dict[str, Any] = {"host": self.host, "started": started, "up": list(up), "down": list(down)}
        body.update(configurations=configurations or {}, dhcp=dhcp)
        await self._client.request("POST", "/v2.0/agent-reports", body)

"""The part of the network service's API that the network agent uses."""

import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from micronova.embedded.network.agent.desired_state import DesiredState, state_of_parts
from micronova.http.client import ServiceClient

WAIT = 45.0  # seconds that a request waits for a change


class NetworkServiceClient:
    """Reads one host's desired state from the network service and reports to it."""

    def __init__(self, client: ServiceClient, host: str) -> None:
        self._client = client
        self.host = host
        self._parts: dict[str, Any] = {}  # of the state that was read last
        self._fingerprint = ""

    async def state(self, fingerprint: str = "", wait: float = WAIT) -> tuple[str, DesiredState | None]:
        """Return the desired state and its fingerprint; None if the state has not changed after `wait` seconds."""
        known = {"fingerprint": fingerprint, "wait": f"{wait:g}"} if fingerprint else {}
        query = urllib.parse.urlencode({"parts": "true", **known})
        answer = await self._client.request("GET", f"/v2.0/agent-states/{urllib.parse.quote(self.host)}?{query}")
        found = answer["fingerprint"]
        if found == fingerprint:
            return found, None
        if "state" in answer:  # of a service before 0.2.0
            return found, msgspec.convert(answer["state"], DesiredState)
        since = answer.get("since", "")
        if since and since != self._fingerprint:
            return await self.state()  # these are changes of a state that this object does not have
        kept = {name: part for name, part in self._parts.items() if name not in answer.get("removed", ())}
        self._parts = {**(kept if since else {}), **answer.get("parts", {})}
        self._fingerprint = found
        return found, msgspec.convert(state_of_parts(self._parts), DesiredState)

    async def report(
        self,
        *,
        started: bool = False,
        configurations: dict[str, Any] | None = None,
        up: Sequence[str] = (),
        down: Sequence[str] = (),
        dhcp: bool = False,
    ) -> float | None:
        """Send a heartbeat with the ports that became wired (`up`) or are no longer (`down`).

        Return the seconds until the next heartbeat, if the service names them.

        `dhcp` asks the service to bring the ports of DHCP servers up to date.
        """
        body: dict[str, Any] = {"host": self.host, "started": started, "up": list(up), "down": list(down)}
        body.update(configurations=configurations or {}, dhcp=dhcp)
        answer = await self._client.request("POST", "/v2.0/agent-reports", body)
        return answer.get("interval") if isinstance(answer, dict) else None

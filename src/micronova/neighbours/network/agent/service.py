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
    ) -> None:
        """Tell that the agent lives, and which ports are wired or no longer so."""
        body: dict[str, Any] = {"host": self.host, "started": started, "up": list(up), "down": list(down)}
        body["configurations"] = configurations or {}
        await self._client.request("POST", "/v2.0/agent-reports", body)

    async def make_dhcp_port(self, network_id: str, subnet_ids: Sequence[str]) -> None:
        """Make the port of the host's DHCP server on a network, unless there is one of which we have not heard yet."""
        device = f"dhcp-{self.host}"[:255]
        query = urllib.parse.urlencode({"network_id": network_id, "device_id": device, "fields": "id"})
        if (await self._client.request("GET", f"/v2.0/ports?{query}"))["ports"]:
            return
        port = {
            "network_id": network_id,
            "name": "",
            "device_owner": "network:dhcp",
            "device_id": device,
            "fixed_ips": [{"subnet_id": each} for each in subnet_ids],
            "port_security_enabled": False,
            "binding:host_id": self.host,
        }
        await self._client.request("POST", "/v2.0/ports", {"port": port})

    async def change_dhcp_port(self, port_id: str, subnet_ids: Sequence[str]) -> None:
        """Give a DHCP port an address on each subnet that is served now."""
        body = {"port": {"fixed_ips": [{"subnet_id": each} for each in subnet_ids]}}
        await self._client.request("PUT", f"/v2.0/ports/{port_id}", body)

    async def delete_port(self, port_id: str) -> None:
        """Delete a port that is needed no more."""
        await self._client.request("DELETE", f"/v2.0/ports/{port_id}", ok=(404,))

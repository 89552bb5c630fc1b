"""The calls of the network API that compute makes, and what it remembers of the answers."""

import asyncio
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from micronova.http.client import ServiceClient
from micronova.network.cache import Remembered
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotFound, PortLimitExceeded

MARK = "micronova"  # our part of binding:profile: the server, whether we made the port, the device tag of the user
REMEMBER = 5.0  # seconds for which networks and subnets are taken as they were
PAGE = 1000


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A network and its subnets, as far as servers are concerned."""

    id: str
    name: str = ""
    project_id: str = ""
    mtu: int | None = None
    shared: bool = False
    external: bool = False
    port_security: bool = True
    subnets: tuple[dict[str, Any], ...] = ()


class Calls:
    """Neutron's API, real or embedded; without a token the service user's is used."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._networks = Remembered(REMEMBER)  # by id, as the service user sees them
        self._extensions = Remembered(600.0)

    async def get(self, path: str, query: Iterable[tuple[str, str]] = (), *, token: str | None = None) -> Any:
        """GET a document."""
        text = urllib.parse.urlencode(list(query))
        return await self._client.request("GET", f"/v2.0{path}" + (f"?{text}" if text else ""), token=token)

    async def all_of(self, collection: str, *query: tuple[str, str], token: str | None = None) -> list[dict[str, Any]]:
        """GET a collection."""
        path = collection.replace("_", "-")
        return list((await self.get(f"/{path}", query, token=token))[collection])

    async def networks_seen_by(self, ids: Sequence[str], token: str) -> dict[str, Network]:
        """Return those of the networks that a user may see, with their subnets' ids only."""
        found = await self.all_of("networks", *(("id", id) for id in dict.fromkeys(ids)), token=token)
        return {each["id"]: network_of(each, ()) for each in found}

    async def networks(self, ids: Iterable[str]) -> dict[str, Network]:
        """Return networks with their subnets; remembered for a while."""
        wanted = list(dict.fromkeys(ids))
        known = {id: self._networks.peek(id) for id in wanted}
        missing = tuple(sorted(id for id, network in known.items() if network is None))
        if missing:
            fetched = await self._networks.get(missing, lambda: self._fetch(missing))
            for id, network in fetched.items():
                self._networks.put(id, network)
                known[id] = network
        return {id: network for id, network in known.items() if network is not None}

    async def _fetch(self, ids: Sequence[str]) -> dict[str, Network]:
        networks, subnets = await asyncio.gather(
            self.all_of("networks", *(("id", id) for id in ids)),
            self.all_of("subnets", *(("network_id", id) for id in ids)),
        )
        below: dict[str, list[dict[str, Any]]] = {}
        for subnet in subnets:
            below.setdefault(subnet["network_id"], []).append(subnet)
        return {each["id"]: network_of(each, below.get(each["id"], ())) for each in networks}

    async def has_extension(self, alias: str) -> bool:
        """Say whether the service has an extension; asked once in a while."""
        found = await self._extensions.get("all", lambda: self.get("/extensions"))
        return any(each["alias"] == alias for each in found["extensions"])

    async def ports_of(self, device_id: str, *fields: str) -> list[dict[str, Any]]:
        """Return the ports that we have given a server; all about them, or only some fields."""
        query = [("device_id", device_id), *(("fields", field) for field in fields)]
        return [port for port in await self.all_of("ports", *query) if mark_of(port).get("server") == device_id]

    async def create_ports(self, ports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create ports in one request: all or none."""
        try:
            if len(ports) == 1:
                return [(await self._client.request("POST", "/v2.0/ports", {"port": ports[0]}))["port"]]
            return list((await self._client.request("POST", "/v2.0/ports", {"ports": ports}))["ports"])
        except Conflict as error:
            if error.details.get("type") == "OverQuota":
                raise PortLimitExceeded("Maximum number of ports exceeded") from None
            if error.details.get("type") == "IpAddressGenerationFailure":
                raise Invalid(f"No fixed IP addresses available: {error.message}") from None
            raise

    async def update_port(
        self, id: str, changes: Mapping[str, Any], *, revision: int | None = None
    ) -> dict[str, Any]:
        """Change a port; with a revision, only if nobody changed it meanwhile."""
        headers = {} if revision is None else {"if-match": f"revision_number={revision}"}
        try:
            answer = await self._client.request("PUT", f"/v2.0/ports/{id}", {"port": changes}, headers=headers)
        except MicronovaError as error:
            if error.details.get("status") == 412:
                raise Conflict(f"Port {id} was changed by somebody else meanwhile.") from None
            raise
        return dict(answer["port"])

    async def delete_port(self, id: str) -> None:
        """Delete a port; one that is gone is deleted."""
        try:
            await self._client.request("DELETE", f"/v2.0/ports/{id}")
        except NotFound:
            pass

    async def all_ports(self, *query: tuple[str, str]) -> list[dict[str, Any]]:
        """Return every port, page by page."""
        found: list[dict[str, Any]] = []
        marker: tuple[tuple[str, str], ...] = ()
        while True:
            page = await self.all_of("ports", *query, ("limit", str(PAGE)), *marker)
            found += page
            if len(page) < PAGE:
                return found
            marker = (("marker", page[-1]["id"]),)


def mark_of(port: Mapping[str, Any]) -> dict[str, Any]:
    """Return what we noted on a port; empty for one that we never had.

    A user may write any server's id on a port of its own. The note is in what only services may write, so it alone
    says which ports are a server's.
    """
    mark = (port.get("binding:profile") or {}).get(MARK)
    return mark if isinstance(mark, dict) else {}


def network_of(document: Mapping[str, Any], subnets: Iterable[dict[str, Any]]) -> Network:
    """Return what we keep of a network."""
    below = tuple(subnets) or tuple({"id": id} for id in document.get("subnets", ()))
    return Network(
        id=document["id"],
        name=document.get("name", ""),
        project_id=document.get("project_id") or document.get("tenant_id") or "",
        mtu=document.get("mtu"),
        shared=document.get("shared", False),
        external=document.get("router:external", False),
        port_security=document.get("port_security_enabled", True),
        subnets=below,
    )

"""The calls of the network API that compute makes, with a short cache of networks and extensions."""

import asyncio
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from micronova.clients.expiring_cache import ExpiringCache
from micronova.http.client import ServiceClient
from micronova.objects.errors import Conflict, Invalid, MicronovaError, NotFound, PortLimitExceeded
from micronova.objects.port_resources import PortResources, resources_of

MARK = "micronova"  # our key in binding:profile; its value names the server, the device tag and who created the port
ALLOCATION = "allocation"  # the key in binding:profile of the resource providers that serve a port
RESOURCE_REQUESTS = "port-resource-request"  # the extension with which ports show what they ask of providers
GUARANTEES = ("minimum_bandwidth", "minimum_packet_rate")  # types of QoS rules that ask for resources
_POLICIES = ("qos_policy_id", "qos_network_policy_id")  # of a port; its own comes first
ASKING = ("id", "resource_request", *_POLICIES)  # the attributes of ports that say what they ask for
NETWORK_CACHE_TIME = 5.0  # seconds for which networks and subnets are cached
PAGE = 1000


class PortChanged(Conflict):
    """The port has another revision than the one that the change is based on."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes of a network and its subnets that servers need."""

    id: str
    name: str = ""
    project_id: str = ""
    mtu: int | None = None
    shared: bool = False
    external: bool = False
    port_security: bool = True
    qos_policy_id: str | None = None
    subnets: tuple[dict[str, Any], ...] = ()


class Calls:
    """Calls the network API of Neutron or of the embedded service; without a token, as the service user."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._networks = ExpiringCache[str, Network](NETWORK_CACHE_TIME)  # by id, as the service user sees them
        # By their ids: who need the same networks share one request.
        self._fetched = ExpiringCache[tuple[str, ...], dict[str, Network]](NETWORK_CACHE_TIME)
        self._extensions = ExpiringCache[None, frozenset[str]](600.0)

    async def get(self, path: str, query: Iterable[tuple[str, str]] = (), *, token: str | None = None) -> Any:
        """Return the document at a path."""
        text = urllib.parse.urlencode(list(query))
        return await self.send("GET", path + (f"?{text}" if text else ""), token=token)

    async def send(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """Send a request and return the document that answers it."""
        return await self._client.request(method, f"/v2.0{path}", body, token=token)

    async def all_of(self, collection: str, *query: tuple[str, str], token: str | None = None) -> list[dict[str, Any]]:
        """Return the resources of a collection that match a query, of all its pages."""
        path = collection.replace("_", "-")
        found: list[dict[str, Any]] = []
        while True:
            document = await self.get(f"/{path}", query, token=token)
            found += document[collection]
            links = document.get(f"{collection}_links", ()) if document[collection] else ()
            following = next((link["href"] for link in links if link["rel"] == "next"), None)
            if following is None:
                return found
            query = tuple(urllib.parse.parse_qsl(urllib.parse.urlsplit(following).query, keep_blank_values=True))

    async def networks_seen_by(self, ids: Sequence[str], token: str) -> dict[str, Network]:
        """Return those of the networks that a user may see, with their subnets' ids only."""
        found = await self.all_of("networks", *(("id", id) for id in dict.fromkeys(ids)), token=token)
        return {each["id"]: network_of(each, ()) for each in found}

    async def networks(self, ids: Iterable[str]) -> dict[str, Network]:
        """Return networks with their subnets, from the cache if it has them."""
        wanted = list(dict.fromkeys(ids))
        known = {id: self._networks.peek(id) for id in wanted}
        missing = tuple(sorted(id for id, network in known.items() if network is None))
        if missing:
            fetched = await self._fetched.get(missing, lambda: self._fetch(missing))
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
        """Return whether the service has an extension; the list is cached."""
        return alias in await self._extensions.get(None, self._aliases)

    async def _aliases(self) -> frozenset[str]:
        return frozenset(each["alias"] for each in (await self.get("/extensions"))["extensions"])

    async def guaranteeing(self, policies: Sequence[str]) -> str | None:
        """Return one of these QoS policies that has a rule that asks for resources, or whose rules cannot be read."""
        document = await self.get("/qos/policies", [("id", id) for id in policies])
        known = {each["id"]: each for each in document["policies"]}
        for id in policies:
            if id not in known or any(rule.get("type") in GUARANTEES for rule in known[id].get("rules", ())):
                return id
        return None

    async def port(self, id: str) -> dict[str, Any]:
        """Return a port; raise NotFound if it does not exist."""
        return dict((await self.get(f"/ports/{id}"))["port"])

    async def ports_of(self, device_id: str, *fields: str) -> list[dict[str, Any]]:
        """Return the ports of a server, with all or only some fields."""
        query = [("device_id", device_id), *(("fields", field) for field in fields)]
        return [port for port in await self.all_of("ports", *query) if mark_of(port).get("server") == device_id]

    async def resources_of_ports(self, ids: Sequence[str]) -> dict[str, PortResources]:
        """Return what ports ask of resource providers, by port; those that ask for nothing are left out."""
        if not ids or not await self.has_extension(RESOURCE_REQUESTS):
            return {}
        query = (*(("id", id) for id in ids), *(("fields", field) for field in ASKING))
        return await self._asked_by(await self.all_of("ports", *query))

    async def resources_of_server(self, device_id: str) -> dict[str, PortResources]:
        """Return what the ports of a server ask of resource providers, by port, as `resources_of_ports` does."""
        if not await self.has_extension(RESOURCE_REQUESTS):
            return {}
        return await self._asked_by(await self.ports_of(device_id, "binding:profile", *ASKING))

    async def _asked_by(self, ports: Iterable[Mapping[str, Any]]) -> dict[str, PortResources]:
        """Return what ports ask for, by port.

        Only services and admins see it. Raise Invalid if a port has a QoS policy with a guarantee and this service user
        does not see what it asks for: the guarantee would be given up without a word.
        """
        found: dict[str, PortResources] = {}
        for port in ports:
            if "resource_request" not in port:
                policy = next((port[name] for name in _POLICIES if port.get(name)), None)
                if policy is not None and await self.guaranteeing([policy]) is not None:
                    raise Invalid(
                        f"Port {port['id']} has a QoS policy, and the network service does not show what that asks of "
                        "hosts: its policy rule get_port:resource_request must allow the service user of compute."
                    )
            if (resources := resources_of(port)) is not None:
                found[port["id"]] = resources
        return found

    async def create_ports(
        self, ports: Sequence[Mapping[str, Any]], *, token: str | None = None
    ) -> list[dict[str, Any]]:
        """Create all ports or none, in one request."""
        try:
            if len(ports) == 1:
                return [(await self._client.request("POST", "/v2.0/ports", {"port": ports[0]}, token=token))["port"]]
            return list((await self._client.request("POST", "/v2.0/ports", {"ports": ports}, token=token))["ports"])
        except Conflict as error:
            if error.details.get("type") == "OverQuota":
                raise PortLimitExceeded("Maximum number of ports exceeded") from None
            if error.details.get("type") == "IpAddressGenerationFailure":
                raise Invalid(f"No fixed IP addresses available: {error.message}") from None
            raise

    async def update_port(self, id: str, changes: Mapping[str, Any], *, revision: int | None = None) -> dict[str, Any]:
        """Change a port; with a revision, raise PortChanged if the port has another revision by now."""
        headers = {} if revision is None else {"if-match": f"revision_number={revision}"}
        try:
            answer = await self._client.request("PUT", f"/v2.0/ports/{id}", {"port": changes}, headers=headers)
        except MicronovaError as error:
            if error.details.get("status") == 412:
                raise PortChanged(f"Port {id} was changed by another request meanwhile.") from None
            raise
        return dict(answer["port"])

    async def delete_port(self, id: str) -> None:
        """Delete a port, if it exists."""
        await self.delete("ports", id)

    async def delete(self, collection: str, id: str) -> None:
        """Delete a resource of a collection, if it exists."""
        try:
            await self._client.request("DELETE", f"/v2.0/{collection}/{id}")
        except NotFound:
            pass

    async def all_ports(self, *query: tuple[str, str]) -> list[dict[str, Any]]:
        """Return every port, page by page."""
        return await self.all_of("ports", *query, ("limit", str(PAGE)))


def mark_of(port: Mapping[str, Any]) -> dict[str, Any]:
    """Return our entry in a port's binding:profile; empty if the port was never a server's.

    Users may write any server's id into the device_id of their ports, but only services may write binding:profile.
    So only this entry says which ports a server has.
    """
    mark = (port.get("binding:profile") or {}).get(MARK)
    return mark if isinstance(mark, dict) else {}


def network_of(document: Mapping[str, Any], subnets: Iterable[dict[str, Any]]) -> Network:
    """Return the attributes of a network document that servers need."""
    below = tuple(subnets) or tuple({"id": id} for id in document.get("subnets", ()))
    return Network(
        id=document["id"],
        name=document.get("name", ""),
        project_id=document.get("project_id") or document.get("tenant_id") or "",
        mtu=document.get("mtu"),
        shared=document.get("shared", False),
        external=document.get("router:external", False),
        port_security=document.get("port_security_enabled", True),
        qos_policy_id=document.get("qos_policy_id"),
        subnets=below,
    )

"""The check of requested networks, ports and security groups, before anything is created."""

import asyncio
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from micronova.clients.expiring_cache import ExpiringCache
from micronova.clients.network.calls import RESOURCE_REQUESTS, Calls, Network, network_of
from micronova.objects.errors import (
    AddressInUse,
    Conflict,
    Forbidden,
    Invalid,
    MicronovaError,
    NotFound,
    RequestedNotFound,
)
from micronova.objects.network import NetworkPlan, NetworkRequest, PlannedPort, RequestedNetworks
from micronova.objects.port_resources import PortResources

PLAN_CACHE_TIME = 2.0  # seconds for which the networks and the free port quota of a project are cached
MOST_INTERFACES = 128  # of a new server; the network service is asked about each
MOST_SECURITY_GROUPS = 128  # that a request names
SPARE_PORTS = 50  # if the quota has this many more ports than requested, its cached value is good enough

_OUTSIDE = {  # addresses for documentation and benchmarks, one of which is in none of a network's subnets
    4: ("192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "198.19.255.254", "100.64.0.1"),
    6: ("2001:db8::1", "2001:db8:ffff::1", "2001:2::1", "3fff::1", "fd00::1"),
}


class _PortDraft(msgspec.Struct, frozen=True):
    """A planned port before it gets the requested security groups."""

    port: PlannedPort
    own_security_groups: tuple[str, ...] | None = None  # ids that it has in any case; None: it gets the requested ones


class Planner:
    """Makes plans. It asks with the user's token, so what the user may not see does not exist."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._known_networks = ExpiringCache[tuple[str, str], Network](PLAN_CACHE_TIME)  # by project and id
        self._usable_networks = ExpiringCache[str, list[Network]](PLAN_CACHE_TIME)  # by project
        self._free_ports = ExpiringCache[str, int](PLAN_CACHE_TIME)  # by project; what its quota still allows

    async def plan(
        self,
        requested: RequestedNetworks,
        security_groups: Sequence[str],
        *,
        token: str,
        project_id: str,
        count: int,
        may_attach_external: bool = False,
    ) -> NetworkPlan:
        """Return the plan for `count` equal servers; raise the error that the user gets (400, 403, 409).

        If the request does not name networks, the server gets a port on the project's only network.
        """
        if requested == "none":
            return NetworkPlan(ports="none")
        _check_number(requested if isinstance(requested, list) else (), MOST_INTERFACES, "interfaces")
        _check_number(security_groups, MOST_SECURITY_GROUPS, "security groups")
        if requested and requested != "auto":
            drafting = self._requested_ports(requested, token, project_id, may_attach_external)
        else:
            drafting = self._default_port(token, project_id)
        drafts, (ids, names) = await asyncio.gather(
            drafting, self._requested_security_groups(security_groups, token, project_id)
        )
        if drafts is None and requested != "auto":
            return NetworkPlan(ports="none")
        if drafts is None:
            await self._check_topology(token, project_id)
            if ids is not None:
                await self._check_found_again(ids, names, project_id)
            max_servers = await self._max_servers(1, count, token, project_id)
            return NetworkPlan(ports="auto", security_groups=names, max_servers=max_servers)
        ports = [_with_security_groups(draft, ids) for draft in drafts]
        new = sum(1 for port in ports if port.port_id is None)
        max_servers = await self._max_servers(new, count, token, project_id)
        shown = await self._shown_names(drafts, names, token)
        return NetworkPlan(ports=ports, security_groups=shown, max_servers=max_servers)

    # --- networks and ports ---

    async def _default_port(self, token: str, project_id: str) -> list[_PortDraft] | None:
        """Return a port on the only network that the project can use; None if there is no network."""
        found = await self._usable_networks.get(project_id, lambda: self._available(token, project_id))
        if len(found) > 1:
            raise Conflict("Multiple possible networks found, use a Network ID to be more specific.")
        await self._check_no_guarantees(found)
        return [_new_port(found[0])] if found else None

    async def _check_topology(self, token: str, project_id: str) -> None:
        """Raise Invalid if the network service cannot create a network for the project."""
        try:
            await self._calls.get(f"/auto-allocated-topology/{project_id}", [("fields", "dry-run")], token=token)
        except MicronovaError as error:
            raise Invalid(f"Unable to automatically allocate a network for project {project_id}: {error}") from None

    async def _available(self, token: str, project_id: str) -> list[Network]:
        own, shared = await asyncio.gather(
            self._calls.all_of(
                "networks", ("project_id", project_id), ("shared", "False"), ("admin_state_up", "True"), token=token
            ),
            self._calls.all_of("networks", ("shared", "True"), ("admin_state_up", "True"), token=token),
        )
        found = {each["id"]: each for each in (*own, *shared)}
        kept = [each for each in found.values() if each.get("shared") or not each.get("router:external")]
        return [network_of(each, ()) for each in kept if each.get("subnets")]

    async def _requested_ports(
        self, requests: Sequence[NetworkRequest], token: str, project_id: str, may_attach_external: bool
    ) -> list[_PortDraft] | None:
        """Return the ports for a list of requests."""
        ports, resources = await self._ports([r.port_id for r in requests if r.port_id], token, project_id)
        names = [r.network_id for r in requests if r.network_id and not r.port_id]
        networks = await self._networks(names, token, project_id)
        await self._check_no_guarantees(networks.values())
        found = []
        for request in requests:
            if request.port_id:
                port = ports[request.port_id]
                planned = PlannedPort(
                    network_id=port["network_id"],
                    port_id=request.port_id,
                    tag=request.tag,
                    resources=resources.get(request.port_id),
                )
                found.append(_PortDraft(planned, tuple(port.get("security_groups", ()))))
                continue
            if not request.network_id:
                raise Invalid("Each of the networks must name a network (uuid) or a port.")
            network = networks[request.network_id]
            if network.external and not network.shared and not may_attach_external:
                raise Forbidden(f"It is not allowed to create an interface on external network {network.id}")
            if not network.subnets:
                raise Invalid(f"Network {network.id} requires a subnet in order to boot instances on.")
            address = await self._address(request.fixed_ip, network, token) if request.fixed_ip else None
            found.append(_new_port(network, address, request.tag))
        return found

    async def _networks(self, ids: Sequence[str], token: str, project_id: str) -> dict[str, Network]:
        cached = {id: self._known_networks.peek((project_id, id)) for id in ids}
        known = {id: network for id, network in cached.items() if network is not None}
        missing = [id for id, network in cached.items() if network is None]
        if missing:
            fetched = await self._calls.networks_seen_by(missing, token)
            for id in missing:
                if id not in fetched:
                    raise RequestedNotFound(f"Network {id} could not be found.")
                known[id] = fetched[id]
                self._known_networks.put((project_id, id), fetched[id])
        return known

    async def _ports(
        self, ids: Sequence[str], token: str, project_id: str
    ) -> tuple[dict[str, dict[str, Any]], dict[str, PortResources]]:
        """Return a user's ports, and what they ask of resource providers."""
        if not ids:
            return {}, {}
        if len(set(ids)) != len(ids):
            raise Invalid("A port can be named only once.")
        listed = await self._calls.all_of("ports", *(("id", id) for id in ids), token=token)
        found = {port["id"]: port for port in listed}
        for id in ids:
            port = found.get(id)
            if port is None:
                raise RequestedNotFound(f"Port id {id} could not be found.")
            if port.get("device_id"):
                raise Conflict(f"Port {id} is still in use.")
            if (port.get("project_id") or port.get("tenant_id")) != project_id:
                raise Invalid(f"Port {id} not usable for the instance: it belongs to another project.")
            if not port["fixed_ips"] and port.get("ip_allocation") not in ("none", "deferred"):
                raise Invalid(f"Port {id} requires a FixedIP in order to be used.")
        asking = [id for id in ids if await self._may_ask(found[id])]
        return found, await self._calls.resources_of_ports(asking)

    async def _may_ask(self, port: Mapping[str, Any]) -> bool:
        """Return whether a port has a QoS policy, of its own or of its network, as far as its owner is shown that."""
        if port.get("qos_policy_id") or port.get("qos_network_policy_id"):
            return True
        return "qos_network_policy_id" not in port and await self._calls.has_extension(RESOURCE_REQUESTS)

    async def _check_no_guarantees(self, networks: Iterable[Network]) -> None:
        """Raise Invalid if new ports on a network would ask for resources: these are claimed before there is a port.

        The policy may be another project's, so that the user's token does not do.
        """
        policies = {each.qos_policy_id: each.id for each in networks if each.qos_policy_id}
        if not policies or not await self._calls.has_extension(RESOURCE_REQUESTS):
            return
        if (policy := await self._calls.guaranteeing(list(policies))) is not None:
            raise new_port_asks(policies[policy])

    async def _address(self, text: str, network: Network, token: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise Invalid(f"Fixed IP address {text[:64]} is invalid.") from None
        subnets = await self._calls.all_of("subnets", ("network_id", network.id), token=token)
        if not any(address in ipaddress.ip_network(subnet["cidr"]) for subnet in subnets):
            raise Invalid(f"Fixed IP {address} is not a valid ip address for network {network.id}.")
        await self._check_may_choose_address(address.version, network, subnets, token)
        query = (("network_id", network.id), ("fixed_ips", f"ip_address={address}"))
        if await self._calls.all_of("ports", *query, token=token):
            raise AddressInUse(f"Fixed IP address {address} is already in use on instance or port of {network.id}.")
        return str(address)

    async def _check_may_choose_address(
        self, version: int, network: Network, subnets: Sequence[dict[str, Any]], token: str
    ) -> None:
        """Raise Forbidden unless the network service lets the user choose the addresses of ports on a network.

        The service user, who creates the port later, may choose any. So the network service is asked as the user for a
        port with an address that is in none of the network's subnets: it checks its policy first, and then refuses.
        """
        ranges = [ipaddress.ip_network(subnet["cidr"]) for subnet in subnets]
        outside = next(
            (each for each in _OUTSIDE[version] if not any(ipaddress.ip_address(each) in cidr for cidr in ranges)), None
        )
        if outside is None:
            raise Invalid(f"Every address is in a subnet of network {network.id}: a fixed IP cannot be chosen there.")
        try:
            wanted = {"network_id": network.id, "fixed_ips": [{"ip_address": outside}]}
            [made] = await self._calls.create_ports([wanted], token=token)
        except Invalid:
            return
        except Forbidden:
            raise Forbidden(
                f"The network service does not let you choose a fixed IP on network {network.id}."
            ) from None
        await self._calls.delete_port(made["id"])  # a subnet with this address was created meanwhile

    # --- security groups and quota ---

    async def _requested_security_groups(
        self, requested: Sequence[str], token: str, project_id: str
    ) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Return the ids of the requested security groups, None for the default one, and their names."""
        if not requested or list(requested) == ["default"]:
            return None, ("default",)
        return await self.find_security_groups(requested, project_id, token)

    async def _check_found_again(self, ids: tuple[str, ...], names: tuple[str, ...], project_id: str) -> None:
        """Raise Invalid unless the names are those of the chosen groups only, in the project.

        The plan of a network that is created later has only the names.
        """
        try:
            again, _ = await self.find_security_groups(names, project_id)
        except (Conflict, Invalid):
            again = ()
        if again != ids:
            raise Invalid(
                "A server on a network that is created for it takes a security group of its own project, and one whose "
                "name no other group of the project has."
            )

    async def _shown_names(
        self, drafts: Sequence[_PortDraft], requested: tuple[str, ...], token: str
    ) -> tuple[str, ...]:
        """Return the names of the security groups that the server's ports will have."""
        taken = requested if any(draft.own_security_groups is None for draft in drafts) else ()
        own = sorted({id for draft in drafts for id in draft.own_security_groups or ()})
        if not own:
            return taken
        query = (*(("id", id) for id in own), ("fields", "name"))
        listed = await self._calls.all_of("security_groups", *query, token=token)
        return tuple(dict.fromkeys((*taken, *sorted(group["name"] for group in listed))))

    async def find_security_groups(
        self, names_or_ids: Sequence[str], project_id: str, token: str | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find security groups of a project, and those that others share with it, by id; return ids and names.

        Without a user's token only those of the project are found: the service user sees the groups of all projects.
        """
        shown = (("fields", "id"), ("fields", "name"))
        own = await self._calls.all_of("security_groups", ("project_id", project_id), *shown, token=token)
        known = {each[key] for each in own for key in ("id", "name")}
        others = [("id", name) for name in names_or_ids if name not in known]
        lent = await self._calls.all_of("security_groups", *others, *shown, token=token) if token and others else []
        found: dict[str, str] = {}
        for name in names_or_ids:
            matching = [each for each in (*own, *lent) if each["id"] == name] or [
                each for each in own if each["name"] == name
            ]
            if not matching:
                raise Invalid(f"Unable to find security_group with name or id '{name}'")
            if len(matching) > 1:
                raise Conflict(f"Multiple security_group matches found for name '{name}', use an ID instead.")
            found[matching[0]["id"]] = matching[0]["name"]
        return tuple(found), tuple(found.values())

    async def _max_servers(self, each: int, count: int, token: str, project_id: str) -> int | None:
        """Return for how many servers with `each` new ports the quota suffices now; None: there is no limit."""
        if each == 0:
            return None
        known = self._free_ports.peek(project_id)
        if known is not None and known >= each * count + SPARE_PORTS:
            return known // each
        try:
            quota = (await self._calls.get(f"/quotas/{project_id}/details", token=token))["quota"]["port"]
            limit, used = int(quota["limit"]), int(quota["used"]) + int(quota.get("reserved", 0))
        except NotFound:  # an older Neutron
            limit = int((await self._calls.get(f"/quotas/{project_id}", token=token))["quota"]["port"])
            mine = (("project_id", project_id), ("fields", "id"))
            used = 0 if limit < 0 else len(await self._calls.all_of("ports", *mine, token=token))
        if limit < 0:
            self._free_ports.put(project_id, 1 << 30)
            return None
        left = max(0, limit - used)
        self._free_ports.put(project_id, left)
        return left // each


def _check_number(given: Sequence[Any], most: int, what: str) -> None:
    if len(given) > most:
        raise Invalid(f"A server may be created with {most} {what}, not with {len(given)}.")


def new_port_asks(network_id: str) -> Invalid:
    """Return the error for a network on which a port that compute creates would ask for resources."""
    return Invalid(
        f"Using networks with QoS policy is not supported. (Network ID is {network_id}) Its policy has a rule "
        "minimum_bandwidth or minimum_packet_rate: create a port there, and name the port."
    )


def _new_port(network: Network, address: str | None = None, tag: str | None = None) -> _PortDraft:
    """Return a port to create; on a network without port security it has no security groups."""
    port = PlannedPort(network_id=network.id, fixed_ip=address, tag=tag)
    return _PortDraft(port, None if network.port_security else ())


def _with_security_groups(draft: _PortDraft, ids: tuple[str, ...] | None) -> PlannedPort:
    if draft.own_security_groups is None:
        return msgspec.structs.replace(draft.port, security_groups=ids)
    if ids is not None and draft.port.port_id is None:
        raise Invalid(
            f"Security groups cannot be applied on network {draft.port.network_id}: it has port security switched off."
        )
    return draft.port

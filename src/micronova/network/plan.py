"""What a server's networks will be: checked with the user's own token, before anything is made."""

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import Any

import msgspec

from micronova.network.cache import Remembered
from micronova.network.calls import Calls, Network, network_of
from micronova.objects.errors import (
    AddressInUse,
    Conflict,
    Forbidden,
    Invalid,
    MicronovaError,
    NotFound,
    RequestedNotFound,
)
from micronova.objects.network import NetworkRequest

REMEMBER = 2.0  # seconds for which a user's view of networks is taken as it was
PLENTY = 50  # ports of room beyond what is asked for: then the quota need not be asked for each server


class PlannedPort(msgspec.Struct, frozen=True, kw_only=True):
    """One interface that the server will have."""

    network_id: str
    port_id: str | None = None  # the user's own
    fixed_ip: str | None = None
    tag: str | None = None
    security_groups: tuple[str, ...] | None = None  # ids; None: the project's default group


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: kept with the request, and what `allocate` works from."""

    requests: list[PlannedPort] | str  # "auto": a network is made when it is needed; "none": no interface
    security_groups: tuple[str, ...] = ()  # names, as users are shown them
    room: int | None = None  # servers for which the quota still has ports; None: no limit


class _Wish(msgspec.Struct, frozen=True):
    """A port to be, before the groups that were asked for are known."""

    port: PlannedPort
    own_groups: tuple[str, ...] | None = None  # ids that it has whatever is asked for; None: it takes what is


class Planner:
    """Makes plans. Everything is asked with the user's token: what it may not see does not exist."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seen = Remembered(REMEMBER)  # (project, network) -> Network, and (project,) -> what is available
        self._rooms = Remembered(REMEMBER)

    async def plan(
        self,
        requests: Sequence[NetworkRequest] | str | None,
        security_groups: Sequence[str],
        *,
        token: str,
        project_id: str,
        count: int,
        may_attach_external: bool = False,
    ) -> Plan:
        """Return the plan for `count` servers alike, or raise what the user has to hear (400, 403, 409)."""
        if requests == "none":
            return Plan(requests="none")
        if not requests or requests == "auto":
            wishes, (ids, names) = await asyncio.gather(
                self._unasked(requests, token, project_id), self._groups(security_groups, token, project_id)
            )
        else:
            assert not isinstance(requests, str)
            wishes, (ids, names) = await asyncio.gather(
                self._asked(requests, token, project_id, may_attach_external),
                self._groups(security_groups, token, project_id),
            )
        if isinstance(wishes, str):
            if wishes == "none":
                return Plan(requests="none")
            room = await self._room(1, count, token, project_id)
            return Plan(requests=wishes, security_groups=names, room=room)
        wanted = [_with_groups(wish, ids) for wish in wishes]
        each = sum(1 for port in wanted if port.port_id is None)
        room = await self._room(each, count, token, project_id)
        shown = await self._shown(wishes, names, token)
        return Plan(requests=wanted, security_groups=shown, room=room)

    # --- networks and ports ---

    async def _unasked(
        self, requests: Sequence[NetworkRequest] | str | None, token: str, project_id: str
    ) -> list[_Wish] | str:
        """Nothing was said about networks: the only one that there is, if there is one."""
        found = await self._seen.get((project_id,), lambda: self._available(token, project_id))
        if len(found) > 1:
            raise Conflict("Multiple possible networks found, use a Network ID to be more specific.")
        if found:
            return [_on(found[0])]
        if requests != "auto":
            return "none"
        try:
            await self._calls.get(
                f"/auto-allocated-topology/{project_id}", [("fields", "dry-run")], token=token
            )
        except MicronovaError as error:
            raise Invalid(f"Unable to automatically allocate a network for project {project_id}: {error}") from None
        return "auto"

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

    async def _asked(
        self, requests: Sequence[NetworkRequest], token: str, project_id: str, may_attach_external: bool
    ) -> list[_Wish]:
        ports = await self._ports([r.port_id for r in requests if r.port_id], token, project_id)
        names = [r.network_id for r in requests if r.network_id and not r.port_id]
        networks = await self._networks(names, token, project_id)
        found = []
        for request in requests:
            if request.port_id:
                port = ports[request.port_id]
                planned = PlannedPort(network_id=port["network_id"], port_id=request.port_id, tag=request.tag)
                found.append(_Wish(planned, tuple(port.get("security_groups", ()))))
                continue
            if not request.network_id:
                raise Invalid("Each of the networks must name a network (uuid) or a port.")
            network = networks[request.network_id]
            if network.external and not network.shared and not may_attach_external:
                raise Forbidden(f"It is not allowed to create an interface on external network {network.id}")
            if not network.subnets:
                raise Invalid(f"Network {network.id} requires a subnet in order to boot instances on.")
            address = await self._address(request.fixed_ip, network, token) if request.fixed_ip else None
            found.append(_on(network, address, request.tag))
        return found

    async def _networks(self, ids: Sequence[str], token: str, project_id: str) -> dict[str, Network]:
        known = {id: self._seen.peek((project_id, id)) for id in ids}
        missing = [id for id, network in known.items() if network is None]
        if missing:
            fetched = await self._calls.networks_seen_by(missing, token)
            for id in missing:
                if id not in fetched:
                    raise RequestedNotFound(f"Network {id} could not be found.")
                known[id] = fetched[id]
                self._seen.put((project_id, id), fetched[id])
        return known

    async def _ports(self, ids: Sequence[str], token: str, project_id: str) -> dict[str, dict[str, Any]]:
        if not ids:
            return {}
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
        return found

    async def _address(self, text: str, network: Network, token: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise Invalid(f"Fixed IP address {text[:64]} is invalid.") from None
        subnets = await self._calls.all_of("subnets", ("network_id", network.id), token=token)
        if not any(address in ipaddress.ip_network(subnet["cidr"]) for subnet in subnets):
            raise Invalid(f"Fixed IP {address} is not a valid ip address for network {network.id}.")
        query = (("network_id", network.id), ("fixed_ips", f"ip_address={address}"))
        if await self._calls.all_of("ports", *query, token=token):
            raise AddressInUse(f"Fixed IP address {address} is already in use on instance or port of {network.id}.")
        return str(address)

    # --- security groups and room ---

    async def _groups(
        self, asked: Sequence[str], token: str, project_id: str
    ) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Return the ids of groups that were named by name or by id, and their names."""
        if not asked or list(asked) == ["default"]:
            return None, ("default",)
        return await self.groups(asked, project_id, token)

    async def _shown(self, wishes: Sequence[_Wish], asked: tuple[str, ...], token: str) -> tuple[str, ...]:
        """Return the names of the groups that the server's ports will have."""
        taken = asked if any(wish.own_groups is None for wish in wishes) else ()
        own = sorted({id for wish in wishes for id in wish.own_groups or ()})
        if not own:
            return taken
        query = (*(("id", id) for id in own), ("fields", "name"))
        listed = await self._calls.all_of("security_groups", *query, token=token)
        return tuple(dict.fromkeys((*taken, *sorted(group["name"] for group in listed))))

    async def groups(
        self, asked: Sequence[str], project_id: str, token: str | None = None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find groups of a project by name or id: their ids and their names."""
        query = (("project_id", project_id), ("fields", "id"), ("fields", "name"))
        listed = await self._calls.all_of("security_groups", *query, token=token)
        found: dict[str, str] = {}
        for name in asked:
            matching = [each for each in listed if each["id"] == name] or [
                each for each in listed if each["name"] == name
            ]
            if not matching:
                raise Invalid(f"Unable to find security_group with name or id '{name}'")
            if len(matching) > 1:
                raise Conflict(f"Multiple security_group matches found for name '{name}', use an ID instead.")
            found[matching[0]["id"]] = matching[0]["name"]
        return tuple(found), tuple(found.values())

    async def _room(self, each: int, count: int, token: str, project_id: str) -> int | None:
        """Return for how many servers the port quota has room; who really takes the ports is seen when they are."""
        if each == 0:
            return None
        known = self._rooms.peek(project_id)
        if known is not None and known >= each * count + PLENTY:
            return int(known) // each
        try:
            quota = (await self._calls.get(f"/quotas/{project_id}/details", token=token))["quota"]["port"]
            limit, used = int(quota["limit"]), int(quota["used"]) + int(quota.get("reserved", 0))
        except NotFound:  # an older Neutron
            limit = int((await self._calls.get(f"/quotas/{project_id}", token=token))["quota"]["port"])
            mine = (("project_id", project_id), ("fields", "id"))
            used = 0 if limit < 0 else len(await self._calls.all_of("ports", *mine, token=token))
        if limit < 0:
            self._rooms.put(project_id, 1 << 30)
            return None
        left = max(0, limit - used)
        self._rooms.put(project_id, left)
        return left // each


def _on(network: Network, address: str | None = None, tag: str | None = None) -> _Wish:
    """A new port: on a network without port security it has no groups."""
    port = PlannedPort(network_id=network.id, fixed_ip=address, tag=tag)
    return _Wish(port, None if network.port_security else ())


def _with_groups(wish: _Wish, ids: tuple[str, ...] | None) -> PlannedPort:
    if wish.own_groups is None:
        return msgspec.structs.replace(wish.port, security_groups=ids)
    if ids is not None and wish.port.port_id is None:
        raise Invalid(
            f"Security groups cannot be applied on network {wish.port.network_id}: it has port security switched off."
        )
    return wish.port

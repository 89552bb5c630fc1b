"""The client of the network service, over the API that Neutron and the embedded service share.

The API role checks requested networks with the user's token and makes a plan (`planner`). The conductor then creates
and binds the ports as the service user (`allocate`), and deletes them (`deallocate`). An existing server gets another
port (`attach`) or loses some (`detach`). All of these may be repeated: a port's device_id and our entry in its
binding:profile say what was done before.

A conductor may lose its operation without noticing, for example while it stands still. So each change of a port that
exists is made in three steps (`_change`): read the port, let the caller check that the operation is still its own
(`check`), and change the port on condition of the revision that was read. A later attempt changes each port that it
takes over, so the condition of an earlier attempt fails from then on. Neutron deletes without a condition; a port that
a later attempt might take over is therefore marked as released first, and no attempt takes a released port.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from micronova.clients.network.as_user import AsUser
from micronova.clients.network.calls import ALLOCATION, RESOURCE_REQUESTS, Calls, PortChanged, mark_of
from micronova.clients.network.plan import Planner, new_port_asks
from micronova.clients.network.security_groups import SecurityGroups
from micronova.clients.network.vifs import vif_of, with_allocation, with_changed_mark, with_mark, without_mark
from micronova.http.client import ServiceClient
from micronova.objects.errors import Conflict, Forbidden, NotFound, Stale, Unavailable
from micronova.objects.network import VIF, NetworkAgent, PlannedPort, PlannedPorts
from micronova.objects.port_resources import BoundPort, PortResources, ServedPort, allocations_of, resources_of

T = TypeVar("T")

Check = Callable[[], Awaitable[None]]
"""Raises Stale if the caller may not change the server's ports any more; which check it is, the caller decides."""

Changes = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""Returns the attributes to set on a port, from the port as it is now; None to leave it as it is."""

TRIES = 10  # how often a change is repeated because others change the port, too
_IN_TRUNK = ("PortInUseAsTrunkParent", "PortInUseAsSubPort")  # why a port is not deleted
AGENT_BINARY = "micronova-network-agent"  # Micronova's own network agents, which other network services have none of
BINDINGS = "bindings"  # the key in our entry of how often a port was bound; absent until the second time


class NetworkClient:
    """Creates, binds and deletes the ports of servers."""

    def __init__(self, client: ServiceClient, default_zone: str = "nova") -> None:
        self._default_zone = default_zone
        self.calls = Calls(client)
        self.planner = Planner(self.calls)
        self.security_groups = SecurityGroups(self.calls, self.planner)

    def as_user(self, token: str) -> AsUser:
        """Return the network API as a user has it."""
        return AsUser(self.calls, token)

    async def allocate(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str | None,
        ports: PlannedPorts,
        security_groups: Sequence[str] = (),
        hostname: str = "",
        served: Sequence[ServedPort] = (),
        fresh: bool = False,
        check: Check,
    ) -> tuple[VIF, ...]:
        """Create the server's ports, or take the user's, and bind them to the host; in the order of the plan.

        `served` is what the server holds for ports that ask for resources; raise Conflict if one asks for something
        else by now. `fresh` says that this is the first attempt, so existing ports are not looked for. Raise what
        `check` raises.
        """
        wanted = await self._planned_ports(ports, project_id)
        if not wanted:
            return ()
        existing = [] if fresh else await self.calls.ports_of(instance_uuid)
        groups = await self._security_group_ids(wanted, security_groups, project_id, ports == "auto")
        matching = [_take_matching(existing, port) for port in wanted]
        common = await self._common(instance_uuid, host, zone, hostname)
        bindings = [
            self._bind_existing(port, before, common, served, check)
            for port, before in zip(wanted, matching, strict=True)
        ]
        # A port that is not in the plan was left by an attempt with another plan.
        deletions = [
            self._delete_unless(lambda known: mark_of(known).get("server") != instance_uuid, port, check)
            for port in existing
            if mark_of(port).get("created")
        ]
        found = (await _all([*bindings, *deletions]))[: len(bindings)]
        # Ports are created last: an attempt that is overtaken notices that first, if it has ports to bind.
        new = [index for index, port in enumerate(found) if port is None]
        if new:
            bodies = [_body(wanted[index], project_id, common, groups[index]) for index in new]
            for index, port in zip(new, await self.calls.create_ports(bodies), strict=True):
                found[index] = port
                if resources_of(port) is not None:  # the policy of its network has changed since the plan
                    raise new_port_asks(port["network_id"])
        return await self._vifs([port for port in found if port is not None])

    async def withdraw(self, port_ids: Sequence[str], *, check: Check) -> None:
        """Delete ports that an attempt created and nobody uses, because another attempt overtook it.

        `check` raises Stale if the ports are in use. A port that another attempt has taken over stays.
        """
        for id in port_ids:
            with contextlib.suppress(NotFound, Stale):
                port = await self.calls.port(id)
                await self._delete_unless(lambda known: BINDINGS in mark_of(known), port, check)

    async def deallocate(self, instance_uuid: str, *, check: Check) -> None:
        """Delete the ports that we created for a server, and unbind the user's own."""
        await self._remove(instance_uuid, await self.calls.ports_of(instance_uuid, *_REMOVAL), check)

    async def attach(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str | None,
        port: PlannedPort,
        hostname: str = "",
        operation: str,
        served: Sequence[ServedPort] = (),
        check: Check,
    ) -> VIF:
        """Create a port for a server, or take the user's own; a repeated call finds the port by `operation`.

        `served` is as in `allocate`.
        """
        common = await self._common(instance_uuid, host, zone, hostname)
        known = await self.calls.ports_of(instance_uuid)
        bound: dict[str, Any] | None = None
        for each in known:
            if bound is None and mark_of(each).get("operation") == operation:
                bound = await self._bind(each, instance_uuid, host, check, served, exact=True)
        if bound is None and port.port_id is not None:
            bound = await self._bind_user_port(port, common, check, served, operation)
        elif bound is None:
            body = _body(port, project_id, common, port.security_groups, operation)
            [bound] = await self.calls.create_ports([body])
            if resources_of(bound) is not None:
                raise new_port_asks(bound["network_id"])
        [vif] = await self._vifs([bound])
        return vif

    async def detach(
        self, *, instance_uuid: str, port_id: str | None = None, operation: str | None = None, check: Check
    ) -> None:
        """Remove one port from a server, or the port that an operation attached; ports that we created are deleted."""
        ports = [
            port
            for port in await self.calls.ports_of(instance_uuid, *_REMOVAL)
            if port["id"] == port_id or (operation is not None and mark_of(port).get("operation") == operation)
        ]
        await self._remove(instance_uuid, ports, check)

    async def rebind(
        self,
        *,
        instance_uuid: str,
        host: str,
        zone: str | None,
        port_ids: Sequence[str],
        served: Sequence[ServedPort] = (),
        exact: bool = False,
        check: Check,
    ) -> tuple[VIF, ...]:
        """Bind the ports of a server to the host that it moves to; return those of `port_ids` that exist, in order.

        `served` is what the server holds there for ports that ask for resources. With `exact`, raise Conflict if one
        asks for something else by now.
        """
        known = {port["id"]: port for port in await self.calls.ports_of(instance_uuid)}
        owner = self._device_owner(zone)
        bound = await _all(
            [
                self._bind(known[id], instance_uuid, host, check, served, exact, device_owner=owner)
                for id in port_ids
                if id in known
            ]
        )
        return await self._vifs([port for port in bound if port is not None], floating=True)

    async def unbind(self, instance_uuid: str, *, check: Check) -> None:
        """Unbind the ports of a server, which has no host for a time; they stay the server's."""
        ports = await self.calls.ports_of(instance_uuid)
        await _all([self._bind(port, instance_uuid, None, check) for port in ports])

    async def resources_of_server(self, instance_uuid: str) -> tuple[PortResources, ...]:
        """Return what the ports of a server ask of resource providers, in the order of their ids."""
        found = await self.calls.resources_of_server(instance_uuid)
        return tuple(found[id] for id in sorted(found))

    async def network_info(self, instance_uuid: str) -> tuple[VIF, ...]:
        """Return a server's interfaces as they are now, floating IPs included."""
        return await self._vifs(await self.calls.ports_of(instance_uuid), floating=True)

    async def plugged_ports(self, instance_uuid: str, host: str) -> frozenset[str]:
        """Return the ports of a server that are bound to a host and plugged there."""
        ports = await self.calls.ports_of(instance_uuid, "id", "status", "binding:host_id", "binding:profile")
        return frozenset(port["id"] for port in ports if port["status"] == "ACTIVE" and port["binding:host_id"] == host)

    async def servers_of_ports(self) -> dict[str, str]:
        """Return the server of each port that belongs to one, by the port's id."""
        fields = (("fields", "id"), ("fields", "binding:profile"))
        servers = {port["id"]: mark_of(port).get("server") for port in await self.calls.all_ports(*fields)}
        return {id: server for id, server in servers.items() if server}

    async def bound_ports(self, server: str | None = None) -> list[BoundPort]:
        """Return the bound ports of all servers, or of one, that ask for resources or have an allocation of them."""
        if not await self.calls.has_extension(RESOURCE_REQUESTS):
            return []
        names = ("id", "binding:host_id", "binding:profile", "resource_request")
        if server is None:
            ports = await self.calls.all_ports(*(("fields", name) for name in names))
        else:
            ports = await self.calls.ports_of(server, *names)
        bound = (
            BoundPort(
                server=mark_of(port)["server"],
                port_id=port["id"],
                allocation=port["binding:profile"].get(ALLOCATION),
                asks=resources_of(port),
            )
            for port in ports
            if port.get("binding:host_id") and mark_of(port).get("server")
        )
        return [port for port in bound if port.asks is not None or port.providers]

    async def list_network_agents(self) -> list[NetworkAgent]:
        """Return Micronova's own network agents that are enabled."""
        fields = (("fields", "host"), ("fields", "alive"), ("fields", "configurations"))
        found = await self._own_agents(("admin_state_up", "true"), *fields)
        return [NetworkAgent(agent["host"], agent["alive"], _faults_of(agent)) for agent in found]

    async def delete_network_agents(self, host: str) -> None:
        """Delete Micronova's own network agents of a host; one that lives registers again with its next report."""
        for agent in await self._own_agents(("host", host), ("fields", "id")):
            await self.calls.delete("agents", agent["id"])

    # --- steps ---

    async def _own_agents(self, *query: tuple[str, str]) -> list[dict[str, Any]]:
        """Return those of Micronova's own network agents that the query finds."""
        try:
            return await self.calls.all_of("agents", ("binary", AGENT_BINARY), *query)
        except Forbidden:  # a Neutron shows agents to admins only; it has none of ours
            return []

    def _device_owner(self, zone: str | None) -> str:
        """Return the device_owner of ports of servers in an availability zone."""
        return f"compute:{zone or self._default_zone}"

    async def _common(self, instance_uuid: str, host: str, zone: str | None, hostname: str) -> dict[str, Any]:
        """Return the attributes that all ports of a server share."""
        common: dict[str, Any] = {
            "device_id": instance_uuid,
            "device_owner": self._device_owner(zone),
            "binding:host_id": host,
        }
        if hostname and await self.calls.has_extension("dns-integration"):
            common["dns_name"] = hostname
        return common

    async def _remove(self, instance_uuid: str, ports: Sequence[dict[str, Any]], check: Check) -> None:
        """Delete the ports that we created, and unbind the user's own. Raise what `check` raises.

        `ports` is read before the check. So if the check passes, the list has no port of a later operation, and the
        server needs none of these ports any more. A port that we created is never another server's.
        """
        if any(mark_of(port).get("created") for port in ports):
            await check()
        await _all(
            [
                self._delete(port, instance_uuid, check)
                if mark_of(port).get("created")
                else self._unbind(port, instance_uuid, check)
                for port in ports
            ]
        )

    async def _delete(self, port: dict[str, Any], instance_uuid: str, check: Check) -> None:
        """Delete a port that we created; leave it to its owner, unbound, if a trunk has it."""
        try:
            await self.calls.delete_port(port["id"])
        except Conflict as error:
            if error.details.get("type") not in _IN_TRUNK:
                raise
            await self._unbind(port, instance_uuid, check)

    async def _change(self, port: Mapping[str, Any], changes: Changes, check: Check) -> dict[str, Any] | None:
        """Change a port and return it; None if `changes` leaves it as it is, or if it does not exist any more.

        If another request changes the port meanwhile, it is read and decided again. Raise what `changes` and `check`
        raise.
        """
        for _ in range(TRIES):
            new = changes(port)
            if new is None:
                return None
            await check()
            try:
                return await self.calls.update_port(port["id"], new, revision=port.get("revision_number"))
            except NotFound:
                return None
            except PortChanged:
                pass
            try:
                port = await self.calls.port(port["id"])
            except NotFound:
                return None
        raise Unavailable(f"Port {port['id']} is being changed by many requests.")

    async def _bind(
        self,
        port: dict[str, Any],
        server: str,
        host: str | None,
        check: Check,
        served: Sequence[ServedPort] = (),
        exact: bool = False,
        **more: str,
    ) -> dict[str, Any] | None:
        """Bind a port of a server to a host, or to none, and set `more`; return None if it is gone or released.

        The port is changed even if it is bound to that host: then no earlier attempt can change it any more. With
        `exact`, raise Conflict if it asks for something else than what `served` says.
        """
        allocation = allocations_of(served).get(port["id"])

        def changes(known: Mapping[str, Any]) -> dict[str, Any] | None:
            mark = mark_of(known)
            if mark.get("server") != server or mark.get("released"):
                return None
            if exact:
                _check_answered(known, served)
            bindings = {BINDINGS: mark.get(BINDINGS, 1) + 1}
            profile = with_allocation(with_changed_mark(known, **bindings), allocation)
            return {"binding:host_id": host, "binding:profile": profile, **more}

        bound = await self._change(port, changes, check)
        if exact and bound is not None:
            _check_answered(bound, served)
        return bound

    async def _delete_unless(
        self, taken_over: Callable[[Mapping[str, Any]], bool], port: dict[str, Any], check: Check
    ) -> None:
        """Delete a port that we created, unless another attempt has taken it over; none can afterwards."""

        def changes(known: Mapping[str, Any]) -> dict[str, Any] | None:
            return None if taken_over(known) else {"binding:profile": with_changed_mark(known, released=True)}

        if await self._change(port, changes, check) is not None:
            await self.calls.delete_port(port["id"])

    async def _planned_ports(self, ports: PlannedPorts, project_id: str) -> list[PlannedPort]:
        """Return the ports to have; for "auto" one on the network that the service creates for the project."""
        if ports == "none":
            return []
        if ports == "auto":
            # The service user creates it, because the user's token is not stored.
            made = await self.calls.get(f"/auto-allocated-topology/{project_id}")
            return [PlannedPort(network_id=made["auto_allocated_topology"]["id"])]
        return ports

    async def _security_group_ids(
        self, wanted: Sequence[PlannedPort], names: Sequence[str], project_id: str, automatic: bool
    ) -> list[tuple[str, ...] | None]:
        """Return the security groups of each port; those of a network that is created now are found by name."""
        if not automatic or not names or list(names) == ["default"]:
            return [port.security_groups for port in wanted]
        ids, _ = await self.planner.find_security_groups(names, project_id)
        return [ids for _ in wanted]

    async def _bind_existing(
        self,
        wanted: PlannedPort,
        before: dict[str, Any] | None,
        common: dict[str, Any],
        served: Sequence[ServedPort],
        check: Check,
    ) -> dict[str, Any] | None:
        """Bind the port of an earlier attempt (`before`), or the user's own; return None if there is neither."""
        if before is not None:
            server, host = common["device_id"], common["binding:host_id"]
            if (bound := await self._bind(before, server, host, check, served, exact=True)) is not None:
                return bound
        return None if wanted.port_id is None else await self._bind_user_port(wanted, common, check, served)

    async def _bind_user_port(
        self,
        wanted: PlannedPort,
        common: dict[str, Any],
        check: Check,
        served: Sequence[ServedPort],
        operation: str | None = None,
    ) -> dict[str, Any]:
        """Bind a user's port; raise Conflict if another server has it, or if it asks for what is not held for it."""
        assert wanted.port_id is not None
        allocation = allocations_of(served).get(wanted.port_id)

        def changes(known: Mapping[str, Any]) -> dict[str, Any]:
            if known["device_id"] not in ("", common["device_id"]):
                raise Conflict(f"Port {wanted.port_id} is still in use.")
            _check_answered(known, served)
            profile = with_mark(known, common["device_id"], False, wanted.tag, operation)
            return {**common, "binding:profile": with_allocation(profile, allocation)}

        bound = await self._change(await self.calls.port(wanted.port_id), changes, check)
        if bound is None:
            raise NotFound(f"Port {wanted.port_id} could not be found.")
        _check_answered(bound, served)
        return bound

    async def _unbind(self, port: dict[str, Any], server: str, check: Check) -> None:
        """Unbind a user's port, unless it is not the server's any more."""

        def changes(known: Mapping[str, Any]) -> dict[str, Any] | None:
            if mark_of(known).get("server") != server:
                return None
            values = {
                "device_id": "",
                "device_owner": "",
                "binding:host_id": None,
                "binding:profile": without_mark(known),
            }
            if known.get("dns_name"):
                values["dns_name"] = ""
            return values

        await self._change(port, changes, check)

    async def _vifs(self, ports: Sequence[dict[str, Any]], floating: bool = False) -> tuple[VIF, ...]:
        if not ports:
            return ()
        networks, addresses = await asyncio.gather(
            self.calls.networks(port["network_id"] for port in ports),
            self._floating([port["id"] for port in ports if floating or not mark_of(port).get("created")]),
        )
        return tuple(vif_of(port, networks.get(port["network_id"]), addresses.get(port["id"])) for port in ports)

    async def _floating(self, port_ids: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """Return the floating IPs of ports, by port and fixed address."""
        query = [("port_id", id) for id in port_ids]
        if not query:
            return {}
        found: dict[str, dict[str, list[str]]] = {}
        for each in await self.calls.all_of("floatingips", *query):
            of_port = found.setdefault(each["port_id"], {})
            of_port.setdefault(each["fixed_ip_address"], []).append(each["floating_ip_address"])
        return found


_REMOVAL = ("id", "binding:profile", "dns_name", "revision_number")


def _faults_of(agent: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what an agent reports as its faults; a host can report anything."""
    faults = (agent.get("configurations") or {}).get("faults", ())
    return tuple(map(str, faults)) if isinstance(faults, list | tuple) else ()


def _check_answered(port: Mapping[str, Any], served: Iterable[ServedPort]) -> None:
    """Raise Conflict if a port asks for something else than what its server holds for it.

    A rule of its QoS policy changes without a new revision of the port, so the answer to a binding is checked, too.
    """
    held = next((each for each in served if each.port_id == port["id"]), ServedPort(port_id=port["id"], groups=()))
    if not held.answers(resources_of(port)):
        raise Conflict(
            f"Port {port['id']} asks for other resources than when they were claimed for it: its QoS policy has "
            "changed meanwhile. Try again."
        )


def _take_matching(existing: list[dict[str, Any]], wanted: PlannedPort) -> dict[str, Any] | None:
    """Remove from `existing`, and return, the port that an earlier attempt created for this planned port."""
    for port in existing:
        if mark_of(port).get("released"):
            continue
        if wanted.port_id is not None:
            fits = port["id"] == wanted.port_id
        else:
            addresses = {fixed["ip_address"] for fixed in port["fixed_ips"]}
            fits = (
                bool(mark_of(port).get("created"))
                and port["network_id"] == wanted.network_id
                and (wanted.fixed_ip is None or wanted.fixed_ip in addresses)
            )
        if fits:
            existing.remove(port)
            return port
    return None


def _body(
    wanted: PlannedPort,
    project_id: str,
    common: dict[str, Any],
    groups: tuple[str, ...] | None,
    operation: str | None = None,
) -> dict[str, Any]:
    body = {
        "network_id": wanted.network_id,
        "project_id": project_id,
        "admin_state_up": True,
        "binding:profile": with_mark({}, common["device_id"], True, wanted.tag, operation),
        **common,
    }
    if wanted.fixed_ip is not None:
        body["fixed_ips"] = [{"ip_address": wanted.fixed_ip}]
    if groups is not None:
        body["security_groups"] = list(groups)
    return body


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Run all concurrently and wait for all, even if one fails: a failure is reported when nothing runs any more."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return done  # type: ignore[return-value]

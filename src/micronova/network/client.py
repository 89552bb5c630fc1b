"""What compute needs of the network service, over its public API: a real Neutron or the embedded one alike.

The API checks, with the user's token, what a server asks for (`validate`). Later the conductor, as a service user
that names the project, makes and binds the ports (`allocate`), moves them (`rebind`) and lets them go
(`deallocate`); a server that exists gets one more (`attach`) or loses some (`release`). All of these may be repeated:
what was done already is found by the port's device_id, and by the note that we leave on the port.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from micronova.http.client import ServiceClient
from micronova.network.calls import Calls, mark_of
from micronova.network.groups import Groups
from micronova.network.plan import Plan, PlannedPort, Planner
from micronova.network.vifs import marked, unmarked, vif_of
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.network import VIF, NetworkRequest

T = TypeVar("T")


class NetworkClient:
    """Networks of servers."""

    def __init__(self, client: ServiceClient) -> None:
        self.calls = Calls(client)
        self._planner = Planner(self.calls)
        self.groups = Groups(self.calls, self._planner)

    async def validate(
        self,
        requests: Sequence[NetworkRequest] | str | None,
        security_groups: Sequence[str],
        *,
        token: str,
        project_id: str,
        count: int,
        may_attach_external: bool = False,
    ) -> Plan:
        """Check with the user's token that networks, ports and groups are its to use, and return the plan.

        `requests` is a list, "auto", "none", or nothing at all: then the project's only network is taken.
        """
        return await self._planner.plan(
            requests,
            security_groups,
            token=token,
            project_id=project_id,
            count=count,
            may_attach_external=may_attach_external,
        )

    async def allocate(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str | None,
        requests: Any,
        security_groups: Sequence[str] = (),
        hostname: str = "",
        fresh: bool = False,
    ) -> tuple[VIF, ...]:
        """Make the server's ports, or take over the user's, bound to the host; in the order of the requests.

        `fresh` says that nobody can have tried before: then existing ports are not looked for.
        """
        wanted = await self._wanted(requests, project_id)
        if not wanted:
            return ()
        existing = [] if fresh else await self.calls.ports_of(instance_uuid)
        groups = await self._group_ids(wanted, security_groups, project_id, requests == "auto")
        found: list[dict[str, Any] | None] = [_take_matching(existing, port) for port in wanted]
        common = await self._common(instance_uuid, host, zone, hostname)
        new = [index for index, port in enumerate(wanted) if found[index] is None and port.port_id is None]
        work: list[Awaitable[Any]] = [
            self._keep(wanted[index], port, common, index, found)
            for index, port in enumerate(found)
            if index not in new
        ]
        if new:
            bodies = [_body(wanted[index], project_id, common, groups[index]) for index in new]
            work.append(self._create(bodies, new, found))
        # A port that no request asks for is what an attempt with another plan left.
        work += [self.calls.delete_port(port["id"]) for port in existing if mark_of(port).get("created")]
        await _all(work)
        return await self._vifs([port for port in found if port is not None])

    async def rebind(self, instance_uuid: str, host: str) -> tuple[VIF, ...]:
        """Bind a server's ports to another host."""
        ports = await self.calls.ports_of(instance_uuid)
        changed = await _all(
            [self.calls.update_port(port["id"], {"binding:host_id": host}) for port in ports]
        )
        return await self._vifs(changed)

    async def deallocate(self, instance_uuid: str) -> None:
        """Delete the ports that we made for a server, and let go of the user's own."""
        await self._remove(await self.calls.ports_of(instance_uuid, "id", "binding:profile", "dns_name"))

    async def attach(
        self,
        *,
        instance_uuid: str,
        project_id: str,
        host: str,
        zone: str | None,
        request: Any,
        hostname: str = "",
        operation: str,
    ) -> VIF:
        """Give a server one more port: a new one, or the user's own; `operation` is the note by which it is found."""
        wanted = msgspec.convert(request, PlannedPort)
        common = await self._common(instance_uuid, host, zone, hostname)
        found = [
            port for port in await self.calls.ports_of(instance_uuid) if mark_of(port).get("operation") == operation
        ]
        if found:
            port = found[0]
            if port.get("binding:host_id") != host:
                port = await self.calls.update_port(port["id"], {"binding:host_id": host})
        elif wanted.port_id is not None:
            port = await self._adopt(wanted, common, operation)
        else:
            body = _body(wanted, project_id, common, wanted.security_groups, operation)
            [port] = await self.calls.create_ports([body])
        [vif] = await self._vifs([port])
        return vif

    async def release(self, *, instance_uuid: str, port_id: str | None = None, operation: str | None = None) -> None:
        """Let go of one port of a server, or of what an operation gave it; those that we made are deleted."""
        ports = await self.calls.ports_of(instance_uuid, "id", "binding:profile", "dns_name")
        await self._remove(
            [
                port
                for port in ports
                if port["id"] == port_id or (operation is not None and mark_of(port).get("operation") == operation)
            ]
        )

    async def network_info(self, instance_uuid: str) -> tuple[VIF, ...]:
        """Return a server's interfaces as they are now, floating IPs included."""
        return await self._vifs(await self.calls.ports_of(instance_uuid), floating=True)

    async def list_server_ports(self) -> list[dict[str, Any]]:
        """Return every port that we have given a server: id and device_id."""
        fields = (("fields", "id"), ("fields", "binding:profile"))
        servers = {port["id"]: mark_of(port).get("server") for port in await self.calls.all_ports(*fields)}
        return [{"id": id, "device_id": server} for id, server in servers.items() if server]

    # --- steps ---

    async def _common(self, instance_uuid: str, host: str, zone: str | None, hostname: str) -> dict[str, Any]:
        """Return what all ports of a server have in common."""
        common: dict[str, Any] = {
            "device_id": instance_uuid,
            "device_owner": f"compute:{zone or 'nova'}",
            "binding:host_id": host,
        }
        if hostname and await self.calls.has_extension("dns-integration"):
            common["dns_name"] = hostname
        return common

    async def _remove(self, ports: Sequence[dict[str, Any]]) -> None:
        """Delete the ports that we made, and let go of the user's own."""
        await _all(
            [
                self.calls.delete_port(port["id"]) if mark_of(port).get("created") else self._let_go(port)
                for port in ports
            ]
        )

    async def _wanted(self, requests: Any, project_id: str) -> list[PlannedPort]:
        if not requests or requests == "none":
            return []
        if requests == "auto":
            # Made by the service user: the user's token is gone by now.
            made = await self.calls.get(f"/auto-allocated-topology/{project_id}")
            return [PlannedPort(network_id=made["auto_allocated_topology"]["id"])]
        return msgspec.convert(msgspec.to_builtins(requests), list[PlannedPort])

    async def _group_ids(
        self, wanted: Sequence[PlannedPort], names: Sequence[str], project_id: str, automatic: bool
    ) -> list[tuple[str, ...] | None]:
        """Return the groups of each port as planned; a network that is made only now has them by name."""
        if not automatic or not names or list(names) == ["default"]:
            return [port.security_groups for port in wanted]
        ids, _ = await self._planner.groups(names, project_id)
        return [ids for _ in wanted]

    async def _create(self, bodies: list[dict[str, Any]], at: list[int], found: list[dict[str, Any] | None]) -> None:
        for index, port in zip(at, await self.calls.create_ports(bodies), strict=True):
            found[index] = port

    async def _keep(
        self,
        wanted: PlannedPort,
        port: dict[str, Any] | None,
        common: dict[str, Any],
        index: int,
        found: list[dict[str, Any] | None],
    ) -> None:
        """Bind a port that there is already: the user's, or ours of an earlier attempt."""
        if port is None:
            assert wanted.port_id is not None
            found[index] = await self._adopt(wanted, common)
        elif port.get("binding:host_id") != common["binding:host_id"]:
            found[index] = await self.calls.update_port(port["id"], {"binding:host_id": common["binding:host_id"]})

    async def _adopt(
        self, wanted: PlannedPort, common: dict[str, Any], operation: str | None = None
    ) -> dict[str, Any]:
        """Take over a user's port, unless another server was faster."""
        port = (await self.calls.get(f"/ports/{wanted.port_id}"))["port"]
        if port["device_id"] not in ("", common["device_id"]):
            raise Conflict(f"Port {wanted.port_id} is still in use.")
        mark = marked(port, common["device_id"], False, wanted.tag, operation)
        changes = {**common, "binding:profile": mark}
        return await self.calls.update_port(port["id"], changes, revision=port.get("revision_number"))

    async def _let_go(self, port: dict[str, Any]) -> None:
        changes = {
            "device_id": "",
            "device_owner": "",
            "binding:host_id": None,
            "binding:profile": unmarked(port),
        }
        if port.get("dns_name"):
            changes["dns_name"] = ""
        try:
            await self.calls.update_port(port["id"], changes)
        except NotFound:
            pass

    async def _vifs(self, ports: Sequence[dict[str, Any]], floating: bool = False) -> tuple[VIF, ...]:
        if not ports:
            return ()
        networks, addresses = await asyncio.gather(
            self.calls.networks(port["network_id"] for port in ports),
            self._floating([port["id"] for port in ports if floating or not mark_of(port).get("created")]),
        )
        return tuple(
            vif_of(port, networks.get(port["network_id"]), addresses.get(port["id"])) for port in ports
        )

    async def _floating(self, port_ids: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """Return the floating IPs of ports, by port and fixed address; a port that we just made has none."""
        query = [("port_id", id) for id in port_ids]
        if not query:
            return {}
        found: dict[str, dict[str, list[str]]] = {}
        for each in await self.calls.all_of("floatingips", *query):
            of_port = found.setdefault(each["port_id"], {})
            of_port.setdefault(each["fixed_ip_address"], []).append(each["floating_ip_address"])
        return found


def _take_matching(existing: list[dict[str, Any]], wanted: PlannedPort) -> dict[str, Any] | None:
    """Take the port of an earlier attempt that this request would make, out of those that there are."""
    for port in existing:
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
        "binding:profile": marked({}, common["device_id"], True, wanted.tag, operation),
        **common,
    }
    if wanted.fixed_ip is not None:
        body["fixed_ips"] = [{"ip_address": wanted.fixed_ip}]
    if groups is not None:
        body["security_groups"] = list(groups)
    return body


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Do all side by side, to the end even if one fails: nothing may be under way when we say that it failed."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return done  # type: ignore[return-value]

"""The security groups of servers, which are those of their ports."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from micronova.clients.network.calls import Calls
from micronova.clients.network.plan import Planner
from micronova.objects.errors import Invalid, NotFound


class SecurityGroups:
    """Reads and changes the groups of servers: groups are read with the user's token, ports changed as the service."""

    def __init__(self, calls: Calls, planner: Planner) -> None:
        self._calls = calls
        self._planner = planner

    async def of_server(self, server: str, token: str) -> list[dict[str, Any]]:
        """Return a server's security groups with their rules, sorted by name."""
        ids = {id for port in await self._calls.ports_of(server) for id in port["security_groups"]}
        if not ids:
            return []
        found = await self._calls.all_of("security_groups", *_by_id(ids), token=token)
        return sorted(found, key=lambda group: (group["name"], group["id"]))

    async def names_of(self, server: str) -> list[str]:
        """Return the names of a server's security groups."""
        return await self._names({id for port in await self._calls.ports_of(server) for id in port["security_groups"]})

    async def add(self, server: str, name_or_id: str, *, token: str, project_id: str) -> list[str]:
        """Add a security group, by name or id, to all ports of a server; return the names of its groups then."""
        group = await self._find(name_or_id, token, project_id)
        ports = await self._calls.ports_of(server)
        able = [port for port in ports if port.get("port_security_enabled", True) and port["fixed_ips"]]
        if not able or len(able) < len(ports):
            raise Invalid(
                f"Security group {name_or_id!r} cannot be applied to server {server}: every port needs an address and "
                "port security."
            )
        return await self._change(able, lambda groups: list(dict.fromkeys((*groups, group))))

    async def remove(self, server: str, name_or_id: str, *, token: str, project_id: str) -> list[str]:
        """Remove a security group from all ports of a server; return the names of its remaining groups."""
        group = await self._find(name_or_id, token, project_id)
        ports = await self._calls.ports_of(server)
        if not any(group in port["security_groups"] for port in ports):
            raise NotFound(f"Security group {name_or_id} is not associated with server {server}.")
        return await self._change(ports, lambda groups: [id for id in groups if id != group])

    async def _find(self, name_or_id: str, token: str, project_id: str) -> str:
        try:
            [id], _ = await self._planner.find_security_groups([name_or_id], project_id, token)
        except Invalid:
            raise NotFound(f"Security group {name_or_id} not found for project {project_id}.") from None
        return id

    async def _change(self, ports: Sequence[dict[str, Any]], change: Callable[[list[str]], list[str]]) -> list[str]:
        """Change the groups of ports concurrently; raise Conflict if a port was changed meanwhile."""
        wanted = [(port, change(port["security_groups"])) for port in ports]
        await asyncio.gather(
            *(
                self._calls.update_port(port["id"], {"security_groups": ids}, revision=port.get("revision_number"))
                for port, ids in wanted
                if ids != port["security_groups"]
            )
        )
        return await self._names({id for _, ids in wanted for id in ids})

    async def _names(self, ids: set[str]) -> list[str]:
        if not ids:
            return []
        return sorted(group["name"] for group in await self._calls.all_of("security_groups", *_by_id(ids)))


def _by_id(ids: Iterable[str]) -> list[tuple[str, str]]:
    return [("id", id) for id in sorted(ids)]

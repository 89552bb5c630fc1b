"""Fixed and floating IPs of servers that exist, changed at the network service with the user's rights."""

from collections.abc import Iterator
from typing import Any

from micronova.clients.network.as_user import AsUser
from micronova.clients.network.client import NetworkClient
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, NotFound, NotSupported
from micronova.objects.instance import FixedIPData, InstanceRow
from micronova.servers.actions import check_lock
from micronova.servers.interfaces import Interfaces


class ServerAddresses:
    """Adds addresses to the ports of servers and removes them."""

    def __init__(self, network_client: NetworkClient | None, interfaces: Interfaces) -> None:
        self._network_client = network_client
        self._interfaces = interfaces

    async def add_fixed(self, context: RequestContext, row: InstanceRow, network_id: str) -> None:
        """Give a server's port on a network another address of one of the network's subnets."""
        check_lock(context, row)
        network = self._network(context)
        ports = [vif["port_id"] for vif in row["network_info"] if vif["network_id"] == network_id]
        subnets = await network.list_("subnets", ("network_id", network_id)) if ports else []
        refusal: str | None = None
        for port_id in ports:
            port = await network.show("ports", port_id)
            for subnet in subnets:
                wanted = [*port["fixed_ips"], {"subnet_id": subnet["id"]}]
                try:
                    await network.update("ports", port_id, {"fixed_ips": wanted})
                except (Conflict, Invalid) as error:
                    refusal = error.message  # perhaps another subnet has a free address
                    continue
                await self._interfaces.refresh(row["uuid"])
                return
        if refusal is not None:
            raise Invalid(f"No fixed IP addresses available for network {network_id}: {refusal}")
        raise NotFound(f"Network {network_id[:64]} could not be found for instance {row['uuid']}.")

    async def remove_fixed(self, context: RequestContext, row: InstanceRow, address: str) -> None:
        """Take an address from a server's port."""
        check_lock(context, row)
        network = self._network(context)
        # An address that the record lacks is found, too: the request that added it may have been interrupted.
        ports = await network.list_("ports", ("device_id", row["uuid"]))
        port = next((each for each in ports if address in _addresses(each)), None)
        if port is not None:
            wanted = [fixed for fixed in port["fixed_ips"] if fixed["ip_address"] != address]
            await network.update("ports", port["id"], {"fixed_ips": wanted})
        elif all(fixed["address"] != address for _, fixed in _fixed(row)):
            raise Invalid(f"Instance {row['uuid']} doesn't have fixed IP '{address}'.")
        await self._interfaces.refresh(row["uuid"])

    async def add_floating(
        self, context: RequestContext, row: InstanceRow, address: str, fixed_address: str | None
    ) -> None:
        """Associate a floating IP with an address of a server, by default with its first IPv4 address."""
        network = self._network(context)
        known = list(_fixed(row))
        if not known:
            raise Invalid(f"No fixed IPs are associated to instance {row['uuid']}.")
        if fixed_address is not None:
            chosen = [each for each in known if each[1]["address"] == fixed_address]
        else:
            chosen = [each for each in known if each[1]["version"] == 4]
        if not chosen:
            wanted = "an IPv4 address" if fixed_address is None else f"the address {fixed_address}"
            raise Invalid(f"Unable to associate floating IP {address}: instance {row['uuid']} does not have {wanted}.")
        port_id, fixed = chosen[0]
        floating = await self._floating(network, address)
        try:
            await network.update(
                "floatingips", floating["id"], {"port_id": port_id, "fixed_ip_address": fixed["address"]}
            )
        except Conflict as error:
            raise Invalid(f"Floating IP {address} association has failed: {error.message}") from None
        await self._interfaces.refresh(row["uuid"])

    async def remove_floating(self, context: RequestContext, row: InstanceRow, address: str) -> None:
        """Dissociate a floating IP from a server; raise Conflict if the server does not have it."""
        network = self._network(context)
        floating = await self._floating(network, address)
        if floating["port_id"] not in {vif["port_id"] for vif in row["network_info"]}:
            raise Conflict(f"Floating IP {address} is not associated with instance {row['uuid']}.")
        await network.update("floatingips", floating["id"], {"port_id": None})
        await self._interfaces.refresh(row["uuid"])

    def _network(self, context: RequestContext) -> AsUser:
        if self._network_client is None:
            raise NotSupported("There is no network service.")
        return self._network_client.as_user(context.token)

    async def _floating(self, network: AsUser, address: str) -> dict[str, Any]:
        found = await network.list_("floatingips", ("floating_ip_address", address))
        if not found:
            raise NotFound(f"Floating IP not found for address {address}.")
        if len(found) > 1:
            raise Conflict(f"Multiple floating IPs are found for address {address}.")
        return found[0]


def _addresses(port: dict[str, Any]) -> set[str]:
    """Return the addresses of a port."""
    return {fixed["ip_address"] for fixed in port["fixed_ips"]}


def _fixed(row: InstanceRow) -> Iterator[tuple[str, FixedIPData]]:
    """Yield each address of a server with its port."""
    for vif in row["network_info"]:
        for fixed in vif["fixed_ips"]:
            yield vif["port_id"], fixed

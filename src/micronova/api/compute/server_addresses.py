"""Actions that give servers addresses and take them (until 2.43); the network API has replaced them."""

from functools import partial
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from micronova.api.compute.action_routes import ActionRoute, action_routes
from micronova.api.compute.server_inputs import ip_address
from micronova.api.compute.server_lookup import authorized_server
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.servers.addresses import ServerAddresses


class FixedNetwork(msgspec.Struct, forbid_unknown_fields=True):
    """The network of a new address."""

    network_id: Annotated[str, Meta(min_length=1, max_length=36)] | int | float = field(name="networkId")


class AddFixedBody(msgspec.Struct, forbid_unknown_fields=True):
    """Add an address."""

    value: FixedNetwork = field(name="addFixedIp")


class Address(msgspec.Struct, forbid_unknown_fields=True):
    """An address."""

    address: str


class RemoveFixedBody(msgspec.Struct, forbid_unknown_fields=True):
    """Remove an address."""

    value: Address = field(name="removeFixedIp")


class FloatingAddress(msgspec.Struct, forbid_unknown_fields=True):
    """A floating IP, and the address that it leads to."""

    address: str
    fixed_address: str | UnsetType = UNSET


class AddFloatingBody(msgspec.Struct, forbid_unknown_fields=True):
    """Associate a floating IP."""

    value: FloatingAddress = field(name="addFloatingIp")


class RemoveFloatingBody(msgspec.Struct, forbid_unknown_fields=True):
    """Dissociate a floating IP."""

    value: Address = field(name="removeFloatingIp")


def routes(database: Database, addresses: ServerAddresses) -> list[Route]:
    """Return the routes of the actions."""

    async def add_fixed(request: Request, id: str) -> None:
        """Add a fixed IP."""
        row = await authorized_server(database, request, id)
        await addresses.add_fixed(request.context, row, str(request.body.value.network_id))

    async def remove_fixed(request: Request, id: str) -> None:
        """Remove a fixed IP."""
        row = await authorized_server(database, request, id)
        await addresses.remove_fixed(request.context, row, _address(request, "address"))

    async def add_floating(request: Request, id: str) -> None:
        """Associate a floating IP."""
        row = await authorized_server(database, request, id)
        fixed = None if request.body.value.fixed_address is UNSET else _address(request, "fixed_address")
        await addresses.add_floating(request.context, row, _address(request, "address"), fixed)

    async def remove_floating(request: Request, id: str) -> None:
        """Dissociate a floating IP."""
        row = await authorized_server(database, request, id)
        await addresses.remove_floating(request.context, row, _address(request, "address"))

    fixed, floating = "os_compute_api:os-multinic", "os_compute_api:os-floating-ips"
    action = partial(ActionRoute, versions=until(43), errors=(500, 501))
    return action_routes(
        [
            action(name="addFixedIp", handler=add_fixed, policy=f"{fixed}:add", body=AddFixedBody),
            action(name="removeFixedIp", handler=remove_fixed, policy=f"{fixed}:remove", body=RemoveFixedBody),
            action(name="addFloatingIp", handler=add_floating, policy=f"{floating}:add", body=AddFloatingBody),
            action(
                name="removeFloatingIp", handler=remove_floating, policy=f"{floating}:remove", body=RemoveFloatingBody
            ),
        ]
    )


def _address(request: Request, name: str) -> str:
    return str(ip_address(name, getattr(request.body.value, name)))

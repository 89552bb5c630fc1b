"""Networks (until 2.35): the id and the label of those that the network service shows to the user."""

from functools import partial
from typing import Any

from micronova.api.inputs import NoQuery
from micronova.clients.network.as_user import AsUser
from micronova.clients.network.client import NetworkClient
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.objects.errors import NotSupported

# Nova's own networks had these; clients still find them, without a value.
_FIELDS = ("cidr", "netmask", "gateway", "broadcast", "dns1", "dns2", "cidr_v6", "gateway_v6", "netmask_v6")
_FOR_ADMINS = (
    "created_at", "updated_at", "deleted_at", "deleted", "injected", "bridge", "vlan", "vpn_public_address",
    "vpn_public_port", "vpn_private_address", "dhcp_start", "project_id", "host", "bridge_interface", "multi_host",
    "priority", "rxtx_base", "mtu", "dhcp_server", "enable_dhcp", "share_address",
)  # fmt: skip

_NETWORK = {
    "id": str,
    "label": str,
    **dict.fromkeys(_FIELDS, None),
    **dict.fromkeys((f"{name}?" for name in _FOR_ADMINS), None),
}
_TENANT_NETWORK = {"id": str, "label": str, "cidr": str}


def network_service(client: NetworkClient | None, request: Request) -> AsUser:
    """Return the network service as the caller has it; raise NotSupported if there is none."""
    if client is None:
        raise NotSupported("There is no network service.")
    return client.as_user(request.context.token)


def _network(request: Request, network: dict[str, Any]) -> dict[str, Any]:
    names = (*_FIELDS, *_FOR_ADMINS) if request.context.is_admin else _FIELDS
    return {"id": network["id"], "label": network["name"], **dict.fromkeys(names)}


def _tenant_network(_: Request, network: dict[str, Any]) -> dict[str, Any]:
    # The text, not null: Nova shows it so for networks of Neutron.
    return {"id": network["id"], "cidr": "None", "label": network["name"]}


def routes(client: NetworkClient | None) -> list[Route]:
    """Declare the routes of both forms of networks."""
    found = []
    route = partial(Route, method="GET", query=NoQuery, versions=until(35), errors=(501,))
    for path, rule, shown, shape in (
        ("/os-networks", "os_compute_api:os-networks", _network, _NETWORK),
        ("/os-tenant-networks", "os_compute_api:os-tenant-networks", _tenant_network, _TENANT_NETWORK),
    ):

        async def index(request: Request, shown: Any = shown) -> dict[str, Any]:
            """List the networks that the caller may see."""
            networks = await network_service(client, request).list_("networks")
            return {"networks": [shown(request, network) for network in networks]}

        async def show(request: Request, id: str, shown: Any = shown) -> dict[str, Any]:
            """Show a network."""
            return {"network": shown(request, await network_service(client, request).show("networks", id))}

        found += [
            route(path=path, handler=index, policy=f"{rule}:list", answer={"networks": [shape]}),
            route(path=f"{path}/{{id}}", handler=show, policy=f"{rule}:show", answer={"network": shape}),
        ]
    return found

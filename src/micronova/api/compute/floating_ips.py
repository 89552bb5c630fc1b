"""Floating IPs and the pools that they come from (until 2.35), which the network service keeps for the user."""

from functools import partial
from typing import Any

from micronova.api.compute.networks import network_service
from micronova.api.inputs import Body, NoQuery
from micronova.clients.network.as_user import AsUser
from micronova.clients.network.client import NetworkClient
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.objects.errors import Conflict, Forbidden, Invalid, NotFound

IPS = "floatingips"
EXTERNAL = ("router:external", "True")
DEFAULT_POOL = "nova"  # if there are several and the request names none
_EXHAUSTED = ("IpAddressGenerationFailure", "ExternalIpAddressExhausted")

_SHAPE = {"id": str, "ip": str, "fixed_ip": str | None, "instance_id": str | None, "pool": str}


class Allocation(Body):
    """The pool of a new floating IP, by name or id. Nova ignores other fields; here they are refused."""

    pool: str | None = None


class FloatingIPs:
    """The handlers."""

    def __init__(self, client: NetworkClient | None) -> None:
        self._client = client

    async def pools(self, request: Request) -> dict[str, Any]:
        """List the external networks."""
        found = await network_service(self._client, request).list_("networks", EXTERNAL)
        return {"floating_ip_pools": [{"name": network["name"] or network["id"]} for network in found]}

    async def index(self, request: Request) -> dict[str, Any]:
        """List the project's floating IPs."""
        network = network_service(self._client, request)
        found = await network.list_(IPS, ("project_id", request.context.project_id))
        return {"floating_ips": await _shown(network, found)}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a floating IP."""
        network = network_service(self._client, request)
        [shown] = await _shown(network, [await network.show(IPS, id)])
        return {"floating_ip": shown}

    async def create(self, request: Request) -> dict[str, Any]:
        """Allocate a floating IP of a pool."""
        network = network_service(self._client, request)
        asked: Allocation | None = request.body
        pool = await _pool(network, asked.pool if asked else None)
        try:
            made = await network.create(IPS, {"floating_network_id": pool["id"]})
        except (Conflict, Invalid) as error:
            if error.details.get("type") in _EXHAUSTED:
                raise NotFound(f"No more floating IPs in pool {pool['name'] or pool['id']}.") from None
            if error.details.get("type") == "OverQuota":
                raise Forbidden(f"IP allocation over quota in pool {pool['name'] or pool['id']}.") from None
            raise Invalid(error.message) from None
        [shown] = await _shown(network, [made])
        return {"floating_ip": shown}

    async def delete(self, request: Request, id: str) -> None:
        """Release a floating IP; a server that has it loses it."""
        await network_service(self._client, request).delete(IPS, id)


async def _pool(network: AsUser, wanted: str | None) -> dict[str, Any]:
    """Return the external network that is wanted: by default the only one, or the one with Nova's default name."""
    found = await network.list_("networks", EXTERNAL)
    if wanted or len(found) > 1:
        name = wanted or DEFAULT_POOL
        found = [each for each in found if each["id"] == name] or [each for each in found if each["name"] == name]
    if not found:
        raise NotFound(f"Floating IP pool {(wanted or DEFAULT_POOL)[:255]} not found.")
    if len(found) > 1:
        raise Invalid(f"Multiple floating IP pools matches found for name '{wanted or DEFAULT_POOL}': use an id.")
    return found[0]


async def _shown(network: AsUser, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not found:
        return []
    ids = sorted({each["floating_network_id"] for each in found})
    names = {each["id"]: each["name"] for each in await network.list_("networks", *(("id", id) for id in ids))}
    ports = sorted({each["port_id"] for each in found if each["port_id"] and "port_details" not in each})
    listed = await network.list_("ports", *(("id", id) for id in ports)) if ports else []
    devices = {port["id"]: port["device_id"] for port in listed}
    return [
        {
            "id": each["id"],
            "ip": each["floating_ip_address"],
            "fixed_ip": each["fixed_ip_address"],
            "instance_id": (each.get("port_details") or {}).get("device_id") or devices.get(each["port_id"]) or None,
            "pool": names.get(each["floating_network_id"]) or each["floating_network_id"],
        }
        for each in found
    ]


def routes(client: NetworkClient | None) -> list[Route]:
    """Declare the routes."""
    handlers = FloatingIPs(client)
    path, rule = "/os-floating-ips", "os_compute_api:os-floating-ips"
    one = f"{path}/{{id}}"
    route = partial(Route, versions=until(35), errors=(501,))
    shown = partial(route, method="GET", query=NoQuery)
    return [
        shown(
            path="/os-floating-ip-pools",
            handler=handlers.pools,
            policy="os_compute_api:os-floating-ip-pools",
            answer={"floating_ip_pools": [{"name": str}]},
        ),
        shown(path=path, handler=handlers.index, policy=f"{rule}:list", answer={"floating_ips": [_SHAPE]}),
        shown(path=one, handler=handlers.show, policy=f"{rule}:show", answer={"floating_ip": _SHAPE}),
        route(
            method="POST",
            path=path,
            handler=handlers.create,
            policy=f"{rule}:create",
            body=Allocation | None,
            answer={"floating_ip": _SHAPE},
        ),
        route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=202),
    ]
